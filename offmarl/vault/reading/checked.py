"""Reads that are compared with checksums: each chunk once, when it is first used."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from offmarl.errors import VaultError, VaultFormatError
from offmarl.vault import layout
from offmarl.vault.faults import damaged, of_chunk, with_episodes
from offmarl.vault.grid import Chunk
from offmarl.vault.layout import Schema
from offmarl.vault.reading.mapped import MappedArray, Snapshot
from offmarl.vault.storage.seal import unseal
from offmarl.vault.storage.store import Store
from offmarl.vault.tables import Episodes

if TYPE_CHECKING:
    from offmarl.vault.reading.reader import Vault


class Checks:
    """Which chunks of a vault of ours have proved sound.

    Parameters
    ----------
    store, schema
        The vault's.
    length
        Steps of a row that we wrote. A chunk that a stock program wrote to has no checksum.
    episodes
        Returns the vault's episodes, of which a fault names those that it hits.

    Attributes
    ----------
    snapshot
        The commit that mapped chunks are of; None where nothing is mapped.
    """

    def __init__(
        self,
        store: Store,
        schema: Schema,
        length: int,
        episodes: Callable[[], Episodes],
    ):
        self.snapshot: Snapshot | None = None
        self._store = store
        self._schema = schema
        self._length = length
        self._episodes = episodes
        self._leaves = schema.leaves
        self._blocks = schema.rows // schema.chunk_rows
        chunks = -(-length // schema.chunk_steps)
        self._sound = {name: np.zeros((self._blocks, chunks), bool) for name in self._leaves}

    def touch(
        self,
        name: str,
        blocks: NDArray[np.int64],
        numbers: NDArray[np.int64],
        mapped: MappedArray | None,
    ) -> None:
        """Compare chunks that have not been; `VaultFormatError` where one is damaged."""
        sound = self._sound[name]
        blocks, numbers = np.broadcast_arrays(blocks, numbers)
        ours = numbers < sound.shape[1]
        blocks, numbers = blocks[ours], numbers[ours]
        fresh = ~sound[blocks, numbers]
        for block, number in {*zip(blocks[fresh].tolist(), numbers[fresh].tolist(), strict=True)}:
            if not self._agrees(name, block, number, mapped):
                raise self._damaged(name, block, number)
            sound[block, number] = True

    def _agrees(self, name: str, block: int, number: int, mapped: MappedArray | None) -> bool:
        key = layout.checksums_key(number)
        place = list(self._leaves).index(name) * self._blocks + block
        if mapped and self.snapshot:
            expected = unseal(key, self.snapshot.value(key) or b"", self._store.path)
            return _crc(mapped.chunk(block, number)) == _entry(expected, place)
        chunk_key = self._leaves[name].chunk_key(name, block, number)
        while True:
            expected, value = self._store.get_all([key, chunk_key])
            if google_crc32c.value(value) == _entry(expected, place):
                return True
            # A writer may have committed between the two.
            if self._store.get_all([key]) == [expected]:
                return False

    def _damaged(self, name: str, block: int, number: int) -> VaultFormatError:
        size, steps = self._schema.chunk_rows, self._schema.chunk_steps
        chunk = Chunk(
            key=self._leaves[name].chunk_key(name, block, number),
            leaf=name,
            rows=(block * size, (block + 1) * size),
            steps=(number * steps, min((number + 1) * steps, self._length)),
        )
        fault = of_chunk(chunk, "its checksum is wrong")
        return damaged(self._store.path, with_episodes(fault, self._episodes()))


def checks_of(store: Store, vault: "Vault") -> Checks | None:
    """Return what to compare a vault's reads with; None where its codec does that by itself.

    Raises
    ------
    VaultError
        It has no checksums.
    """
    if vault.own is None:
        raise VaultError(
            f"{vault.path} was not written by offmarl, so there are no checksums to compare reads "
            "with: open it without `checked`."
        )
    schema = vault.own.schema
    if schema.codec != "raw":
        return None
    length = vault.own.head.length
    if length < vault.length:  # a stock program wrote to the last chunk
        length -= length % schema.chunk_steps
    return Checks(store, schema, length, lambda: vault.episodes)


def _crc(chunk: NDArray[Any]) -> int:
    return int(google_crc32c.value(chunk.reshape(-1).view(np.uint8)))


def _entry(checksums: bytes, place: int) -> int | None:
    """Return one of the checksums stored for a chunk of time, None where it is not there."""
    found = layout.decode_checksums(checksums)
    return int(found[place]) if place < len(found) else None
