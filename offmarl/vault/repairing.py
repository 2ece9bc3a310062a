"""Keeping what is sound of a damaged vault.

That is the longest stretch from the beginning whose chunks are all as they were written, in every
row and leaf, so whole steps to the end of a chunk. The episode table is made anew from it; what it
said beside, where it can still be read, is taken over.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from offmarl.errors import OffmarlError, VaultFormatError
from offmarl.vault import chunk_checks, layout, rebuild, scan, tree
from offmarl.vault.atomic import sync
from offmarl.vault.checksum import OWN_PREFIX
from offmarl.vault.commit import Contents
from offmarl.vault.compaction import copy, exclusive, rebuilding, switch
from offmarl.vault.drivers import Directory
from offmarl.vault.faults import Fault
from offmarl.vault.layout import DATA, METADATA
from offmarl.vault.progress import Progress, quiet
from offmarl.vault.store import store_of
from offmarl.vault.system import errors_of
from offmarl.vault.verification import Verification, examine, find, own_grids


class Repair(NamedTuple):
    """What a repair did, or would do."""

    path: Path
    faults: tuple[Fault, ...]
    """What was wrong; where nothing was, nothing was changed."""
    length_before: int | None
    """Steps of each row; None where that can no longer be known."""
    length: int
    """Steps of each row that are kept."""
    dropped: tuple[str, ...]
    """What could not be kept, in words."""


def repair(
    path: str | os.PathLike[str], *, dry_run: bool = False, progress: Progress = quiet
) -> Repair:
    """Keep the longest sound prefix of a damaged vault, and set the rest of it right.

    It is built beside the vault and takes its place in one instant: killed at any other, the vault
    is as it was. It needs as much room as the result takes.

    Parameters
    ----------
    path
        As `open_vault` takes it; files may be missing there.
    dry_run
        Whether only to say what would be done.
    progress
        Shows how far the search for damage is.

    Raises
    ------
    VaultLockedError
        Somebody writes to it.
    VaultFormatError
        There is nothing left that a vault could be made of.
    """
    store = store_of(find(path))
    directory = store.driver.directory
    with exclusive(store.driver), errors_of(directory):
        before = examine(store, deep=True, progress=progress)
        if before.sound:
            return Repair(directory, (), before.length, before.length, ())
        with rebuilding(directory) as fresh:
            source, found = _source(directory, fresh, before)
            result = rebuild.rebuild(source, found, fresh / "sound")
            if not dry_run:
                _put_in_place(directory, fresh / "sound")
    known = before.length if source.driver.directory == directory else None
    return Repair(directory, before.faults, known, result.length, result.dropped)


def _source(directory: Path, fresh: Path, before: Verification) -> tuple[Contents, Verification]:
    """Return what to repair from, and what is wrong with it.

    The last commit, if its tree can be read; otherwise a copy of what is left of the commit that
    most is left of.
    """
    driver = Directory(directory)
    with suppress(ValueError, OSError):
        last = Contents(driver, tree.current(driver))
        if not last.tree.lost:
            return last, before
    best = max(_candidates(driver), key=_extent, default=None)
    if best is None or _extent(best)[0] < 1:
        raise VaultFormatError(
            f"nothing is left of {directory}: neither its manifest nor any commit can be read. "
            "Copy the vault again from where it came from."
        )
    salvaged = fresh / "salvaged"
    _salvage(best, salvaged)
    copied = store_of(Directory(salvaged))
    return Contents.of(copied), examine(copied, deep=True)


def _candidates(driver: Directory) -> Iterator[Contents]:
    """Yield the last commit and those before it, up to the first that is whole."""
    with suppress(ValueError, OSError):
        yield Contents(driver, tree.current(driver))
        for earlier in tree.earlier(driver):
            yield Contents(driver, earlier)
            if not earlier.lost:
                return
        return
    yield from (Contents(driver, found) for found in tree.earlier(driver))


def _extent(contents: Contents) -> tuple[int, int]:
    """Return what to judge a commit by: the steps that are there, and the keys."""
    try:
        metadata = rebuild.metadata_of(contents.driver)
        if not contents.keys(OWN_PREFIX):
            return (1, len(contents.tree.values)) if layout.INDEX_KEY in contents else (0, 0)
        schema = scan.read_schema(contents, metadata, [])
        own = scan.read(contents, schema, [])
    except OffmarlError:
        return 0, 0
    return chunk_checks.placed_length(contents, own_grids(schema), own.length), len(
        contents.tree.values
    )


def _salvage(contents: Contents, target: Path) -> None:
    """Copy the values that can be read, and ``metadata.json``."""
    target.mkdir()
    readable = [key for key in contents.tree.values if not contents.is_cut_off(key)]
    copy(contents, readable, store_of(Directory(target)), strict=False)
    with suppress(FileNotFoundError):
        shutil.copy(Path(contents.driver.directory, METADATA), target)


def _put_in_place(directory: Path, sound: Path) -> None:
    """Replace the metadata, which says the same in every commit, and then the store."""
    sync(sound / METADATA)
    (sound / METADATA).replace(directory / METADATA)
    (directory / DATA).mkdir(exist_ok=True)
    switch(directory, sound, expected=None)
