"""Many files as one stretch of read-only memory.

Python's own maps lie wherever the kernel puts them and hold a file descriptor each. A vault has up
to thousands of data files, and one gather over windows of all of them needs one range of addresses:
so the files are mapped here side by side, by the system's ``mmap`` itself.
"""

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

from offmarl.vault import regular_files

_PROT_NONE = 0
_MAP_FIXED = 0x10  # on Linux and macOS; Python does not name these two


class Region:
    """Files mapped side by side; unmapped when the last view of them is gone.

    What was mapped stays readable when the files are deleted.

    Parameters
    ----------
    directory, names
        Of a vault, and of its files; no link is followed.

    Attributes
    ----------
    bytes
        ``(size,)`` read-only; between the files, up to the next page, there is nothing to read.
    starts
        ``(F,)`` the index in ``bytes`` at which each file begins.
    sizes
        ``(F,)`` bytes of each file.

    Raises
    ------
    OSError, ValueError
        A file cannot be opened, or is not a regular file inside the directory.
    MemoryError
        The system grants no more memory maps, or none so large.
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
        descriptor = regular_files.open_file(directory, name)
        try:
            shared = mmap.MAP_SHARED | _MAP_FIXED
            _map(self._base + start, size, mmap.PROT_READ, shared, descriptor)
        finally:
            os.close(descriptor)

    def items(self, size: int) -> NDArray[Any]:
        """Return the runs of ``size`` bytes that begin at every index, to pick from by index.

        NumPy copies each picked run as a whole, however it is aligned: nothing is faster.
        """
        count = len(self.bytes) - size + 1
        return np.ndarray((count,), f"V{size}", self.bytes.data, strides=(1,))

    def will_need(self, begins: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Ask the kernel to read stretches of so many bytes from the disk, all at once."""
        advise, page = _libc().madvise, mmap.PAGESIZE
        first = begins // page * page
        for start, count in zip(first.tolist(), (begins + sizes - first).tolist(), strict=True):
            advise(self._base + start, count, mmap.MADV_WILLNEED)

    def release(self) -> None:
        """Stop counting what was read as memory of this process; it stays in the page cache."""
        _libc().madvise(self._base, len(self.bytes), mmap.MADV_DONTNEED)


def _size(directory: Path, name: str) -> int:
    descriptor = regular_files.open_file(directory, name)
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
