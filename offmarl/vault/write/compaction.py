"""Rebuilds a vault's store, and replaces the old store atomically.

Every commit leaves behind the data that it replaced. `compact` writes the live data again, in the
order in which it is read, and so does `reclaim` when a writer closes, if much is unused. New data
files are written among the old ones, and the new manifest in a directory of its own. Then it
replaces the old one atomically, and files without references are deleted. The directory is removed
last. If it exists, a process was killed meanwhile, and the next writer cleans up.
"""

import os
import re
import shutil
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from offmarl._ahead import ahead, depth_of
from offmarl.vault.check.verification import examine
from offmarl.vault.format.layout import DATA, MANIFEST, OWN_PREFIX, UNFINISHED, damage_error, unseal
from offmarl.vault.read.open import locate
from offmarl.vault.storage import commit
from offmarl.vault.storage.commit import Contents
from offmarl.vault.storage.files import conflict_error, errors_of
from offmarl.vault.storage.store import Directory, Store

REBUILT = ".rebuilt"
"""The directory that a store is built in, inside the vault's."""

_BATCH_BYTES = 2**25
_MOST_UNUSED = 1 / 6
"""Largest unused part that `reclaim` leaves: files take 1.2 times their data."""
_LEAST_RECLAIMED = 2**20
"""Unused bytes below which `reclaim` does nothing."""
_MOST_MOVED = 2**32
"""Data of more bytes is left to `compact`, so that a writer closes in limited time."""
_CHUNK = re.compile(r"(.+\./)(\d+)\.(\d+)((?:\.\d+)*)")


class Compaction(NamedTuple):
    """The size of a vault's data files and manifest before and after."""

    path: Path
    bytes_before: int
    bytes_after: int
    files_before: int
    files_after: int


def compact(path: str | os.PathLike[str]) -> Compaction:
    """Reclaim unused space, and store the data in the order in which it is read.

    The content stays the same, whatever program wrote the vault, even if the process is killed. The
    disk needs free space for the result. Programs that have the vault open can continue to read;
    stock programs must not write to it meanwhile.

    Raises
    ------
    VaultLockedError
        Another process is writing to it.
    VaultFormatError
        It is damaged.
    VaultConflictError
        A stock program wrote to it meanwhile; nothing was changed.
    """
    store = locate(path)
    directory = store.directory  # an error elsewhere
    assert isinstance(store, Directory)
    with lock_and_tidy(store), errors_of(directory):
        before, manifest = _usage(directory), store.files.read(MANIFEST).result()
        verification = examine(store, deep=False)
        if not verification.sound:
            raise damage_error(directory, verification.faults[0])
        _rewrite(store, manifest.stamp)
        after = _usage(directory)
    return Compaction(directory, before[0], after[0], before[1], after[1])


def reclaim(store: Store) -> None:
    """Rewrite the data files, if much of them is unused.

    The files then take at most 1.2 times the data, apart from vaults with less than 1 MB of unused
    space or more than 4 GB of data. The content stays the same, even if the process is killed.
    Programs that have the vault open can continue to read. The caller must hold the vault's lock.
    """
    if not isinstance(store, Directory):
        return
    with errors_of(store.path):
        manifest, live_bytes = store.files.read(MANIFEST).result(), commit.live_bytes(store)
        total = sum(_data_sizes(store.directory).values())
        is_wasteful = total - live_bytes >= max(_LEAST_RECLAIMED, _MOST_UNUSED * total)
        if is_wasteful and live_bytes <= _MOST_MOVED:
            _rewrite(store, manifest.stamp)


def _rewrite(store: Directory, stamp: Any) -> None:
    """Write all values to new data files, unless the manifest has changed since its stamp.

    TensorStore compares and replaces the manifest under the same lock as in a commit, so this is
    safe even if a stock program is writing.
    """
    contents = Contents.of(store)
    if contents.tree.lost:
        raise damage_error(store.path, contents.tree.lost[0])
    directory, before = store.directory / REBUILT, _data_sizes(store.directory)
    directory.mkdir()
    try:
        # With the same identity, programs that have the vault open can continue to read.
        copy(contents, contents.tree.values, store.beside(directory, commit.config_of(store)))
        files, content = store.files, (directory / MANIFEST).read_bytes()
        done = files.write(MANIFEST, content, if_equal=stamp.generation).result()
        now = files.read(MANIFEST, if_not_equal=done.generation).result()
        if now.state != "unspecified":
            raise conflict_error(store.path)
    except BaseException:
        tidy(store)
        raise
    tidy(store, before)


@contextmanager
def lock_and_tidy(store: Store) -> Iterator[None]:
    """Hold a vault's lock, after deleting the leftovers of a killed process."""
    lock = store.lock()
    try:
        tidy(store)
        yield
    finally:
        lock.release()


def copy(contents: Contents, keys: Iterable[str], target: Store) -> None:
    """Copy keys and values in the order in which they are read; offmarl's keys with checksums."""
    batch: dict[str, bytes] = {}
    size = 0
    ordered = sorted(keys, key=_order)
    for key, read in ahead(ordered, contents.start, depth_of(_BATCH_BYTES // 16)):
        batch |= unseal({key: read()}, contents.path)
        size += len(batch[key])
        if size >= _BATCH_BYTES:
            target.commit(batch, fence={}).result()
            batch, size = {}, 0
    target.commit(batch, fence={}).result()


def _order(key: str) -> tuple[bool, str, int, int, str]:
    """Sort the chunks of a leaf by time, and offmarl's keys, which complete a vault, last."""
    match = _CHUNK.fullmatch(key)
    leaf, block, number, suffix = match.groups() if match else (key, 0, -1, "")
    return key.startswith(OWN_PREFIX), leaf, int(number), int(block), suffix


def tidy(store: Store, files: Container[str] | None = None) -> None:
    """Delete files that a killed commit or rebuild left; of data files only those named, if any.

    Other data files may be those of a stock program's commit, which is not complete yet. The caller
    must hold the vault's lock.
    """
    if not isinstance(store, Directory):
        return  # elsewhere nothing is left
    directory = store.directory
    (directory / UNFINISHED).unlink(missing_ok=True)
    leftover = directory / REBUILT
    if not leftover.exists():
        return
    try:
        live = commit.live_files(store)
    except (ValueError, OSError):
        live = None  # unknown without a manifest: any file may be needed
    for file in (directory / DATA).glob("*"):
        name = f"{DATA}/{file.name}"
        if live is not None and name not in live and (files is None or name in files):
            file.unlink()
    shutil.rmtree(leftover)


def _usage(directory: Path) -> tuple[int, int]:
    """Return the bytes and the number of a store's files."""
    sizes = [*_data_sizes(directory).values(), (directory / MANIFEST).stat().st_size]
    return sum(sizes), len(sizes)


def _data_sizes(directory: Path) -> dict[str, int]:
    """Return the bytes of each data file, by its name in the tree."""
    with os.scandir(directory / DATA) as entries:
        return {f"{DATA}/{file.name}": file.stat().st_size for file in entries}
