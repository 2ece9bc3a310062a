"""Statistics of columns of numbers, accumulated a part at a time: extremes, moments, quantiles.

Quantiles are those of a sketch. It holds a few values of each column, in levels: a value of level h
stands for 2^h values of the data. A full level is sorted, and every second value moves to the next
level (Manku, Rajagopalan and Lindsay, *Approximate medians and other quantiles in one pass*, 1998).
Which half moves is random, so that errors cancel (Agarwal et al., *Mergeable summaries*, 2013).
Until a level is full for the first time, quantiles are exact.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from offmarl.vault.format.layout import NumpyArray

_ELEMENTS = 2**18
"""Elements processed at once: few enough to stay in the processor's cache."""
FAILURE = 0.001
"""Probability that the rank of a quantile is farther off than `QuantileSketch.error`."""
_SMALLEST, _LARGEST = 2**6, 2**15
"""Capacities of sketches."""


class Ranges(NamedTuple):
    """Statistics of columns of shape ``*c``; NaN where a column has no finite value."""

    low: Float[np.ndarray, "*c"]
    high: Float[np.ndarray, "*c"]
    mean: Float[np.ndarray, "*c"]
    std: Float[np.ndarray, "*c"]
    finite: Int[np.ndarray, "*c"]
    """Number of finite values."""
    not_finite: Int[np.ndarray, "*c"]
    """Number of values that are NaN or infinite; they are excluded from the other statistics."""

    @property
    def constant(self) -> Bool[np.ndarray, "*c"]:
        """Columns that hold a single value throughout."""
        return (self.finite > 0) & (self.low == self.high) & (self.not_finite == 0)

    def pooled(self, axis: int | tuple[int, ...] | None = None) -> "Ranges":
        """Return the statistics of all values of the columns along some axes; of all by default."""
        count = self.finite
        total = count.sum(axis)
        low, high = (
            np.where(count, x, fill) for x, fill in ((self.low, np.inf), (self.high, -np.inf))
        )
        mean, std = (np.where(count, x, 0) for x in (self.mean, self.std))
        center = (count * mean).sum(axis, keepdims=True) / np.maximum(
            count.sum(axis, keepdims=True), 1
        )
        squares = (count * (std**2 + (mean - center) ** 2)).sum(axis)
        statistics = (
            low.min(axis),
            high.max(axis),
            (count * mean).sum(axis) / np.maximum(total, 1),
            np.sqrt(squares / np.maximum(total, 1)),
        )
        low, high, mean, std = (np.where(total > 0, x, np.nan) for x in statistics)
        return Ranges(low, high, mean, std, total, self.not_finite.sum(axis))


class RangesAccumulator:
    """Accumulates `Ranges` of columns of a shape over parts of the data."""

    def __init__(self, *shape: int):
        self._low, self._high = np.full(shape, np.inf), np.full(shape, -np.inf)
        self._mean, self._squares = np.zeros(shape), np.zeros(shape)
        self._count, self._not_finite = np.zeros(shape, np.int64), np.zeros(shape, np.int64)

    def add(self, values: Any, mask: Any = True) -> None:
        """Add values ``(n, *shape)``."""
        mask = np.broadcast_to(mask, values.shape)
        rows = max(1, _ELEMENTS // max(self._count.size, 1))
        for begin in range(0, len(values), rows):
            self._add(values[begin : begin + rows], mask[begin : begin + rows])

    def _add(self, values: Any, mask: Any) -> None:
        if values.dtype.kind != "f":  # small integers overflow in sums
            values = values.astype(float)
        finite = np.isfinite(values)
        self._not_finite += (~finite & mask).sum(0)
        valid = finite & mask
        if not valid.all():  # a mask makes reductions many times slower
            low = values.min(0, where=valid, initial=np.inf)
            high = values.max(0, where=valid, initial=-np.inf)
            values = np.where(valid, values, 0)
        else:
            low, high = values.min(0), values.max(0)
        self._low, self._high = np.minimum(self._low, low), np.maximum(self._high, high)
        count = valid.sum(0)
        mean = values.sum(0, dtype=float) / np.maximum(count, 1)
        squares = (np.where(valid, values - mean, 0) ** 2).sum(0)
        self._merge(count, mean, squares)

    def _merge(self, count: Any, mean: Any, squares: Any) -> None:
        """Combine moments after Chan, Golub and LeVeque, *Updating formulae*, 1979."""
        total = self._count + count
        share = count / np.maximum(total, 1)
        apart = mean - self._mean
        self._squares += squares + apart**2 * self._count * share
        self._mean += apart * share
        self._count = total

    @property
    def ranges(self) -> Ranges:
        """The statistics of everything added so far."""
        nonempty = self._count > 0
        low, high, mean = (
            np.where(nonempty, value, np.nan) for value in (self._low, self._high, self._mean)
        )
        std = np.sqrt(self._squares / np.maximum(self._count, 1))
        std = np.where(nonempty, std, np.nan)
        return Ranges(low, high, mean, std, self._count, self._not_finite)


class QuantileSketch:
    """A summary of columns of numbers, of bounded size; the columns get the same number of values.

    A level holds ``capacity`` values of each column, an even number.
    """

    def __init__(self, columns: int, capacity: int):
        self.count = 0
        self._columns, self._capacity = columns, capacity
        self._levels: list[list[NumpyArray]] = []
        self._variance = 0.0
        self._rng = np.random.default_rng(0)

    def add(self, values: Shaped[np.ndarray, "n columns"]) -> None:
        """Add numbers of any type; NaN and infinities count, but are not among the quantiles."""
        self.count += len(values)
        begin = 0
        while begin < len(values):
            room = self._capacity - self._size(0)
            self._put(0, np.ascontiguousarray(values[begin : begin + room].T))
            begin += room

    def _size(self, level: int) -> int:
        return (
            sum(part.shape[1] for part in self._levels[level]) if level < len(self._levels) else 0
        )

    def _put(self, level: int, values: NumpyArray) -> None:
        """Add at most as many values to a level as it has room for, and empty it if it is full."""
        while len(self._levels) <= level:
            self._levels.append([])
        self._levels[level].append(values)
        if self._size(level) == self._capacity:
            full = np.sort(np.concatenate(self._levels[level], axis=1), axis=1)
            self._levels[level] = []
            # The rank of any value changes by 2^level at most, up or down with equal probability.
            self._variance += 4.0**level
            half = full[:, int(self._rng.integers(2)) :: 2]  # two of them fill the next level
            self._put(level + 1, np.ascontiguousarray(half))

    @property
    def error(self) -> float:
        """Bound of the difference between a quantile's rank and the asked one, as a fraction.

        It is 0 if quantiles are exact. It holds for each quantile of each column with a probability
        of 1 - `FAILURE` (Hoeffding's inequality).
        """
        if not self._variance:
            return 0.0
        heaviest = 2.0 ** (len(self._levels) - 1)
        return (math.sqrt(2 * math.log(2 / FAILURE) * self._variance) + heaviest) / self.count

    def quantiles(self, at: Float[np.ndarray, "Q"]) -> Float[np.ndarray, "Q columns"]:
        """Return values of the data: the smallest that at least a fraction ``at`` do not exceed.

        NaN for a column without finite values.
        """
        quantiles = np.full((len(at), self._columns), np.nan)
        parts = [(part, level) for level, parts in enumerate(self._levels) for part in parts]
        if not parts:
            return quantiles
        values = np.concatenate([part for part, _ in parts], axis=1)
        weights = np.concatenate([np.full(part.shape[1], 2.0**level) for part, level in parts])
        order = np.argsort(values, axis=1, kind="stable")
        for column in range(self._columns):
            sorted_values, weight = values[column][order[column]], weights[order[column]]
            finite = np.isfinite(sorted_values)
            if finite.any():
                cumulative = np.cumsum(weight[finite])
                ranks = np.searchsorted(cumulative, np.asarray(at) * cumulative[-1] * (1 - 1e-12))
                quantiles[:, column] = sorted_values[finite][np.minimum(ranks, len(cumulative) - 1)]
        return quantiles


def capacity_for(columns: int, count: int, memory: int) -> int:
    """Return the capacity of sketches of so many columns and values that fit in memory."""
    capacity = _LARGEST
    while capacity > _SMALLEST:
        levels = 2 + max(0, math.ceil(math.log2(max(count, 1) / capacity)))
        if 4 * columns * capacity * levels <= memory:
            break
        capacity //= 2
    return capacity
