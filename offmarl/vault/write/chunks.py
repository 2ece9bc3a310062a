"""Gathers steps into the chunks that are written to disk."""

from collections.abc import Iterable, Mapping

import numpy as np

from offmarl.errors import VaultFormatError
from offmarl.vault.format import layout
from offmarl.vault.format.layout import NumpyArray, damage_error
from offmarl.vault.format.metadata import own_grids
from offmarl.vault.storage.store import Store

Value = bytes | bytearray


class _Chunk:
    """The values of all keys of one chunk of time, and an array ``(rows, T, ...)`` over each.

    The arrays are views of the values, so that a full chunk is written without being copied here.
    """

    def __init__(self, schema: layout.Schema):
        blocks = range(0, schema.rows, schema.chunk_rows)
        self.values: list[bytearray] = []
        """In the order of keys; zeros at first."""
        self.arrays: list[tuple[str, slice, NumpyArray]] = []
        """Name, rows and array of each value."""
        for name, leaf in schema.leaves.items():
            shape = (schema.chunk_rows, schema.chunk_steps, *leaf.shape)
            for row in blocks:
                value = bytearray(schema.chunk_rows * schema.chunk_steps * leaf.step_bytes)
                self.values.append(value)
                array = np.ndarray(shape, leaf.dtype, value)
                self.arrays.append((name, slice(row, row + schema.chunk_rows), array))


class ChunkBuffer:
    """The chunk of time that is not full yet, and those that wait for a commit."""

    def __init__(self, schema: layout.Schema, start: int):
        self.staged: dict[str, Value] = {}
        """Full chunks for the next commit, by key; the caller empties it when it takes them."""
        self._schema = schema
        self._number, self._filled = divmod(start, schema.chunk_steps)
        self._chunk = _Chunk(schema)

    @property
    def through(self) -> int:
        """Steps of each row that are in full chunks, staged or committed."""
        return self._number * self._schema.chunk_steps

    @property
    def full_bytes(self) -> int:
        """Uncompressed bytes of all full chunks."""
        return self._number * sum(map(len, self._chunk.values))

    @property
    def length(self) -> int:
        """Steps of each row, those of the unfinished chunk included."""
        return self.through + self._filled

    @property
    def staged_bytes(self) -> int:
        """Bytes that a commit would write."""
        return sum(map(len, self.staged.values()))

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
            sound = _agree(values, expected) | _agree(self._chunk.values, expected)
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
        self.staged |= self._chunk_values()
        if self._schema.codec == "raw":
            self._chunk = _Chunk(self._schema)
        self._number, self._filled = self._number + 1, 0

    def tail(self) -> dict[str, Value]:
        """Return the keys and values of the unfinished chunk, padded with zeros."""
        if not self._filled:
            return {}
        for *_, array in self._chunk.arrays:
            array[:, self._filled :] = 0
        return self._chunk_values()

    def _chunk_values(self) -> dict[str, Value]:
        """Return the keys and values of the chunk; those that are not compressed are not copied."""
        keys, values = self._schema.chunk_keys(self._number), self._chunk.values
        if self._schema.codec == "zstd":
            # Imported here: it takes as long as all other imports together, and few vaults need it.
            from numcodecs import Zstd

            frames = map(bytes, map(Zstd(level=1, checksum=True).encode, values))
            return dict(zip(keys, frames, strict=True))
        checksums = {layout.checksums_key(self._number): layout.encode_checksums(values)}
        return dict(zip(keys, values, strict=True)) | checksums


def _agree(values: Iterable[Value], expected: bytes) -> NumpyArray:
    actual = layout.decode_checksums(layout.encode_checksums(values))
    recorded = layout.decode_checksums(expected)
    return actual == recorded if len(actual) == len(recorded) else np.zeros(len(actual), bool)
