"""Reads uncompressed arrays through memory maps of a vault's data files.

An OCDBT store keeps each value unchanged in one of its data files, and its tree records the file
and the offset. `Snapshot` walks that tree once. After that, every step of an array has a known
address, so random windows of a dataset larger than memory are gathered as fast as from an array in
memory.
"""

import ctypes
import mmap
import os
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from offmarl._arrays import as_items
from offmarl.vault import commit, files, layout
from offmarl.vault.commit import ValueLocation
from offmarl.vault.drivers import Driver, TensorStoreDriver
from offmarl.vault.layout import Leaf, NumpyArray, load_json

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


_ABSENT = -1
_RELEASE_BYTES = 2**22
"""Bytes read between two calls of `Region.release`, which keeps the resident memory small."""
_PIECE_BYTES = 2**17
_CACHED_BYTES = 2**18
_LARGE_BYTES = 512
"""From this size on a leaf is gathered step by step, so that each is copied once from the disk."""
_CHUNK = re.compile(r"(.+)\./(\d+)\.(\d+)(?:\.0)*")


@runtime_checkable
class Check(Protocol):
    """Compares the chunks of an array with their checksums, each once."""

    def is_fresh(self, block: int, number: int) -> bool:
        """Whether a chunk has not been compared yet."""

    def compare(
        self, block: int, number: int, chunk: NumpyArray, checksum: int | None = None
    ) -> None:
        """Compare a chunk with its checksum; ``checksum`` is its CRC32C, if known.

        Raises `VaultChecksumError` if the chunk is damaged.
        """


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
        extent = self._extents.get(key)
        if extent is None and (match := _CHUNK.fullmatch(key)):
            extent = self._chunks.get(match[1], {}).get((int(match[2]), int(match[3])))
        if extent is None:
            return self._values.get(key)  # short values are in the tree
        start, length = extent
        return self.region.bytes[start : start + length].tobytes()

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix and are not those of chunks, sorted."""
        return sorted(k for k in (*self._values, *self._extents) if k.startswith(prefix))

    def count(self, name: str) -> int:
        """Return the number of chunks of an array."""
        return len(self._chunks.get(name, {}))

    def chunks(self, name: str, shape: tuple[int, int], size: int) -> NDArray[np.int64]:
        """Return the indices in the region's bytes at which an array's chunks begin.

        Parameters
        ----------
        name
            The array's disk name.
        shape
            Number of blocks of rows, and of chunks of time.
        size
            Bytes of a chunk. A chunk of any other size counts as missing.

        Returns
        -------
        numpy.ndarray
            Indices of the given shape; -1 where a chunk is missing.
        """
        found = np.full(shape, _ABSENT, np.int64)
        for (block, number), (start, length) in self._chunks.get(name, {}).items():
            if block < shape[0] and number < shape[1] and length == size:
                found[block, number] = start
        return found


@dataclass(frozen=True)
class MappedArray:
    """An array ``(rows, T, *leaf)`` with uncompressed chunks in mapped files.

    Attributes
    ----------
    name
        Its disk name.
    leaf
        Type and shape of a single step.
    chunk_rows, chunk_steps
        Rows and steps of a chunk.
    region
        The mapped files.
    addresses
        ``(blocks, chunks)`` int64, the index in ``region.bytes`` at which each chunk begins.
    """

    name: str
    leaf: Leaf
    chunk_rows: int
    chunk_steps: int
    region: Region
    addresses: NDArray[np.int64]

    @property
    def chunk_size(self) -> tuple[int, int]:
        """Rows and steps of a chunk."""
        return self.chunk_rows, self.chunk_steps

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return self.chunk_rows * self.chunk_steps * self.leaf.step_bytes

    def chunk(self, block: int, number: int) -> NumpyArray:
        """Return one chunk ``(chunk_rows, chunk_steps, *leaf)``, not copied."""
        shape = (self.chunk_rows, self.chunk_steps, *self.leaf.shape)
        data = self.region.bytes.data
        return np.ndarray(shape, self.leaf.dtype, data, int(self.addresses[block, number]))

    def read(
        self,
        rows: range,
        steps: range,
        agents: slice | None,
        check: Check | None = None,
    ) -> NumpyArray:
        """Return ``(B, T, *leaf)``: a read-only view if one chunk holds all of it, else a copy.

        Parameters
        ----------
        rows, steps
            The B rows and T steps to read.
        agents
            Selects from the third axis; None reads all of it.
        check
            Compares each chunk that has not been compared yet.
        """
        select = () if agents is None else (agents,)
        by_rows, by_steps = list(cut(rows, self.chunk_rows)), list(cut(steps, self.chunk_steps))
        if len(by_rows) == len(by_steps) == 1:
            ((block, inside, _),), ((number, times, _),) = by_rows, by_steps
            chunk = self.chunk(block, number)
            if check and check.is_fresh(block, number):
                check.compare(block, number, chunk)
            return chunk[(inside, times, *select)]
        shape = np.empty((0, *self.leaf.shape))[(slice(None), *select)].shape[1:]
        out: NumpyArray = np.empty((len(rows), len(steps), *shape), self.leaf.dtype)
        unreleased = 0
        for number, times, to_steps in by_steps:
            for block, inside, to_rows in by_rows:
                chunk = self.chunk(block, number)
                part, target = chunk[(inside, times, *select)], out[to_rows, to_steps]
                if check is None or not check.is_fresh(block, number):
                    target[...] = part
                elif part.shape == chunk.shape:
                    check.compare(block, number, chunk, copy(chunk, target))
                else:
                    target[...] = part
                    check.compare(block, number, chunk)
                unreleased += self.chunk_bytes
                if unreleased > _RELEASE_BYTES:
                    self.region.release()
                    unreleased = 0
        return out

    def windows(
        self, rows: NDArray[np.int64], starts: NDArray[np.int64], length: int
    ) -> NumpyArray:
        """Gather ``(W, length, *leaf)``; window i begins at step ``starts[i]`` of ``rows[i]``."""
        return self.windows_at(self.window_places(rows, starts, length))

    def window_places(
        self, rows: NDArray[np.int64], starts: NDArray[np.int64], length: int
    ) -> "WindowPlaces":
        """Return where windows are, for all arrays whose chunks have the size of this one's."""
        return WindowPlaces(rows, starts, length, self.chunk_rows, self.chunk_steps)

    def windows_at(self, places: "WindowPlaces") -> NumpyArray:
        """Gather windows ``(W, length, *leaf)``."""
        crossing, shape = places.crossing, (len(places.rows), places.length, *self.leaf.shape)
        addresses = self._address(places.pieces)
        if not len(crossing):
            return self._gather(addresses, places.piece_steps).reshape(shape)
        found = self._gather(addresses[: len(places.rows)], places.piece_steps)
        steps = self._step_addresses(places, addresses)[places.index[crossing]]
        found[crossing] = self._gather(steps.ravel(), 1).reshape(len(crossing), *shape[1:])
        return found

    def window_steps_at(
        self,
        places: "WindowPlaces",
        index: NDArray[np.int64],
        out: NumpyArray,
        at: NDArray[np.int64] | None,
    ) -> None:
        """Gather windows, and write some of their steps to an array.

        ``index``, ``out`` and ``at`` are those of `put_steps`.
        """
        index = places.steps(index, out.shape[1])
        if self.leaf.step_bytes < _LARGE_BYTES or out.dtype != self.leaf.dtype:
            put_steps(self._pieces(places), index, out, at)
            return
        steps = self._step_addresses(places, self._address(places.pieces))
        wanted = steps[index].ravel()
        items, target = self.region.items(self.leaf.step_bytes), as_items(out)
        to = None
        if at is not None:
            to = (at[:, None] * out.shape[1] + np.arange(out.shape[1])).ravel()
        # NumPy gathers only into new arrays. Where these fit in the processor's cache, the copy
        # from there to ``out`` takes little time.
        size = max(1, _CACHED_BYTES // self.leaf.step_bytes)
        for begin in range(0, len(wanted), size):
            some = slice(begin, begin + size)
            target[some if to is None else to[some]] = items[wanted[some]]

    def prefetch(self, rows: NDArray[np.int64], starts: NDArray[np.int64], length: int) -> None:
        """Ask the disk to read windows in the background."""
        stops = starts + length
        while len(starts):
            ends = np.minimum(stops, (starts // self.chunk_steps + 1) * self.chunk_steps)
            sizes = (ends - starts) * self.leaf.step_bytes
            self.region.will_need(self._locate(rows, starts), sizes)
            goes_on = ends < stops
            rows, starts, stops = rows[goes_on], ends[goes_on], stops[goes_on]

    def prefetch_chunks(self, places: Sequence[tuple[int, int]]) -> None:
        """Ask the disk to read whole chunks in the background, given as (block, number)."""
        begins = self.addresses[tuple(np.array(places).T)]
        self.region.will_need(begins, np.full_like(begins, self.chunk_bytes))

    def _locate(self, rows: NDArray[np.int64], times: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._address(_Steps.of(rows, times, self.chunk_rows, self.chunk_steps))

    def _address(self, steps: "_Steps") -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.addresses[steps.block, steps.number]
        return found + steps.step * self.leaf.step_bytes

    def _step_addresses(
        self, places: "WindowPlaces", pieces: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the addresses of all steps of pieces, given those of the pieces."""
        steps = np.arange(places.piece_steps) * self.leaf.step_bytes
        return (pieces.reshape(-1, 1) + steps).ravel()

    def _pieces(self, places: "WindowPlaces") -> NumpyArray:
        """Gather the pieces of windows, ``(P, piece_steps, *leaf)``."""
        return self._gather(self._address(places.pieces), places.piece_steps)

    def _gather(self, addresses: NDArray[np.int64], steps: int) -> NumpyArray:
        found = self.region.items(steps * self.leaf.step_bytes)[addresses]
        return found.view(self.leaf.dtype).reshape(-1, steps, *self.leaf.shape)


class _Steps(NamedTuple):
    """Where steps are in chunks of one size; all arrays have one shape."""

    block: NDArray[np.int64]
    number: NDArray[np.int64]
    step: NDArray[np.int64]
    """Index in the chunk, through all its rows."""

    @classmethod
    def of(
        cls, rows: NDArray[np.int64], times: NDArray[np.int64], chunk_rows: int, chunk_steps: int
    ) -> "_Steps":
        """Return where the steps at some times of some rows are."""
        block, row = np.divmod(rows, chunk_rows)
        number, time = np.divmod(times, chunk_steps)
        return cls(block, number, row * chunk_steps + time)


class WindowPlaces:
    """Where windows are in chunks of one size; computed once for all arrays that have such chunks.

    Attributes
    ----------
    rows, starts, length
        The windows.
    pieces
        First steps of pieces that each lie in one chunk: one for each window, and one more for
        those that cross into another chunk. Windows that are longer than chunks have a piece for
        each step.
    piece_steps
        Steps in a piece.
    index
        ``(W, length)`` which steps of the pieces, counted through all of them, are the windows'.
    crossing
        The windows that have two pieces.
    """

    def __init__(
        self,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        length: int,
        chunk_rows: int,
        chunk_steps: int,
    ):
        self.rows, self.starts, self.length = rows, starts, length
        self._given: NDArray[np.int64] | None = None
        self._steps: dict[int, NDArray[np.int64]] = {}
        self.index = np.arange(len(rows) * length).reshape(len(rows), length)
        if length > chunk_steps:
            times, self.crossing, self.piece_steps = (
                starts[:, None] + np.arange(length),
                rows[:0],
                1,
            )
            self.pieces = _Steps.of(rows[:, None], times, chunk_rows, chunk_steps)
            return
        over, self.piece_steps = np.maximum(starts % chunk_steps + length - chunk_steps, 0), length
        self.crossing = some = np.flatnonzero(over)
        first = np.append(starts - over, starts[some] + length - over[some])
        self.pieces = _Steps.of(np.append(rows, rows[some]), first, chunk_rows, chunk_steps)
        if len(some):
            # In their first pieces, these windows begin later; the last steps are in the second.
            before, step = (length - over[some])[:, None], np.arange(length)
            second = (len(rows) + np.arange(len(some)))[:, None] * length + step - before
            self.index[some] = np.where(step < before, self.index[some] + over[some, None], second)

    def steps(self, index: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return which steps of the pieces are the first ``count`` of the windows' steps ``index``.

        It keeps what it returns, for the other arrays of a read.
        """
        if self._given is not index:
            self._given, self._steps = index, {}
        if count not in self._steps:
            first = np.ascontiguousarray(index[:, :count])
            self._steps[count] = self.index.ravel()[first] if len(self.crossing) else first
        return self._steps[count]


def put_steps(
    windows: NumpyArray, index: NDArray[np.int64], out: NumpyArray, at: NDArray[np.int64] | None
) -> None:
    """Write some steps of windows to an array, as numbers of its type; masks are what is not 0.

    Parameters
    ----------
    windows
        ``(W, length, *leaf)``.
    index
        ``(n, S)`` which steps, counted through all windows.
    out
        ``(m, S, *leaf)``, contiguous. If it has fewer than S steps, it takes the first ones.
    at
        ``(n,)`` where on its first axis; None for all, in order.
    """
    if not out.size:
        return
    items, where = as_items(np.ascontiguousarray(windows)), slice(None) if at is None else at
    index = index[:, : out.shape[1]]
    if out.dtype == windows.dtype and at is None:
        items.take(index, out=as_items(out).reshape(index.shape), mode="clip")
        return
    if out.dtype == bool:  # bytes are moved faster than the numbers they are made of
        items = as_items(np.ascontiguousarray(windows) != 0)
    found = items.take(index, mode="clip").view(bool if out.dtype == bool else windows.dtype)
    out[where] = found.reshape(*index.shape, *out.shape[2:])


def copy(chunk: NumpyArray, target: NumpyArray) -> int:
    """Copy a chunk ``(rows, steps, ...)``, and return its CRC32C.

    Each piece is copied and then hashed, while it is still in the processor's cache.
    """
    checksum = 0
    steps = max(1, _PIECE_BYTES // max(1, chunk[:1, :1].nbytes))
    for row, to_row in zip(chunk, target, strict=True):
        for start in range(0, len(row), steps):
            piece = row[start : start + steps]
            to_row[start : start + steps] = piece
            checksum = google_crc32c.extend(checksum, piece)
    return checksum


def cut(span: range, size: int) -> Iterator[tuple[int, slice, slice]]:
    """Cut a range at multiples of ``size``.

    Yields
    ------
    tuple
        The index of a block of ``size``, the slice inside the block, and the slice of the range.
    """
    done = 0
    while done < len(span):
        block, first = divmod(span[done], size)
        count = min(len(span) - done, -(-(size - first) // span.step))
        inside = slice(first, first + (count - 1) * span.step + 1, span.step)
        yield block, inside, slice(done, done + count)
        done += count


def open_snapshot(driver: Driver) -> Snapshot | None:
    """Return the content of a store now; None if it cannot be mapped.

    Raises
    ------
    OSError, ValueError
        Files that the store refers to cannot be read.
    """
    if not (driver.can_map and isinstance(driver, TensorStoreDriver)):
        return None
    try:
        return Snapshot(driver)
    except MemoryError:
        return None
    except (OSError, ValueError):
        return Snapshot(driver)  # a compaction replaced the files; the new ones have the same data


def map_arrays(
    snapshot: Snapshot, leaves: Mapping[str, Leaf], rows: int, length: int
) -> dict[str, MappedArray]:
    """Return the arrays that can be mapped, by name.

    An array can be mapped if it is uncompressed and in C order, its chunks hold whole steps, and no
    chunk is missing.
    """
    found = {}
    for name, leaf in leaves.items():
        key = f"{layout.prefix_of(name)}.zarray"
        document = load_json(snapshot.value(key) or b"{}", key)
        if not _is_plain(document, leaf):
            continue
        chunk_rows, chunk_steps, *_ = document["chunks"]
        shape = -(-rows // chunk_rows), -(-length // chunk_steps)
        if snapshot.count(name) < shape[0] * shape[1]:
            continue  # a forged length must not make the next line allocate memory for it
        addresses = snapshot.chunks(name, shape, chunk_rows * chunk_steps * leaf.step_bytes)
        if (addresses != _ABSENT).all():
            region = snapshot.region
            found[name] = MappedArray(name, leaf, chunk_rows, chunk_steps, region, addresses)
    return found


def _is_plain(document: Mapping[str, Any], leaf: Leaf) -> bool:
    return (
        document.get("compressor", "unknown") is None
        and not document["filters"]
        and document["order"] == "C"
        and np.dtype(document["dtype"]) == leaf.dtype
        and tuple(document["chunks"][2:]) == leaf.shape
    )
