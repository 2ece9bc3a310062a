"""Compares the chunks of a vault with their checksums when they are read.

Chunks of mapped files, which stay as they are, are compared once: one array holds the checksums of
all chunks, and a mask marks those that were found intact. Later reads only look at the mask.
"""

from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import NamedTuple, Protocol

import google_crc32c
import numpy as np
from jaxtyping import Bool, Int

from offmarl.errors import VaultChecksumError, VaultFormatError
from offmarl.vault import layout
from offmarl.vault.faults import damaged, of_chunk, with_episodes
from offmarl.vault.layout import Head, NumpyArray, Schema
from offmarl.vault.manifest import Description
from offmarl.vault.metadata import Chunk
from offmarl.vault.tables import Episodes

_UNKNOWN = -1


class ChunkPlace(NamedTuple):
    """A chunk of whole steps: its array, the index of its block of rows, and of its time."""

    name: str
    block: int
    number: int


class _Values(Protocol):
    """Where checksums are read from: the store, or its mapped files."""

    def get_all(self, keys: list[str]) -> list[bytes]: ...


class Checks:
    """The checksums of an offmarl vault's chunks; threads may share them.

    Parameters
    ----------
    values
        Where checksums are: they must be of the commit that chunks are read from.
    vault, schema
        The vault.
    episodes
        Returns the vault's episodes; an error names the episodes that the damage affects.
    """

    def __init__(
        self,
        values: _Values,
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
            key=self._vault.leaves[name].chunk_key(name, block, number),
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
