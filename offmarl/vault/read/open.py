"""Finds, opens and lists vaults."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePath
from typing import NamedTuple

from offmarl.errors import OffmarlError, VaultError, VaultFormatError, VaultNotFoundError
from offmarl.paths import path_of_name
from offmarl.teams import only_or_all, teams_of
from offmarl.vault.format import encoding, tables
from offmarl.vault.format.faults import ERRORS, reason
from offmarl.vault.format.layout import OBSERVATIONS
from offmarl.vault.read.manifest import describe, read_episodes
from offmarl.vault.read.reader import Reader
from offmarl.vault.storage.files import errors_of
from offmarl.vault.storage.store import Directory, Store, store_of

SUFFIX = ".vlt"

_MOST_NAMED = 20
_READERS = 4
"""Number of vaults that are opened at once, since opening is mostly waiting."""


class Summary(NamedTuple):
    """A short description of a vault; None for facts that would require reading the data."""

    name: str
    uid: str
    env: str | None = None
    num_agents: int | None = None
    steps: int | None = None
    """Recorded transitions in all rows."""
    episodes: int | None = None
    """Episodes that offmarl wrote, without those that another program appended."""
    mean_return: float | dict[str, float | None] | None = None
    """Mean over those that are complete, and over agents; by team where there are several. See
    `offmarl.vault.Episodes`."""
    native: bool = False
    error: str | None = None
    """Why the vault cannot be read, if it cannot."""
    incomplete: int | None = None
    """How many of the episodes are not complete."""


def open_reader(path: str | os.PathLike[str], time_limit: int | None = None) -> Reader:
    """Open a vault for reading, as it is now; see `open_vault`."""
    return Reader(locate(path), time_limit=time_limit)


def place_of(path: str | os.PathLike[str], single: bool = False) -> Store:
    """Resolve a path or the name of a dataset; ``single`` refuses several vaults of a name."""
    return store_of(path_of_name(os.fspath(path), single) or path)


def locate(path: str | os.PathLike[str]) -> Store:
    """Return the place of the vault at a path; see `open_vault`."""
    place = place_of(path, single=True)
    root = place.path
    with errors_of(root):
        if place.is_vault():
            return place
        inside, linked = place.vaults(), place.links()
    if len(inside) == 1:
        return store_of(inside[0])
    if linked and not inside:
        raise refused_link(linked[0])
    if inside:
        names = ", ".join(str(vault.relative_to(root)) for vault in inside[:_MOST_NAMED])
        if len(inside) > _MOST_NAMED:
            names += f", ... ({len(inside)} in all)"
        raise VaultError(f"{root} holds several vaults: add one of {names} to the path.")
    error = place.missing()
    raise type(error)(f"{error}{_nearby(root)}") if type(error) is VaultNotFoundError else error


def _nearby(path: PurePath) -> str:
    with suppress(OffmarlError, OSError, ValueError):
        if near := store_of(path.parent).vaults():
            return f" Nearby: {', '.join(vault.name for vault in near[:_MOST_NAMED])}."
    return ""


def refused_link(path: Path) -> VaultFormatError:
    """Return the error for a link to a vault that was found below a directory."""
    return VaultFormatError(
        f"{path} is a symbolic link to {os.path.realpath(path)}: links below a dataset's directory "
        "are not followed. Give the path of the vault itself, or replace the link by a copy."
    )


def list_vaults(
    directory: str | os.PathLike[str], env: str | None = None, agents: int | None = None
) -> Iterator[tuple[PurePath, Summary]]:
    """Walk a directory tree and yield every vault's absolute path and summary, by path.

    ``env`` and ``agents`` select by the environment's name and the number of agents. A vault that
    cannot be read is listed with its error. Symbolic links to directories of datasets are followed,
    but not in circles. A symbolic link in place of a vault is listed with an error. Archives and
    buckets are searched in the same way.
    """
    place = place_of(directory)
    with errors_of(place.path):
        paths = list(_walk(place) if isinstance(place, Directory) else place.vaults())
    with ThreadPoolExecutor(_READERS) as readers:
        summaries = readers.map(lambda path: _summarise(path, place.path), paths)
        for path, summary in zip(paths, summaries, strict=True):
            if env in (None, summary.env) and agents in (None, summary.num_agents):
                yield path, summary


def _walk(place: Directory) -> Iterator[PurePath]:
    root = place.directory
    if not root.is_dir():
        raise VaultNotFoundError(f"there is no directory {root} to list vaults in.")
    if place.is_vault():
        yield root
        return
    linked = [root.resolve()]
    for parent, below, _ in os.walk(root, followlinks=True):
        if parent.endswith(SUFFIX):
            below.clear()
            yield from sorted([*Directory(Path(parent)).vaults(), *Directory(Path(parent)).links()])
        inside = (Path(parent, name) for name in sorted(below) if not name.startswith("."))
        below[:] = [path.name for path in inside if _descends_into(path, linked)]


def _descends_into(path: Path, linked: list[Path]) -> bool:
    """Whether a walk descends into a directory; ``linked`` are its root and the targets of links.

    A link into one of them, or to a directory above the root, would repeat what is found there.
    """
    if not path.is_symlink() or path.name.endswith(SUFFIX):
        return True
    target = Path(os.path.realpath(path))
    if linked[0].is_relative_to(target) or any(
        target.is_relative_to(directory) for directory in linked
    ):
        return False
    linked.append(target)
    return True


def _summarise(path: PurePath, root: PurePath) -> Summary:
    """Return the summary of a vault at or below ``root``."""
    summary = Summary(path.parent.name.removesuffix(SUFFIX), path.name)
    try:
        if path != root and isinstance(path, Path) and path.is_symlink():
            raise refused_link(path)
        return _described(summary, store_of(path))
    except ERRORS as error:
        return summary._replace(error=reason(error))


def _described(summary: Summary, store: Store) -> Summary:
    """Fill in a summary from a vault's small keys."""
    description = describe(store, check_arrays=False)
    manifest, steps = description.manifest, description.rows * description.length
    if manifest is None:
        shapes = (y.shape for x, y in description.leaves.items() if encoding.is_of(OBSERVATIONS, x))
        return summary._replace(num_agents=next((x[0] for x in shapes if x), None), steps=steps)
    spec = manifest.schema.spec
    episodes = tables.to_episodes(read_episodes(store, manifest), teams_of(spec))
    return summary._replace(
        env=spec.name or None,
        num_agents=spec.num_agents,
        steps=steps,
        episodes=len(episodes.row),
        mean_return=only_or_all(episodes.mean_returns),
        native=True,
        incomplete=episodes.incomplete,
    )
