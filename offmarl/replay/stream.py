"""Replay of data larger than memory: the device's batches, gathered from disk ahead of time.

Which windows a batch is made of follows from its key, and what a window holds from where it starts:
so a stream gives the very batches that the same data on the device would, can begin at any step,
and has no state but the step's number. Threads gather what comes next from the vault's memory map
while the device computes.
"""

import math
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, count
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Int, Key
from numpy.typing import NDArray

from offmarl import _ahead
from offmarl.errors import OptionError
from offmarl.replay import threefry
from offmarl.replay.circles import Circles, Mixed, Weighting
from offmarl.replay.fields import Fields, check_extras, fields_of, finished, to_sequence
from offmarl.replay.gathering import Batch, BatchLayout, CircleReader
from offmarl.replay.sampling import Chosen, Source, Windows
from offmarl.replay.starts import Starts, draw_on_host
from offmarl.types import ArraySpec, Sequence

_THREADS = 2
IN_HAND = 1 + _THREADS
"""Parts held beside those ahead: one in use, and of those being gathered the host's copies."""
_MOST_AHEAD = 16
"""Batches ready before they are asked for; more would only take memory."""
_GATHERED_WINDOWS = 256
"""Windows that small batches are gathered by."""
_DRAWN = 64
"""Batches whose windows are drawn at once."""

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=[])
@dataclass(frozen=True)
class Batches:
    """Batches on the device that were drawn beforehand; a pytree, to pass to jitted functions.

    Attributes
    ----------
    data
        Their fields, ``(*b, B, T, ...)``.
    """

    data: Sequence

    def __getitem__(self, index: Int[Array, ""] | int) -> "Batches":
        """Return those at an index of the first axis."""
        return jax.tree.map(lambda leaf: leaf[index], self)

    def sequence(self) -> Sequence:
        """Return them as a sequence; fields are ``(*b, B, T, ...)``."""
        return self.data


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
        There are no episodes of such numbers, they weigh nothing, or the data does not have an
        extra column that batches shall carry.
    """

    def __init__(
        self,
        source: Source | Mixed,
        windows: Windows,
        episodes: Chosen = None,
        weights: Weighting = None,
    ):
        check_extras(source.spec, windows, source.path)
        self._windows = windows
        self._circles = Circles(source, windows, episodes, weights)
        leaves = fields_of(source.spec, windows)
        if self._circles.factors is not None:
            leaves["weight"] = ArraySpec(())
        self._layout = BatchLayout(leaves, windows)
        self._readers = [CircleReader(part, windows) for part in self._circles.parts]

    @property
    def starts(self) -> Starts:
        """How likely a window is to start at each slot."""
        return self._circles.starts

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch."""
        return self._windows.batch_size * self._layout.window_bytes

    def arrays(self, starts: Int[np.ndarray, "*b"]) -> Sequence:
        """Return the windows that start at given slots as NumPy arrays, ``(*b, T, ...)``.

        It never calls JAX, and neither does a source that is a `offmarl.vault.Dataset`: so forked
        processes may call it, if `Dataset.prepare_fork` was called before the fork.
        """
        found = finished(self._gather(starts.ravel()).fields, self._windows)
        return to_sequence({k: x.reshape(*starts.shape, *x.shape[1:]) for k, x in found.items()})

    def batches(self, keys: Key[Array, "*b"]) -> Batches:
        """Return the batches that keys draw, on the device."""
        words = np.asarray(jax.random.key_data(keys))
        return self.at(draw_on_host(self.starts, words, self._windows.batch_size))

    def at(self, starts: Int[np.ndarray, "*b"]) -> Batches:
        """Return the windows that start at given slots, on the device."""
        (found,) = self.each_at(starts[None])
        return Batches(found)

    def each_at(self, starts: Int[np.ndarray, "k *b"]) -> list[Sequence]:
        """Return windows on the device, one sequence for each index of the first axis.

        All are gathered at once, which takes less time than one call for each.
        """
        batch = self._gather(starts.ravel())
        return _on_device(batch, self._layout, starts.shape)

    def beginnings(self) -> Sequence:
        """Return the windows that the episodes begin with, ``(K, T, ...)``, on the device.

        Where an episode ends before its window, the slot that ends it is repeated.
        """
        counts = [len(part.table.episodes) for part in self._circles.parts]
        batch, first = Batch(self._layout, sum(counts)), 0
        for reader, number in zip(self._readers, counts, strict=True):
            reader.read_beginnings(batch, first + np.arange(number))
            first += number
        (found,) = _on_device(batch, self._layout, (1, first))
        return found

    def _gather(self, starts: NDArray[np.int64]) -> Batch:
        """Return the windows that start at ``n`` slots."""
        batch, parts = Batch(self._layout, len(starts)), self._circles.parts
        if len(parts) == 1:
            self._readers[0].read(starts - parts[0].first_slot, batch, None)
        else:
            firsts = [part.first_slot for part in parts]
            number = np.searchsorted(firsts, starts, side="right") - 1
            for index, reader in enumerate(self._readers):
                own = np.flatnonzero(number == index)
                if len(own):
                    reader.read(starts[own] - firsts[index], batch, own)
        if self._circles.factors is not None:
            rows = starts[:, None] + np.arange(self._windows.steps)
            batch.fields["weight"][...] = self._circles.factors[rows]
        return batch


def _on_device(batch: Batch, layout: BatchLayout, shape: tuple[int, ...]) -> list[Sequence]:
    """Put windows on the device, as one sequence for each index of the first axis of ``shape``.

    Small fields are transferred together. Large ones are not copied where the device is a CPU.
    """
    large = [
        {name: array.reshape(*shape, *array.shape[1:])[i] for name, array in batch.large.items()}
        for i in range(shape[0])
    ]
    small = _split(batch.shared, layout, shape)
    return [to_sequence(a | b) for a, b in zip(small, jax.device_put(large), strict=True)]


@partial(jax.jit, static_argnums=(1, 2))
def _split(shared: dict[str, Array], layout: BatchLayout, shape: tuple[int, ...]) -> list[Fields]:
    """Cut the small fields of windows out of the memory that they share."""
    found: list[Fields] = [{} for _ in range(shape[0])]
    for word, parts in layout.shared.items():
        start = 0
        for part in parts:
            for batch in found:
                stop = start + math.prod((*shape[1:], part.size))
                values = _as_type(shared[word][start:stop], part.dtype)
                batch[part.name] = values.reshape(*shape[1:], *part.shape)
                start = stop
    return [finished(batch, layout.windows) for batch in found]


def _as_type(words: Array, dtype: np.dtype[Any]) -> Array:
    """Return the numbers that unsigned words of the same size hold."""
    return words != 0 if dtype.kind == "b" else jax.lax.bitcast_convert_type(words, dtype)


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
        self._drawn = WindowSource(source, windows, episodes, weights)
        size, self._batch_size = self._drawn.batch_bytes, windows.batch_size
        together = min(_GATHERED_WINDOWS // windows.batch_size, memory // (size * (2 + IN_HAND)))
        together = max(1, together)
        most = parts_ahead(memory, together * size, "a batch", max(1, _MOST_AHEAD // together))
        self._key = threefry.key(seed)
        self._starts = lru_cache(2)(self._draw)
        self.seed, self.step = seed, start
        parts = ahead(partial(self._gather, together), count(start, together), most)
        self._parts, self._ahead = parts, chain.from_iterable(parts)

    def _gather(self, together: int, step: int) -> list[Sequence]:
        """Return some batches, from a number on."""
        each = (divmod(number, _DRAWN) for number in range(step, step + together))
        return self._drawn.each_at(np.stack([self._starts(block)[i] for block, i in each]))

    def _draw(self, block: int) -> Int[np.ndarray, "n B"]:
        """Draw the starts of a block of batches; it takes little longer than for one."""
        steps = np.arange(block * _DRAWN, (block + 1) * _DRAWN)
        keys = threefry.fold_in(self._key, steps)
        return draw_on_host(self._drawn.starts, keys, self._batch_size)

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Sequence:
        """Return the next batch; fields are ``(B, T, ...)``."""
        batch = next(self._ahead)
        self.step += 1
        return batch

    def state(self) -> dict[str, int]:
        """Return what `Dataset.stream` must be given to go on from here; JSON."""
        return {"seed": self.seed, "start": self.step}

    def close(self) -> None:
        """Stop gathering. Idempotent."""
        self._parts.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
