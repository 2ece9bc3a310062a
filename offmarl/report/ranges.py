"""What values the columns of data take: extremes, moments, and what is no number."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

_ELEMENTS = 2**18
"""Looked at together: few enough to stay in the processor's cache."""


class Ranges(NamedTuple):
    """Statistics of columns of some shape; those without a finite value have NaN for extremes."""

    low: Float[np.ndarray, "*c"]
    high: Float[np.ndarray, "*c"]
    mean: Float[np.ndarray, "*c"]
    std: Float[np.ndarray, "*c"]
    finite: Int[np.ndarray, "*c"]
    """How many values there are that are finite."""
    not_finite: Int[np.ndarray, "*c"]
    """Values that are NaN or infinite; left out of all others."""

    @property
    def constant(self) -> Bool[np.ndarray, "*c"]:
        """Columns that hold one value, always the same."""
        return (self.finite > 0) & (self.low == self.high) & (self.not_finite == 0)


class RangesOver:
    """Gathers `Ranges` over data that comes in parts.

    Parameters
    ----------
    shape
        Of the columns.
    """

    def __init__(self, *shape: int):
        self._low, self._high = np.full(shape, np.inf), np.full(shape, -np.inf)
        self._mean, self._squares = np.zeros(shape), np.zeros(shape)
        self._count, self._not_finite = np.zeros(shape, np.int64), np.zeros(shape, np.int64)

    def add(self, values: Any, there: Any = True) -> None:
        """Add values ``(n, *shape)``, those that are there: a mask that broadcasts to them."""
        there = np.broadcast_to(there, values.shape)
        rows = max(1, _ELEMENTS // max(self._count.size, 1))
        for begin in range(0, len(values), rows):
            self._add(values[begin : begin + rows], there[begin : begin + rows])

    def _add(self, values: Any, there: Any) -> None:
        finite = np.isfinite(values)
        self._not_finite += (~finite & there).sum(0)
        chosen = finite & there
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
        """Join moments: Chan, Golub and LeVeque, *Updating formulae*, 1979."""
        total = self._count + count
        share = count / np.maximum(total, 1)
        apart = mean - self._mean
        self._squares += squares + apart**2 * self._count * share
        self._mean += apart * share
        self._count = total

    @property
    def ranges(self) -> Ranges:
        """What was gathered so far."""
        some = self._count > 0
        low, high, mean = (
            np.where(some, value, np.nan) for value in (self._low, self._high, self._mean)
        )
        std = np.sqrt(self._squares / np.maximum(self._count, 1))
        std = np.where(some, std, np.nan)
        return Ranges(low, high, mean, std, self._count, self._not_finite)
