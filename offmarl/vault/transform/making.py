"""How transforms make vaults: examine the sources, choose, copy, and note the lineage."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from offmarl.errors import VaultError
from offmarl.vault.atomic import whole
from offmarl.vault.creation import create_whole
from offmarl.vault.dataset import Vault
from offmarl.vault.layout import Codec
from offmarl.vault.location import Location
from offmarl.vault.open import SUFFIX, open_source, open_vault
from offmarl.vault.progress import Progress
from offmarl.vault.transform import lineage, origins, selection
from offmarl.vault.transform.copying import Copy, copy_pieces, copy_rows
from offmarl.vault.transform.lineage import Source
from offmarl.vault.transform.selection import Pieces
from offmarl.vault.writer import Writer

StrPath = str | os.PathLike[str]
AnyVault = StrPath | Vault
"""A vault, open or by its path."""

Select = Callable[[Source], Pieces]
"""Chooses what to take of a source."""


def as_vault(vault: AnyVault) -> Vault:
    """Open a vault, checked, unless it is open."""
    return vault if isinstance(vault, Vault) else open_source(vault)


def with_limit(vaults: Sequence[AnyVault], time_limit: int | None) -> list[Vault]:
    """Open vaults; those that do not tell how their episodes ended with a time limit.

    Raises
    ------
    VaultError
        All of them tell.
    """
    found = [as_vault(vault) for vault in vaults]
    if time_limit is None:
        return found
    if all(vault.native for vault in found):
        names = ", ".join(str(vault.path) for vault in found)
        raise VaultError(f"{names} tell how their episodes ended: leave the time limit out.")
    return [
        vault if vault.native else open_source(vault.path, time_limit=time_limit) for vault in found
    ]


def derive(
    operation: str,
    arguments: Mapping[str, Any],
    chosen: Sequence[tuple[Vault, Select]],
    path: StrPath,
    codec: Codec | None,
    progress: Progress,
    provenance: Mapping[str, Any] | None = None,
    chunk_steps: int | None = None,
) -> Vault:
    """Make a vault of what is chosen of others; see `offmarl.vault.transform.operations`."""
    vaults = [vault for vault, _ in chosen]
    with _create(vaults, path, codec, chunk_steps) as writer:
        sources = examine(vaults, progress)
        selects = [select for _, select in chosen]
        taken = [(source, select(source)) for source, select in zip(sources, selects, strict=True)]
        _fill(writer, operation, arguments, taken, progress, provenance or {})
    return open_vault(path)


def examine(vaults: Sequence[Vault], progress: Progress) -> list[Source]:
    """Read sources through, for what tells them from others."""
    with progress("digest", sum(vault.num_steps for vault in vaults)) as advance:
        return [lineage.examine(vault, advance) for vault in vaults]


def write(
    operation: str,
    arguments: Mapping[str, Any],
    taken: tuple[Source, Pieces],
    path: StrPath,
    codec: Codec | None,
    progress: Progress,
    copy: Copy = copy_pieces,
) -> None:
    """Make a vault of what is taken of one that was examined."""
    with _create([taken[0].vault], path, codec) as writer:
        _fill(writer, operation, arguments, [taken], progress, {}, copy)


def rewrite(
    vault: Vault,
    arguments: Mapping[str, Any],
    path: StrPath,
    codec: Codec | None,
    chunk_steps: int | None,
    progress: Progress,
) -> None:
    """Make a vault of the same content and rows."""
    with _create([vault], path, codec, chunk_steps, vault.rows) as writer:
        (source,) = examine([vault], progress)
        with progress("recode", vault.num_steps) as advance:
            copy_rows(vault, writer, advance)
        taken = source, selection.everything(vault)
        writer.annotate(lineage.provenance("recode", arguments, [taken], source.named))


@contextmanager
def together(path: StrPath) -> Iterator[Path]:
    """Give a directory for vaults, which appears at its path with all of them or not at all.

    Parameters
    ----------
    path
        ``<directory>/<name>.vlt``.

    Raises
    ------
    VaultExistsError
        There is something at the path.
    VaultError
        It is not of this form, or nothing can be written there.
    """
    location = Location.of(path)
    final = location.directory
    if not final.name.endswith(SUFFIX):
        raise VaultError(f"{final} cannot hold several vaults: its name must end in {SUFFIX}.")
    with whole(final) as beside:
        yield beside


def _create(
    vaults: Sequence[Vault],
    path: StrPath,
    codec: Codec | None,
    chunk_steps: int | None = None,
    rows: int = 1,
) -> AbstractContextManager[Writer]:
    first = vaults[0].manifest
    if codec is None:
        codec = first.schema.codec if first else "raw"
    spec = lineage.common_spec(vaults)
    # What the sources hold was let in, or imported as it was: it is kept.
    return create_whole(
        path, spec, rows=rows, codec=codec, chunk_steps=chunk_steps, on_invalid="keep"
    )


def _fill(
    writer: Writer,
    operation: str,
    arguments: Mapping[str, Any],
    taken: Sequence[tuple[Source, Pieces]],
    progress: Progress,
    provenance: Mapping[str, Any],
    copy: Copy = copy_pieces,
) -> None:
    """Copy what is taken, and note the lineage."""
    steps = sum(pieces.steps for _, pieces in taken)
    if not steps:
        names = ", ".join(str(source.vault.path) for source, _ in taken)
        raise VaultError(f"nothing is left of {names}, and an empty vault is of no use.")
    united = origins.unite(named for source, pieces in taken for named in source.present(pieces))
    target = [named.origin for named in united]
    with progress(operation, steps) as advance:
        for source, pieces in taken:
            translate = partial(origins.translate, source=source.origins, target=target)
            copy(source.vault, pieces, writer, translate, advance)
    told = lineage.provenance(operation, arguments, taken, united)
    writer.annotate({**told, **provenance})
