"""Taking out of a damaged vault every episode that the damage has not touched."""

import os
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from pathlib import PurePath
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool

from offmarl.errors import VaultError, VaultFormatError
from offmarl.vault import layout, scan, tables, tree
from offmarl.vault.commit import Contents
from offmarl.vault.creation import free_place
from offmarl.vault.dataset import Vault
from offmarl.vault.faults import Fault, with_episodes
from offmarl.vault.final_views import FinalViews
from offmarl.vault.layout import POLICY_IDS, Codec, NumpyArray
from offmarl.vault.location import Location
from offmarl.vault.mmap import Snapshot
from offmarl.vault.open import locate
from offmarl.vault.progress import Advance, Progress, quiet, silent
from offmarl.vault.transform import lineage, selection
from offmarl.vault.transform.copying import Translate, copy_pieces
from offmarl.vault.transform.making import write
from offmarl.vault.transform.selection import Pieces
from offmarl.vault.verification import Verification, verify
from offmarl.vault.writer import Writer

_MOST_NAMED = 1000
"""Episodes that the provenance of what is salvaged names."""


class Lost(NamedTuple):
    """An episode that damage touches."""

    row: int
    start: int
    length: int


class Salvage(NamedTuple):
    """What was taken out of a damaged vault, and what was not."""

    path: PurePath
    """The vault that was made."""
    faults: tuple[Fault, ...]
    """What is wrong with the other."""
    episodes: int
    steps: int
    """That were taken, in all rows together."""
    lost: tuple[Lost, ...]
    """The episodes that were not."""
    unknown_steps: int
    """Steps, in all rows, of which it can no longer be told what episodes they belong to."""


def salvage(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    codec: Codec | None = None,
    progress: Progress = quiet,
) -> Salvage:
    """Make a vault of the episodes of a damaged one that are sound to the last byte.

    `repair` keeps a vault's beginning up to the first damage, in its place; this takes whole
    episodes from before and behind, and leaves the damaged vault as it is. They come end to end in
    one row, in the order they have.

    Parameters
    ----------
    source
        A vault as `open_vault` takes it. Where not even that can read it any more, repair it first.
    path, codec, progress
        As for `offmarl.vault.cat`.

    Raises
    ------
    VaultExistsError
        There is something at the path.
    VaultFormatError
        What the vault says of itself is damaged.
    VaultError
        No episode is sound, or nothing can be written.
    """
    free_place(path)  # before anything long
    found = verify(source, deep=True, progress=progress)
    left = _open(found)
    sound = _sound(left, found)
    pieces = selection.of_episodes(left, sound)
    runs = partial(_runs, faults=found.faults)
    if found.sound:
        examined = lineage.examine(left, silent)
    else:
        examined = lineage.of_damaged(left, _ids(left, runs(left, pieces)))
    table = left.episodes
    places = zip(table.row[~sound], table.start[~sound], table.length[~sound], strict=True)
    lost = tuple(Lost(*map(int, place)) for place in places)
    unknown = left.num_steps - int(table.length.sum())
    told = {"lost": [list(episode) for episode in lost[:_MOST_NAMED]], "unknown_steps": unknown}

    def copy(
        vault: Vault, pieces: Pieces, writer: Writer, translate: Translate, advance: Advance
    ) -> None:
        for run in runs(vault, pieces):
            copy_pieces(vault, run, writer, translate, advance)

    write("salvage", told, (examined, pieces), path, codec, progress, copy)
    made = locate(path)
    return Salvage(made, found.faults, pieces.episodes, pieces.steps, lost, unknown)


class _Remains(Vault):
    """A vault with as much of its tables as can be read, and no more of its files than asked for.

    A memory map would need all of them.
    """

    def _snapshot(self) -> Snapshot | None:
        return None

    def _kept(self) -> Iterator[tables.Table]:
        if self.manifest is None:
            return
        location = Location.of(self.path)
        contents = Contents(location, tree.current(location))
        known = scan.read(contents, self.manifest.schema, []).ended
        yield from (known[first] for first in sorted(known))

    @cached_property
    def _finals(self) -> FinalViews:
        return FinalViews(
            self._store, self.spec, self.manifest.head.finals if self.manifest else 0, 0
        )


def _open(found: Verification) -> Vault:
    """Open what is left of a vault that was verified."""
    try:
        return _Remains(found.path, checked=False)  # the verification was deep
    except VaultError as error:
        if found.sound:
            raise
        raise VaultFormatError(
            f"{found.path} is damaged where it says what it holds ({found.faults[0]}), so that its "
            "episodes cannot be told apart: `offmarl repair --dry-run` tells what it could keep."
        ) from error


def _sound(left: Vault, found: Verification) -> Bool[np.ndarray, "M"]:
    """Return the episodes that no fault is in."""
    sound = np.ones(len(left.episodes.row), bool)
    for fault in found.faults:
        sound[list(with_episodes(fault, left.episodes).episodes)] = False
        if fault.key and fault.key.startswith(layout.FINALS_PREFIX):
            sound &= ~left._finals.in_block(fault.key, left.episodes.final)
    return sound


def _runs(vault: Vault, pieces: Pieces, faults: Iterable[Fault]) -> Iterator[Pieces]:
    """Part pieces so that nothing damaged lies between those that are read together."""
    touched = np.zeros(vault.rows, bool)
    for fault in faults:
        touched[slice(*(fault.rows or (0, vault.rows)))] = True
    row = vault.episodes.row[pieces.episode]
    near = touched[row[1:]] | touched[row[:-1]]
    apart = (np.diff(row) > 0) | (pieces.start[1:] != pieces.stop[:-1])
    edges = np.flatnonzero(near & apart) + 1
    columns = (np.split(column, edges) for column in pieces)
    yield from (Pieces(*run) for run in zip(*columns, strict=True) if len(run[0]))


def _ids(vault: Vault, runs: Iterable[Pieces]) -> Iterator[NumpyArray]:
    """Yield the ids of the policies of what is taken; others may be damaged."""
    names = [name for name in (POLICY_IDS,) if name in vault.leaves]
    for run in runs if names else []:
        row = vault.episodes.row[run.episode]
        stop = int(run.stop.max())
        for begin, end in vault.blocks(names, int(run.start.min())):
            if begin < stop:
                rows = slice(int(row[0]), int(row[-1]) + 1)
                yield vault.read(begin, min(end, stop), rows, names)[POLICY_IDS]
