"""Files mapped into memory, one after the other."""

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmarl.vault import files

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
