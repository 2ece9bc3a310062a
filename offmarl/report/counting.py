"""Counting what differs among more rows than fit in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt64

_CAPACITY = 2**20
"""Keys held at most: estimates are then off by about a thousandth."""
_WORDS = 2**17
"""Words that are mixed at once: few enough to stay in the processor's cache."""


class Distinct:
    """How many distinct keys there are, and how often each occurs, in bounded memory.

    Up to ``capacity`` distinct keys all are held. Beyond, a sample of them is: those whose hash
    ends in so many zeros that they fit, each with the exact count of its occurrences (adaptive
    sampling: Flajolet, *On adaptive sampling*, Computing 43, 1990). The order of the keys does not
    matter.

    Attributes
    ----------
    total
        Keys seen, each as often as it occurred.
    """

    def __init__(self, capacity: int = _CAPACITY):
        self.total = 0
        self._capacity = capacity
        self._level = 0
        self._keys = np.empty(0, np.uint64)
        self._counts = np.empty(0, np.int64)
        self._pending: list[UInt64[np.ndarray, "_"]] = []

    def add(self, keys: UInt64[np.ndarray, "n"]) -> None:
        """Count some more, as `hash_rows` returns them."""
        self.total += len(keys)
        self._pending.append(keys[self._sampled(keys)])
        if sum(map(len, self._pending)) >= self._capacity:
            self._merge()

    @property
    def exact(self) -> bool:
        """Whether every key is held; otherwise `count` is an estimate."""
        self._merge()
        return self._level == 0

    @property
    def count(self) -> int:
        """How many distinct keys there are."""
        self._merge()
        return len(self._keys) << self._level

    @property
    def occurrences(self) -> Int[np.ndarray, "keys"]:
        """How often each key that is held occurred."""
        self._merge()
        return self._counts

    @property
    def weight(self) -> int:
        """How many distinct keys each one that is held stands for."""
        return 1 << self._level

    def _merge(self) -> None:
        if not self._pending:
            return
        keys = np.concatenate([self._keys, *self._pending])
        counts = np.concatenate([self._counts, np.ones(len(keys) - len(self._keys), np.int64)])
        self._pending.clear()
        self._keys, which = np.unique(keys, return_inverse=True)
        self._counts = np.bincount(which, counts, len(self._keys)).astype(np.int64)
        while len(self._keys) > self._capacity:
            self._level += 1
            kept = self._sampled(self._keys)
            self._keys, self._counts = self._keys[kept], self._counts[kept]

    def _sampled(self, keys: UInt64[np.ndarray, "n"]) -> Any:
        return keys & np.uint64((1 << self._level) - 1) == 0


def entropy(counts: Int[np.ndarray, "*n"] | Float[np.ndarray, "*n"]) -> float:
    """Return the entropy in bits of what occurred so often, by the plug-in estimate."""
    there = counts[counts > 0]
    if not there.size:
        return 0.0
    share = there / there.sum()
    return float(-(share * np.log2(share)).sum()) + 0.0


def hash_rows(*parts: Any) -> UInt64[np.ndarray, "n"]:
    """Return a number for each row of some arrays ``(n, ...)``: equal for equal rows.

    Rows that differ have different numbers but for one pair in 2**64. Minus zero is zero.
    """
    words = np.concatenate([_words(part) for part in parts], axis=1)
    if words.shape[1] % 2:
        words = np.pad(words, ((0, 0), (0, 1)))
    words = words.view(np.uint64)
    factors = np.random.default_rng(0).integers(0, 2**64, (2, words.shape[1]), np.uint64) | 1
    step = max(1, _WORDS // max(words.shape[1], 1))
    pieces = [_mix(words[i : i + step], factors) for i in range(0, len(words), step)]
    return np.concatenate(pieces) if pieces else np.empty(0, np.uint64)


def _words(part: Any) -> Any:
    flat = part.reshape(len(part), int(np.prod(part.shape[1:])))
    if flat.dtype.kind == "f":
        return np.ascontiguousarray(flat.astype(np.float32) + np.float32(0)).view(np.uint32)
    return np.ascontiguousarray(flat, np.int32).view(np.uint32)


def _mix(words: Any, factors: Any) -> Any:
    """Mix each word by itself, reversibly, add them up, and mix the sum."""
    mixed = words * factors[0]
    mixed ^= mixed >> np.uint64(32)
    mixed *= factors[1]
    total = mixed.sum(1, dtype=np.uint64)
    total ^= total >> np.uint64(31)
    total *= np.uint64(0x9E3779B97F4A7C15)
    return total ^ (total >> np.uint64(29))
