"""Replay of data larger than memory: the device's batches, gathered from disk ahead of time.

Which windows a batch is made of follows from its key, and what a window holds from where it starts:
so a stream gives the very batches that the same data on the device would, can begin at any step,
and has no state but the step's number. Threads gather what comes next from the vault's memory map
while the device computes.
"""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Key, UInt32
from numpy.typing import NDArray

from offmarl import _ahead
from offmarl.errors import OptionError
from offmarl.replay import packing
from offmarl.replay.circles import Circles, Mixed, Part, Weighting
from offmarl.replay.packing import Place
from offmarl.replay.sampling import Chosen, Source, Windows, returns_to_go
from offmarl.replay.starts import Starts, draw_on_host
from offmarl.types import EnvSpec, Sequence

_THREADS = 2
IN_HAND = 1 + _THREADS
"""Parts held beside those ahead: one in use, and of those being gathered the host's copies."""
_MOST_AHEAD = 16
"""Batches ready before they are asked for; more would only take memory."""
_GATHERED_WINDOWS = 256
"""Windows gathered at once, so that little lies in memory between disk and batch."""

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "weight"],
    meta_fields=["spec", "windows"],
)
@dataclass(frozen=True)
class Batches:
    """Batches on the device that were drawn beforehand; a pytree, to pass to jitted functions.

    Attributes
    ----------
    rows
        ``(*b, B, T+1, W)`` packed windows.
    spec
        Sizes of the data.
    windows
        Sizes of the batches.
    weight
        ``(*b, B, T)`` what each step is multiplied by in losses; None for 1.
    """

    rows: UInt32[Array, "*b W"]
    spec: EnvSpec
    windows: Windows
    weight: Float[Array, "..."] | None = None

    def __getitem__(self, index: Int[Array, ""] | int) -> "Batches":
        """Return those at an index of the first axis."""
        return jax.tree.map(lambda leaf: leaf[index], self)

    def sequence(self) -> Sequence:
        """Unpack them; fields are ``(*b, B, T, ...)``."""
        sequence = packing.to_sequence(self.rows, self.spec, self.windows)
        return sequence._replace(weight=self.weight)


def batch_bytes(spec: EnvSpec, windows: Windows) -> int:
    """Return the bytes of a streamed batch."""
    return 4 * windows.batch_size * windows.slots * packing.layout_of(spec, windows).width


class WindowSource:
    """Draws windows as `Replay.sample` does, and gathers them from disk.

    Parameters
    ----------
    source
        What to draw from: a vault or a mixture.
    windows
        What to draw.
    episodes
        Numbers of the episodes to draw from; all of them by default.
    weights
        What steps weigh; all the same by default.

    Raises
    ------
    ShapeError
        There is no step to draw.
    OptionError
        There are no episodes of such numbers, or they weigh nothing.
    """

    def __init__(
        self,
        source: Source | Mixed,
        windows: Windows,
        episodes: Chosen = None,
        weights: Weighting = None,
    ):
        self._spec, self._shape = source.spec, windows
        self._circles = Circles(source, windows, episodes, weights)
        self._layout = packing.layout_of(source.spec, windows)
        self._circle_sources = [_CircleSource(part, windows) for part in self._circles.parts]

    @property
    def starts(self) -> Starts:
        """How likely a window is to start at each slot."""
        return self._circles.starts

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch."""
        return batch_bytes(self._spec, self._shape)

    def batches(self, keys: Key[Array, "*b"]) -> Batches:
        """Return the batches that keys draw, on the device."""
        words = np.asarray(jax.random.key_data(keys))
        return self.at(draw_on_host(self.starts, words, self._shape.batch_size))

    def at(self, starts: Int[np.ndarray, "*b B"]) -> Batches:
        """Return the batches of the windows that start at given slots, on the device."""
        rows = self._windows(starts.ravel())
        factors, weight = self._circles.factors, None
        if factors is not None:
            weight = factors[starts[..., None] + np.arange(self._shape.steps)]
        return self._put(rows.reshape(*starts.shape, *rows.shape[1:]), weight)

    def beginnings(self) -> Sequence:
        """Return the windows that the episodes begin with, ``(K, T, ...)``, on the device.

        Where an episode ends before its window, the slot that ends it is repeated.
        """
        parts = self._circles.parts
        starts = [part.first_slot + part.table.offsets for part in parts]
        ends = np.concatenate([part.table.lengths for part in parts])
        slots = np.minimum(np.arange(self._shape.slots), ends[:, None])
        rows = self._windows(np.concatenate(starts))
        return _sequence(self._put(np.take_along_axis(rows, slots[..., None], axis=1)))

    def _put(self, rows: NDArray[np.uint32], weight: NDArray[np.float32] | None = None) -> Batches:
        there = None if weight is None else jax.device_put(weight)
        return Batches(jax.device_put(rows), self._spec, self._shape, there)

    def _windows(self, starts: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the windows ``(n, T+1, W)`` that start at slots."""
        if len(self._circle_sources) == 1:
            return self._circle_sources[0].windows(starts)
        rows = np.empty((len(starts), self._shape.slots, self._layout.width), np.uint32)
        firsts = [part.first_slot for part in self._circles.parts]
        number = np.searchsorted(firsts, starts, side="right") - 1
        for index, source in enumerate(self._circle_sources):
            own = np.flatnonzero(number == index)
            if len(own):
                rows[own] = source.windows(starts[own] - firsts[index])
        return rows


class _CircleSource:
    """Gathers windows of one circle from disk."""

    def __init__(self, part: Part, windows: Windows):
        self._source, self._table, self._shape = part.source, part.table, windows
        self._first_episode = part.first_episode
        self._layout = packing.layout_of(part.source.spec, windows)
        discount = windows.return_to_go
        self._to_go = None if discount is None else returns_to_go(part.source, discount)

    def windows(self, starts: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the windows ``(n, T+1, W)`` that start at slots."""
        self._prefetch(starts)
        if len(starts) <= _GATHERED_WINDOWS:
            return self._gather(starts)
        rows = np.empty((len(starts), self._shape.slots, self._layout.width), np.uint32)
        for first in range(0, len(starts), _GATHERED_WINDOWS):
            part = slice(first, first + _GATHERED_WINDOWS)
            rows[part] = self._gather(starts[part])
        return rows

    def _prefetch(self, starts: NDArray[np.int64]) -> None:
        source, place = self._source, self._place(starts)
        size = min(self._shape.slots, source.length)
        time = np.minimum(source.episodes.start[place.episode] + place.time, source.length - size)
        source.prefetch(source.episodes.row[place.episode], time, size)

    def _place(self, slots: NDArray[np.int64]) -> Place:
        index, time = self._table.locate(slots)
        return Place(time, self._table.episodes[index])

    def _gather(self, starts: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Pack the windows ``(n, T+1, W)`` that start at slots."""
        shape = len(starts), self._shape.slots
        place = self._place((starts[:, None] + np.arange(shape[1])).ravel())
        is_step = place.time < self._source.episodes.length[place.episode]
        steps, ends = np.flatnonzero(is_step), np.flatnonzero(~is_step)
        packed, index = self._read(place.at(steps), window=steps // shape[1])
        if len(packed) == len(place.time):  # most steps are where they belong already
            moved = np.flatnonzero(index != steps)
            rows = packed
            rows[steps[moved]] = rows[index[moved]]
        else:
            rows = np.empty((len(place.time), self._layout.width), np.uint32)
            rows[steps] = packed[index]
        rows[ends] = packing.pack_ends(
            place.at(ends), self._source, self._layout, self._first_episode
        )
        return rows.reshape(*shape, -1)

    def _read(
        self, place: Place, window: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return packed rows, and which of them are the wanted steps.

        What lies on end on disk is read as one piece of a fixed size, also across the end of an
        episode. Each window has at least one, and most have no more.
        """
        source, episodes = self._source, self._source.episodes
        row, time = episodes.row[place.episode], episodes.start[place.episode] + place.time
        breaks = (np.diff(window) != 0) | (np.diff(row) != 0) | (np.diff(time) != 1)
        begins = np.append(0, np.flatnonzero(breaks) + 1)
        size = min(self._shape.slots, source.length)
        first = np.minimum(time[begins], source.length - size)
        steps: Any = source.window_transitions(row[begins], first, size)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps)
        base = np.arange(len(begins)) * size - first
        index = np.repeat(base, np.diff(begins, append=len(time))) + time
        there = place.spread(index, len(flat.last))
        to_go = None
        if self._to_go is not None:
            to_go = np.zeros((len(flat.last), source.spec.num_agents), np.float32)
            to_go[index] = self._to_go[row, time]
        packed = packing.pack_steps(flat, there, episodes, self._layout, to_go, self._first_episode)
        return packed, index


def whole_episodes(source: Source | Mixed, episodes: NDArray[np.int64]) -> Sequence:
    """Put some episodes on the device, ``(M, T, ...)`` with T the length of the longest."""
    longest = int(source.episodes.length.take(episodes, mode="clip").max(initial=1))
    return WindowSource(source, Windows(1, longest), episodes).beginnings()


class Stream:
    """An endless iterator over the batches of a dataset, on the device, gathered ahead of time.

    Batch number i is the one that the same dataset on the device gives for the same seed:
    ``dataset.replay(batch, length).sample(jax.random.fold_in(jax.random.key(seed), i))``.
    Close it, or use it as a context manager, to stop its threads.

    Attributes
    ----------
    seed
        What the batches follow from.
    step
        The number of the batch that comes next.
    """

    def __init__(
        self,
        source: Source | Mixed,
        windows: Windows,
        seed: int,
        start: int,
        memory: int,
        episodes: Chosen = None,
        weights: Weighting = None,
    ):
        drawn = WindowSource(source, windows, episodes, weights)
        most = parts_ahead(memory, drawn.batch_bytes, "a batch", _MOST_AHEAD)
        key = on_host(jax.random.key(seed))
        self.seed, self.step = seed, start
        self._ahead = ahead(
            lambda step: drawn.batches(jax.random.fold_in(key, step)),
            count(start),
            most,
        )

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Sequence:
        """Return the next batch; fields are ``(B, T, ...)``."""
        batch = _sequence(next(self._ahead))
        self.step += 1
        return batch

    def state(self) -> dict[str, int]:
        """Return what `Dataset.stream` must be given to go on from here; JSON."""
        return {"seed": self.seed, "start": self.step}

    def close(self) -> None:
        """Stop gathering. Idempotent."""
        self._ahead.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_sequence = jax.jit(Batches.sequence)


def on_host(keys: Key[Array, "*b"]) -> Key[Array, "*b"]:
    """Put keys where drawing waits for nothing; nowhere else where JAX knows no processor."""
    try:
        processor = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return keys
    return jax.device_put(keys, processor)


def parts_ahead(memory: int, part: int, name: str, most: int) -> int:
    """Return how many parts to gather ahead of use, so that all take no more than ``memory``.

    Parameters
    ----------
    memory, part
        Bytes there are, and bytes of a part.
    name
        What a part is, in words.
    most
        Parts that are enough.

    Raises
    ------
    OptionError
        There is no room for one.
    """
    room = memory // part - IN_HAND
    if room < 1:
        raise OptionError(
            f"{memory:,} bytes of memory are too few to stream: {name} takes {part:,}, and "
            f"{1 + IN_HAND} are held at a time. Give more memory, or smaller batches."
        )
    return min(room, most)


def ahead(
    produce: Callable[[_In], _Out], arguments: Iterable[_In], most: int
) -> Generator[_Out, None, None]:
    """Yield what a function makes of each argument, in order, made by threads ahead of time.

    Parameters
    ----------
    produce
        Called by several threads.
    arguments
        May be endless.
    most
        Results that may be ready or under way before they are asked for.
    """
    with ThreadPoolExecutor(_THREADS, "offmarl-stream") as pool:
        started = _ahead.ahead(arguments, lambda one: pool.submit(produce, one), most + 1)
        try:
            # A loop's variable would hold the last result while the next one is waited for.
            yield from map(_result, started)
        finally:
            pool.shutdown(cancel_futures=True)


def _result(started: tuple[object, Future[_Out]]) -> _Out:
    return started[1].result()
