"""Windows gathered from their source into NumPy arrays, without JAX.

Large leaves are copied once, from the source straight to where they stay.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmarl._arrays import as_items
from offmarl.replay.fields import (
    COMPUTED,
    Fields,
    Kinds,
    SlotPlace,
    end_fields,
    fields_of,
    in_windows,
)
from offmarl.replay.sampling import SlotTable, Windows, returns_to_go

_ALIGNMENT = 64
"""Bytes. JAX uses memory of this alignment as it is, where the device is a CPU."""
_SLOTS_ON_END = 64
"""Slots that are read as one window, if chunks are as long: longer windows take more pieces."""


def new_batch(kinds: Kinds, count: int) -> Fields:
    """Return memory for ``count`` windows of some fields, ``(n, T+1, ...)`` or ``(n, T, ...)``."""
    return {name: aligned((count, *shape), dtype) for name, (shape, dtype) in kinds.items()}


def window_bytes(kinds: Kinds) -> int:
    """Return the bytes of a window of some fields."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds.values())


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a new array whose memory JAX can use as it is."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


class RingReader:
    """Gathers windows of the ring of one source."""

    def __init__(self, table: SlotTable, windows: Windows, first_episode: int = 0):
        self._source, self._table, self._windows = table.source, table, windows
        self._episodes, self._first_episode = table.recorded, first_episode

    @cached_property
    def to_go(self) -> NDArray[np.float32] | None:
        """The returns-to-go of all steps of the source, if windows carry them."""
        discount = self._windows.return_to_go
        return None if discount is None else returns_to_go(self._source, self._episodes, discount)

    def read(self, starts: NDArray[np.int64], batch: Fields, at: NDArray[np.int64] | None) -> None:
        """Write the windows from ``n`` slots on to windows ``at`` of a batch; None for all."""
        table, slots = self._table, np.arange(self._windows.slots)
        index, before = table.locate(starts)
        place = SlotPlace(
            before[:, None] + slots, np.repeat(table.episodes[index, None], len(slots), 1)
        )
        across = np.flatnonzero(place.time[:, -1] >= table.lengths[index])
        if len(across):  # into the ring's next episodes
            index, place.time[across] = table.locate(starts[across, None] + slots)
            place.episode[across] = table.episodes[index]
        self._write(place, across, batch, at)

    def read_beginnings(self, batch: Fields, at: NDArray[np.int64]) -> None:
        """Gather the windows that the episodes begin with; the slot that ends one is repeated."""
        table = self._table
        time = np.minimum(np.arange(self._windows.slots), table.lengths[:, None])
        episode = np.repeat(table.episodes[:, None], self._windows.slots, 1)
        self._write(SlotPlace(time, episode), np.arange(len(time)), batch, at)

    def _write(
        self,
        place: SlotPlace,
        across: NDArray[np.int64],
        batch: Fields,
        at: NDArray[np.int64] | None,
    ) -> None:
        """Write slots ``(n, T+1)`` to a batch.

        The windows that are not ``across`` hold steps of one episode only.
        """
        fields, target = batch, slice(None) if at is None else at
        size, rows, starts, index = self._pieces(place, across)
        out = {name: array for name, array in fields.items() if name not in COMPUTED}
        self._source.window_fields(rows, starts, size, index, out, at)
        fields["time"][target] = place.time
        fields["episode"][target] = place.episode + self._first_episode
        fields["mask"][target] = fields["next_known"][target] = True
        if self.to_go is not None:
            episodes, (time, episode) = self._episodes, place.at((slice(None), slice(-1)))
            step = episodes.start[episode] + np.minimum(time, episodes.length[episode] - 1)
            fields["return_to_go"][target] = self.to_go[episodes.row[episode], step]
        to = across if at is None else at[across]
        self._write_ends(place.at(across), fields, to)

    def _pieces(
        self, place: SlotPlace, across: NDArray[np.int64]
    ) -> tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the size, rows and starts of the pieces to read, and the index of the slots.

        The index counts the steps of all pieces. A window inside of an episode is a piece, and one
        that goes ``across`` has a piece for each part that is contiguous on disk. The slots that
        end episodes have any index.
        """
        source, episodes = self._source, self._episodes
        count, slots = place.time.shape
        size = min(slots, source.length)
        inside = np.delete(np.arange(count), across)
        first, crossing = place.at((inside, 0)), place.at(across)
        flat = SlotPlace(crossing.time.ravel(), crossing.episode.ravel())
        steps = np.flatnonzero(flat.time < episodes.length[flat.episode])
        (time, episode), window = flat.at(steps), steps // slots
        row, time = episodes.row[episode], episodes.start[episode] + time
        breaks = (np.diff(window) != 0) | (np.diff(row) != 0) | (np.diff(time) != 1)
        begins = np.flatnonzero(np.append(len(time) > 0, breaks))
        starts = np.minimum(time[begins], source.length - size)
        base = (len(inside) + np.arange(len(begins))) * size - starts
        of_crossing = np.zeros(flat.time.size, np.int64)
        of_crossing[steps] = np.repeat(base, np.diff(begins, append=len(time))) + time
        index = np.empty((count, slots), np.int64)
        index[inside] = np.arange(len(inside))[:, None] * size + np.arange(slots)
        index[across] = of_crossing.reshape(-1, slots)
        rows = np.append(episodes.row[first.episode], row[begins])
        return size, rows, np.append(episodes.start[first.episode] + first.time, starts), index

    def _write_ends(self, place: SlotPlace, fields: Fields, to: NDArray[np.int64]) -> None:
        """Write the slots that end episodes, in windows ``to`` of a batch, and ``next_known``."""
        episodes = self._episodes
        window, slot = np.nonzero(place.time == episodes.length[place.episode])
        ends = end_fields(place.at((window, slot)), self._source, episodes, self._first_episode)
        slots, steps = self._windows.slots, self._windows.steps
        of_slots = to[window] * slots + slot
        of_steps = (to[window] * steps + slot)[slot < steps]
        for name, array in fields.items():
            if array.size and name in ends:
                values = np.ascontiguousarray(ends[name], array.dtype)
                as_items(array)[of_slots] = as_items(values[:, None])
            elif array.size:
                items = as_items(array)
                items[of_steps] = np.zeros((), items.dtype)
        is_last = place.time == episodes.length[place.episode] - 1
        unknown = is_last & (episodes.final[place.episode] < 0)
        if unknown.any():
            window, slot = np.nonzero(unknown[:, :steps])
            terminated = fields["terminated"][to[window], slot].all(-1)
            fields["next_known"][to[window], slot] = terminated


def read_slots(
    table: SlotTable, windows: Windows, count: int, num_bytes: int, first_episode: int = 0
) -> Iterator[tuple[NDArray[np.int64], Fields]]:
    """Yield numbers of a ring's slots and their fields, until each has come up to ``count``.

    The slots from the ring's end on are those at its beginning; a few above ``count`` come, too.
    Slots that share chunks are read together, about ``num_bytes`` at once.
    """
    recorded, (chunk_rows, chunk_steps) = table.recorded, table.source.chunk_shape
    length = max(1, min(_SLOTS_ON_END, chunk_steps - 1, count))
    on_end = replace(windows, length=length, burn_in=0)
    reader = RingReader(table, on_end, first_episode)
    kinds = in_windows(fields_of(table.source.spec, on_end), on_end)
    starts = np.arange(0, count, length)
    index, before = table.locate(starts)
    number = table.episodes[index]
    order = np.lexsort((recorded.start[number] + before, recorded.row[number] // chunk_rows))
    pieces = 1 + _breaks_before(table, starts + length) - _breaks_before(table, starts)
    starts, pieces = starts[order], pieces[order]
    size = max(1, num_bytes // window_bytes(kinds))
    bounds = np.flatnonzero(np.diff(np.cumsum(pieces) // size)) + 1
    for part in np.split(starts, bounds):
        batch = new_batch(kinds, len(part))
        reader.read(part, batch, None)
        slots = (part[:, None] + np.arange(length)).ravel()
        fields = ((name, x[:, :length]) for name, x in batch.items())
        yield slots, {name: x.reshape(len(slots), *x.shape[2:]) for name, x in fields}


def _breaks_before(table: SlotTable, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how often the steps before slots are not contiguous on disk."""
    row, start = (x[table.episodes] for x in (table.recorded.row, table.recorded.start))
    is_broken = (row != np.roll(row, -1)) | (start + table.lengths != np.roll(start, -1))
    breaks = np.append(0, np.cumsum(is_broken))
    before: NDArray[np.int64] = breaks[table.locate(slots)[0]]
    return before + slots // table.num_slots * breaks[-1]
