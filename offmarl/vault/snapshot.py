"""A store's data files mapped into memory, as they are at one commit.

An OCDBT store keeps each value unchanged in one of its data files, and its tree records the file
and the offset. `Snapshot` walks that tree once. After that, every step of an uncompressed array has
a known address, so random windows of a dataset larger than memory are gathered as fast as from an
array in memory.
"""

import ctypes
import mmap
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmarl.errors import VaultFormatError
from offmarl.vault import commit, files
from offmarl.vault.commit import ValueLocation
from offmarl.vault.drivers import Driver, TensorStoreDriver
from offmarl.vault.layout import unseal

_ABSENT = -1
_CHUNK = re.compile(r"(.+)\./(\d+)\.(\d+)(?:\.0)*")
_PROT_NONE = 0
_MAP_FIXED = 0x10  # on Linux and macOS; Python's mmap has neither constant


class Region:
    """Files mapped into one range of memory, one after the other.

    They are unmapped when the last array on them is garbage-collected. The data stays readable
    after the files are deleted.

    Parameters
    ----------
    directory
        Directory of a vault.
    names
        Names of F data files in it. Links are not followed.

    Attributes
    ----------
    bytes
        ``(size,)`` uint8, read-only. Each file begins at a page; do not read between the end of a
        file and the next page.
    starts
        ``(F,)`` int64, the index in ``bytes`` at which each file begins.
    sizes
        ``(F,)`` int64, bytes of each file.

    Raises
    ------
    OSError, ValueError
        A file cannot be opened, or is not a regular file inside the directory.
    MemoryError
        The system refuses the memory map.
    """

    def __init__(self, directory: Path, names: Sequence[str]):
        self.sizes = np.array([_size(directory, name) for name in names], np.int64)
        spans = -(-self.sizes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.starts = np.cumsum(spans) - spans
        total = max(int(spans.sum()), mmap.PAGESIZE)
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANON
        self._base = _map(None, total, _PROT_NONE, anonymous, -1)
        memory = (ctypes.c_ubyte * total).from_address(self._base)
        weakref.finalize(memory, _libc().munmap, self._base, total)
        for name, start, size in zip(names, self.starts.tolist(), self.sizes.tolist(), strict=True):
            if size:
                self._map_file(directory, name, start, size)
        self.bytes: NDArray[np.uint8] = np.frombuffer(memoryview(memory), np.uint8)
        self.bytes.flags.writeable = False

    def _map_file(self, directory: Path, name: str, start: int, size: int) -> None:
        descriptor = files.open_file(directory, name)
        try:
            shared = mmap.MAP_SHARED | _MAP_FIXED
            _map(self._base + start, size, mmap.PROT_READ, shared, descriptor)
        finally:
            os.close(descriptor)

    def items(self, size: int) -> NDArray[Any]:
        """Return a view whose item i is the ``size`` bytes from index i on; items overlap.

        Indexing it with an array gathers items. NumPy copies each item as one block, whatever its
        alignment, which is the fastest gather measured.
        """
        count = len(self.bytes) - size + 1
        return np.ndarray((count,), f"V{size}", self.bytes.data, strides=(1,))

    def will_need(self, begins: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Ask the kernel to read intervals of bytes from the disk, without waiting for them."""
        advise, page = _libc().madvise, mmap.PAGESIZE
        first = begins // page * page
        for start, count in zip(first.tolist(), (begins + sizes - first).tolist(), strict=True):
            advise(self._base + start, count, mmap.MADV_WILLNEED)

    def release(self) -> None:
        """Drop the pages from the process's resident memory; they stay in the page cache."""
        _libc().madvise(self._base, len(self.bytes), mmap.MADV_DONTNEED)


def _size(directory: Path, name: str) -> int:
    descriptor = files.open_file(directory, name)
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _map(address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    found = _libc().mmap(address, size, protection, flags, descriptor, 0)
    if found == ctypes.c_void_p(-1).value:
        raise MemoryError(os.strerror(ctypes.get_errno()))
    return int(found)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_int64]
    libc.mmap.restype = pointer
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    return libc


class Snapshot:
    """The content of a store in a directory at one commit, memory-mapped.

    It stays readable whatever is committed or compacted afterwards.

    Parameters
    ----------
    driver
        The directory.

    Attributes
    ----------
    region
        The mapped data files.

    Raises
    ------
    OSError, ValueError
        Files that the store refers to cannot be read.
    MemoryError
        The system refuses the memory map.
    """

    def __init__(self, driver: TensorStoreDriver):
        self.path = driver.path
        found = commit.current_tree(driver)
        if found.lost:
            raise ValueError(found.lost[0])
        self._values = {k: v for k, v in found.values.items() if isinstance(v, bytes)}
        placed = {k: v for k, v in found.values.items() if isinstance(v, ValueLocation)}
        files = sorted({place.file for place in placed.values()})
        self.region = Region(driver.directory, files)
        starts = dict(zip(files, self.region.starts.tolist(), strict=True))
        ends = dict(zip(files, (self.region.starts + self.region.sizes).tolist(), strict=True))
        self._extents: dict[str, tuple[int, int]] = {}
        self._chunks: dict[str, dict[tuple[int, int], tuple[int, int]]] = {}
        for key, (file, offset, length) in placed.items():
            start = starts[file] + offset
            if start + length > ends[file]:
                raise ValueError(f"{file} was cut short")
            if match := _CHUNK.fullmatch(key):
                chunks = self._chunks.setdefault(match[1], {})
                chunks[int(match[2]), int(match[3])] = start, length
            else:
                self._extents[key] = start, length

    def value(self, key: str) -> bytes | None:
        """Return the value of a key; None if it does not exist."""
        found = self._find(key)
        return None if found is None else bytes(found)

    def _find(self, key: str) -> Any:
        """Return the value of a key, not copied."""
        extent = self._extents.get(key)
        if extent is None and (match := _CHUNK.fullmatch(key)):
            extent = self._chunks.get(match[1], {}).get((int(match[2]), int(match[3])))
        if extent is None:
            return self._values.get(key)  # short values are in the tree
        start, length = extent
        return self.region.bytes[start : start + length].data

    def fetch(self, keys: Sequence[str], _: int) -> Iterator[Any]:
        """Yield the values of keys, not copied; None for each that does not exist."""
        return map(self._find, keys)

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that must exist."""
        path = self.path
        values = [(key, self.value(key)) for key in keys]
        if lost := [key for key, value in values if value is None]:
            raise VaultFormatError(f"{path} has lost {lost[0]}: the vault is damaged.")
        return [unseal(key, value or b"", path) for key, value in values]

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix and are not those of chunks, sorted."""
        return sorted(k for k in (*self._values, *self._extents) if k.startswith(prefix))

    def addresses(self, name: str, shape: tuple[int, int], size: int) -> NDArray[np.int64] | None:
        """Return where an array's chunks of ``size`` bytes begin; None if any is missing.

        ``shape`` is the number of blocks of rows and of chunks in time.
        """
        chunks = self._chunks.get(name, {})
        if len(chunks) < shape[0] * shape[1]:
            return None  # a forged length must not make the next line allocate memory for it
        found = np.full(shape, _ABSENT, np.int64)
        for (block, number), (start, length) in chunks.items():
            if block < shape[0] and number < shape[1] and length == size:
                found[block, number] = start
        return found if (found != _ABSENT).all() else None


def open_snapshot(driver: Driver) -> Snapshot | None:
    """Return the content of a store now; None if it cannot be mapped."""
    if not (driver.can_map and isinstance(driver, TensorStoreDriver)):
        return None
    try:
        return Snapshot(driver)
    except MemoryError:
        return None
    except (OSError, ValueError):
        return Snapshot(driver)  # a compaction replaced the files; the new ones have the same data
