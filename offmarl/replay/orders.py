"""Which windows make which batch: draws without an end, or passes over all windows.

The windows of batch number i follow from the seed and i alone. So a stream can begin at any batch,
and processes can share the batches of one stream. Nothing here needs JAX.
"""

from functools import lru_cache
from typing import Any

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


class Draws:
    """Windows drawn at random: the batches of `Replay.sample`."""

    num_batches: int | None = None
    """There is no end."""

    def __init__(self, starts: Starts, batch_size: int, seed: int):
        self._starts, self._batch_size = starts, batch_size
        self._key = threefry.key(seed)
        self._block = lru_cache(4)(self._draw)

    def slots(self, step: int) -> Int[np.ndarray, "B"]:
        """Return the slots at which the windows of a batch start."""
        block, index = divmod(step, _DRAWN)
        found: Int[np.ndarray, "B"] = self._block(block)[index]
        return found

    def _draw(self, block: int) -> Int[np.ndarray, "n B"]:
        steps = block * _DRAWN + np.arange(_DRAWN)
        return draw_on_host(self._starts, threefry.fold_in(self._key, steps), self._batch_size)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._starts, self._batch_size, int(self._key[1]))


class Epochs:
    """Passes over all windows; each pass has every window once, in another random order."""

    def __init__(self, num_windows: int, batch_size: int, seed: int, epochs: int, drop_last: bool):
        self.num_windows, self.batch_size, self.seed = num_windows, batch_size, seed
        whole, rest = divmod(num_windows, batch_size)
        self.batches_per_epoch = whole + (rest > 0 and not drop_last)
        self.num_batches = epochs * self.batches_per_epoch

    def slots(self, step: int) -> Int[np.ndarray, "B"]:
        """Return the slots at which the windows of a batch start."""
        epoch, index = divmod(step, self.batches_per_epoch)
        block, index = divmod(index, _DRAWN)
        size = _DRAWN * self.batch_size
        found = _shuffled_block(block, size, self.num_windows, self.seed, epoch)
        return found[index * self.batch_size : (index + 1) * self.batch_size]


Order = Draws | Epochs


def make_order(
    starts: Starts, batch_size: int, seed: int, epochs: int | None, drop_last: bool
) -> Order:
    """Return the order of the batches of a stream."""
    check_seed(seed)
    if epochs is None and drop_last:
        raise OptionError("drop_last is for epochs: without them, all batches are full.")
    if epochs is None:
        return Draws(starts, batch_size, seed)
    if epochs < 1:
        raise OptionError(f"a stream of {epochs} epochs has no batches: give at least 1.")
    if not isinstance(starts, Uniform):
        raise OptionError(
            "an epoch has each window once, so it cannot follow weights or the shares of a "
            "mixture: leave out epochs, or the weights."
        )
    found = Epochs(starts.num_slots, batch_size, seed, epochs, drop_last)
    if not found.num_batches:
        raise OptionError(
            f"there are {found.num_windows:,} windows, fewer than a batch of {batch_size:,}: take "
            "smaller batches, or leave out drop_last."
        )
    return found


def shuffle(
    places: Int[np.ndarray, "n"], count: int, seed: int, epoch: int
) -> Int[np.ndarray, "n"]:
    """Return the numbers at some places of a random order of ``range(count)``.

    It takes no memory by ``count``: a Feistel network permutes the numbers of as many bits, and is
    applied again to those that are ``count`` or more (Black and Rogaway, "Ciphers with arbitrary
    finite domains", CT-RSA 2002).
    """
    keys = _round_keys(seed, epoch)
    bits = max(2, (count - 1).bit_length())
    found = places.astype(np.uint64)
    found = _permute(found, bits, keys)
    while (outside := np.flatnonzero(found >= count)).size:
        found[outside] = _permute(found[outside], bits, keys)
    return found.astype(np.int64)


@lru_cache(4)
def _shuffled_block(
    block: int, size: int, count: int, seed: int, epoch: int
) -> Int[np.ndarray, "n"]:
    """Return a block of a random order of ``range(count)``."""
    places = np.arange(block * size, min((block + 1) * size, count))
    return shuffle(places, count, seed, epoch)


@lru_cache(4)
def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    words = threefry.bits(threefry.fold_in(threefry.key(seed), epoch), 2 * _ROUNDS)
    found: NDArray[np.uint64] = words.astype(np.uint64)
    return found[::2] << np.uint64(32) | found[1::2]


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
