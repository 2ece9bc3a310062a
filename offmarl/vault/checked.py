"""Compares each chunk of a vault with its checksum once, when it is first used.

One array holds the checksums of all chunks, and a mask marks the chunks that were found intact.
Later reads only look at the mask.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from threading import Lock
from typing import NamedTuple

import google_crc32c
import numpy as np
from jaxtyping import Bool, Int

from offmarl.errors import VaultChecksumError, VaultFormatError
from offmarl.vault import layout
from offmarl.vault.faults import damaged, of_chunk, with_episodes
from offmarl.vault.layout import Head, Leaf, NumpyArray, Schema, unseal
from offmarl.vault.manifest import Description
from offmarl.vault.metadata import Chunk
from offmarl.vault.mmap import Check, Snapshot
from offmarl.vault.store import Store
from offmarl.vault.tables import Episodes

_UNKNOWN = -1


class ChunkPlace(NamedTuple):
    """Position of a chunk in an array: the index of its block of rows, and of its chunk of time."""

    block: int
    number: int


class Fresh(NamedTuple):
    """Chunks of a read, some of which have not been compared yet."""

    names: tuple[str, ...]
    """The arrays that are read."""
    places: Int[np.ndarray, "P"]
    """Indices of the chunks that are read, the same for each array."""
    chunks: dict[str, list[ChunkPlace]]
    """By array, the chunks that have not been compared, in the order of time; never empty."""
    checks: dict[str, Check]
    """The checks that compare them if they are mapped."""


class Checks:
    """Which chunks of an offmarl vault were found intact, for one way of reading them.

    Chunks read through TensorStore and chunks of mapped files have separate objects, because they
    may belong to different commits. Threads may share an object: a lock guards everything except
    reading the mask of intact chunks.

    Parameters
    ----------
    store, schema
        The vault's store and schema.
    leaves
        The vault's arrays, in the order in which their checksums are stored.
    length
        Steps of a row.
    covered
        Steps of a row that have checksums. A chunk that a stock program wrote to has none.
    episodes
        Returns the vault's episodes; an error names the episodes that the damage affects.
    """

    def __init__(
        self,
        store: Store,
        schema: Schema,
        leaves: Mapping[str, Leaf],
        length: int,
        covered: int,
        episodes: Callable[[], Episodes],
    ):
        self._store, self._schema, self._leaves = store, schema, leaves
        self._length, self._covered = length, covered
        self._written = covered
        self._episodes = episodes
        self._index = {name: index for index, name in enumerate(leaves)}
        self._blocks = schema.rows // schema.chunk_rows
        self._numbers = -(-covered // schema.chunk_steps)
        self._chunks = -(-length // schema.chunk_steps)
        columns = len(leaves) * self._blocks
        # Zeros take no memory until they are written, and entries that are not loaded are not read.
        self._expected: Int[np.ndarray, "T columns"] = np.zeros((self._numbers, columns), int)
        self._loaded: Bool[np.ndarray, "T"] = np.zeros(self._numbers, bool)
        shape = len(leaves), self._blocks, self._chunks
        sound: Bool[np.ndarray, "L B T"] = np.zeros(shape, bool)
        sound[:, :, self._numbers :] = True  # nothing to compare them with
        self._sound: Bool[np.ndarray, "L places"] = sound.reshape(len(leaves), -1)
        self._sound_in_all: dict[tuple[str, ...], Bool[np.ndarray, "places"]] = {}
        self._done: set[tuple[str, ...]] = set()
        self._lock = Lock()

    def for_snapshot(self, snapshot: Snapshot) -> "Checks":
        """Return the checks of mapped files, in which no chunk has been compared yet."""
        found = Checks(
            self._store, self._schema, self._leaves, self._length, self._covered, self._episodes
        )
        head = unseal(layout.HEAD_KEY, snapshot.value(layout.HEAD_KEY) or b"", self._store.path)
        found._written = Head.decode(head).length
        for number in range(found._numbers):
            key = layout.checksums_key(number)
            try:
                found._expect(number, unseal(key, snapshot.value(key) or b"", self._store.path))
            except VaultFormatError:
                found._expect(number, b"")  # reading one of these chunks raises the error
        return found

    def _load(self, numbers: Iterable[int]) -> None:
        """Load the checksums of some chunks of time, and the vault's length, in one read."""
        wanted = list(numbers)
        keys = [layout.HEAD_KEY, *map(layout.checksums_key, wanted)]
        head, *found = self._store.get_all(keys)
        self._written = Head.decode(head).length
        for number, value in zip(wanted, found, strict=True):
            self._expect(number, value)

    def _expect(self, number: int, stored: bytes) -> None:
        found = layout.decode_checksums(stored)[: self._expected.shape[1]]
        checksums = np.full(self._expected.shape[1], _UNKNOWN)
        checksums[: len(found)] = found
        self._expected[number] = checksums  # one assignment, since other threads read the row
        self._loaded[number] = True

    def in_steps(self, names: Iterable[str], rows: range, steps: range) -> Fresh | None:
        """Return the chunks that hold some steps, if any of them must still be compared."""
        key = tuple(names)
        if key in self._done or not (key and rows and steps):
            return None
        size, time = self._schema.chunk_rows, self._schema.chunk_steps
        blocks = np.unique(np.arange(rows.start, rows.stop, rows.step) // size)
        numbers = np.arange(steps.start // time, (steps.stop - 1) // time + 1)
        return self._fresh(key, (blocks[:, None] * self._chunks + numbers).ravel())

    def in_windows(
        self,
        names: Iterable[str],
        rows: Int[np.ndarray, "W"],
        starts: Int[np.ndarray, "W"],
        length: int,
    ) -> Fresh | None:
        """Return the chunks that hold some windows, if any of them must still be compared."""
        key = tuple(names)
        if key in self._done or not (key and len(rows) and length):
            return None
        time = self._schema.chunk_steps
        row = rows // self._schema.chunk_rows * self._chunks
        first, last = row + starts // time, row + (starts + length - 1) // time
        if length <= time + 1:
            return self._fresh(key, np.concatenate([first, last]))
        between = np.arange(-(-length // time) + 1)
        return self._fresh(key, np.minimum(first[:, None] + between, last[:, None]).ravel())

    def _fresh(self, names: tuple[str, ...], places: Int[np.ndarray, "P"]) -> Fresh | None:
        sound = self._sound_in_all.get(names)
        if sound is not None and sound[places].all():
            return None
        with self._lock:
            return self._select_fresh(names, np.unique(places))

    def _select_fresh(self, names: tuple[str, ...], places: Int[np.ndarray, "P"]) -> Fresh | None:
        rows = [self._index[name] for name in names]
        if names not in self._sound_in_all:
            self._sound_in_all[names] = np.logical_and.reduce(self._sound[rows], axis=0)
        if self._sound_in_all[names][places].all():
            return None
        order = np.argsort(places % self._chunks, kind="stable")  # as they lie in the files
        places = places[order]
        chunks = {}
        for name, row in zip(names, rows, strict=True):
            new = places[~self._sound[row, places]].tolist()
            if new:
                chunks[name] = [ChunkPlace(*divmod(place, self._chunks)) for place in new]
        numbers = {place.number for new in chunks.values() for place in new}
        if missing := sorted(number for number in numbers if not self._loaded[number]):
            self._load(missing)
        return Fresh(names, places, chunks, {name: self._check_of(name) for name in chunks})

    def mark_sound(self, fresh: Fresh) -> None:
        """Record that these chunks were compared, so that later reads skip them quickly."""
        rows = np.array([self._index[name] for name in fresh.names])
        with self._lock:
            sound = self._sound_in_all[fresh.names]
            sound[fresh.places] = self._sound[np.ix_(rows, fresh.places)].all(0)
            if sound.all():
                self._done.add(fresh.names)

    def is_fresh(self, name: str, place: ChunkPlace) -> bool:
        """Whether a chunk must still be compared."""
        return not self._sound[self._index[name], place.block * self._chunks + place.number]

    def _check_of(self, name: str) -> "_Check":
        index = self._index[name]
        columns = slice(index * self._blocks, (index + 1) * self._blocks)
        shape = self._blocks, self._chunks
        on_mismatch = partial(self._examine, name)
        return _Check(self._sound[index].reshape(shape), self._expected[:, columns], on_mismatch)

    def _examine(self, name: str, place: ChunkPlace, chunk: NumpyArray) -> None:
        if not self._agrees(name, place, chunk):
            raise self._damaged(name, place)

    def verified(
        self, name: str, place: ChunkPlace, chunk: NumpyArray, again: Callable[[], NumpyArray]
    ) -> NumpyArray:
        """Compare a chunk that was read from the store, and return it.

        ``again`` reads the chunk once more. It is called if the checksum differs, because a writer
        may have committed after the chunk was read and before its checksum was.
        """
        while not self._agrees(name, place, chunk):
            with self._lock:
                before = self._expected[place.number].copy(), self._written
            chunk = again()
            with self._lock:
                self._load([place.number])
                same = np.array_equal(before[0], self._expected[place.number])
                same = same and before[1] == self._written
            if same and not self._agrees(name, place, chunk):
                raise self._damaged(name, place)
        # A writer may still replace the last chunk, so it is compared on every read.
        if (place.number + 1) * self._schema.chunk_steps <= self._covered:
            self._sound[self._index[name], place.block * self._chunks + place.number] = True
        return chunk

    def _agrees(self, name: str, place: ChunkPlace, chunk: NumpyArray) -> bool:
        expected = self._expected[place.number, self._index[name] * self._blocks + place.block]
        filled = self._written - place.number * self._schema.chunk_steps
        return agrees(chunk, int(expected), filled)

    def _damaged(self, name: str, place: ChunkPlace) -> VaultFormatError:
        size, steps = self._schema.chunk_rows, self._schema.chunk_steps
        chunk = Chunk(
            key=self._leaves[name].chunk_key(name, *place),
            leaf=name,
            rows=(place.block * size, (place.block + 1) * size),
            steps=(place.number * steps, min((place.number + 1) * steps, self._covered)),
        )
        fault = with_episodes(of_chunk(chunk, "its checksum is wrong"), self._episodes())
        return damaged(self._store.path, fault, VaultChecksumError)


class _Check(NamedTuple):
    """Compares the mapped chunks of an array; see `offmarl.vault.mmap.Check`."""

    sound: Bool[np.ndarray, "B T"]
    expected: Int[np.ndarray, "T B"]
    on_mismatch: Callable[[ChunkPlace, NumpyArray], None]
    """Called with a chunk whose checksum differs; raises if the chunk is damaged."""

    def is_fresh(self, block: int, number: int) -> bool:
        return not self.sound[block, number]

    def compare(
        self, block: int, number: int, chunk: NumpyArray, checksum: int | None = None
    ) -> None:
        if checksum is None:
            checksum = google_crc32c.value(chunk)
        if checksum != self.expected[number, block]:
            self.on_mismatch(ChunkPlace(block, number), chunk)
        self.sound[block, number] = True


def checks_of(vault: Description, episodes: Callable[[], Episodes]) -> Checks | None:
    """Return the checks of an open vault.

    None if the codec has checksums of its own, or if another program wrote the vault: offmarl's
    checksums are missing there.
    """
    if vault.manifest is None or vault.manifest.schema.codec != "raw":
        return None
    schema, length = vault.manifest.schema, vault.manifest.head.length
    if length < vault.length:  # a stock program wrote to the last chunk
        length -= length % schema.chunk_steps
    return Checks(vault.store, schema, vault.leaves, vault.length, length, episodes)


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
