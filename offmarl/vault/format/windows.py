"""Where windows of steps are in the chunks of arrays, and how their steps are put together."""

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

    Windows are read in pieces that each lie in one chunk: one for each window, and one more for
    those that cross into another chunk. Windows that are longer than chunks have a piece for each
    step.
    """

    pieces: ChunkSteps
    """Their first steps."""
    piece_steps: int
    """Steps in a piece."""
    index: NDArray[np.int64]
    """``(W, length)`` which steps of the pieces, counted through all of them, are the windows'."""
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
        self._given: NDArray[np.int64] | None = None
        self._steps: dict[int, NDArray[np.int64]] = {}
        self.index = np.arange(len(rows) * length).reshape(len(rows), length)
        if length > chunk_steps:
            times = (starts[:, None] + np.arange(length)).ravel()
            self.crossing, self.piece_steps = rows[:0], 1
            self.pieces = ChunkSteps.of(rows.repeat(length), times, chunk_rows, chunk_steps)
            return
        over, self.piece_steps = np.maximum(starts % chunk_steps + length - chunk_steps, 0), length
        self.crossing = some = np.flatnonzero(over)
        first = np.append(starts - over, starts[some] + length - over[some])
        self.pieces = ChunkSteps.of(np.append(rows, rows[some]), first, chunk_rows, chunk_steps)
        if len(some):
            # In their first pieces, these windows begin later; the last steps are in the second.
            before, step = (length - over[some])[:, None], np.arange(length)
            second = (len(rows) + np.arange(len(some)))[:, None] * length + step - before
            self.index[some] = np.where(step < before, self.index[some] + over[some, None], second)

    def steps(self, index: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return which steps of the pieces are the first ``count`` of the windows' steps ``index``.

        It keeps what it returns, for the other arrays of a read.
        """
        if self._given is not index:
            self._given, self._steps = index, {}
        if count not in self._steps:
            first = np.ascontiguousarray(index[:, :count])
            self._steps[count] = self.index.ravel()[first] if len(self.crossing) else first
        return self._steps[count]


def put_steps(
    windows: NumpyArray, index: NDArray[np.int64], out: NumpyArray, at: NDArray[np.int64] | None
) -> None:
    """Write some steps of windows to an array, as numbers of its type; masks are what is not 0."""
    if not out.size:
        return
    items, where = as_items(np.ascontiguousarray(windows)), slice(None) if at is None else at
    index = index[:, : out.shape[1]]
    if out.dtype == windows.dtype and at is None:
        items.take(index, out=as_items(out).reshape(index.shape), mode="clip")
        return
    if out.dtype == bool:  # bytes are moved faster than the numbers they are made of
        items = as_items(np.ascontiguousarray(windows) != 0)
    found = items.take(index, mode="clip").view(bool if out.dtype == bool else windows.dtype)
    out[where] = found.reshape(*index.shape, *out.shape[2:])
