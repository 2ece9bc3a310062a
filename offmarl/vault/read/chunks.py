"""Chunks of a vault's arrays: those of mapped files, and their checksums."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import google_crc32c
import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import NDArray

from offmarl._arrays import as_items
from offmarl.errors import VaultChecksumError, VaultFormatError
from offmarl.vault.format import layout
from offmarl.vault.format.faults import Fault, with_episodes
from offmarl.vault.format.layout import Head, Leaf, NumpyArray, Schema, damage_error
from offmarl.vault.format.tables import Episodes
from offmarl.vault.format.windows import ChunkSteps, WindowPlaces, put_steps
from offmarl.vault.read.manifest import Description
from offmarl.vault.storage.commit import Contents, Region, ValueLocation
from offmarl.vault.storage.store import Store

_CACHED_BYTES = 2**18
_LARGE_BYTES = 512
"""From this size on a leaf is gathered step by step, so that each is copied once from the disk."""
_UNKNOWN = -1
_RELEASE_BYTES = 2**22
"""Bytes read between two calls of `Region.release`, which keeps the resident memory small."""
_COMPARED_BYTES = 2**24
"""Bytes compared between two such calls."""


class ChunkPlace(NamedTuple):
    """A chunk of whole steps: its array, the index of its block of rows, and of its time."""

    name: str
    block: int
    number: int


class ChunkPart(NamedTuple):
    """A part of a chunk, and the array to copy it to."""

    place: ChunkPlace
    source: tuple[slice, slice]
    target: NumpyArray


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
        shape = (len(places.rows), places.length, *self.leaf.shape)
        if len(places.crossing) == len(places.rows):
            steps = places.at(np.arange(len(places.rows) * places.length))
            return self._gather(self._address(steps), 1).reshape(shape)
        windows = self._gather(self._address(places.pieces), places.length)
        if len(places.crossing):
            steps = self._gather(self._address(places.steps), 1)
            windows[places.crossing] = steps.reshape(-1, *shape[1:])
        return windows

    def window_steps(
        self,
        places: WindowPlaces,
        index: NDArray[np.int64],
        out: NumpyArray,
        at: NDArray[np.int64] | None,
    ) -> None:
        """Gather windows, and write some of their steps to an array, as `put_steps` does."""
        if self.leaf.step_bytes < _LARGE_BYTES or out.dtype != self.leaf.dtype:
            put_steps(self.windows(places), index, out, at)
            return
        addresses, count = self._address(places.at(index)), index.shape[1]
        items, target = self.region.items(self.leaf.step_bytes), as_items(out)
        to = None if at is None else (at[:, None] * count + np.arange(count)).ravel()
        # NumPy gathers only into new arrays. Where these fit in the processor's cache, the copy
        # from there to ``out`` takes little time.
        size = max(1, _CACHED_BYTES // self.leaf.step_bytes)
        for begin in range(0, len(addresses), size):
            span = slice(begin, begin + size)
            target[span if to is None else to[span]] = items[addresses[span]]

    def prefetch(self, places: WindowPlaces) -> None:
        """Ask the disk to read windows in the background."""
        for steps, count in ((places.pieces, places.length), (places.steps, 1)):
            begins = self._address(steps)
            self.region.will_need(begins, np.full_like(begins, count * self.leaf.step_bytes))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return self.chunk_rows * self.chunk_steps * self.leaf.step_bytes

    def _address(self, steps: ChunkSteps) -> NDArray[np.int64]:
        begins: NDArray[np.int64] = self.addresses[steps.block, steps.number]
        return begins + steps.step * self.leaf.step_bytes

    def _gather(self, addresses: NDArray[np.int64], steps: int) -> NumpyArray:
        items = self.region.items(steps * self.leaf.step_bytes)[addresses]
        return items.view(self.leaf.dtype).reshape(-1, steps, *self.leaf.shape)


class Chunks(NamedTuple):
    """The source of chunks: a store, or its files once they are mapped."""

    values: Store | Contents
    maps: Mapping[str, MappedArray]
    """The uncompressed arrays of mapped files, by name."""
    checks: "Checks | None"
    """None if nothing is compared."""

    def chunk(self, place: ChunkPlace) -> NumpyArray:
        """Return a mapped chunk, not copied; it is compared before its first use."""
        chunk = self.maps[place.name].chunk(place.block, place.number)
        if self.checks and self.checks.is_fresh(place):
            self.checks.compare(place, chunk)
        return chunk

    def copy(self, parts: Iterable[ChunkPart]) -> None:
        """Copy parts of mapped chunks to their targets."""
        unreleased = 0
        for place, source, target in parts:
            chunk = self.chunk(place)
            target[...] = chunk[source]
            unreleased += chunk.nbytes
            if unreleased > _RELEASE_BYTES:
                self.maps[place.name].region.release()
                unreleased = 0

    def compare(self, names: Sequence[str], windows: WindowPlaces, cold: bool) -> None:
        """Compare the chunks of windows of mapped arrays; on a cold disk, many are requested."""
        if self.checks is None or not len(windows.rows):
            return
        block, number, _ = map(np.append, windows.pieces, windows.steps)
        places = self.checks.fresh(names, block, number)
        self.checks.load({place.number for place in places})
        step = max(1, _COMPARED_BYTES // max(self.maps[name].chunk_bytes for name in names))
        for begin in range(0, len(places), step):
            batch = places[begin : begin + step]
            if cold:
                self.prefetch(batch)
            for place in batch:
                self.chunk(place)
            self.maps[batch[0].name].region.release()

    def prefetch(self, places: Sequence[ChunkPlace]) -> None:
        """Ask the disk to read whole mapped chunks in the background."""
        for name, block, number in places:
            array = self.maps[name]
            begin = array.addresses[block, [number]]
            array.region.will_need(begin, np.full_like(begin, array.chunk_bytes))


def map_arrays(mapped: Contents, vault: Description) -> dict[str, MappedArray]:
    """Return the arrays that can be mapped, by name: plain arrays without missing chunks."""
    arrays, region, values = {}, mapped.region, mapped.tree.values
    for name, grid in vault.grids.items():
        rows, steps, *_ = grid.chunks
        blocks, numbers = -(-vault.rows // rows), -(-vault.length // steps)
        # A forged length must not make the addresses take memory for it.
        if region is None or not grid.is_plain or blocks * numbers > len(values):
            continue
        suffix, size = ".0" * (len(grid.shape) - 2), grid.chunk_bytes
        begins: list[int] = []
        for block in range(blocks):
            for number in range(numbers):
                place = values.get(f"{grid.prefix}{block}.{number}{suffix}")
                if isinstance(place, ValueLocation) and place.length == size:
                    begins.append(region.starts[place.file] + place.offset)
        if len(begins) == blocks * numbers:
            addresses = np.array(begins, np.int64).reshape(blocks, numbers)
            arrays[name] = MappedArray(vault.leaves[name], rows, steps, region, addresses)
    return arrays


# ---------------------------------------------------------------------------------- checksums


class Checks:
    """Compares chunks with the checksums of a vault that offmarl wrote; threads may share them.

    Chunks of mapped files, which stay as they are, are compared once: a mask marks those that were
    found intact. Later reads only look at the mask.
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
        self._expected: dict[int, Int[np.ndarray, "columns"]] = {}
        shape = len(self._index), self._blocks, self._chunks
        sound: Bool[np.ndarray, "L B T"] = np.zeros(shape, bool)
        sound[:, :, self._numbers :] = True  # nothing to compare them with
        self._sound: Bool[np.ndarray, "L places"] = sound.reshape(len(self._index), -1)
        self._lock = Lock()

    def load(self, numbers: Iterable[int]) -> None:
        """Load the checksums of some chunks of time, unless they are loaded, in one read."""
        numbers = {number for number in numbers if number < self._numbers}
        if missing := sorted(number for number in numbers if number not in self._expected):
            with self._lock:
                self._load(missing)

    def _load(self, numbers: Sequence[int]) -> None:
        """Load checksums and the vault's length."""
        keys = [layout.HEAD_KEY, *map(layout.checksums_key, numbers)]
        head, *values = self._values.get_all(keys)
        self._written = Head.decode(head).length
        for number, value in zip(numbers, values, strict=True):
            row = np.full(len(self._index) * self._blocks, _UNKNOWN)
            checksums = layout.decode_checksums(value)[: len(row)]
            row[: len(checksums)] = checksums
            self._expected[number] = row

    def fresh(
        self, names: Sequence[str], block: Int[np.ndarray, "P"], number: Int[np.ndarray, "P"]
    ) -> list[ChunkPlace]:
        """Return the chunks of some arrays that have not been compared, in the files' order."""
        rows = np.array([self._index[name] for name in names])
        places = block * self._chunks + number
        if self._sound[rows[:, None], places].all():
            return []
        places = np.unique(places)
        places = places[np.argsort(places % self._chunks, kind="stable")]
        pairs = zip(*np.nonzero(~self._sound[rows[:, None], places]), strict=True)
        return [ChunkPlace(names[i], *divmod(int(places[j]), self._chunks)) for i, j in pairs]

    def is_fresh(self, place: ChunkPlace) -> bool:
        """Whether a chunk must still be compared."""
        name, block, number = place
        return not self._sound[self._index[name], block * self._chunks + number]

    def compare(
        self,
        place: ChunkPlace,
        chunk: NumpyArray,
        again: Callable[[], NumpyArray] | None = None,
    ) -> NumpyArray:
        """Return a chunk that agrees with its checksum; `VaultChecksumError` if it is damaged.

        ``again`` reads the chunk once more. It is called if the checksum differs, because a writer
        may have committed between the reads of both.
        """
        self.load([place.number])
        while not self._agrees(place, chunk):
            with self._lock:
                before = self._state(place.number)
            if again is None:
                raise self._damaged(place)
            chunk = again()
            with self._lock:
                self._load([place.number])
                same = before == self._state(place.number)
            if same and not self._agrees(place, chunk):
                raise self._damaged(place)
        self._sound[self._index[place.name], place.block * self._chunks + place.number] = True
        return chunk

    def _state(self, number: int) -> tuple[bytes, int]:
        return self._expected[number].tobytes(), self._written

    def _agrees(self, place: ChunkPlace, chunk: NumpyArray) -> bool:
        name, block, number = place
        if number >= self._numbers:
            return True
        expected = int(self._expected[number][self._index[name] * self._blocks + block])
        steps = self._written - number * self._schema.chunk_steps
        return matches_checksum(chunk, expected, steps)

    def _damaged(self, place: ChunkPlace) -> VaultFormatError:
        name, block, number = place
        size, steps = self._schema.chunk_rows, self._schema.chunk_steps
        fault = Fault(
            "its checksum is wrong",
            key=self._schema.chunk_key(name, block, number),
            leaf=name,
            rows=(block * size, (block + 1) * size),
            steps=(number * steps, min((number + 1) * steps, self._covered)),
        )
        fault = with_episodes(fault, self._episodes())
        return damage_error(self._vault.path, fault, VaultChecksumError)


def matches_checksum(chunk: NumpyArray, expected: int, steps: int) -> bool:
    """Whether a chunk matches its checksum, as it is or with zeros after the vault's last step.

    A stock program that died may have written past the end; these bytes are not part of the vault.
    """
    if google_crc32c.value(chunk) == expected:
        return True
    if steps >= chunk.shape[1]:
        return False
    padded = chunk.copy()
    padded[:, steps:] = 0
    return bool(google_crc32c.value(padded) == expected)
