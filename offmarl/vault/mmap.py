"""Reads uncompressed arrays through memory maps of a vault's data files.

An OCDBT store keeps each value unchanged in one of its data files, and its tree records the file
and the offset. `Snapshot` walks that tree once. After that, every step of an array has a known
address, so random windows of a dataset larger than memory are gathered as fast as from an array in
memory.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from offmarl._arrays import as_items
from offmarl.vault import commit, layout
from offmarl.vault.commit import ValueLocation
from offmarl.vault.drivers import Driver, TensorStoreDriver
from offmarl.vault.layout import Leaf, NumpyArray, load_json
from offmarl.vault.region import Region
from offmarl.vault.windows import ChunkSteps, WindowPlaces, put_steps

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
        """Return the indices in the region's bytes at which an array's chunks begin."""
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
        """Return ``(B, T, *leaf)``: a read-only view if one chunk holds all of it, else a copy."""
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
    ) -> WindowPlaces:
        """Return where windows are, for all arrays whose chunks have the size of this one's."""
        return WindowPlaces(rows, starts, length, self.chunk_rows, self.chunk_steps)

    def windows_at(self, places: WindowPlaces) -> NumpyArray:
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
        places: WindowPlaces,
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
        return self._address(ChunkSteps.of(rows, times, self.chunk_rows, self.chunk_steps))

    def _address(self, steps: ChunkSteps) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.addresses[steps.block, steps.number]
        return found + steps.step * self.leaf.step_bytes

    def _step_addresses(self, places: WindowPlaces, pieces: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the addresses of all steps of pieces, given those of the pieces."""
        steps = np.arange(places.piece_steps) * self.leaf.step_bytes
        return (pieces.reshape(-1, 1) + steps).ravel()

    def _pieces(self, places: WindowPlaces) -> NumpyArray:
        """Gather the pieces of windows, ``(P, piece_steps, *leaf)``."""
        return self._gather(self._address(places.pieces), places.piece_steps)

    def _gather(self, addresses: NDArray[np.int64], steps: int) -> NumpyArray:
        found = self.region.items(steps * self.leaf.step_bytes)[addresses]
        return found.view(self.leaf.dtype).reshape(-1, steps, *self.leaf.shape)


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
    """Cut a range at multiples of ``size``."""
    done = 0
    while done < len(span):
        block, first = divmod(span[done], size)
        count = min(len(span) - done, -(-(size - first) // span.step))
        inside = slice(first, first + (count - 1) * span.step + 1, span.step)
        yield block, inside, slice(done, done + count)
        done += count


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
