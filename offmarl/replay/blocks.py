"""Windows of data on another machine, shuffled by blocks.

Reading windows from anywhere takes a request for each. So episodes are grouped into blocks that lie
together in the data, whole chunks of it as far as possible. Each pass reads the blocks in a random
order, a few at a time: these are the shuffle buffer. The episodes in the buffer form a ring of
slots (see `offmarl.replay.sampling`), and a pass has the window from each slot once, in a random
order within the buffer. So each step is in as many batches of a pass as every other, but windows
that follow one another come from the blocks of one buffer, while local data is drawn from
everywhere. While one buffer is used, the next one is read. Nothing here needs JAX.

The windows of batch number i follow from the seed and i alone, as for the other orders.
"""

from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmarl._ahead import in_thread
from offmarl._memory import return_free
from offmarl.errors import OptionError
from offmarl.replay.fields import COMPUTED, Fields, check_extras, fields_of, in_windows
from offmarl.replay.gathering import new_batch, read_slots
from offmarl.replay.host import WindowReader
from offmarl.replay.orders import BLOCKS, SLOT_BITS, BlockOrder, Order, make_order
from offmarl.replay.rings import Mixed, Weighting
from offmarl.replay.sampling import (
    Chosen,
    SlotTable,
    Source,
    Windows,
    add_following,
    sound_episodes,
)
from offmarl.types import sum_bytes

BUFFER_BYTES = 2**26
"""Default size of the shuffle buffer."""
BLOCK_SEED = 0
"""Seed of the order of blocks in training, the same for all of its seeds."""
_READ_BYTES = 2**23
"""Approximate size of what is read into a buffer at once."""


class BlockTable:
    """Which episodes each block holds.

    `OptionError` if there are no such episodes, or an episode does not fit the buffer.
    """

    def __init__(
        self,
        source: Source,
        windows: Windows,
        episodes: Chosen = None,
        buffer_bytes: int | None = None,
    ):
        check_extras(source.spec, windows, source.path)
        buffer_bytes = buffer_bytes or BUFFER_BYTES
        self.recorded = recorded = sound_episodes(source)
        """All episodes of the source."""
        table = SlotTable(source, recorded, episodes)
        row, start = recorded.row[table.episodes], recorded.start[table.episodes]
        chunk_rows, chunk_steps = source.chunk_shape
        fields = fields_of(source.spec, windows).items()
        step_bytes = sum_bytes({name: leaf for name, leaf in fields if name not in COMPUTED})
        longest = int(table.lengths.max()) * step_bytes
        if longest > buffer_bytes:
            raise OptionError(
                f"the longest episode of {source.path} takes {longest:,} bytes, and the shuffle "
                f"buffer {buffer_bytes:,}: give a larger buffer, or pull the data first."
            )
        chunk_bytes = chunk_rows * chunk_steps * step_bytes
        chunks = max(1, buffer_bytes // (BLOCKS * chunk_bytes))
        self.per_buffer = max(1, min(BLOCKS, buffer_bytes // (chunks * chunk_bytes)))
        steps = chunk_steps * chunks
        block = (row // chunk_rows) * -(-source.length // steps) + start // steps
        order = np.lexsort((start, row, block))
        self.numbers = table.episodes[order]
        """Numbers of the episodes, ordered by block."""
        first = np.flatnonzero(np.diff(block[order], prepend=-1))
        self.bounds: NDArray[np.int64] = np.append(first, len(order)).astype(np.int64)
        """``(K+1,)`` where each block begins in these."""
        self.sizes = np.add.reduceat(table.lengths[order] + 1, first)
        """``(K,)`` slots of each block."""

    def of(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of the episodes of some blocks."""
        parts = [self.numbers[self.bounds[i] : self.bounds[i + 1]] for i in blocks.tolist()]
        return np.concatenate(parts)


class ShuffleBuffer:
    """The slots of some episodes of a source in memory."""

    def __init__(self, table: SlotTable, windows: Windows):
        self._count, discount = table.num_slots, windows.return_to_go
        self._fields = {
            name: np.zeros((self._count, *leaf.shape), leaf.numpy_dtype)
            for name, leaf in fields_of(table.source.spec, windows).items()
        }
        recorded = replace(windows, return_to_go=None)
        for slots, fields in read_slots(table, recorded, self._count, _READ_BYTES):
            for name, values in fields.items():
                self._fields[name][slots % self._count] = values
        if discount is not None:
            returns = self._fields["return_to_go"][None]
            returns[...] = self._fields["reward"]
            episodes = np.zeros_like(table.offsets), table.offsets, table.lengths
            add_following(returns, episodes, discount)

    def read(self, starts: NDArray[np.int64], batch: Fields, at: Any) -> None:
        """Write the windows from ``n`` slots on to windows ``at`` of a batch."""
        for name, array in batch.items():
            slots = (starts[:, None] + np.arange(array.shape[1])) % self._count
            array[at] = self._fields[name].take(slots, axis=0)


class BlockReader(WindowReader):
    """Gathers windows from shuffle buffers; the next buffer is read while one is used.

    The windows are numbered as `BlockOrder` does.
    """

    def __init__(self, source: Source, windows: Windows, order: BlockOrder, table: BlockTable):
        self._source, self.windows, self._order, self._table = source, windows, order, table
        self.kinds = in_windows(fields_of(source.spec, windows), windows)
        self._buffers: dict[int, Future[ShuffleBuffer]] = {}
        self._lock, self._reading = Lock(), Lock()
        self._is_closed = False

    def close(self) -> None:
        """Abandon the buffers that are being read, which may wait for a network. Idempotent."""
        with self._lock:
            self._is_closed = True
            for future in self._buffers.values():
                future.cancel()

    def prepare_fork(self) -> None:
        """Let processes that are forked from this one read the windows."""
        self._source.prepare_fork()

    def gather(self, starts: NDArray[np.int64]) -> Fields:
        """Return ``n`` windows."""
        batch = new_batch(self.kinds, len(starts))
        buffers, slots = starts >> SLOT_BITS, starts & (2**SLOT_BITS - 1)
        numbers = np.unique(buffers)
        for number in numbers.tolist():
            at = np.flatnonzero(buffers == number)
            self._buffer(number).read(slots[at], batch, at)
        self._move_on(int(numbers[0]), int(numbers[-1]))
        return batch

    def _buffer(self, number: int) -> ShuffleBuffer:
        with self._lock:
            future = self._start(number)
        try:
            return future.result()
        except BaseException:
            with self._lock:
                self._buffers.pop(number, None)  # the next attempt reads it again
            raise

    def _start(self, number: int) -> Future[ShuffleBuffer]:
        if self._is_closed:
            raise CancelledError
        if number not in self._buffers:
            self._buffers[number] = in_thread(partial(self._load, number), "offmarl-blocks")
        return self._buffers[number]

    def _load(self, number: int) -> ShuffleBuffer:
        numbers = self._table.of(self._order.blocks(number))
        table = SlotTable(self._source, self._table.recorded, numbers)
        with self._reading:  # one at a time, for the sake of memory
            buffer = ShuffleBuffer(table, self.windows)
            return_free()
        return buffer

    def _move_on(self, first: int, last: int) -> None:
        """Release the buffers before the first in use, and read the one after the last."""
        with self._lock:
            for number in [x for x in self._buffers if not first <= x <= last + 1]:
                del self._buffers[number]  # another thread may still wait for it: no `cancel`
            if self._order.has_buffer(last + 1):
                self._start(last + 1)


_INSTEAD = "leave out --replay blocks", "pull it first"


def check_blocked(source: Any, weighted: bool) -> None:
    """Raise `OptionError` if windows of a source, or by weights, cannot be shuffled by blocks."""
    if isinstance(source, Mixed):
        raise OptionError(
            f"{source.path} is a mixture, and data on another machine is shuffled by blocks of one "
            "vault: pull the vaults first, or give one of them."
        )
    if weighted:
        instead = _INSTEAD[bool(getattr(source, "is_remote", True))]
        raise OptionError(
            f"{source.path} is shuffled by blocks, in which all steps are equally likely: to draw "
            f"by weights or priorities, {instead}."
        )


def open_reader(
    source: Any,
    windows: Windows,
    passes: tuple[int, int | None, bool],
    episodes: Chosen,
    weights: Weighting,
    shuffle_buffer: int | None = None,
) -> tuple[WindowReader, Order]:
    """Return a reader of windows and their order, from the seed, ``epochs`` and ``drop_last``."""
    seed, epochs, drop_last = passes
    if shuffle_buffer is None and not getattr(source, "is_remote", False):
        reader = WindowReader(source, windows, episodes, weights)
        return reader, make_order(reader.rings.starts, windows.batch_size, seed, epochs, drop_last)
    check_blocked(source, weights is not None)
    table = BlockTable(source, windows, episodes, shuffle_buffer)
    order = BlockOrder(
        table.sizes, windows.batch_size, seed, epochs, drop_last, per_buffer=table.per_buffer
    )
    return BlockReader(source, windows, order, table), order
