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
from typing import TypeVar

import jax
import numpy as np
from jaxtyping import Array, Int, Key, UInt32
from numpy.typing import NDArray

from offmarl import _ahead
from offmarl.errors import OptionError
from offmarl.replay import packing
from offmarl.replay.sampling import Chosen, Source, WindowTable, draw_on_host, on_host
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


@partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["spec"])
@dataclass(frozen=True)
class Batches:
    """Batches on the device that were drawn beforehand; a pytree, to pass to jitted functions.

    Attributes
    ----------
    rows
        ``(*b, B, T+1, W)`` packed windows.
    spec
        Sizes of the data.
    """

    rows: UInt32[Array, "*b W"]
    spec: EnvSpec

    def __getitem__(self, index: Int[Array, ""] | int) -> "Batches":
        """Return those at an index of the first axis."""
        return Batches(self.rows[index], self.spec)

    def sequence(self) -> Sequence:
        """Unpack them; fields are ``(*b, B, T, ...)``."""
        return packing.to_sequence(self.rows, self.spec)


class WindowSource:
    """Draws windows of a vault as `Replay.sample` does, and gathers them from disk.

    Parameters
    ----------
    source
        What to draw from.
    batch_size, length
        Windows in a batch, and steps in a window.
    episodes
        Numbers of the episodes to draw windows from; all of them by default.

    Raises
    ------
    ShapeError
        Where there is no step to draw, or a size is not positive.
    """

    def __init__(self, source: Source, batch_size: int, length: int, episodes: Chosen = None):
        self._source = source
        self._table = WindowTable(source, batch_size, length, episodes)
        self._layout = packing.layout_of(source.spec)
        self._batch_size = batch_size

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch."""
        return 4 * self._batch_size * (self._table.length + 1) * self._layout.width

    def batches(self, keys: Key[Array, "*b"]) -> Batches:
        """Return the batches that keys draw, on the device."""
        windows = draw_on_host(keys, self._batch_size, self._table.num_windows)
        rows = self._windows(self._table.starts(windows.ravel()))
        rows = rows.reshape(*windows.shape, *rows.shape[1:])
        return Batches(jax.device_put(rows), self._source.spec)

    def beginnings(self) -> Sequence:
        """Return the windows that the episodes begin with, ``(M, T, ...)``, on the device."""
        rows = self._windows(self._table.beginnings)
        return _sequence(Batches(jax.device_put(rows), self._source.spec))

    def _windows(self, starts: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the windows ``(n, T+1, W)`` that start at packed rows."""
        rows = np.empty((len(starts), self._table.length + 1, self._layout.width), np.uint32)
        self._prefetch(starts)
        for first in range(0, len(starts), _GATHERED_WINDOWS):
            part = slice(first, first + _GATHERED_WINDOWS)
            self._gather(starts[part], rows[part])
        return rows

    def _locate(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the episodes that packed rows belong to, and their places in them."""
        episode = np.searchsorted(self._table.offsets, rows, side="right") - 1
        return episode, rows - self._table.offsets[episode]

    def _prefetch(self, starts: NDArray[np.int64]) -> None:
        source, (episode, place) = self._source, self._locate(starts)
        size = min(self._table.length + 1, source.length)
        time = np.minimum(source.episodes.start[episode] + place, source.length - size)
        source.prefetch(source.episodes.row[episode], time, size)

    def _gather(self, starts: NDArray[np.int64], out: NDArray[np.uint32]) -> None:
        """Fill ``(n, T+1, W)`` with the windows that start at packed rows."""
        size = self._table.length + 1
        episode, place = self._locate(starts)
        # Most windows end before their episode does, and then they are one piece on disk.
        whole = place + size <= self._table.lengths[episode]
        out[whole] = self._steps(episode[whole], place[whole], size).reshape(-1, *out.shape[1:])
        rows = starts[~whole, None] + np.arange(size)
        out[~whole] = self._rows(rows.ravel()).reshape(-1, *out.shape[1:])

    def _rows(self, rows: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return packed rows of any kind ``(n, W)``: steps, final views, and padding."""
        episode, place = self._locate(rows)
        end, final = self._table.lengths[episode], self._source.episodes.final[episode]
        packed = np.tile(packing.blank(self._layout), (len(rows), 1))
        is_step = place < end
        packed[is_step] = self._steps(episode[is_step], place[is_step], 1)
        is_final = (place == end) & (final >= 0)
        views = self._source.final_views(final[is_final])._asdict()
        packed[is_final] = packing.pack(views, self._layout, int(is_final.sum()))
        return packed

    def _steps(
        self, episode: NDArray[np.int64], place: NDArray[np.int64], size: int
    ) -> NDArray[np.uint32]:
        """Pack ``size`` steps on end of each episode, from a place on: ``(n * size, W)``."""
        episodes = self._source.episodes
        start = episodes.start[episode] + place
        steps = self._source.window_transitions(episodes.row[episode], start, size)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps)
        left = (episodes.length[episode] - place)[:, None] - np.arange(size)
        known = np.repeat(episodes.final[episode] >= 0, size)
        return packing.pack_steps(flat, left.ravel(), known, self._layout)


def whole_episodes(source: Source, episodes: NDArray[np.int64]) -> Sequence:
    """Put some episodes on the device, ``(M, T, ...)`` with T the length of the longest."""
    longest = int(source.episodes.length.take(episodes, mode="clip").max(initial=1))
    return WindowSource(source, 1, longest, episodes).beginnings()


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
        source: Source,
        batch_size: int,
        length: int,
        seed: int,
        start: int,
        memory: int,
        episodes: Chosen = None,
    ):
        windows = WindowSource(source, batch_size, length, episodes)
        most = parts_ahead(memory, windows.batch_bytes, "a batch", _MOST_AHEAD)
        key = on_host(jax.random.key(seed))
        self.seed, self.step = seed, start
        self._ahead = ahead(
            lambda step: windows.batches(jax.random.fold_in(key, step)),
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
