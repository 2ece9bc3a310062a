"""Building a sound vault from what is left of a damaged one."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offmarl import __version__
from offmarl.errors import VaultFormatError
from offmarl.vault import layout, scan, tables
from offmarl.vault.checksum import OWN_PREFIX
from offmarl.vault.commit import Contents
from offmarl.vault.compaction import copy, repeat_tree
from offmarl.vault.dataset import Dataset
from offmarl.vault.drivers import Directory, Driver
from offmarl.vault.grid import Grid
from offmarl.vault.layout import METADATA, Head, NumpyArray
from offmarl.vault.manifest import read_metadata
from offmarl.vault.metadata import to_metadata, without_episodes
from offmarl.vault.reindex import reindex
from offmarl.vault.scan import Books
from offmarl.vault.store import OcdbtStore, Store
from offmarl.vault.tables import Table
from offmarl.vault.verification import Verification, examine, foreign_grids, own_grids

_BLOCK_RECORDS = 2**16
_FOUND_AGAIN = (
    "of episodes that only the steps tell of: final views, whether the recording cut them off, and "
    "where those that it gave up ended"
)


class RebuildResult(NamedTuple):
    """What was built."""

    length: int
    """Steps of each row."""
    dropped: tuple[str, ...]
    """What could not be kept."""


def rebuild(source: Contents, found: Verification, target: Path) -> RebuildResult:
    """Build a vault of the longest sound prefix.

    Parameters
    ----------
    source
        The damaged one.
    found
        What is wrong with it.
    target
        A directory to make.

    Raises
    ------
    VaultFormatError
        No vault can be made of what is left.
    """
    kept = sound_length(found)
    native = bool(source.keys(OWN_PREFIX))
    target.mkdir()
    store = OcdbtStore(Directory(target))
    dropped = _own(source, kept, store) if native else _foreign(source, kept, store)
    left = examine(store, deep=True)
    if left.faults and sound_length(left) < kept:
        # What could not be looked at in the source, because its description was damaged too.
        shutil.rmtree(target)
        return rebuild(source, found._replace(faults=(*found.faults, *left.faults)), target)
    if left.faults:
        raise VaultFormatError(
            f"{source.driver.path} cannot be repaired: {left.faults[0]}. Nothing was changed; "
            "copy the vault again from where it came from."
        )
    if kept < found.length:
        dropped = [f"steps {kept} to {found.length - 1} of every row", *dropped]
    return RebuildResult(kept, tuple(dropped))


def sound_length(found: Verification) -> int:
    """Return the steps before the first that something is wrong with; `VaultFormatError` if none.

    A vault is not emptied: what lies behind the damage may still be of use to somebody.
    """
    kept = min([found.length, *(fault.steps[0] for fault in found.faults if fault.steps)])
    if found.length and not kept:
        raise VaultFormatError(
            f"{found.path} is damaged from its first steps on, so that no stretch from the "
            "beginning can be kept, and nothing was changed. `offmarl repair --salvage OUT` makes "
            "a vault of the episodes that the damage does not touch; or copy the vault again from "
            "where it came from."
        )
    return kept


def _foreign(source: Contents, kept: int, store: OcdbtStore) -> list[str]:
    """Copy the keys of a vault that others wrote, but for the chunks past the end."""
    metadata = source.driver.read(METADATA)
    if metadata is None:
        raise VaultFormatError(
            f"{source.driver.path} cannot be repaired: it has lost {METADATA}, which nothing "
            "else in it repeats. Copy that file again from where the vault came from."
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
    """Build a vault of ours, and return what of it was dropped beside steps."""
    schema = scan.read_schema(source, metadata_of(source.driver), [])
    own = scan.read(source, schema, [])
    store.driver.write(METADATA, layout.dump_json(to_metadata(schema)))
    copy(source, _chunk_keys(source, own_grids(schema), kept, own), store)
    ours = min(kept, own.own_length)
    untold = without_episodes(schema, {}, Head(length=ours), kept)
    store.commit(untold, fence={}).result()
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
    """Return the content of ``metadata.json``; nothing where it is damaged or lost."""
    try:
        return read_metadata(driver)
    except VaultFormatError:
        return {}


def _chunk_keys(source: Contents, grids: list[Grid], kept: int, own: Books) -> Iterator[str]:
    """Yield the keys of chunks and of their checksums."""
    for grid in grids:
        yield from (chunk.key for chunk in grid.within(kept))
    for number in range(-(-kept // own.schema.chunk_steps)):
        if (key := layout.checksums_key(number)) in source:
            yield key


def _no_episodes(own: Books) -> Table:
    return np.zeros(0, tables.dtype(own.schema.spec.num_agents))


def _finals_of(ended: Table, known: Table) -> NumpyArray:
    """Return the final views that known episodes have; -1 for others."""
    place = ["row", "start", "length"]
    final_of = dict(zip(known[place].tolist(), known["final"].tolist(), strict=True))
    return np.array([final_of.get(episode, -1) for episode in ended[place].tolist()], np.int64)


def _copy_finals(source: Contents, own: Books, ended: Table, store: Store) -> tuple[Table, int]:
    """Copy the final views of episodes, numbered anew, and return the table and their number."""
    old = ended["final"].copy()
    ended["final"] = -1
    count = 0
    for first, size in sorted(own.finals.items()):
        here = np.flatnonzero((old >= first) & (old < first + size))
        if len(here):
            here = here[np.argsort(old[here])]
            views = scan.final_views(source, own.schema, first)[old[here] - first]
            store.commit({layout.finals_key(count): views.tobytes()}, fence={}).result()
            ended["final"][here] = count + np.arange(len(here))
            count += len(here)
    return ended, count


def _head(own: Books, length: int, ended: Table, finals: int) -> Head:
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


def _dropped(own: Books, running: Table, head: Head) -> list[str]:
    """Say what the new tables lack of the old."""
    lines = []
    if own.head is None or head.length < own.head.length:
        unfinished = int((running["length"] > 0).sum())
        lines.append(f"the ends of {unfinished} episodes, which are open now")
        lines.append("which records of which run are there: a recording cannot go on from here")
    known = sum(map(len, own.ended.values()))
    if own.head is None or known < own.head.episodes:
        lines.append(_FOUND_AGAIN)
    if own.head and head.finals < own.head.finals and head.length == own.head.length:
        lines.append(f"{own.head.finals - head.finals} final views")
    if own.provenance is None:
        lines.append("the provenance")
    return lines


def _blocks(table: Table) -> Iterator[tuple[int, bytes]]:
    for first in range(0, len(table), _BLOCK_RECORDS):
        yield first, table[first : first + _BLOCK_RECORDS].tobytes()
