"""How likely a window is to start at each slot, fixed before the training.

Draws are a function of a key alone. `draw_on_host` needs no JAX, and gives the bits that
`offmarl.replay.device.draw` gives on the device.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray

from offmarl.replay import threefry
from offmarl.replay.threefry import Keys

WORDS_OF_A_DRAW = 5
"""Random words of a draw from segments: two for the segment, one against its alias, two inside."""

_MOST_SLOTS = 2**31
"""Slots that 32 bits tell apart; of more, the host draws with 64 bits."""


class Uniform(NamedTuple):
    """Every slot is equally likely; a pytree."""

    num_slots: Any
    """Their number."""


class Segments(NamedTuple):
    """n segments of slots; each has a share of the draws, and its slots are equally likely.

    A pytree, made by `segments`. A draw takes the same time for any n: an alias table (Walker 1977)
    finds the segment.
    """

    first: Any
    """``(n,)`` first slot of each, ascending."""
    size: Any
    """``(n,)`` slots of each."""
    share: Any
    """``(n,)`` share of the draws, float32."""
    threshold: Any
    """``(n,)`` a draw of this segment stays if 32 random bits are below; else ``alias`` has it."""
    alias: Any
    """``(n,)``"""
    num_slots: Any
    """Slots, with those that are in no segment and are never drawn."""


Starts = Uniform | Segments


def segments(
    first: NDArray[np.int64], size: NDArray[np.int64], share: NDArray[np.float64], num_slots: int
) -> Segments:
    """Return segments of slots that are drawn in proportion to ``share``."""
    nonzero = np.flatnonzero(share > 0)
    first, size, share = first[nonzero], size[nonzero], share[nonzero] / share.sum()
    keep, alias = _alias_table(share * len(share))
    is_full = keep >= 1 - 2.0**-33
    index = np.int32 if num_slots < _MOST_SLOTS else np.int64
    return Segments(
        first=first.astype(index),
        size=size.astype(index),
        share=share.astype(np.float32),
        threshold=np.where(is_full, 2**32 - 1, np.round(keep * 2.0**32)).astype(np.uint32),
        alias=np.where(is_full, np.arange(len(share)), alias).astype(np.int32),
        num_slots=num_slots,
    )


def _alias_table(scaled: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the alias table of values whose mean is 1: the part that each keeps, and its alias.

    Entries below 1 are filled up, in order, from the first entry above 1 that has something left;
    one that falls below 1 by that is filled up from the next. Cumulative sums tell which these are.
    """
    keep, alias = np.ones(len(scaled)), np.arange(len(scaled))
    low, high = np.flatnonzero(scaled < 1), np.flatnonzero(scaled >= 1)
    if not len(high):  # by rounding
        return keep, alias
    missing, extra = np.cumsum(1 - scaled[low]), np.cumsum(scaled[high] - 1)
    giver = np.searchsorted(extra, missing - (1 - scaled[low]), side="left")
    keep[low], alias[low] = scaled[low], high[np.minimum(giver, len(high) - 1)]
    taker = np.searchsorted(missing, extra, side="right")
    emptied = np.flatnonzero(taker[:-1] < len(low))  # the last one keeps what rounding leaves
    keep[high[emptied]] = 1 - (missing[taker[emptied]] - extra[emptied])
    alias[high[emptied]] = high[emptied + 1]
    return keep.clip(0, 1), alias


def draw_on_host(starts: Starts, keys: Keys, count: int) -> Int[np.ndarray, "*k count"]:
    """Draw slots for many keys, ``(*k, 2)`` words, without JAX.

    The slots are those that the device draws, where 32 bits tell all slots apart.
    """
    wide = starts.num_slots >= _MOST_SLOTS
    if isinstance(starts, Uniform):
        return (_wide if wide else threefry.randint)(keys, count, starts.num_slots).astype(np.int64)
    words = threefry.bits(keys, WORDS_OF_A_DRAW * count)
    words = np.moveaxis(words.reshape(*keys.shape[:-1], WORDS_OF_A_DRAW, count), -2, 0)
    number = threefry.below(words[0], words[1], np.uint32(len(starts.share)))
    number = np.where(words[2] < starts.threshold[number], number, starts.alias[number])
    size = starts.size[number]
    if wide:
        inside = _joined(words[3], words[4]) % size.astype(np.uint64)
    else:
        inside = threefry.below(words[3], words[4], size.astype(np.uint32))
    return starts.first[number] + inside.astype(np.int64)


def _wide(keys: Keys, count: int, stop: int) -> NDArray[np.uint64]:
    """Return whole numbers from 0 to below ``stop``, each from 64 random bits."""
    words = threefry.bits(keys, 2 * count).reshape(*keys.shape[:-1], count, 2)
    return _joined(words[..., 0], words[..., 1]) % np.uint64(stop)


def _joined(high: NDArray[Any], low: NDArray[Any]) -> NDArray[np.uint64]:
    """Return numbers of 64 bits from their two words."""
    return high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
