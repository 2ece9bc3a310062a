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

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import PurePath
from threading import Lock
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from offmarl._ahead import in_thread
from offmarl._arrays import as_items
from offmarl._memory import return_free
from offmarl.errors import OptionError
from offmarl.replay.fields import COMPUTED, check_extras, fields_of, recorded_fields
from offmarl.replay.gathering import Batch, BatchLayout, RingReader
from offmarl.replay.orders import BLOCKS, SLOT_BITS, BlockOrder
from offmarl.replay.rings import SlotRing
from offmarl.replay.sampling import Chosen, SlotTable, Source, Windows, sound_part
from offmarl.types import ArraySpec, EnvSpec, Transition, View, map_tree, sum_bytes

BUFFER_BYTES = 2**26
"""Default size of the shuffle buffer."""
BLOCK_SEED = 0
"""Seed of the order of blocks in training, the same for all of its seeds."""


@runtime_checkable
class BlockedSource(Source, Protocol):
    """A source whose chunks are known; `offmarl.vault.Dataset` is one."""

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """Rows and steps that are stored together."""

    def transitions(self, start: int, stop: int, rows: slice = slice(None)) -> Transition:
        """Read an interval of time of some rows, ``(B, T, ...)``, several requests at a time."""


class BlockTable:
    """Which episodes each block holds.

    `OptionError` if there are no such episodes, or an episode does not fit the buffer.
    """

    def __init__(
        self, source: BlockedSource, windows: Windows, episodes: Chosen, buffer_bytes: int
    ):
        table = SlotTable(source, episodes)
        row, start = (column[table.episodes] for column in source.episodes[:2])
        chunk_rows, chunk_steps = source.chunk_shape
        step_bytes = sum_bytes(_recorded(source.spec, windows))
        longest = int(table.lengths.max(initial=0)) * step_bytes
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

    def of(self, blocks: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the numbers of the episodes of each of some blocks."""
        return [self.numbers[self.bounds[i] : self.bounds[i + 1]] for i in blocks.tolist()]


def _recorded(spec: EnvSpec, windows: Windows) -> dict[str, ArraySpec]:
    """Return the fields of windows that come from the source."""
    fields = fields_of(spec, windows).items()
    return {name: leaf for name, leaf in fields if name not in COMPUTED}


class _Episodes(NamedTuple):
    """The table of the episodes in a buffer."""

    row: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    final: NDArray[np.int64]


class ShuffleBuffer:
    """Some episodes of a source in memory, laid end to end in one row; a `Source`.

    ``blocks`` has the numbers of the episodes of each block.
    """

    rows = 1

    def __init__(self, source: BlockedSource, blocks: list[NDArray[np.int64]], windows: Windows):
        self.path: PurePath = source.path
        self.spec: EnvSpec = source.spec
        self.numbers = np.concatenate(blocks)
        table = source.episodes
        length = table.length[self.numbers]
        final = table.final[self.numbers]
        self._finals: View = source.final_views(final[final >= 0])
        final_index = np.where(final >= 0, np.cumsum(final >= 0) - 1, -1)
        start = np.cumsum(length) - length
        self.episodes = _Episodes(np.zeros_like(start), start, length, final_index)
        self.length = int(length.sum())
        self._fields = {
            name: np.empty((1, self.length, *leaf.shape), leaf.numpy_dtype)
            for name, leaf in _recorded(source.spec, windows).items()
        }
        at = 0
        for numbers in blocks:
            at = self._read(source, numbers, at)

    def _read(self, source: BlockedSource, numbers: NDArray[np.int64], at: int) -> int:
        """Read the episodes of a block, and return where the next block begins."""
        table, (chunk_rows, _) = source.episodes, source.chunk_shape
        row, start, length = (x[numbers] for x in (table.row, table.start, table.length))
        block = int(row[0]) // chunk_rows * chunk_rows
        first, stop = int(start.min()), int((start + length).max())
        transitions = source.transitions(first, stop, slice(block, block + chunk_rows))
        offset = np.cumsum(length) - length
        step = np.repeat((row - block) * (stop - first) + start - first - offset, length)
        step += np.arange(len(step))
        for name, values in recorded_fields(transitions).items():
            if name in self._fields:
                array = np.asarray(values)
                flat = array.reshape(math.prod(array.shape[:2]), *array.shape[2:])
                self._fields[name][0, at : at + len(step)] = flat[step]
        return at + len(step)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the only interval."""
        yield 0, self.length

    def transitions(self, start: int, stop: int) -> Transition:
        """Raise: windows are read with `window_fields`."""
        raise NotImplementedError

    def rewards(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return the rewards of an interval, ``(1, T, N)``."""
        rewards: NDArray[np.float32] = self._fields["reward"][:, start:stop]
        return rewards

    def window_fields(
        self, rows: Any, starts: Any, length: int, index: Any, out: Mapping[str, Any], at: Any
    ) -> None:
        """Write some steps of windows to arrays; see `Source.window_fields`."""
        del rows
        window, step = np.divmod(index, length)
        steps = starts[window] + step
        for name, array in out.items():
            if not array.size:
                continue
            items = as_items(self._fields[name])
            places = steps[:, : array.shape[1]]
            if at is None:
                items.take(places, out=as_items(array).reshape(places.shape), mode="clip")
            else:
                values = items.take(places, mode="clip").view(array.dtype)
                array[at] = values.reshape(*places.shape, *array.shape[2:])

    def final_views(self, numbers: Any) -> View:
        """Return final views, ``(len(numbers), ...)``."""
        views: View = map_tree(lambda leaf: leaf[numbers], self._finals)
        return views

    def prepare_fork(self) -> None:
        """Do nothing: everything is in memory."""


class BlockGatherer:
    """Gathers windows from shuffle buffers; the next buffer is read while one is used.

    It is mixed into the readers of `offmarl.replay.stream` and `offmarl.replay.batches`, in which
    windows are then numbered as `BlockOrder` does.
    """

    def __init__(
        self, source: BlockedSource, windows: Windows, order: BlockOrder, table: BlockTable
    ):
        check_extras(source.spec, windows, source.path)
        self._source, self._windows, self._order, self._table = source, windows, order, table
        self._layout = BatchLayout.of(fields_of(source.spec, windows), windows)
        self._buffers: dict[int, Future[_LoadedBuffer]] = {}
        self._lock, self._reading = Lock(), Lock()
        self._is_closed = False

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch."""
        return self._windows.batch_size * self._layout.window_bytes

    def close(self) -> None:
        """Abandon the buffers that are being read, which may wait for a network. Idempotent."""
        with self._lock:
            self._is_closed = True
            for future in self._buffers.values():
                future.cancel()

    def _gather(self, starts: NDArray[np.int64]) -> Batch:
        """Return ``n`` windows."""
        batch = Batch(self._layout, len(starts))
        buffers, slots = starts >> SLOT_BITS, starts & (2**SLOT_BITS - 1)
        numbers = np.unique(buffers)
        for number in numbers.tolist():
            buffer = self._buffer(number)
            index = None if len(numbers) == 1 else np.flatnonzero(buffers == number)
            buffer.reader.read(slots if index is None else slots[index], batch, index)
            to = slice(None) if index is None else index
            episode = batch.fields["episode"]
            episode[to] = buffer.numbers[episode[to]]
        self._move_on(int(numbers[0]), int(numbers[-1]))
        return batch

    def _buffer(self, number: int) -> "_LoadedBuffer":
        with self._lock:
            future = self._start(number)
        try:
            return future.result()
        except BaseException:
            with self._lock:
                self._buffers.pop(number, None)  # the next attempt reads it again
            raise

    def _start(self, number: int) -> "Future[_LoadedBuffer]":
        if self._is_closed:
            raise CancelledError
        if number not in self._buffers:
            self._buffers[number] = in_thread(partial(self._load, number), "offmarl-blocks")
        return self._buffers[number]

    def _load(self, number: int) -> "_LoadedBuffer":
        blocks = self._table.of(self._order.blocks(number))
        with self._reading:  # one at a time, for the sake of memory
            buffer = ShuffleBuffer(self._source, blocks, self._windows)
            return_free()
        ring = SlotRing(buffer, 1.0, SlotTable(buffer), 0, 0, None, np.ones(1))
        return _LoadedBuffer(RingReader(ring, self._windows), buffer.numbers)

    def _move_on(self, first: int, last: int) -> None:
        """Release the buffers before the first in use, and read the one after the last."""
        with self._lock:
            for number in [x for x in self._buffers if not first <= x <= last + 1]:
                self._buffers.pop(number).cancel()
            if self._order.has_buffer(last + 1):
                self._start(last + 1)


class _LoadedBuffer(NamedTuple):
    """A buffer in memory."""

    reader: RingReader
    numbers: NDArray[np.int64]
    """Numbers of its episodes in the source."""


def plan_blocks(
    source: Any, windows: Windows, episodes: Chosen, buffer_bytes: int | None
) -> tuple[BlockedSource, BlockTable]:
    """Return a source that can be read by blocks, and its blocks."""
    if not isinstance(source, BlockedSource):
        raise OptionError(
            f"{source.path} is a mixture, and data on another machine is shuffled by blocks of one "
            "vault: pull the vaults first, or give one of them."
        )
    source = sound_part(source)
    return source, BlockTable(source, windows, episodes, buffer_bytes or BUFFER_BYTES)


def check_unweighted(weighted: bool, source: Any) -> None:
    """Raise `OptionError` if windows shall be drawn by weights, which blocks do not support."""
    if weighted:
        raise OptionError(
            f"{source.path} is shuffled by blocks, in which all steps are equally likely: pull it "
            "first to draw by weights or priorities."
        )
