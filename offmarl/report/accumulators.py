"""Statistics of data that does not fit in memory, accumulated a part at a time.

`Distinct` counts distinct rows, and `Actions` what agents did.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt64

from offmarl.types import EnvSpec, Transition
from offmarl.vault.format.column_statistics import Ranges

# ------------------------------------------------------------------------------------ distinct rows


_CAPACITY = 2**20
"""Maximum number of keys held; the error of estimates is then about a thousandth."""
_WORDS = 2**17
"""Words mixed at once: as they stay in the processor's cache, it takes a third of the time."""


class Distinct:
    """Counts distinct keys and their occurrences in bounded memory.

    Up to ``capacity`` distinct keys are counted exactly. Beyond that a sample is kept: the keys
    whose hash ends in enough zero bits for the sample to fit, each with the exact number of its
    occurrences (Flajolet, *On adaptive sampling*, Computing 43, 1990). The result does not depend
    on the order of the keys.
    """

    def __init__(self, capacity: int = _CAPACITY):
        self.total = 0
        self._capacity = capacity
        self._level = 0
        self._keys = np.empty(0, np.uint64)
        self._counts = np.empty(0, np.int64)
        self._pending: list[UInt64[np.ndarray, "_"]] = []

    def add(self, keys: UInt64[np.ndarray, "n"]) -> None:
        """Add keys, as `hash_rows` returns them."""
        self.total += len(keys)
        self._pending.append(keys[self._sampled(keys)])
        if sum(map(len, self._pending)) >= self._capacity:
            self._merge()

    @property
    def exact(self) -> bool:
        """Whether `count` is exact; otherwise it is an estimate."""
        self._merge()
        return self._level == 0

    @property
    def count(self) -> int:
        """Number of distinct keys."""
        self._merge()
        return len(self._keys) << self._level

    @property
    def occurrences(self) -> Int[np.ndarray, "keys"]:
        """Number of occurrences of each key held."""
        self._merge()
        return self._counts

    @property
    def weight(self) -> int:
        """Number of distinct keys that each key held represents."""
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
    """Return the plug-in estimate of an entropy, in bits."""
    positive = counts[counts > 0]
    if not positive.size:
        return 0.0
    share = positive / positive.sum()
    return float(-(share * np.log2(share)).sum()) + 0.0


def hash_rows(*parts: Any) -> UInt64[np.ndarray, "n"]:
    """Return a 64-bit hash of each row of arrays ``(n, ...)`` that are read side by side.

    Two different rows have the same hash with probability 2**-64. Minus zero equals zero.
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
    if flat.dtype.kind not in "biu":
        return np.ascontiguousarray(flat.astype(np.float32) + np.float32(0)).view(np.uint32)
    return np.ascontiguousarray(flat, np.int32).view(np.uint32)


def _mix(words: Any, factors: Any) -> Any:
    """Mix each word reversibly, add the words of a row, and mix the sum."""
    mixed = words * factors[0]
    mixed ^= mixed >> np.uint64(32)
    mixed *= factors[1]
    total = mixed.sum(1, dtype=np.uint64)
    total ^= total >> np.uint64(31)
    total *= np.uint64(0x9E3779B97F4A7C15)
    return total ^ (total >> np.uint64(29))


# ------------------------------------------------------------------------------------------ actions


BINS = 40
"""Bins of the histograms of continuous actions, from -1 to 1; the outermost hold what lies beyond.
"""

_MOST_PAIRED = 128
"""Actions, summed over agents, up to which pairs are counted: the cost is quadratic."""
_ROWS = 2**13


class DiscreteActions:
    """How often live agents took each action, and how often it was legal: ``(N, A)``.

    ``steps`` and ``illegal``, ``(N,)``, are the steps at which the agent was alive, and took an
    action that was not legal or does not exist.
    """

    COUNTS = "taken", "legal", "steps", "illegal", "together"

    def __init__(self, spec: EnvSpec):
        self._shape = (spec.num_agents, spec.num_actions)
        self.taken, self.legal = np.zeros(self._shape, np.int64), np.zeros(self._shape, np.int64)
        self.steps, self.illegal = (np.zeros(spec.num_agents, np.int64) for _ in range(2))
        size = spec.num_agents * spec.num_actions
        # The last place counts agents that did nothing.
        pairs = np.zeros((size + 1, size + 1), np.int64)
        self._pairs = pairs if size <= _MOST_PAIRED else None

    def add(self, steps: Transition) -> None:
        """Add steps ``(n, ...)``."""
        action = np.asarray(steps.action).reshape(-1, self._shape[0])
        for begin in range(0, len(action), _ROWS):
            piece = slice(begin, begin + _ROWS)
            view = steps.view
            self._add(action[piece], view.alive[piece], view.legal_actions[piece])

    def _add(self, action: Any, alive: Any, legal: Any) -> None:
        agents, actions = self._shape
        known = (action >= 0) & (action < actions)
        safe = np.where(known, action, 0)
        allowed = known & np.take_along_axis(legal, safe[..., None], -1)[..., 0]
        took = alive & known
        size = agents * actions
        place = np.where(took, np.arange(agents) * actions + safe, size)
        counts = np.bincount(place.ravel(), minlength=size + 1)[:size]
        self.taken += counts.reshape(self._shape)
        self.legal += (legal & alive[..., None]).sum(0)
        self.steps += alive.sum(0)
        self.illegal += (alive & ~allowed).sum(0)
        if self._pairs is not None:
            for agent in range(agents):
                pairs = place[:, agent, None] * (size + 1) + place
                counts = np.bincount(pairs.ravel(), minlength=(size + 1) ** 2)
                self._pairs += counts.reshape(size + 1, size + 1)

    @property
    def together(self) -> Int[np.ndarray, "N A N A"] | None:
        """How often two live agents took each pair of actions; None if there are too many pairs."""
        return None if self._pairs is None else self._pairs[:-1, :-1].reshape(2 * self._shape)

    @property
    def entropy(self) -> Float[np.ndarray, "N"]:
        """Entropy of each agent's actions, in bits."""
        return np.array([entropy(counts) for counts in self.taken])

    @property
    def information(self) -> Float[np.ndarray, "N N"] | None:
        """Mutual information of each two agents' actions, in bits; 0 on the diagonal.

        Miller and Madow (1955) correct it: that of independent samples is 0 in the mean.
        """
        if (together := self.together) is None:
            return None
        matrix = np.zeros((len(self.taken), len(self.taken)))
        for first, second in zip(*np.nonzero(~np.eye(len(matrix), dtype=bool)), strict=True):
            pairs = together[first, :, second]
            alone = entropy(pairs.sum(1)) + entropy(pairs.sum(0))
            taken = np.count_nonzero(pairs.sum(1)), np.count_nonzero(pairs.sum(0))
            excess = (taken[0] - 1) * (taken[1] - 1) / (2 * np.log(2) * max(pairs.sum(), 1))
            matrix[first, second] = max(0.0, alone - entropy(pairs) - excess)
        return matrix


class ContinuousActions:
    """Values of the actions of live agents, for each dimension ``(N, A)``.

    ``steps``, ``(N,)``, are those at which the agent was alive; of these, the dimension was usable
    at ``legal``. ``at_bounds`` are values that are 1 or -1, or beyond.
    """

    COUNTS = "ranges", "histogram", "steps", "legal", "at_bounds"
    ranges: Ranges
    """Extremes and moments: those of the vault's statistics."""

    def __init__(self, spec: EnvSpec):
        self._shape = (spec.num_agents, spec.action_size)
        self.histogram = np.zeros((*self._shape, BINS), np.int64)
        self.steps = np.zeros(spec.num_agents, np.int64)
        self.legal, self.at_bounds = (np.zeros(self._shape, np.int64) for _ in range(2))

    def add(self, steps: Transition) -> None:
        """Add steps ``(n, ...)``."""
        action = np.asarray(steps.action).reshape(-1, *self._shape)
        alive = steps.view.alive
        usable = alive[..., None] & steps.view.legal_actions
        self.steps += alive.sum(0)
        self.legal += usable.sum(0)
        for begin in range(0, len(action), _ROWS):
            piece = slice(begin, begin + _ROWS)
            self._count(action[piece], alive[piece, :, None] & np.isfinite(action[piece]))

    def _count(self, action: Any, mask: Any) -> None:
        bins = np.floor((np.where(mask, action, 0) + 1) * (BINS / 2))
        bins = np.clip(bins, 0, BINS - 1).astype(np.int64)
        columns = np.arange(self.at_bounds.size).reshape(self._shape)
        place = (columns * BINS + bins)[mask]
        counts = np.bincount(place, minlength=self.histogram.size)
        self.histogram += counts.reshape(self.histogram.shape)
        self.at_bounds += (mask & (np.abs(action) >= 1)).sum(0)


Actions = DiscreteActions | ContinuousActions
