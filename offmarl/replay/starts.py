"""How likely a window is to start at each slot, fixed before the training.

All draws are a function of a key alone. They are the same on the device and on the host.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray, UInt32
from numpy.typing import NDArray

from offmarl.types import ArrayTree

_MOST_SLOTS = 2**31
"""Slots that 32 bits tell apart; of more, the host draws with 64 bits."""


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["num_slots"])
@dataclass(frozen=True)
class Uniform:
    """Every slot is equally likely."""

    num_slots: int
    wide_words: ClassVar[int] = 2
    """Words of 32 bits that `draw_wide` takes for a slot."""

    def draw(self, key: PRNGKeyArray, count: int) -> Int[Array, "count"]:
        """Draw slots."""
        return jax.random.randint(key, (count,), 0, self.num_slots)

    def draw_wide(self, words: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return slots for random bits ``(*b, wide_words)``, of more slots than 32 bits tell."""
        return _below(self.num_slots, words)

    def probability(self, slots: Int[Array, "*b"]) -> Float[Array, "*b"]:
        """Return how likely each slot is."""
        return jnp.full(slots.shape, 1 / self.num_slots, jnp.float32)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["first", "size", "share", "threshold", "alias"],
    meta_fields=["num_slots"],
)
@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of slots, each of which has a share of the draws; its slots are equally likely.

    A draw takes the same time for any number of segments: an alias table (Walker 1977) finds the
    segment. Made by `segments`.
    """

    first: Int[Array, "n"] | NDArray[np.int64]
    """First slot of each segment, ascending."""
    size: Int[Array, "n"] | NDArray[np.int64]
    """Slots of each."""
    share: Float[Array, "n"]
    """Share of the draws."""
    threshold: UInt32[Array, "n"]
    alias: Int[Array, "n"]
    num_slots: int
    """Slots, with those that are in no segment and are never drawn."""
    wide_words: ClassVar[int] = 5

    def draw(self, key: PRNGKeyArray, count: int) -> Int[Array, "count"]:
        """Draw slots."""
        which, against, inside = jax.random.split(key, 3)
        number = jax.random.randint(which, (count,), 0, len(self.share))
        bits = jax.random.bits(against, (count,), jnp.uint32)
        number = jnp.where(bits < self.threshold[number], number, self.alias[number])
        return self.first[number] + jax.random.randint(inside, (count,), 0, self.size[number])

    def draw_wide(self, words: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return slots for random bits ``(*b, wide_words)``, of more slots than 32 bits tell."""
        number = _below(len(self.share), words)
        threshold, alias = np.asarray(self.threshold), np.asarray(self.alias)
        number = np.where(words[..., 4] < threshold[number], number, alias[number])
        size = np.asarray(self.size, np.int64)[number]
        return np.asarray(self.first, np.int64)[number] + _below(size, words[..., 2:])

    def probability(self, slots: Int[Array, "*b"]) -> Float[Array, "*b"]:
        """Return how likely each slot is."""
        number = jnp.searchsorted(self.first, slots, side="right") - 1
        inside = slots - self.first[number] < self.size[number]
        return jnp.where(inside, self.share[number] / self.size[number], 0.0)


Starts = Uniform | Segments


def segments(
    first: NDArray[np.int64], size: NDArray[np.int64], share: NDArray[np.float64], num_slots: int
) -> Segments:
    """Return segments of slots that are drawn in proportion to ``share``.

    Parameters
    ----------
    first, size
        First slot of each segment, ascending, and its number of slots.
    share
        At least 0; not all 0.
    num_slots
        Slots in all.
    """
    some = np.flatnonzero(share > 0)
    first, size, share = first[some], size[some], share[some] / share.sum()
    keep, alias = _alias_table(share * len(share))
    whole = keep >= 1 - 2.0**-33
    return Segments(
        first=first.astype(_index_type(num_slots)),
        size=size.astype(_index_type(num_slots)),
        share=share.astype(np.float32),
        threshold=np.where(whole, 2**32 - 1, np.round(keep * 2.0**32)).astype(np.uint32),
        alias=np.where(whole, np.arange(len(share)), alias).astype(np.int32),
        num_slots=num_slots,
    )


def _index_type(num_slots: int) -> type:
    return np.int32 if num_slots < _MOST_SLOTS else np.int64


def _alias_table(scaled: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the alias table of values whose mean is 1: each one's own part, and who has the rest.

    Entries below 1 are filled up, in order, from the first entry above 1 that has something left;
    one that falls below 1 by that is filled up from the next. Cumulative sums tell who meets whom.
    """
    keep, alias = np.ones(len(scaled)), np.arange(len(scaled))
    low, high = np.flatnonzero(scaled < 1), np.flatnonzero(scaled >= 1)
    if not len(low) or not len(high):
        return keep, alias
    missing, extra = np.cumsum(1 - scaled[low]), np.cumsum(scaled[high] - 1)
    giver = np.searchsorted(extra, missing - (1 - scaled[low]), side="left")
    keep[low], alias[low] = scaled[low], high[np.minimum(giver, len(high) - 1)]
    taker = np.searchsorted(missing, extra, side="right")
    emptied = np.flatnonzero(taker[:-1] < len(low))  # the last one keeps what rounding leaves
    keep[high[emptied]] = 1 - (missing[taker[emptied]] - extra[emptied])
    alias[high[emptied]] = high[emptied + 1]
    return keep.clip(0, 1), alias


def _below(limit: NDArray[np.int64] | int, words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return whole numbers in ``[0, limit)``, each from two words of 32 random bits."""
    bits = words[..., 0] << np.uint64(32) | words[..., 1]
    return (bits % np.asarray(limit, np.uint64)).astype(np.int64)


def on_host(tree: ArrayTree) -> ArrayTree:
    """Put keys and tables where drawing waits for nothing; nowhere else where JAX knows no CPU."""
    try:
        processor = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return tree
    return jax.device_put(tree, processor)


def draw_on_host(starts: Starts, keys: Key[Array, "*b"], count: int) -> Int[np.ndarray, "*b count"]:
    """Draw for many keys, without waiting for what the accelerator is busy with.

    The slots are those that ``starts.draw`` gives on the device, where 32 bits tell them apart.
    """
    flat = on_host(keys).ravel()
    if starts.num_slots < _MOST_SLOTS:
        found = np.asarray(_draws(on_host(starts), flat, count)).astype(np.int64)
    else:
        found = starts.draw_wide(
            np.asarray(_words(flat, (count, starts.wide_words))).astype(np.uint64)
        )
    return found.reshape(*keys.shape, count)


@partial(jax.jit, static_argnums=2)
def _draws(starts: Starts, keys: Key[Array, "n"], count: int) -> Int[Array, "n count"]:
    return jax.vmap(lambda key: starts.draw(key, count))(keys)


@partial(jax.jit, static_argnums=1)
def _words(keys: Key[Array, "n"], shape: tuple[int, int]) -> UInt32[Array, "n count words"]:
    return jax.vmap(lambda key: jax.random.bits(key, shape))(keys)
