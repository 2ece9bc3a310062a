"""Gathering steps into the chunks that go to disk."""

from collections.abc import Iterable, Iterator, Mapping

import google_crc32c
import numpy as np

from offmarl.errors import VaultFormatError
from offmarl.vault import layout
from offmarl.vault.layout import NumpyArray
from offmarl.vault.store import Store


class ChunkBuffer:
    """The chunk of every row that is not full yet, and those that wait for a commit.

    Attributes
    ----------
    staged
        Keys and values for the next commit; the caller clears them when they are durable.
    through
        Steps of each row that are in staged or committed chunks.
    """

    def __init__(self, schema: layout.Schema, start: int):
        self.staged: dict[str, bytes] = {}
        self.through = start
        self._schema = schema
        self._leaves = layout.leaves(schema.spec)
        self._chunk, self._filled = divmod(start, schema.chunk_steps)
        self._arrays = {
            name: np.zeros((schema.rows, schema.chunk_steps, *leaf.shape), leaf.dtype)
            for name, leaf in self._leaves.items()
        }

    @property
    def tail(self) -> slice:
        """The steps that are in the unfinished chunk."""
        start = self._chunk * self._schema.chunk_steps
        return slice(start, start + self._filled)

    def restore(self, tail: Mapping[str, NumpyArray]) -> None:
        """Take back the steps of an unfinished chunk from disk."""
        for name, array in self._arrays.items():
            array[:, : self._filled] = tail[name]

    def verify(self, store: Store) -> None:
        """Raise `VaultFormatError` where the steps just restored are not those we wrote.

        They are about to be written again, with checksums that would make the damage look right.
        What follows them in the chunk does not matter: a stock program that died may have left it.
        """
        if self._filled and self._schema.codec == "raw":
            keys = list(self._keys())
            (expected,) = store.get_all([layout.checksums_key(self._chunk)])
            restored = [block.tobytes() for block in self._blocks()]
            sound = _agree(store.get_all(keys), expected) | _agree(restored, expected)
            if not sound.all():
                raise VaultFormatError(
                    f"{store.path} is damaged: the checksum of {keys[sound.argmin()]} is wrong. "
                    "Copy the vault again from where it came from."
                )

    def put(self, arrays: Mapping[str, NumpyArray]) -> None:
        """Copy ``(rows, T, ...)`` steps in, and stage each chunk that is full."""
        steps = arrays["rewards"].shape[1]
        done = 0
        while done < steps:
            count = min(steps - done, self._schema.chunk_steps - self._filled)
            for name, array in self._arrays.items():
                array[:, self._filled : self._filled + count] = arrays[name][:, done : done + count]
            done += count
            self._filled += count
            if self._filled == self._schema.chunk_steps:
                self._stage_chunk()
                self._chunk, self._filled = self._chunk + 1, 0

    def stage_tail(self) -> None:
        """Stage the unfinished chunk, zeros where nothing is yet."""
        if self._filled:
            for array in self._arrays.values():
                array[:, self._filled :] = 0
            self._stage_chunk()

    def _stage_chunk(self) -> None:
        if self._schema.codec == "zstd":
            values = [_compress(block) for block in self._blocks()]
        else:
            values = [block.tobytes() for block in self._blocks()]
            self.staged[layout.checksums_key(self._chunk)] = checksums(values)
        self.staged.update(zip(self._keys(), values, strict=True))
        self.through = self.tail.stop

    def _keys(self) -> Iterator[str]:
        """Yield the keys of the current chunk: of each leaf, each block of rows."""
        for name, leaf in self._leaves.items():
            for block in range(self._schema.rows // self._schema.chunk_rows):
                yield leaf.chunk_key(name, block, self._chunk)

    def _blocks(self) -> Iterator[NumpyArray]:
        """Yield the arrays that belong to `_keys`."""
        size = self._schema.chunk_rows
        for array in self._arrays.values():
            yield from array.reshape(-1, size, *array.shape[1:])

    def last_key(self) -> str:
        """Return the key of a chunk that anybody who appends at the end must write too."""
        chunk = max(self.through - 1, 0) // self._schema.chunk_steps
        name, leaf = next(iter(self._leaves.items()))
        return leaf.chunk_key(name, 0, chunk)


def checksums(values: Iterable[bytes]) -> bytes:
    """Return the CRC32C of each value, big-endian, one after the other."""
    return b"".join(google_crc32c.value(value).to_bytes(4, "big") for value in values)


def _agree(values: Iterable[bytes], expected: bytes) -> NumpyArray:
    found = checksums(values)
    return np.frombuffer(found, ">u4") == np.frombuffer(expected, ">u4")


def _compress(block: NumpyArray) -> bytes:
    # Imported here: it takes as long as all else together, and few vaults need it.
    from numcodecs import Zstd

    return bytes(Zstd(level=1, checksum=True).encode(block))
