"""Windows gathered from their source into NumPy arrays, without JAX.

Large leaves are copied once, from the source straight to where they stay.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offmarl._arrays import as_items
from offmarl.replay.circles import Part
from offmarl.replay.fields import Fields, Place, end_fields, is_of_slots
from offmarl.replay.sampling import Windows, returns_to_go
from offmarl.types import ArraySpec

_ALIGNMENT = 64
"""Bytes. JAX uses memory of this alignment as it is, where the device is a CPU."""
_OWN = ("time", "episode", "mask", "next_known", "return_to_go", "weight")
"""Fields that do not come from the source."""
_LARGE_BYTES = 512
"""From this size on a field has memory of its own, which JAX need not copy."""


class _Part(NamedTuple):
    """A field of windows."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """In a window."""

    @property
    def size(self) -> int:
        """Numbers in a window."""
        return math.prod(self.shape)


class BatchLayout:
    """What windows hold: the fields with memory of their own, and those that share memory.

    Attributes
    ----------
    large
        The fields that have memory of their own.
    shared
        The others in order, by the name of an unsigned type of as many bytes.
    """

    def __init__(self, leaves: dict[str, ArraySpec], windows: Windows):
        self.windows, self._leaves = windows, tuple(leaves.items())
        self.large: list[_Part] = []
        self.shared: dict[str, list[_Part]] = {}
        for name, leaf in leaves.items():
            slots = windows.slots if is_of_slots(name) else windows.steps
            part, dtype = _Part(name, leaf.numpy_dtype, (slots, *leaf.shape)), leaf.numpy_dtype
            if leaf.num_bytes >= _LARGE_BYTES:
                self.large.append(part)
            else:
                self.shared.setdefault(f"uint{8 * dtype.itemsize}", []).append(part)
        self._hash = hash((self._leaves, windows))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchLayout):
            return False
        return (self._leaves, self.windows) == (other._leaves, other.windows)

    @property
    def window_bytes(self) -> int:
        """Bytes of a window."""
        parts = [*self.large, *(part for some in self.shared.values() for part in some)]
        return sum(part.size * part.dtype.itemsize for part in parts)


class Batch:
    """Memory for ``n`` windows.

    Attributes
    ----------
    large
        The large fields, ``(n, T+1, ...)`` or ``(n, T, ...)`` by name.
    shared
        The memory of the others, a vector for each unsigned type.
    fields
        All fields.
    """

    def __init__(self, layout: BatchLayout, count: int):
        self.large: Fields = {
            part.name: aligned((count, *part.shape), part.dtype) for part in layout.large
        }
        self.shared: dict[str, NDArray[Any]] = {}
        self.fields: Fields = dict(self.large)
        for word, parts in layout.shared.items():
            size = count * sum(part.size for part in parts)
            memory = self.shared[word] = aligned((size,), np.dtype(word))
            for part in parts:
                own, memory = memory[: count * part.size], memory[count * part.size :]
                self.fields[part.name] = own.view(part.dtype).reshape(count, *part.shape)


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a new array whose memory JAX can use as it is."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


class CircleReader:
    """Gathers windows of the circle of one source."""

    def __init__(self, part: Part, windows: Windows):
        self._source, self._table, self._windows = part.source, part.table, windows
        self._first_episode = part.first_episode
        discount = windows.return_to_go
        self._to_go = None if discount is None else returns_to_go(part.source, discount)

    def read(self, starts: NDArray[np.int64], batch: Batch, at: NDArray[np.int64] | None) -> None:
        """Gather the windows that start at some slots of the circle.

        Parameters
        ----------
        starts
            ``(n,)`` slots of the circle.
        batch
            What to write to.
        at
            ``(n,)`` the windows to write; None for all.
        """
        index, before = self._table.locate(starts)
        last = before + self._windows.slots - 1
        across = np.flatnonzero(last >= self._table.lengths[index])
        time = before[:, None] + np.arange(self._windows.slots)
        episode = np.repeat(self._table.episodes[index, None], self._windows.slots, 1)
        place = Place(time, episode)
        if len(across):
            time[across], episode[across] = self._across(index[across], time[across])
        self._write(place, across, batch, at)

    def read_beginnings(self, batch: Batch, at: NDArray[np.int64]) -> None:
        """Gather the windows that the episodes begin with; the slot that ends one is repeated."""
        table = self._table
        time = np.minimum(np.arange(self._windows.slots), table.lengths[:, None])
        episode = np.repeat(table.episodes[:, None], self._windows.slots, 1)
        self._write(Place(time, episode), np.arange(len(time)), batch, at)

    def _across(self, index: NDArray[np.int64], time: NDArray[np.int64]) -> Place:
        """Return where the slots are of windows that go on in the next episodes of the circle."""
        table, which = self._table, np.repeat(index[:, None], time.shape[1], 1)
        longer = np.arange(len(time))
        while len(longer):
            own, number = time[longer], which[longer]
            past = own > table.lengths[number]
            own -= np.where(past, table.lengths[number] + 1, 0)
            number = (number + past) % len(table.lengths)
            time[longer], which[longer] = own, number
            longer = longer[own[:, -1] > table.lengths[number[:, -1]]]
        return Place(time, table.episodes[which])

    def _write(
        self,
        place: Place,
        across: NDArray[np.int64],
        batch: Batch,
        at: NDArray[np.int64] | None,
    ) -> None:
        """Write slots ``(n, T+1)`` to a batch.

        The windows that are not ``across`` hold steps of one episode only.
        """
        fields, where = batch.fields, slice(None) if at is None else at
        size, rows, starts, index = self._pieces(place, across)
        out = {name: array for name, array in fields.items() if name not in _OWN}
        self._source.window_fields(rows, starts, size, index, out, at)
        fields["time"][where] = place.time
        fields["episode"][where] = place.episode + self._first_episode
        fields["mask"][where] = fields["next_known"][where] = True
        if self._to_go is not None:
            fields["return_to_go"][where] = self._follows(place)
        to = across if at is None else at[across]
        self._write_ends(place.at(across), fields, to)

    def _pieces(
        self, place: Place, across: NDArray[np.int64]
    ) -> tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return what to read: the size, rows and starts of pieces.

        And which of their steps, counted through all of them, are the slots'. There is one piece
        for each window, and more behind for those whose steps do not lie on end on disk.
        """
        source, episodes = self._source, self._source.episodes
        count, slots = place.time.shape
        size = min(slots, source.length)
        in_own = place.time[:, 0] < episodes.length[place.episode[:, 0]]
        first = place.at((np.arange(count), np.where(in_own, 0, 1)))  # each one's first step
        rows, wanted = episodes.row[first.episode], episodes.start[first.episode] + first.time
        starts = np.minimum(wanted, source.length - size)
        index = np.arange(count)[:, None] * size + np.arange(slots)
        if len(across):
            own = place.at(across)
            last = episodes.length[own.episode] - 1
            step = episodes.start[own.episode] + np.minimum(own.time, last) - starts[across, None]
            there = (episodes.row[own.episode] == rows[across, None]) & (step >= 0) & (step < size)
            index[across] = across[:, None] * size + np.clip(step, 0, size - 1)
            broken = np.flatnonzero(~(there | (own.time > last)).all(-1))
            if len(broken):
                more_rows, more_starts, part = self._broken_pieces(own.at(broken), size)
                rows, starts = np.append(rows, more_rows), np.append(starts, more_starts)
                index[across[broken]] = count * size + part
        return size, rows, starts, index

    def _broken_pieces(
        self, place: Place, size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows and starts of pieces, and which of their steps are the slots'.

        The slots that end episodes have any step.
        """
        source, episodes = self._source, self._source.episodes
        flat = Place(place.time.ravel(), place.episode.ravel())
        steps = np.flatnonzero(flat.time < episodes.length[flat.episode])
        some = flat.at(steps)
        row, time = episodes.row[some.episode], episodes.start[some.episode] + some.time
        window = steps // place.time.shape[1]
        breaks = (np.diff(window) != 0) | (np.diff(row) != 0) | (np.diff(time) != 1)
        begins = np.append(0, np.flatnonzero(breaks) + 1)
        first = np.minimum(time[begins], source.length - size)
        base = np.arange(len(begins)) * size - first
        index = np.zeros(place.time.size, np.int64)
        index[steps] = np.repeat(base, np.diff(begins, append=len(time))) + time
        return row[begins], first, index.reshape(place.time.shape)

    def _follows(self, place: Place) -> NDArray[np.float32]:
        """Return the returns-to-go of the steps of windows, ``(n, T, N)``."""
        assert self._to_go is not None
        episodes, some = self._source.episodes, place.at((slice(None), slice(-1)))
        time = np.minimum(some.time, episodes.length[some.episode] - 1)
        row = episodes.row[some.episode]
        found: NDArray[np.float32] = self._to_go[row, episodes.start[some.episode] + time]
        return found

    def _write_ends(self, place: Place, fields: Fields, to: NDArray[np.int64]) -> None:
        """Write the slots that end episodes, in windows ``to`` of a batch, and what is known."""
        episodes = self._source.episodes
        window, slot = np.nonzero(place.time == episodes.length[place.episode])
        found = end_fields(place.at((window, slot)), self._source, self._first_episode)
        slots, steps = self._windows.slots, self._windows.steps
        of_slots = to[window] * slots + slot
        of_steps = (to[window] * steps + slot)[slot < steps]
        for name, array in fields.items():
            if array.size and name in found:
                values = np.ascontiguousarray(found[name], array.dtype)
                as_items(array)[of_slots] = as_items(values[:, None])
            elif array.size:
                items = as_items(array)
                items[of_steps] = np.zeros((), items.dtype)
        is_last = place.time == episodes.length[place.episode] - 1
        unknown = is_last & (episodes.final[place.episode] < 0)
        if unknown.any():
            window, slot = np.nonzero(unknown[:, :steps])
            over = fields["terminated"][to[window], slot].all(-1)
            fields["next_known"][to[window], slot] = over
