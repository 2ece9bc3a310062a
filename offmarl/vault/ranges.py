"""Extremes and moments of columns of numbers, accumulated a part at a time."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

_ELEMENTS = 2**18
"""Elements processed at once: few enough to stay in the processor's cache."""


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
        found = (
            low.min(axis),
            high.max(axis),
            (count * mean).sum(axis) / np.maximum(total, 1),
            np.sqrt(squares / np.maximum(total, 1)),
        )
        low, high, mean, std = (np.where(total > 0, x, np.nan) for x in found)
        return Ranges(low, high, mean, std, total, self.not_finite.sum(axis))


class RangesAccumulator:
    """Accumulates `Ranges` over parts of the data.

    Parameters
    ----------
    shape
        Shape of the columns.
    """

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

    def merge(self, other: "RangesAccumulator") -> None:
        """Add everything that another accumulator of the same columns was given."""
        self._low = np.minimum(self._low, other._low)
        self._high = np.maximum(self._high, other._high)
        self._not_finite = self._not_finite + other._not_finite
        self._merge(other._count, other._mean, other._squares)

    def _add(self, values: Any, mask: Any) -> None:
        if values.dtype.kind != "f":  # small integers overflow in sums
            values = values.astype(float)
        finite = np.isfinite(values)
        self._not_finite += (~finite & mask).sum(0)
        chosen = finite & mask
        if not chosen.all():  # a mask makes reductions many times slower
            low = values.min(0, where=chosen, initial=np.inf)
            high = values.max(0, where=chosen, initial=-np.inf)
            values = np.where(chosen, values, 0)
        else:
            low, high = values.min(0), values.max(0)
        self._low, self._high = np.minimum(self._low, low), np.maximum(self._high, high)
        count = chosen.sum(0)
        mean = values.sum(0, dtype=float) / np.maximum(count, 1)
        squares = (np.where(chosen, values - mean, 0) ** 2).sum(0)
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
        some = self._count > 0
        low, high, mean = (
            np.where(some, value, np.nan) for value in (self._low, self._high, self._mean)
        )
        std = np.sqrt(self._squares / np.maximum(self._count, 1))
        std = np.where(some, std, np.nan)
        return Ranges(low, high, mean, std, self._count, self._not_finite)
