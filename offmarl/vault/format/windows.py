"""Locates windows of steps in the chunks of arrays, and gathers their steps."""

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offmarl._arrays import as_items
from offmarl.vault.format.layout import NumpyArray


class ChunkSteps(NamedTuple):
    """Where P steps are in chunks of one size; arrays ``(P,)``."""

    block: NDArray[np.int64]
    number: NDArray[np.int64]
    step: NDArray[np.int64]
    """Index in the chunk, through all its rows."""

    @classmethod
    def of(
        cls, rows: NDArray[np.int64], times: NDArray[np.int64], chunk_rows: int, chunk_steps: int
    ) -> "ChunkSteps":
        """Return where the steps at some times of some rows are."""
        block, row = np.divmod(rows, chunk_rows)
        number, time = np.divmod(times, chunk_steps)
        return cls(block, number, row * chunk_steps + time)


class WindowPlaces:
    """Where windows are in chunks of one size; computed once for all arrays that have such chunks.

    A window that lies in one chunk is read as a piece. Of the others, each step is read.
    """

    crossing: NDArray[np.int64]
    """The windows that do not lie in one chunk."""
    pieces: ChunkSteps
    """The first step of each window; an earlier one in the same chunk for those that cross."""
    steps: ChunkSteps
    """All steps of those that cross."""

    def __init__(
        self,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        length: int,
        chunk_rows: int,
        chunk_steps: int,
    ):
        self.rows, self.starts, self.length = rows, starts, length
        self._size = chunk_rows, chunk_steps
        step = starts % chunk_steps
        over = np.maximum(step + length - chunk_steps, 0)
        self.crossing = np.flatnonzero(over)
        self.pieces = ChunkSteps.of(rows, starts - np.minimum(over, step), *self._size)
        self.steps = self.at(self.crossing[:, None] * length + np.arange(length))

    def at(self, index: NDArray[np.int64]) -> ChunkSteps:
        """Return where some steps are, which are counted through all windows."""
        window, step = np.divmod(index.ravel(), self.length)
        return ChunkSteps.of(self.rows[window], self.starts[window] + step, *self._size)

    @cached_property
    def by_chunk(self) -> list[tuple[int, int, NDArray[np.int64], NDArray[np.int64]]]:
        """The chunks, by time: block, number, and the steps in the windows and in the chunk."""
        block, number, step = self.at(np.arange(len(self.rows) * self.length))
        order = np.lexsort((block, number))
        ends = np.diff(block[order]) | np.diff(number[order])
        parts = np.split(order, np.flatnonzero(ends) + 1) if len(order) else []
        return [(int(block[x[0]]), int(number[x[0]]), x, step[x]) for x in parts]


def put_steps(
    windows: NumpyArray, index: NDArray[np.int64], out: NumpyArray, at: NDArray[np.int64] | None
) -> None:
    """Write some steps of windows to an array that is not empty, converted to its type."""
    items, places = as_items(np.ascontiguousarray(windows)), slice(None) if at is None else at
    index = index[:, : out.shape[1]]
    if out.dtype == windows.dtype and at is None:
        items.take(index, out=as_items(out).reshape(index.shape), mode="clip")
        return
    if out.dtype == bool:  # bytes are moved faster than the numbers they are made of
        items = as_items(np.ascontiguousarray(windows) != 0)
    values = items.take(index, mode="clip").view(bool if out.dtype == bool else windows.dtype)
    out[places] = values.reshape(*index.shape, *out.shape[2:])
