"""Gathers steps into the chunks that are written to disk."""

from collections.abc import Iterable, Mapping
from mmap import mmap
from typing import Any, NamedTuple

import numpy as np

from offmarl.errors import VaultFormatError
from offmarl.vault.format import layout
from offmarl.vault.format.layout import NumpyArray, damage_error
from offmarl.vault.format.metadata import own_grids
from offmarl.vault.storage.bulk import PageBlock, allocate
from offmarl.vault.storage.store import Store

Value = bytes | bytearray

_ALIGNMENT = 64
"""Bytes of a line of the processor's cache."""
_SPARE_BYTES = 2**27
"""Memory of written chunks that is reused: allocating new pages took 6% of a bulk write."""


class _Chunk:
    """The values of all keys of one chunk of time, and an array ``(rows, T, ...)`` over each.

    The arrays are views of one block of memory, so that a full chunk goes to disk without being
    copied. New memory is zero at first.
    """

    def __init__(self, schema: layout.Schema, memory: mmap | None = None):
        leaves, blocks = schema.leaves.items(), range(0, schema.rows, schema.chunk_rows)
        steps = schema.chunk_rows * schema.chunk_steps
        sizes = [steps * leaf.step_bytes for _, leaf in leaves for _ in blocks]
        starts = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
        self.memory = memory or allocate(starts[-1])
        self.places: list[tuple[int, int]] = list(zip(starts[:-1], sizes, strict=True))
        """Offset and size of each value, in the order of keys."""
        self.arrays: list[tuple[str, slice, NumpyArray]] = []
        """Name, rows and array of each value."""
        values = ((name, leaf, row) for name, leaf in leaves for row in blocks)
        for start, (name, leaf, row) in zip(starts[:-1], values, strict=True):
            shape = (schema.chunk_rows, schema.chunk_steps, *leaf.shape)
            array = np.ndarray(shape, leaf.dtype, self.memory, start)
            self.arrays.append((name, slice(row, row + schema.chunk_rows), array))

    def values(self) -> list[memoryview]:
        """Return the values, not copied."""
        memory = memoryview(self.memory)
        return [memory[start : start + count] for start, count in self.places]


class Staged(NamedTuple):
    """A full chunk that waits for a commit."""

    values: dict[str, Value]
    """Small or compressed values, by key."""
    block: PageBlock | None
    """Uncompressed values."""

    @property
    def num_bytes(self) -> int:
        """Bytes that a commit would write."""
        return sum(map(len, self.values.values())) + (len(self.block.memory) if self.block else 0)


class ChunkBuffer:
    """The chunk of time that is not full yet, and those that wait for a commit."""

    def __init__(self, schema: layout.Schema, start: int):
        self.staged: dict[int, Staged] = {}
        """Full chunks for the next commit, by number; the caller empties it when it takes them."""
        self._schema = schema
        self._number, self._filled = divmod(start, schema.chunk_steps)
        self._chunk = _Chunk(schema)
        self._spare: list[mmap] = []

    @property
    def through(self) -> int:
        """Steps of each row that are in full chunks, staged or committed."""
        return self._number * self._schema.chunk_steps

    @property
    def full_bytes(self) -> int:
        """Uncompressed bytes of all full chunks."""
        return self._number * len(self._chunk.memory)

    @property
    def length(self) -> int:
        """Steps of each row, those of the unfinished chunk included."""
        return self.through + self._filled

    @property
    def staged_bytes(self) -> int:
        """Bytes that a commit would write."""
        return sum(chunk.num_bytes for chunk in self.staged.values())

    def restore(self, store: Store) -> None:
        """Read the steps of the unfinished chunk from disk."""
        if not self._filled:
            return
        keys = self._schema.chunk_keys(self._number)
        values = store.get_all(keys)
        grids = own_grids(self._schema)
        for key, value, (name, _, array) in zip(keys, values, self._chunk.arrays, strict=True):
            try:
                chunk = grids[name].decode(value, key)
            except VaultFormatError as error:
                raise damage_error(store.path, str(error).removesuffix(".")) from error
            array[:, : self._filled] = chunk[:, : self._filled]
        if self._schema.codec == "raw":
            (expected,) = store.get_all([layout.checksums_key(self._number)])
            sound = _agree(values, expected) | _agree(self._chunk.values(), expected)
            if not sound.all():
                raise damage_error(store.path, f"its checksum is wrong, of {keys[sound.argmin()]}")

    def put(self, arrays: Mapping[str, NumpyArray]) -> None:
        """Copy ``(rows, T, ...)`` steps in, and stage each chunk that is full."""
        steps = arrays["rewards"].shape[1]
        done = 0
        while done < steps:
            count = min(steps - done, self._schema.chunk_steps - self._filled)
            for name, rows, array in self._chunk.arrays:
                target = array[:, self._filled : self._filled + count]
                target[:] = arrays[name][rows, done : done + count]
            done += count
            self._filled += count
            if self._filled == self._schema.chunk_steps:
                self._stage()

    def _stage(self) -> None:
        keys = self._schema.chunk_keys(self._number)
        if self._schema.codec == "raw":
            places = dict(zip(keys, self._chunk.places, strict=True))
            block = PageBlock(self._chunk.memory, places)
            self.staged[self._number] = Staged(self._checksums(), block)
            self._chunk = _Chunk(self._schema, self._spare.pop() if self._spare else None)
        else:
            self.staged[self._number] = Staged(self._compressed(), None)
        self._number, self._filled = self._number + 1, 0

    def tail(self) -> dict[str, Value]:
        """Return the keys and values of the unfinished chunk, padded with zeros."""
        if not self._filled:
            return {}
        for *_, array in self._chunk.arrays:
            array[:, self._filled :] = 0
        if self._schema.codec == "zstd":
            return self._compressed()
        values = map(bytes, self._chunk.values())
        keys = self._schema.chunk_keys(self._number)
        return dict(zip(keys, values, strict=True)) | self._checksums()

    def reuse(self, durable: Iterable[Staged]) -> None:
        """Reuse the memory of chunks that are durable."""
        self._spare += [chunk.block.memory for chunk in durable if chunk.block]
        del self._spare[max(1, _SPARE_BYTES // len(self._chunk.memory)) :]

    def _compressed(self) -> dict[str, Value]:
        values = map(compress, self._chunk.values())
        return dict(zip(self._schema.chunk_keys(self._number), values, strict=True))

    def _checksums(self) -> dict[str, Value]:
        values = self._chunk.values()
        return {layout.checksums_key(self._number): layout.encode_checksums(values)}


def _agree(values: Iterable[Value | memoryview], expected: bytes) -> NumpyArray:
    actual = layout.decode_checksums(layout.encode_checksums(values))
    recorded = layout.decode_checksums(expected)
    return actual == recorded if len(actual) == len(recorded) else np.zeros(len(actual), bool)


def compress(value: Value | memoryview) -> bytes:
    """Return a value as a zstd frame with a checksum."""
    return bytes(_zstd().encode(value))


def _zstd() -> Any:
    # Imported here: it takes as long as all other imports together, and few vaults need it.
    from numcodecs import Zstd

    return Zstd(level=1, checksum=True)
