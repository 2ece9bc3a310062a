"""Reads chunks of a vault's arrays: the one way from stored bytes to steps.

The bytes come from mapped files, from requests to another machine, or from a driver that a user
registered. Each chunk is compared with its checksum and decoded. Uncompressed chunks of mapped
files are used where they are, and a bounded number of others is kept in memory.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from threading import Lock
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import NDArray

from offmarl._ahead import ahead, depth_of, in_pool
from offmarl._arrays import as_items
from offmarl.errors import VaultChecksumError, VaultFormatError
from offmarl.vault.format import layout
from offmarl.vault.format.faults import damaged, of_chunk, with_episodes
from offmarl.vault.format.layout import Head, Leaf, NumpyArray, Schema
from offmarl.vault.format.metadata import Chunk
from offmarl.vault.format.tables import Episodes
from offmarl.vault.format.windows import ChunkSteps, WindowPlaces, put_steps
from offmarl.vault.read.manifest import Description
from offmarl.vault.storage.commit import Contents, Region, ValueLocation
from offmarl.vault.storage.files import lost_chunk
from offmarl.vault.storage.location import is_forked
from offmarl.vault.storage.store import Store

_KEPT_BYTES = 2**26
"""Bytes of decoded chunks that are kept in memory."""
_DECODED_AHEAD = 2 * (os.cpu_count() or 1)
_RELEASE_BYTES = 2**22
"""Bytes read between two calls of `Region.release`, which keeps the resident memory small."""
_COMPARED_BYTES = 2**24
"""Bytes compared between two such calls."""
_PIECE_BYTES = 2**17
_CACHED_BYTES = 2**18
_LARGE_BYTES = 512
"""From this size on a leaf is gathered step by step, so that each is copied once from the disk."""
_UNKNOWN = -1


class ChunkPlace(NamedTuple):
    """A chunk of whole steps: its array, the index of its block of rows, and of its time."""

    name: str
    block: int
    number: int


class Part(NamedTuple):
    """A part of a chunk, and where to copy it."""

    place: ChunkPlace
    source: tuple[slice, ...]
    target: NumpyArray


class ChunkReader:
    """Reads the chunks of one vault, from its mapped files or from its store; threads may share it.

    If offmarl wrote the vault, every chunk must exist; other programs may omit chunks that hold
    only the fill value. Without checks, nothing is compared.
    """

    def __init__(self, vault: Description, checks: "Checks | None", mapped: Contents | None = None):
        self._vault, self._checks, self._mapped = vault, checks, mapped
        self._kept: OrderedDict[ChunkPlace, NumpyArray] = OrderedDict()
        self._kept_bytes, self._lock = 0, Lock()
        self.maps = _map_arrays(mapped, vault) if mapped else {}
        """The uncompressed arrays of mapped files, by name."""

    def read(self, places: Sequence[ChunkPlace]) -> Iterator[tuple[ChunkPlace, NumpyArray]]:
        """Yield chunks ``(rows, steps, *leaf)`` that are not mapped; do not write to them.

        Several are read and decoded at once, and those in memory come first.
        """
        wanted = []
        for place in places:
            if (chunk := self._kept.get(place)) is None:
                wanted.append(place)
            else:
                yield place, chunk
        if self._checks:
            self._checks.load({place.number for place in wanted})
        keys = [self._keys(place) for place in wanted]
        depth = depth_of(max((self._bytes_of(place) for place in wanted), default=0))
        values = self._fetch([key for some in keys for key in some], depth)
        encoded = (
            (place, [*islice(values, len(some))]) for place, some in zip(wanted, keys, strict=True)
        )
        if len(wanted) < 2 or is_forked():
            yield from ((place, self._decode(place, some)) for place, some in encoded)
            return
        decode = partial(_in_pool, self._decode)
        for (place, _), done in ahead(encoded, decode, min(depth, _DECODED_AHEAD)):
            yield place, done.result()

    def _fetch(self, keys: Sequence[str], depth: int) -> Iterator[Any]:
        """Yield the stored values of keys; None for each that does not exist."""
        if self._mapped:
            return map(self._mapped.value, keys)
        return self._vault.store.fetch(keys, depth)

    def _keys(self, place: ChunkPlace) -> list[str]:
        return self._vault.grids[place.name].keys(place.block, place.number)

    def _bytes_of(self, place: ChunkPlace) -> int:
        rows, steps, *_ = self._vault.grids[place.name].chunks
        return rows * steps * self._vault.leaves[place.name].step_bytes

    def _decode(self, place: ChunkPlace, values: Sequence[Any]) -> NumpyArray:
        grid, parts = self._vault.grids[place.name], []
        for key, value in zip(self._keys(place), values, strict=True):
            if value is None and self._vault.manifest:
                raise lost_chunk(self._vault.path, key)
            place_of = f"{self._vault.path}: {key}"
            parts.append(grid.missing_chunk() if value is None else grid.decode(value, place_of))
        chunk = grid.join(parts)
        if self._checks is None:
            return chunk
        again = None if self._mapped else partial(self._again, place)
        return self._checks.compare(place, chunk, again=again)

    def _again(self, place: ChunkPlace) -> NumpyArray:
        grid, keys = self._vault.grids[place.name], self._keys(place)
        values = self._fetch(keys, len(keys))
        return grid.join([grid.decode(x or b"", k) for x, k in zip(values, keys, strict=True)])

    def _keep(self, place: ChunkPlace, chunk: NumpyArray) -> None:
        """Keep a decoded chunk until newer ones need its memory."""
        with self._lock:
            if chunk.nbytes > _KEPT_BYTES or place in self._kept:
                return
            self._kept[place] = chunk
            self._kept_bytes += chunk.nbytes
            while self._kept_bytes > _KEPT_BYTES:
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= oldest.nbytes

    # ------------------------------------------------------------------------------ steps

    def mapped(self, places: Iterable[ChunkPlace]) -> list[NumpyArray]:
        """Return mapped chunks, not copied."""
        found = []
        for place in places:
            chunk = self.maps[place.name].chunk(place.block, place.number)
            if self._checks and self._checks.is_fresh(place):
                self._checks.compare(place, chunk)
            found.append(chunk)
        return found

    def copy(self, parts: Sequence[Part]) -> None:
        """Copy parts of chunks to where they belong."""
        others, unreleased = {}, 0
        for part in parts:
            if part.place.name not in self.maps:
                others[part.place] = part
                continue
            unreleased += self._copy_mapped(part)
            if unreleased > _RELEASE_BYTES:
                self.maps[part.place.name].region.release()
                unreleased = 0
        for place, chunk in self.read([*others]) if others else ():
            part = others[place]
            part.target[...] = taken = chunk[part.source]
            if taken.size < chunk.size:
                self._keep(place, chunk)

    def _copy_mapped(self, part: Part) -> int:
        """Copy a part of a mapped chunk, compare the chunk, and return its bytes."""
        place, source, target = part
        chunk = self.maps[place.name].chunk(place.block, place.number)
        if self._checks is None or not self._checks.is_fresh(place):
            target[...] = chunk[source]
        elif target.shape == chunk.shape:
            self._checks.compare(place, chunk, checksum=_copy(chunk, target))
        else:
            target[...] = chunk[source]
            self._checks.compare(place, chunk)
        return chunk.nbytes

    def fresh(self, names: Sequence[str], places: WindowPlaces) -> list[ChunkPlace]:
        """Return the mapped chunks of windows that have not been compared."""
        if self._checks is None or not (names and len(places.rows)):
            return []
        return self._checks.fresh(names, places.pieces.block, places.pieces.number)

    def compare(self, places: Sequence[ChunkPlace], cold: bool) -> None:
        """Compare mapped chunks; on a cold disk, many are requested at once."""
        if not places or not self._checks:
            return
        self._checks.load({place.number for place in places})
        step = max(1, _COMPARED_BYTES // max(map(self._bytes_of, places)))
        for begin in range(0, len(places), step):
            some = places[begin : begin + step]
            if cold:
                self.prefetch(some)
            for place in some:
                self._checks.compare(place, self.maps[place.name].chunk(place.block, place.number))
            self.maps[some[0].name].region.release()

    def prefetch(self, places: Sequence[ChunkPlace]) -> None:
        """Ask the disk to read whole mapped chunks in the background."""
        for name in dict.fromkeys(place.name for place in places):
            some = [(block, number) for one, block, number in places if one == name]
            self.maps[name].prefetch_chunks(some)

    def gather(
        self, names: Sequence[str], places: Mapping[str, WindowPlaces]
    ) -> dict[str, NumpyArray]:
        """Gather the pieces of windows of arrays that are not mapped, ``(P, steps, *leaf)``."""
        found: dict[str, NumpyArray] = {}
        wanted: dict[ChunkPlace, NDArray[np.int64]] = {}
        for name in names:
            leaf, pieces = self._vault.leaves[name], places[name].pieces
            block, number = pieces.block, pieces.number
            shape = len(block), places[name].piece_steps, *leaf.shape
            found[name] = np.empty(shape, leaf.dtype)
            order = np.lexsort((block, number))
            ends = np.diff(block[order]) | np.diff(number[order])
            for some in np.split(order, np.flatnonzero(ends) + 1) if len(order) else []:
                wanted[ChunkPlace(name, int(block[some[0]]), int(number[some[0]]))] = some
        for place, chunk in self.read([*wanted]):
            some, pieces = wanted[place], places[place.name].pieces
            steps = pieces.step[some, None] + np.arange(places[place.name].piece_steps)
            as_items(found[place.name]).reshape(-1, steps.shape[1])[some] = as_items(chunk)[steps]
            self._keep(place, chunk)
        return found


def _in_pool(decode: Any, one: tuple[ChunkPlace, Sequence[Any]]) -> Any:
    return in_pool(partial(decode, *one))


def windows_of(pieces: NumpyArray, places: WindowPlaces) -> NumpyArray:
    """Put windows ``(W, length, *leaf)`` together from their pieces."""
    shape = len(places.rows), places.length, *pieces.shape[2:]
    if len(places.crossing):
        pieces = as_items(pieces)[places.index].view(pieces.dtype)
    return pieces.reshape(shape)


@dataclass(frozen=True)
class MappedArray:
    """An array ``(rows, T, *leaf)`` with uncompressed chunks in mapped files."""

    leaf: Leaf
    chunk_rows: int
    chunk_steps: int
    region: Region
    addresses: NDArray[np.int64]
    """``(blocks, chunks)``, the index in ``region.bytes`` at which each chunk begins."""

    def chunk(self, block: int, number: int) -> NumpyArray:
        """Return one chunk ``(chunk_rows, chunk_steps, *leaf)``, not copied."""
        shape = (self.chunk_rows, self.chunk_steps, *self.leaf.shape)
        data = self.region.bytes.data
        return np.ndarray(shape, self.leaf.dtype, data, int(self.addresses[block, number]))

    def windows(self, places: WindowPlaces) -> NumpyArray:
        """Gather windows ``(W, length, *leaf)``."""
        crossing, shape = places.crossing, (len(places.rows), places.length, *self.leaf.shape)
        addresses = self._address(places.pieces)
        if not len(crossing):
            return self._gather(addresses, places.piece_steps).reshape(shape)
        found = self._gather(addresses[: len(places.rows)], places.piece_steps)
        steps = self._step_addresses(places, addresses)[places.index[crossing]]
        found[crossing] = self._gather(steps.ravel(), 1).reshape(len(crossing), *shape[1:])
        return found

    def window_steps(
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
            pieces = self._gather(self._address(places.pieces), places.piece_steps)
            put_steps(pieces, index, out, at)
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
            steps = ChunkSteps.of(rows, starts, self.chunk_rows, self.chunk_steps)
            self.region.will_need(self._address(steps), sizes)
            goes_on = ends < stops
            rows, starts, stops = rows[goes_on], ends[goes_on], stops[goes_on]

    def prefetch_chunks(self, places: Sequence[tuple[int, int]]) -> None:
        """Ask the disk to read whole chunks in the background, given as (block, number)."""
        begins = self.addresses[tuple(np.array(places).T)]
        size = self.chunk_rows * self.chunk_steps * self.leaf.step_bytes
        self.region.will_need(begins, np.full_like(begins, size))

    def _address(self, steps: ChunkSteps) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.addresses[steps.block, steps.number]
        return found + steps.step * self.leaf.step_bytes

    def _step_addresses(self, places: WindowPlaces, pieces: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the addresses of all steps of pieces, given those of the pieces."""
        steps = np.arange(places.piece_steps) * self.leaf.step_bytes
        return (pieces.reshape(-1, 1) + steps).ravel()

    def _gather(self, addresses: NDArray[np.int64], steps: int) -> NumpyArray:
        found = self.region.items(steps * self.leaf.step_bytes)[addresses]
        return found.view(self.leaf.dtype).reshape(-1, steps, *self.leaf.shape)


def _map_arrays(mapped: Contents, vault: Description) -> dict[str, MappedArray]:
    """Return the arrays that can be mapped, by name: plain ones of which no chunk is missing."""
    found, region, values = {}, mapped.region, mapped.tree.values
    for name, grid in vault.grids.items():
        rows, steps, *_ = grid.chunks
        blocks, numbers = -(-vault.rows // rows), -(-vault.length // steps)
        # A forged length must not make the addresses take memory for it.
        if region is None or not grid.is_plain or blocks * numbers > len(values):
            continue
        rest, size = ".0" * (len(grid.shape) - 2), grid.chunk_bytes
        begins: list[int] = []
        for block in range(blocks):
            for number in range(numbers):
                place = values.get(f"{grid.prefix}{block}.{number}{rest}")
                if isinstance(place, ValueLocation) and place.length == size:
                    begins.append(region.starts[place.file] + place.offset)
        if len(begins) == blocks * numbers:
            addresses = np.array(begins, np.int64).reshape(blocks, numbers)
            found[name] = MappedArray(vault.leaves[name], rows, steps, region, addresses)
    return found


def _copy(chunk: NumpyArray, target: NumpyArray) -> int:
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


# ---------------------------------------------------------------------------------- checksums


class Checks:
    """Compares chunks with the checksums of a vault that offmarl wrote; threads may share them.

    Chunks of mapped files, which stay as they are, are compared once: one array holds the checksums
    of all chunks, and a mask marks those that were found intact. Later reads only look at the mask.
    ``episodes`` returns the vault's episodes; an error names those that the damage affects.
    """

    def __init__(
        self,
        values: Store | Contents,
        vault: Description,
        schema: Schema,
        episodes: Callable[[], Episodes],
    ):
        self._values, self._vault, self._schema = values, vault, schema
        self._episodes = episodes
        # Steps of a row that have checksums: a chunk that a stock program wrote to has none.
        self._covered = vault.manifest.head.length if vault.manifest else 0
        if self._covered < vault.length:
            self._covered -= self._covered % schema.chunk_steps
        self._written = self._covered
        self._index = {name: index for index, name in enumerate(vault.leaves)}
        self._blocks = schema.rows // schema.chunk_rows
        self._numbers = -(-self._covered // schema.chunk_steps)
        self._chunks = -(-vault.length // schema.chunk_steps)
        columns = len(self._index) * self._blocks
        # Zeros take no memory until they are written, and entries that are not loaded are not read.
        self._expected: Int[np.ndarray, "T columns"] = np.zeros((self._numbers, columns), int)
        self._loaded: Bool[np.ndarray, "T"] = np.zeros(self._numbers, bool)
        shape = len(self._index), self._blocks, self._chunks
        sound: Bool[np.ndarray, "L B T"] = np.zeros(shape, bool)
        sound[:, :, self._numbers :] = True  # nothing to compare them with
        self._sound: Bool[np.ndarray, "L places"] = sound.reshape(len(self._index), -1)
        self._sound_in_all: dict[tuple[str, ...], Bool[np.ndarray, "places"]] = {}
        self._lock = Lock()

    def load(self, numbers: Iterable[int]) -> None:
        """Load the checksums of some chunks of time, unless they are loaded, in one read."""
        numbers = {number for number in numbers if number < self._numbers}
        if wanted := sorted(number for number in numbers if not self._loaded[number]):
            with self._lock:
                self._load(wanted)

    def _load(self, numbers: Sequence[int]) -> None:
        """Load checksums and the vault's length."""
        keys = [layout.HEAD_KEY, *map(layout.checksums_key, numbers)]
        head, *found = self._values.get_all(keys)
        self._written = Head.decode(head).length
        for number, value in zip(numbers, found, strict=True):
            decoded = layout.decode_checksums(value)[: self._expected.shape[1]]
            checksums = np.full(self._expected.shape[1], _UNKNOWN)
            checksums[: len(decoded)] = decoded
            self._expected[number] = checksums  # one assignment, since other threads read the row
            self._loaded[number] = True

    def fresh(
        self, names: Sequence[str], block: Int[np.ndarray, "P"], number: Int[np.ndarray, "P"]
    ) -> list[ChunkPlace]:
        """Return which chunks of some arrays have not been compared, as they lie in the files."""
        key, places = tuple(names), block * self._chunks + number
        sound = self._sound_in_all.get(key)
        if sound is not None and sound[places].all():
            return []
        rows = np.array([self._index[name] for name in names])
        if sound is None:
            sound = np.logical_and.reduce(self._sound[rows], axis=0)
            self._sound_in_all[key] = sound
        places = np.unique(places)
        places = places[np.argsort(places % self._chunks, kind="stable")]
        known = self._sound[np.ix_(rows, places)]
        sound[places] = known.all(0)
        found = zip(*np.nonzero(~known), strict=True)
        return [ChunkPlace(names[i], *divmod(int(places[j]), self._chunks)) for i, j in found]

    def is_fresh(self, place: ChunkPlace) -> bool:
        """Whether a chunk must still be compared."""
        name, block, number = place
        return not self._sound[self._index[name], block * self._chunks + number]

    def compare(
        self,
        place: ChunkPlace,
        chunk: NumpyArray,
        *,
        checksum: int | None = None,
        again: Callable[[], NumpyArray] | None = None,
    ) -> NumpyArray:
        """Return a chunk that agrees with its checksum; `VaultChecksumError` if it is damaged.

        ``checksum`` is its CRC32C, if known. ``again`` reads the chunk once more. It is called if
        the checksum differs, because a writer may have committed between the reads of both.
        """
        if place.number < self._numbers and not self._loaded[place.number]:
            self.load([place.number])
        while not self._agrees(place, chunk, checksum):
            with self._lock:
                before = self._state(place.number)
            if again is None:
                raise self._damaged(place)
            chunk, checksum = again(), None
            with self._lock:
                self._load([place.number])
                same = before == self._state(place.number)
            if same and not self._agrees(place, chunk):
                raise self._damaged(place)
        self._sound[self._index[place.name], place.block * self._chunks + place.number] = True
        return chunk

    def _state(self, number: int) -> tuple[bytes, int]:
        return self._expected[number].tobytes(), self._written

    def _agrees(self, place: ChunkPlace, chunk: NumpyArray, checksum: int | None = None) -> bool:
        name, block, number = place
        if number >= self._numbers:
            return True
        expected = int(self._expected[number, self._index[name] * self._blocks + block])
        filled = self._written - number * self._schema.chunk_steps
        return checksum == expected or agrees(chunk, expected, filled)

    def _damaged(self, place: ChunkPlace) -> VaultFormatError:
        name, block, number = place
        size, steps = self._schema.chunk_rows, self._schema.chunk_steps
        chunk = Chunk(
            key=self._schema.chunk_key(name, block, number),
            leaf=name,
            rows=(block * size, (block + 1) * size),
            steps=(number * steps, min((number + 1) * steps, self._covered)),
        )
        fault = with_episodes(of_chunk(chunk, "its checksum is wrong"), self._episodes())
        return damaged(self._vault.path, fault, VaultChecksumError)


def agrees(chunk: NumpyArray, expected: int, filled: int) -> bool:
    """Whether a chunk matches its checksum, as it is or with zeros after the vault's end.

    A stock program that died may have written past the end; these bytes are not part of the vault.
    """
    if google_crc32c.value(chunk) == expected:
        return True
    if filled >= chunk.shape[1]:
        return False
    whole = chunk.copy()
    whole[:, filled:] = 0
    return bool(google_crc32c.value(whole) == expected)
