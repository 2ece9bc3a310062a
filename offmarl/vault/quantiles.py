"""Quantiles of data that does not fit in memory, with a bound of their error.

A sketch holds a few values of each column, in levels: a value of level h stands for 2^h values of
the data. A full level is sorted, and every second value moves to the next level (Manku, Rajagopalan
and Lindsay, *Approximate medians and other quantiles in one pass*, 1998). Which half moves is
random, so that errors cancel (Agarwal et al., *Mergeable summaries*, 2013). Until a level is full
for the first time, quantiles are exact.
"""

import math

import numpy as np
from jaxtyping import Float, Shaped

from offmarl.vault.layout import NumpyArray

FAILURE = 0.001
"""Probability that the rank of a quantile is farther off than `QuantileSketch.error`."""


class QuantileSketch:
    """A summary of columns of numbers, of bounded size.

    Parameters
    ----------
    columns
        Number of columns, which always get the same number of values.
    capacity
        Values of each column that a level holds, even.

    Attributes
    ----------
    count
        Number of values of each column.
    """

    def __init__(self, columns: int, capacity: int):
        if capacity < 2 or capacity % 2:
            raise ValueError(f"the capacity must be an even number, not {capacity}")
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

    def merge(self, other: "QuantileSketch") -> None:
        """Add all values of another sketch of the same columns and capacity."""
        if (self._columns, self._capacity) != (other._columns, other._capacity):
            raise ValueError("sketches of other columns or another capacity cannot be merged")
        self.count += other.count
        self._variance += other._variance
        for level, parts in enumerate(other._levels):
            for part in parts:
                first = self._capacity - self._size(level)
                for piece in (part[:, :first], part[:, first:]):
                    self._put(level, piece)

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
            self._move(level + 1, np.ascontiguousarray(full[:, int(self._rng.integers(2)) :: 2]))

    def _move(self, level: int, values: NumpyArray) -> None:
        room = self._capacity - self._size(level)
        for piece in (values[:, :room], values[:, room:]):
            if piece.shape[1]:
                self._put(level, piece)

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
        found = np.full((len(at), self._columns), np.nan)
        parts = [(part, level) for level, parts in enumerate(self._levels) for part in parts]
        if not parts:
            return found
        values = np.concatenate([part for part, _ in parts], axis=1)
        weights = np.concatenate([np.full(part.shape[1], 2.0**level) for part, level in parts])
        order = np.argsort(values, axis=1, kind="stable")
        for column in range(self._columns):
            one, weight = values[column][order[column]], weights[order[column]]
            finite = np.isfinite(one)
            if finite.any():
                below = np.cumsum(weight[finite])
                wanted = np.searchsorted(below, np.asarray(at) * below[-1] * (1 - 1e-12))
                found[:, column] = one[finite][np.minimum(wanted, len(below) - 1)]
        return found


def capacity_for(columns: int, count: int, memory: int) -> int:
    """Return the capacity of sketches of so many columns and values that fit in memory."""
    capacity = _LARGEST
    while capacity > _SMALLEST:
        levels = 2 + max(0, math.ceil(math.log2(max(count, 1) / capacity)))
        if 4 * columns * capacity * levels <= memory:
            break
        capacity //= 2
    return capacity


_SMALLEST, _LARGEST = 2**6, 2**15
