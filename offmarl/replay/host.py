"""Windows and streams without JAX: gathered from disk as NumPy arrays, ahead of time.

Which windows a batch is made of follows from the seed and its number, and what a window holds from
where it starts. So a stream gives the very batches that the same data on the device would, can
begin at any step, and has no state but the step's number. A thread gathers what comes next from the
vault's memory map while the learner computes. `offmarl.replay.stream` puts windows on the device.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, count, groupby
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray

from offmarl import _ahead
from offmarl.config import check_seed
from offmarl.errors import OptionError
from offmarl.replay.blocks import (
    BlockGatherer,
    BlockOrder,
    check_unweighted,
    plan_blocks,
)
from offmarl.replay.circles import Circles, Mixed, Weighting
from offmarl.replay.fields import check_extras, fields_of, finished, to_sequence
from offmarl.replay.gathering import Batch, BatchLayout, CircleReader
from offmarl.replay.orders import Draws, Epochs, make_order
from offmarl.replay.sampling import Chosen, Source, Windows
from offmarl.replay.starts import Starts
from offmarl.types import ArraySpec, Sequence, map_tree

To = Literal["jax", "numpy", "torch"]
"""What batches are made of."""

_THREADS = 1
"""More gather no faster: each holds the interpreter's lock between its many small copies."""
IN_HAND = 1 + _THREADS
"""Parts held beside those ahead: one in use, and of those being gathered the host's copies."""
_MOST_AHEAD = 16
"""Batches ready before they are asked for; more would only take memory."""
GATHERED_WINDOWS = 256
"""Windows that small batches are gathered by."""

Order = Draws | Epochs | BlockOrder

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class WindowReader:
    """Gathers windows of a vault or a mixture as NumPy arrays.

    It never calls JAX, and neither does a source that is a `offmarl.vault.Dataset`.

    Parameters
    ----------
    source
        What to read: a vault or a mixture.
    windows
        What to read of it.
    episodes
        Numbers of the episodes; all of them by default.
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
        self._prepare(Circles(source, windows, episodes, weights))

    @classmethod
    def of(cls, circles: Circles) -> Any:
        """Return what reads the windows of circles that were made before."""
        made = cls.__new__(cls)
        made._prepare(circles)
        return made

    def _prepare(self, circles: Circles) -> None:
        source, self._windows, self._circles = circles.source, circles.windows, circles
        check_extras(source.spec, self._windows, source.path)
        leaves = fields_of(source.spec, self._windows)
        if circles.factors is not None:
            leaves["weight"] = ArraySpec(())
        self._layout = BatchLayout(leaves, self._windows)
        self._readers = [CircleReader(part, self._windows) for part in circles.parts]

    @property
    def starts(self) -> Starts:
        """How likely a window is to start at each slot."""
        return self._circles.starts

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch."""
        return self._windows.batch_size * self._layout.window_bytes

    def arrays(self, starts: Int[np.ndarray, "*b"]) -> Sequence:
        """Return the windows that start at given slots, ``(*b, T, ...)``."""
        found = finished(self._gather(starts.ravel()).fields, self._windows)
        return to_sequence({k: x.reshape(*starts.shape, *x.shape[1:]) for k, x in found.items()})

    def each_array(self, starts: Int[np.ndarray, "k *b"]) -> list[Sequence]:
        """Return windows as one sequence for each index of the first axis.

        All are gathered at once, which takes less time than one call for each.
        """
        found = self.arrays(starts)
        return [map_tree(lambda leaf, i=i: leaf[i], found) for i in range(len(starts))]

    def each_batch(self, starts: Iterable[Int[np.ndarray, "B"]]) -> Iterator[Sequence]:
        """Yield the batches of windows that start at given slots; see `each_array`."""
        for _, equal in groupby(starts, len):
            yield from self.each_array(np.stack([*equal]))

    def prepare_fork(self) -> None:
        """Let processes that are forked from this one read the windows."""
        for part in self._circles.parts:
            part.source.prepare_fork()

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


def _no_op() -> None:
    """No-op callback."""


class Stream:
    """An iterator over the batches of a dataset, gathered ahead of time; see `EpisodeSet.stream`.

    Without epochs it has no end, and batch number i is the one that the same dataset on the device
    gives for the same seed:
    ``dataset.replay(batch, length).sample(jax.random.fold_in(jax.random.key(seed), i))``.
    Close it, or use it as a context manager, to stop its thread.

    Parameters
    ----------
    read
        Returns the windows that start at given slots ``(k, B)``, as k batches.
    order
        Which windows make which batch.
    batch_size, batch_bytes
        Windows and bytes of a batch.
    seed, start
        What the order follows from, and the number of the first batch.
    memory
        Bytes that batches may take at a time.
    close
        Called when the stream is closed.

    Attributes
    ----------
    seed
        What the batches follow from.
    step
        The number of the batch that comes next.
    """

    def __init__(
        self,
        read: Callable[[Int[np.ndarray, "k B"]], list[Sequence]],
        order: Order,
        batch_size: int,
        batch_bytes: int,
        seed: int,
        start: int,
        memory: int,
        close: Callable[[], None] = _no_op,
    ):
        if start < 0:
            raise OptionError(f"batches are numbered from 0: a stream cannot start at {start}.")
        self._read, self._order, self._close = read, order, close
        room = memory // (batch_bytes * (2 + IN_HAND))
        together = max(1, min(GATHERED_WINDOWS // batch_size, room))
        most = max(1, _MOST_AHEAD // together)
        most = parts_ahead(memory, together * batch_bytes, "a batch", most)
        self.seed, self.step = check_seed(seed), start
        stop = order.num_batches
        firsts = count(start, together) if stop is None else range(start, stop, together)
        self._parts = ahead(partial(self._gather, together), firsts, most)
        self._batches = chain.from_iterable(self._parts)

    def _gather(self, together: int, first: int) -> list[Sequence]:
        """Return some batches, from a number on."""
        stop = self._order.num_batches
        stop = first + together if stop is None else min(first + together, stop)
        starts = map(self._order.slots, range(first, stop))
        parts = (np.stack([*equal]) for _, equal in groupby(starts, len))
        return [batch for part in parts for batch in self._read(part)]

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Sequence:
        """Return the next batch; fields are ``(B, T, ...)``."""
        batch = next(self._batches)
        self.step += 1
        return batch

    def __len__(self) -> int:
        """Return the number of batches that are left; `TypeError` if there is no end."""
        return num_left(self._order, self.step)

    def state(self) -> dict[str, int]:
        """Return what `EpisodeSet.stream` must be given to go on from here; JSON."""
        return {"seed": self.seed, "start": self.step}

    def close(self) -> None:
        """Stop gathering. Idempotent."""
        self._close()
        self._parts.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def num_left(order: Order, step: int) -> int:
    """Return how many batches follow before the end; `TypeError` if there is none."""
    if order.num_batches is None:
        raise TypeError("batches without an end have no length: give a number of epochs.")
    return max(0, order.num_batches - step)


class BlockReader(BlockGatherer, WindowReader):
    """Gathers windows of data on another machine as NumPy arrays."""


def open_stream(
    source: Source | Mixed,
    windows: Windows,
    to: str,
    *,
    seed: int,
    start: int,
    memory: int,
    episodes: Chosen = None,
    weights: Weighting = None,
    epochs: int | None = None,
    drop_last: bool = False,
    shuffle_buffer: int | None = None,
) -> Stream:
    """Open a stream; see `EpisodeSet.stream`.

    Raises
    ------
    OptionError
        ``to`` is none of its values, or as for `EpisodeSet.stream`.
    """
    if to not in get_args(To):
        raise OptionError(f"batches are made of {' or '.join(get_args(To))}: {to!r} is none.")
    if shuffle_buffer is not None or getattr(source, "is_remote", False):
        check_unweighted(weights is not None, source)
        blocked, table = plan_blocks(source, windows, episodes, shuffle_buffer)
        blocks = BlockOrder(
            table.sizes,
            windows.batch_size,
            seed,
            epochs,
            drop_last,
            per_buffer=table.per_buffer,
        )
        gatherer: Any = _kind_of_reader(to, blocks=True)(blocked, windows, blocks, table)
        size = windows.batch_size, gatherer.batch_bytes
        read = _read_to(gatherer, to)
        options = {"seed": seed, "start": start, "memory": memory, "close": gatherer.close}
        return Stream(read, blocks, *size, **options)
    reader = _kind_of_reader(to)(source, windows, episodes, weights)
    read = _read_to(reader, to)
    order = make_order(reader.starts, windows.batch_size, seed, epochs, drop_last)
    size = windows.batch_size, reader.batch_bytes
    return Stream(read, order, *size, seed=seed, start=start, memory=memory)


def _kind_of_reader(to: str, blocks: bool = False) -> Any:
    """Return the class that gathers windows, for JAX's or for other arrays."""
    if to != "jax":
        return BlockReader if blocks else WindowReader
    from offmarl.replay.stream import BlockWindowSource, WindowSource

    return BlockWindowSource if blocks else WindowSource


def _read_to(reader: Any, to: str) -> Callable[[Int[np.ndarray, "k B"]], list[Sequence]]:
    """Return what reads windows as JAX's, NumPy's or torch's arrays."""
    if to == "jax":
        found: Callable[[Int[np.ndarray, "k B"]], list[Sequence]] = reader.each_at
        return found
    each: Callable[[Int[np.ndarray, "k B"]], list[Sequence]] = reader.each_array
    if to == "numpy":
        return each

    from offmarl.replay.torch import to_tensors

    return lambda starts: [*map(to_tensors, each(starts))]


def parts_ahead(memory: int, part: int, name: str, most: int) -> int:
    """Return how many parts to gather ahead of use, so that all take no more than ``memory``."""
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
    """Yield what a function makes of each argument, in order, made by threads ahead of time."""
    pool = ThreadPoolExecutor(_THREADS, "offmarl-stream")
    try:
        started = _ahead.ahead(arguments, lambda one: pool.submit(produce, one), most + 1)
        # A loop's variable would hold the last result while the next one is waited for.
        yield from map(_result, started)
    except GeneratorExit:
        pool.shutdown(cancel_futures=True)
        raise
    finally:  # after a signal nothing is waited for, such as a network
        pool.shutdown(wait=False, cancel_futures=True)


def _result(started: tuple[object, Future[_Out]]) -> _Out:
    return started[1].result()
