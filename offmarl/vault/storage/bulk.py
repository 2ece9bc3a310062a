"""Writes large blocks of values to a data file of an OCDBT store.

TensorStore copies a value several times before it is on the disk. A recording writes hundreds of
megabytes a second, so offmarl writes full chunks itself, from the memory in which they were
gathered and past the page cache. A node of a B+tree, in OCDBT's format, follows the values and
lists them. TensorStore then adds these references to the vault's tree, in the same transaction as
all other keys of the commit.
"""

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import google_crc32c

from offmarl.vault.format.layout import DATA
from offmarl.vault.storage.files import sync

_DIRECT = getattr(os, "O_DIRECT", 0)
"""Writes that bypass the page cache: not on all systems, and not in all file systems."""
_NODE, _MANIFEST = bytes.fromhex("0cdb20de"), bytes.fromhex("0cdb3a2a")
_INDIRECT = 1
_NO_COMPRESSION = b"\0"


class PageBlock(NamedTuple):
    """Values in one block of memory, which is a whole number of pages."""

    memory: mmap.mmap
    places: Mapping[str, tuple[int, int]]
    """By key, the offset and the length of its value."""

    def values(self) -> dict[str, bytes]:
        """Return a copy of the values, by key."""
        return {key: self.memory[at : at + size] for key, (at, size) in self.places.items()}


class DataFile(NamedTuple):
    """A data file that was written."""

    name: str
    """Path in the store's directory."""
    manifest: bytes
    """A manifest of a store that holds the values of this file and nothing else."""


def write_blocks(directory: Path, blocks: Sequence[PageBlock]) -> DataFile:
    """Write blocks to a new data file durably."""
    name = f"{DATA}/{os.urandom(16).hex()}"
    starts, size = [], 0
    for block in blocks:
        starts.append(size)
        size += len(block.memory)
    places = (
        (key.encode(), start + at, length)
        for start, block in zip(starts, blocks, strict=True)
        for key, (at, length) in block.places.items()
    )
    entries = sorted(places)
    node = _node(name, entries)
    descriptor = os.open(
        directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
    )
    try:
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, _DIRECT)
        for block in blocks:
            _write(descriptor, block.memory)
        _write(descriptor, _copied(node))
        os.fdatasync(descriptor)
        sync(directory / DATA)
    except BaseException:
        (directory / name).unlink()
        raise
    finally:
        os.close(descriptor)
    values = sum(length for *_, length in entries)
    return DataFile(name, _manifest(name, size, len(node), len(entries), values))


def allocate(size: int) -> mmap.mmap:
    """Allocate zeros that begin at a page and fill pages, as writes past the page cache need.

    They are in large pages where the system has them: filling new small ones costs more than
    copying the data.
    """
    pages = max(-(-size // mmap.PAGESIZE), 1)
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel may lack them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _copied(data: bytes) -> mmap.mmap:
    memory = allocate(len(data))
    memory.write(data)
    return memory


def _write(descriptor: int, memory: mmap.mmap) -> None:
    """Write all bytes, through the page cache if the file system wants that."""
    remaining = memoryview(memory)
    try:
        while remaining:
            try:
                done = os.write(descriptor, remaining)
            except OSError as error:
                if error.errno != errno.EINVAL or not _is_direct(descriptor):
                    raise
                fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
                continue
            remaining, previous = remaining[done:], remaining
            previous.release()
    finally:
        remaining.release()


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT)


# ---------------------------------------------------------------------------------- format


def _node(name: str, entries: Sequence[tuple[bytes, int, int]]) -> bytes:
    """Return a leaf node that lists values: key, offset and length in the file, sorted by key."""
    keys = [key for key, *_ in entries]
    shared = [_num_shared(*pair) for pair in pairwise(keys)]
    suffixes = [key[size:] for key, size in zip(keys, [0, *shared], strict=True)]
    count = len(entries)
    return _sealed(
        _NODE,
        b"\0",  # height of a leaf
        _files(name),
        _varints([count, *shared, *map(len, suffixes)]),
        *suffixes,
        _varints(length for *_, length in entries),
        bytes([_INDIRECT]) * count,
        _varints([0] * count),  # number of the file
        _varints(offset for _, offset, _ in entries),
    )


def _num_shared(first: bytes, second: bytes) -> int:
    """Return the length of the longest common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _manifest(name: str, offset: int, size: int, num_keys: int, values: int) -> bytes:
    """Return the manifest of a store with one commit, whose root is the node in a file."""
    config = bytes(16) + _varints([0, 100, 2**23]) + bytes([4]) + _NO_COMPRESSION
    root = _varints([0, offset, size, num_keys, size, values])
    num_versions, generation, height, time, no_earlier = b"\1", b"\1", b"\0", bytes(8), b"\0"
    versions = num_versions + generation + height + root + time + no_earlier
    return _sealed(_MANIFEST, config, _files(name), versions)


def _files(name: str) -> bytes:
    """Return a table of one data file: the length of its path, and of its base, which is empty."""
    return _varints([1, len(name), 0]) + name.encode()


def _sealed(magic: bytes, *parts: bytes) -> bytes:
    """Join the parts of a node or a manifest: a header before them, and a CRC32C after them."""
    version = b"\0"
    inside = version + _NO_COMPRESSION + b"".join(parts)
    content = magic + struct.pack("<Q", len(inside) + 16) + inside
    return content + struct.pack("<I", google_crc32c.value(content))


def _varints(numbers: Iterable[int]) -> bytes:
    return bytes(byte for number in numbers for byte in _varint(number))


def _varint(number: int) -> Iterator[int]:
    while number > 127:
        yield number & 127 | 128
        number >>= 7
    yield number
