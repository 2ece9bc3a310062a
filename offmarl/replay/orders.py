"""The windows of each batch: draws without an end, or passes over all windows.

The windows of batch number i follow from the seed and i alone. So a stream can begin at any batch,
and processes can share the batches of one stream. Nothing here needs JAX.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import count
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray

from offmarl.config import check_seed
from offmarl.errors import OptionError
from offmarl.replay import threefry
from offmarl.replay.starts import Starts, Uniform, draw_on_host

_DRAWN = 64
"""Batches whose windows are drawn at once, which takes little longer than for one."""
_ROUNDS = 8
BLOCKS = 8
"""Blocks of a full shuffle buffer; fewer where chunks are large."""
SLOT_BITS = 40
"""A window of a shuffle buffer is numbered by the buffer and, in the lower bits, its slot there."""


class Order:
    """The windows of each batch."""

    num_batches: int | None = None
    """None if there is no end."""

    def slots(self, step: int) -> Int[np.ndarray, "B"]:
        """Return the slots at which the windows of a batch start."""
        raise NotImplementedError

    def steps(self, start: int, stride: int = 1) -> Iterable[int]:
        """Return the numbers of the batches from ``start`` on."""
        if self.num_batches is None:
            return count(start, stride)
        return range(start, self.num_batches, stride)

    def num_left(self, step: int) -> int:
        """Return how many batches are left; `TypeError` if there is no end."""
        if self.num_batches is None:
            raise TypeError("batches without an end have no length: give a number of epochs.")
        return max(0, self.num_batches - step)


class Draws(Order):
    """Windows drawn at random: the batches of `Replay.sample`.

    Batch i is drawn with ``jax.random.fold_in(jax.random.key(seed), i)``.
    """

    def __init__(self, starts: Starts, batch_size: int, seed: int):
        self._starts, self._batch_size = starts, batch_size
        self._key = threefry.key(seed)
        self._block = lru_cache(4)(self._draw)

    def slots(self, step: int) -> Int[np.ndarray, "B"]:
        """Return the slots at which the windows of a batch start."""
        block, index = divmod(step, _DRAWN)
        slots: Int[np.ndarray, "B"] = self._block(block)[index]
        return slots

    def _draw(self, block: int) -> Int[np.ndarray, "n B"]:
        steps = block * _DRAWN + np.arange(_DRAWN)
        return draw_on_host(self._starts, threefry.fold_in(self._key, steps), self._batch_size)


class Epochs(Order):
    """Passes over all windows; each pass has every window once, in another random order.

    The last batch of a pass may have fewer windows, unless ``drop_last`` leaves it out.
    """

    def __init__(self, num_windows: int, batch_size: int, seed: int, epochs: int, drop_last: bool):
        self.num_windows, self.batch_size, self.seed = num_windows, batch_size, seed
        self.batches_per_epoch = _batches_of_pass(num_windows, batch_size, epochs, drop_last)
        self.num_batches = epochs * self.batches_per_epoch

    def slots(self, step: int) -> Int[np.ndarray, "B"]:
        """Return the slots at which the windows of a batch start."""
        epoch, index = divmod(step, self.batches_per_epoch)
        block, index = divmod(index, _DRAWN)
        size = _DRAWN * self.batch_size
        slots = _shuffled_block(block, size, self.num_windows, self.seed, epoch)
        return slots[index * self.batch_size : (index + 1) * self.batch_size]


class _Pass(NamedTuple):
    """The buffers of one pass."""

    blocks: NDArray[np.int64]
    """``(K,)`` the blocks in the order of the pass."""
    bounds: NDArray[np.int64]
    """``(G+1,)`` where each buffer begins in these."""
    stops: NDArray[np.int64]
    """``(G,)`` windows of the pass up to the end of each buffer."""


class BlockOrder(Order):
    """The windows of each batch, in passes over blocks in a random order.

    ``sizes`` ``(K,)`` are the slots of each block, of which a full buffer has ``per_buffer``. The
    order of windows in a buffer follows from ``seed``, and that of blocks from ``block_seed``, by
    default the same. Without ``epochs``, passes have no end, and all batches are full; the last one
    of a pass may have fewer windows, unless ``drop_last`` leaves it out.
    """

    def __init__(
        self,
        sizes: NDArray[np.int64],
        batch_size: int,
        seed: int,
        epochs: int | None = None,
        drop_last: bool = False,
        block_seed: int | None = None,
        per_buffer: int = BLOCKS,
    ):
        self._sizes, self._batch_size, self._per_buffer = sizes, batch_size, per_buffer
        self._seed, self._block_seed = seed, seed if block_seed is None else block_seed
        self.num_windows = int(sizes.sum())
        self._per_pass = _batches_of_pass(self.num_windows, batch_size, epochs, drop_last)
        self.num_batches = None if epochs is None else epochs * self._per_pass
        self._epochs = epochs
        self._passes = lru_cache(4)(self._pass)
        self._windows = lru_cache(4)(self._draw)

    @property
    def _num_buffers(self) -> tuple[int, int]:
        """Buffers of the first pass and of each later one."""
        return len(self._passes(0).stops), -(-len(self._sizes) // self._per_buffer)

    def has_buffer(self, buffer: int) -> bool:
        """Whether there is a buffer of this number before the last pass ends."""
        return self._epochs is None or self._epoch_of(buffer)[0] < self._epochs

    def blocks(self, buffer: int) -> NDArray[np.int64]:
        """Return the blocks of a buffer; buffers are numbered through all passes."""
        epoch, number = self._epoch_of(buffer)
        buffers = self._passes(epoch)
        return buffers.blocks[buffers.bounds[number] : buffers.bounds[number + 1]]

    def slots(self, step: int) -> Int[np.ndarray, "B"]:
        """Return the windows of a batch: the number of the buffer, and the slot in it."""
        begin, stop = self._interval(step)
        first = step - step % _DRAWN
        windows = self._windows(first)
        base = self._interval(first)[0]
        return windows[begin - base : stop - base]

    def _interval(self, step: int) -> tuple[int, int]:
        """Return the windows of a batch, as numbers through all passes."""
        if self.num_batches is None:
            return step * self._batch_size, (step + 1) * self._batch_size
        epoch, index = divmod(step, self._per_pass)
        stop = min((index + 1) * self._batch_size, self.num_windows)
        first = epoch * self.num_windows
        return first + index * self._batch_size, first + stop

    def _draw(self, first: int) -> NDArray[np.int64]:
        last = first + _DRAWN - 1
        if self.num_batches is not None:
            last = min(last, self.num_batches - 1)
        at, stop = self._interval(first)[0], self._interval(last)[1]
        parts = []
        while at < stop:
            epoch, inside = divmod(at, self.num_windows)
            stops = self._passes(epoch).stops
            number = int(np.searchsorted(stops, inside, side="right"))
            base = int(stops[number - 1]) if number else 0
            count = int(stops[number]) - base
            end = min(stop, at + int(stops[number]) - inside)
            places = np.arange(inside - base, inside - base + end - at)
            first_pass, later = self._num_buffers
            buffer = number if epoch == 0 else first_pass + (epoch - 1) * later + number
            slots = shuffle(places, count, self._seed, 2 * buffer + 1)
            parts.append((buffer << SLOT_BITS) + slots)
            at = end
        return np.concatenate(parts)

    def _pass(self, epoch: int) -> _Pass:
        count, most = len(self._sizes), self._per_buffer
        blocks = shuffle(np.arange(count), count, self._block_seed, 2 * epoch)
        sizes = np.full(-(-count // most) + BLOCKS, most)
        if epoch == 0:  # so that the first batch needs one block only
            ramp = 2 ** np.arange(int(math.log2(most)))
            sizes[: len(ramp)] = ramp
        bounds = np.unique(np.minimum(np.append(0, np.cumsum(sizes)), count))
        windows = np.cumsum(self._sizes[blocks])
        return _Pass(blocks, bounds, windows[bounds[1:] - 1])

    def _epoch_of(self, buffer: int) -> tuple[int, int]:
        first, later = self._num_buffers
        if buffer < first:
            return 0, buffer
        epoch, number = divmod(buffer - first, later)
        return epoch + 1, number


def _batches_of_pass(num_windows: int, batch_size: int, epochs: int | None, drop_last: bool) -> int:
    """Return the number of batches of a pass; `OptionError` if there is none, or no epoch."""
    full, last = divmod(num_windows, batch_size)
    batches = full + (last > 0 and not drop_last)
    if drop_last and epochs is None:
        raise OptionError("drop_last is for epochs: without them, all batches are full.")
    if epochs is not None and (epochs < 1 or not batches):
        raise OptionError(
            f"{epochs} epochs of {num_windows:,} windows hold no batch of {batch_size:,}: give at "
            "least 1 epoch, and smaller batches, or leave out drop_last."
        )
    return batches


def make_order(
    starts: Starts, batch_size: int, seed: int, epochs: int | None, drop_last: bool
) -> Order:
    """Return the order of the batches of a stream."""
    check_seed(seed)
    if epochs is None:
        _batches_of_pass(starts.num_slots, batch_size, epochs, drop_last)
        return Draws(starts, batch_size, seed)
    if not isinstance(starts, Uniform):
        raise OptionError(
            "an epoch has each window once, so it cannot follow weights or the shares of a "
            "mixture: leave out epochs, or the weights."
        )
    return Epochs(starts.num_slots, batch_size, seed, epochs, drop_last)


def check_start(start: int) -> int:
    """Return the number of a stream's first batch; `OptionError` if it is negative."""
    if start < 0:
        raise OptionError(f"batches are numbered from 0: a stream cannot start at {start}.")
    return start


def shuffle(
    places: Int[np.ndarray, "n"], count: int, seed: int, epoch: int
) -> Int[np.ndarray, "n"]:
    """Return the numbers at some places of a random order of ``range(count)``.

    It takes no memory by ``count``: a Feistel network permutes the numbers of as many bits, and is
    applied again to those that are ``count`` or more (Black and Rogaway, "Ciphers with arbitrary
    finite domains", CT-RSA 2002).
    """
    keys = _round_keys(seed, epoch)
    bits = max(6, (count - 1).bit_length())  # fewer leave few orders to choose from
    numbers = places.astype(np.uint64)
    numbers = _permute(numbers, bits, keys)
    while (outside := np.flatnonzero(numbers >= count)).size:
        numbers[outside] = _permute(numbers[outside], bits, keys)
    return numbers.astype(np.int64)


@lru_cache(4)
def _shuffled_block(
    block: int, size: int, count: int, seed: int, epoch: int
) -> Int[np.ndarray, "n"]:
    """Return a block of a random order of ``range(count)``."""
    places = np.arange(block * size, min((block + 1) * size, count))
    return shuffle(places, count, seed, epoch)


@lru_cache(4)
def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    key = threefry.fold_in(threefry.key(seed), epoch)
    words: NDArray[np.uint64] = threefry.bits(key, 2 * _ROUNDS).astype(np.uint64)
    return words[::2] << np.uint64(32) | words[1::2]


def _permute(x: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permute numbers of so many bits, one-to-one."""
    upper, lower = bits // 2, bits - bits // 2
    for key in keys:
        high, low = x >> np.uint64(lower), x & np.uint64(2**lower - 1)
        high = (high ^ _mix(low, key)) & np.uint64(2**upper - 1)
        x = low << np.uint64(upper) | high
        upper, lower = lower, upper
    return x


def _mix(x: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Return random-looking bits for numbers and a key."""
    x = (x ^ key) * np.uint64(0xD6E8FEB86659FD93)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(32))
    return mixed
