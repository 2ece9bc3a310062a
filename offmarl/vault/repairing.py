"""Repairs a damaged vault by keeping its longest intact prefix.

The prefix is every step before the first damaged chunk of any row and array. The episode table is
rebuilt from these steps; facts that the steps do not show are taken from the old table if it can be
read.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offmarl import __version__
from offmarl.errors import OffmarlError, VaultFormatError
from offmarl.terminal import Progress, quiet
from offmarl.vault import commit, layout, tables
from offmarl.vault.commit import Contents
from offmarl.vault.compaction import copy, exclusive, rebuilding, repeat_tree, switch
from offmarl.vault.dataset import Dataset
from offmarl.vault.drivers import Directory, Driver
from offmarl.vault.faults import Fault
from offmarl.vault.files import errors_of, sync
from offmarl.vault.index import reindex
from offmarl.vault.layout import DATA, METADATA, OWN_PREFIX, Head, NumpyArray
from offmarl.vault.manifest import Parts, read_final_block, read_metadata, read_parts, read_schema
from offmarl.vault.metadata import Grid, to_metadata, without_episodes
from offmarl.vault.store import OcdbtStore, Store, store_of
from offmarl.vault.tables import Table
from offmarl.vault.verification import (
    Verification,
    examine,
    find,
    foreign_grids,
    own_grids,
    placed_length,
)


class Repair(NamedTuple):
    """The result of a repair, or of a dry run."""

    path: Path
    faults: tuple[Fault, ...]
    """The damage that was found; if there is none, nothing was changed."""
    length_before: int | None
    """Steps of each row before the repair; None if unknown."""
    length: int
    """Steps of each row after the repair."""
    dropped: tuple[str, ...]
    """Descriptions of the data that could not be kept."""


def repair(
    path: str | os.PathLike[str], *, dry_run: bool = False, progress: Progress = quiet
) -> Repair:
    """Keep the longest intact prefix of a damaged vault, and rebuild its tables and documents.

    The result is built in another directory and replaces the vault atomically: if the process is
    killed, the vault is unchanged. The disk needs free space for the result.

    Parameters
    ----------
    path
        As `open_vault` takes it; files may be missing there.
    dry_run
        Whether only to report what would be done.
    progress
        Shows the progress of the search for damage.

    Raises
    ------
    VaultLockedError
        Another process is writing to it.
    VaultFormatError
        Too little is left to build a vault from.
    """
    store = store_of(find(path))
    directory = store.driver.directory
    with exclusive(store.driver), errors_of(directory):
        before = examine(store, deep=True, progress=progress)
        if before.sound:
            return Repair(directory, (), before.length, before.length, ())
        with rebuilding(directory) as fresh:
            source, found = _source(directory, fresh, before)
            result = rebuild(source, found, fresh / "sound")
            if not dry_run:
                _put_in_place(directory, fresh / "sound")
    known = before.length if source.driver.directory == directory else None
    return Repair(directory, before.faults, known, result.length, result.dropped)


def _source(directory: Path, fresh: Path, before: Verification) -> tuple[Contents, Verification]:
    """Return the commit to repair from, and its faults.

    The last commit is used if its tree can be read; otherwise a copy of the commit of which the
    most can be read.
    """
    driver = Directory(directory)
    with suppress(ValueError, OSError):
        last = Contents(driver, commit.current_tree(driver))
        if not last.tree.lost:
            return last, before
    best = max(_candidates(driver), key=_extent, default=None)
    if best is None or _extent(best)[0] < 1:
        raise VaultFormatError(
            f"nothing is left of {directory}: neither its manifest nor any commit can be read. "
            "Copy the vault again from its source."
        )
    salvaged = fresh / "salvaged"
    _salvage(best, salvaged)
    copied = store_of(Directory(salvaged))
    return Contents.of(copied), examine(copied, deep=True)


def _candidates(driver: Directory) -> Iterator[Contents]:
    """Yield the last commit and earlier ones, up to the first with a complete tree."""
    with suppress(ValueError, OSError):
        yield Contents(driver, commit.current_tree(driver))
        for earlier in commit.earlier_trees(driver):
            yield Contents(driver, earlier)
            if not earlier.lost:
                return
        return
    yield from (Contents(driver, found) for found in commit.earlier_trees(driver))


def _extent(contents: Contents) -> tuple[int, int]:
    """Return the number of steps, and of keys, of a commit that are left."""
    try:
        metadata = metadata_of(contents.driver)
        if not contents.keys(OWN_PREFIX):
            return (1, len(contents.tree.values)) if layout.INDEX_KEY in contents else (0, 0)
        schema = read_schema(contents, metadata, [])
        own = read_parts(contents, schema, [])
    except OffmarlError:
        return 0, 0
    return placed_length(contents, own_grids(schema), own.length), len(contents.tree.values)


def _salvage(contents: Contents, target: Path) -> None:
    """Copy the values that can be read, and ``metadata.json``."""
    target.mkdir()
    readable = [key for key in contents.tree.values if not contents.is_cut_off(key)]
    copy(contents, readable, store_of(Directory(target)), strict=False)
    with suppress(FileNotFoundError):
        shutil.copy(Path(contents.driver.directory, METADATA), target)


def _put_in_place(directory: Path, sound: Path) -> None:
    """Replace the metadata, which is the same in every commit, and then the store."""
    sync(sound / METADATA)
    (sound / METADATA).replace(directory / METADATA)
    (directory / DATA).mkdir(exist_ok=True)
    switch(directory, sound, expected=None)


_BLOCK_RECORDS = 2**16
_EPISODES_REBUILT = (
    "of episodes known only from their steps: final views, whether the recording cut them off, and "
    "where those that it abandoned ended"
)


class RebuildResult(NamedTuple):
    """A rebuilt vault."""

    length: int
    """Steps of each row."""
    dropped: tuple[str, ...]
    """Descriptions of the data that could not be kept."""


def rebuild(source: Contents, found: Verification, target: Path) -> RebuildResult:
    """Build a vault of the longest intact prefix."""
    kept = sound_length(found)
    native = bool(source.keys(OWN_PREFIX))
    target.mkdir()
    store = OcdbtStore(Directory(target))
    dropped = _own(source, kept, store) if native else _foreign(source, kept, store)
    left = examine(store, deep=True)
    if left.faults and sound_length(left) < kept:
        # The source's arrays could not be checked if their description was damaged too.
        shutil.rmtree(target)
        return rebuild(source, found._replace(faults=(*found.faults, *left.faults)), target)
    if left.faults:
        raise VaultFormatError(
            f"{source.driver.path} cannot be repaired: {left.faults[0]}. Nothing was changed; "
            "copy the vault again from its source."
        )
    if kept < found.length:
        dropped = [f"steps {kept} to {found.length - 1} of every row", *dropped]
    return RebuildResult(kept, tuple(dropped))


def sound_length(found: Verification) -> int:
    """Return the number of steps before the first damaged one; `VaultFormatError` if it is 0.

    Repairing would then empty the vault, and the data after the damage may still be useful.
    """
    kept = min([found.length, *(fault.steps[0] for fault in found.faults if fault.steps)])
    if found.length and not kept:
        raise VaultFormatError(
            f"{found.path} is damaged in its first steps, so it has no intact prefix, and nothing "
            "was changed. `offmarl repair --salvage OUT` makes a vault of the intact episodes; or "
            "copy the vault again from its source."
        )
    return kept


def _foreign(source: Contents, kept: int, store: OcdbtStore) -> list[str]:
    """Copy the keys of another program's vault, without the chunks past the end."""
    metadata = source.driver.read(METADATA)
    if metadata is None:
        raise VaultFormatError(
            f"{source.driver.path} cannot be repaired: it has lost {METADATA}, of which it has no "
            "copy. Copy that file again from the vault's source."
        )
    store.driver.write(METADATA, metadata)
    grids = foreign_grids(source, read_metadata(source.driver), [])
    chunks = {chunk.key for grid in grids for chunk in grid.within(kept)}
    prefixes = tuple(layout.prefix_of(grid.name) for grid in grids)
    others = (k for k in source.tree.values if not k.startswith(prefixes) or k.endswith(".zarray"))
    copy(source, {*others, *(chunks & source.tree.values.keys())}, store)
    store.array(layout.INDEX_PREFIX, write=True).write(np.array([kept], np.int32)).result()
    repeat_tree(store)
    return []


def _own(source: Contents, kept: int, store: Store) -> list[str]:
    """Build a vault of offmarl, and describe what was dropped in addition to steps."""
    schema = read_schema(source, metadata_of(source.driver), [])
    own = read_parts(source, schema, [])
    store.driver.write(METADATA, layout.dump_json(to_metadata(schema)))
    copy(source, _chunk_keys(source, own_grids(schema), kept, own), store)
    ours = min(kept, own.own_length)
    empty = without_episodes(schema, {}, Head(length=ours), kept)
    store.commit(empty, fence={}).result()
    known = np.concatenate([_no_episodes(own), *own.ended.values()])
    ended, running = reindex(Dataset(store, checked=False), ours, known)
    ended["final"] = _finals_of(ended, known)
    ended, finals = _copy_finals(source, own, ended, store)
    head = _head(own, ours, ended, finals)
    dropped = _dropped(own, running, head)
    repaired = {"by": f"offmarl {__version__}", "dropped": dropped}
    provenance = {**(own.provenance or {}), "repaired": repaired}
    store.commit(
        {
            **{layout.episodes_key(first): block for first, block in _blocks(ended)},
            layout.HEAD_KEY: layout.dump_json(head._asdict()),
            layout.RUNNING_KEY: running.tobytes(),
            layout.PROVENANCE_KEY: layout.dump_json(provenance),
        },
        fence={},
    ).result()
    repeat_tree(store)
    return dropped


def metadata_of(driver: Driver) -> dict[str, Any]:
    """Return the content of ``metadata.json``; empty if it is damaged or lost."""
    try:
        return read_metadata(driver)
    except VaultFormatError:
        return {}


def _chunk_keys(source: Contents, grids: list[Grid], kept: int, own: Parts) -> Iterator[str]:
    """Yield the keys of chunks and of their checksums."""
    for grid in grids:
        yield from (chunk.key for chunk in grid.within(kept))
    for number in range(-(-kept // own.schema.chunk_steps)):
        if (key := layout.checksums_key(number)) in source:
            yield key


def _no_episodes(own: Parts) -> Table:
    return np.zeros(0, tables.dtype(own.schema.spec.num_agents))


def _finals_of(ended: Table, known: Table) -> NumpyArray:
    """Return the final views that known episodes have; -1 for others."""
    place = ["row", "start", "length"]
    final_of = dict(zip(known[place].tolist(), known["final"].tolist(), strict=True))
    return np.array([final_of.get(episode, -1) for episode in ended[place].tolist()], np.int64)


def _copy_finals(source: Contents, own: Parts, ended: Table, store: Store) -> tuple[Table, int]:
    """Copy and renumber the final views of episodes; return the table and the number of views."""
    old = ended["final"].copy()
    ended["final"] = -1
    count = 0
    for first, size in sorted(own.finals.items()):
        here = np.flatnonzero((old >= first) & (old < first + size))
        if len(here):
            here = here[np.argsort(old[here])]
            views = read_final_block(source, own.schema, first)[old[here] - first]
            store.commit({layout.finals_key(count): views.tobytes()}, fence={}).result()
            ended["final"][here] = count + np.arange(len(here))
            count += len(here)
    return ended, count


def _head(own: Parts, length: int, ended: Table, finals: int) -> Head:
    before = own.head or Head()
    whole = own.head is not None and length == own.head.length
    inside = ((a, min(b, length)) for a, b in before.unverified if a < length)
    return Head(
        length=length,
        episodes=len(ended),
        finals=finals,
        total_return=float(ended["returns"].mean(-1).sum()),
        runs=before.runs if whole else {},
        run=before.run if whole else None,
        unverified=tuple(inside),
    )


def _dropped(own: Parts, running: Table, head: Head) -> list[str]:
    """Describe what the old tables had and the new ones do not."""
    lines = []
    if own.head is None or head.length < own.head.length:
        unfinished = int((running["length"] > 0).sum())
        lines.append(f"the ends of {unfinished} episodes, which are open now")
        lines.append("which records of which run exist: a recording cannot continue from here")
    known = sum(map(len, own.ended.values()))
    if own.head is None or known < own.head.episodes:
        lines.append(_EPISODES_REBUILT)
    if own.head and head.finals < own.head.finals and head.length == own.head.length:
        lines.append(f"{own.head.finals - head.finals} final views")
    if own.provenance is None:
        lines.append("the provenance")
    return lines


def _blocks(table: Table) -> Iterator[tuple[int, bytes]]:
    for first in range(0, len(table), _BLOCK_RECORDS):
        yield first, table[first : first + _BLOCK_RECORDS].tobytes()
