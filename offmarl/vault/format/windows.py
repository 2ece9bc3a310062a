"""Locates windows of steps in the chunks of arrays, and gathers their steps."""

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

    Windows are read in pieces that each lie in one chunk: one piece for each window, and a second
    for windows that cross into another chunk. Windows longer than a chunk have a piece for each
    step.
    """

    pieces: ChunkSteps
    """The first step of each piece."""
    piece_steps: int
    """Steps in a piece."""
    index: NDArray[np.int64]
    """``(W, length)`` index of each step of the windows among the steps of all pieces."""
    crossing: NDArray[np.int64]
    """The windows that have two pieces."""

    def __init__(
        self,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        length: int,
        chunk_rows: int,
        chunk_steps: int,
    ):
        self.rows, self.starts, self.length = rows, starts, length
        self._index: NDArray[np.int64] | None = None
        self._steps: dict[int, NDArray[np.int64]] = {}
        self.index = np.arange(len(rows) * length).reshape(len(rows), length)
        if length > chunk_steps:
            times = (starts[:, None] + np.arange(length)).ravel()
            self.crossing, self.piece_steps = rows[:0], 1
            self.pieces = ChunkSteps.of(rows.repeat(length), times, chunk_rows, chunk_steps)
            return
        over, self.piece_steps = np.maximum(starts % chunk_steps + length - chunk_steps, 0), length
        self.crossing = crossing = np.flatnonzero(over)
        first = np.append(starts - over, starts[crossing] + length - over[crossing])
        self.pieces = ChunkSteps.of(np.append(rows, rows[crossing]), first, chunk_rows, chunk_steps)
        if len(crossing):
            # In their first pieces, these windows begin later; the last steps are in the second.
            before, step = (length - over[crossing])[:, None], np.arange(length)
            second = (len(rows) + np.arange(len(crossing)))[:, None] * length + step - before
            self.index[crossing] = np.where(
                step < before, self.index[crossing] + over[crossing, None], second
            )

    def steps(self, index: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return the indices in the pieces of the first ``count`` of the windows' steps ``index``.

        The result is cached, for the other arrays of a read.
        """
        if self._index is not index:
            self._index, self._steps = index, {}
        if count not in self._steps:
            first = np.ascontiguousarray(index[:, :count])
            self._steps[count] = self.index.ravel()[first] if len(self.crossing) else first
        return self._steps[count]


def put_steps(
    windows: NumpyArray, index: NDArray[np.int64], out: NumpyArray, at: NDArray[np.int64] | None
) -> None:
    """Write some steps of windows to an array, converted to its type."""
    if not out.size:
        return
    items, places = as_items(np.ascontiguousarray(windows)), slice(None) if at is None else at
    index = index[:, : out.shape[1]]
    if out.dtype == windows.dtype and at is None:
        items.take(index, out=as_items(out).reshape(index.shape), mode="clip")
        return
    if out.dtype == bool:  # bytes are moved faster than the numbers they are made of
        items = as_items(np.ascontiguousarray(windows) != 0)
    values = items.take(index, mode="clip").view(bool if out.dtype == bool else windows.dtype)
    out[places] = values.reshape(*index.shape, *out.shape[2:])
