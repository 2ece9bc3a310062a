"""Windows without JAX: gathered from disk as NumPy arrays.

The content of a window follows from its start. `offmarl.replay.batches` puts windows on the
device, and `offmarl.replay.torch` makes tensors of them.
"""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, SupportsIndex, TypeVar

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray

from offmarl import _ahead
from offmarl.errors import OptionError
from offmarl.replay.fields import (
    Fields,
    check_extras,
    fields_of,
    finish_fields,
    in_windows,
    to_sequence,
)
from offmarl.replay.gathering import RingReader, new_batch, window_bytes
from offmarl.replay.rings import Mixed, SlotRings, Weighting
from offmarl.replay.sampling import Chosen, Source, Windows
from offmarl.replay.starts import Uniform
from offmarl.types import ArraySpec, Sequence, map_tree

_THREADS = 1
"""More gather no faster: each holds the interpreter's lock between its many small copies."""
IN_HAND = 1 + _THREADS
"""Parts held beside those ahead: one in use, and of those being gathered the host's copies."""
GATHERED_WINDOWS = 256
"""Windows that small batches are gathered by."""

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class WindowReader:
    """Gathers windows of a vault or a mixture as NumPy arrays.

    It never calls JAX, and neither does a source that is a `offmarl.vault.Dataset`.

    Parameters
    ----------
    source
        A vault or a mixture.
    windows
        The windows to read.
    episodes
        Numbers of the episodes; all of them by default.
    weights
        Weights of steps; all the same by default.

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
        self.rings, self.windows = SlotRings(source, windows, episodes, weights), windows
        """The slots that windows may start at."""
        check_extras(source.spec, windows, source.path)
        leaves = {**fields_of(source.spec, windows)}
        if self.rings.factors is not None:
            leaves["weight"] = ArraySpec(())
        self.kinds = in_windows(leaves, windows)
        self._readers = [
            RingReader(ring.table, windows, ring.first_episode) for ring in self.rings.members
        ]

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch."""
        return self.windows.batch_size * window_bytes(self.kinds)

    def arrays(self, starts: Int[np.ndarray, "*b"]) -> Sequence:
        """Return the windows that start at given slots, ``(*b, T, ...)``."""
        fields = finish_fields(self.gather(starts.ravel()), self.windows)
        return to_sequence({k: x.reshape(*starts.shape, *x.shape[1:]) for k, x in fields.items()})

    def each_array(self, starts: list[Int[np.ndarray, "_"]]) -> list[Sequence]:
        """Return batches of windows, ``(B, T, ...)``, each from its slots.

        All are gathered at once, which takes less time than one call for each.
        """
        sequence = self.arrays(np.concatenate(starts))
        stops = np.cumsum([0, *map(len, starts)]).tolist()
        return [map_tree(lambda x, i=i, j=j: x[i:j], sequence) for i, j in pairwise(stops)]

    def beginnings(self) -> Fields:
        """Return the windows that the episodes begin with, of K episodes.

        Where an episode ends before its window, the slot that ends it is repeated.
        """
        counts = [len(ring.table.episodes) for ring in self.rings.members]
        batch, first = new_batch(self.kinds, sum(counts)), 0
        for reader, number in zip(self._readers, counts, strict=True):
            reader.read_beginnings(batch, first + np.arange(number))
            first += number
        return batch

    def close(self) -> None:
        """Stop reading; does nothing but for data on another machine."""

    def prepare_fork(self) -> None:
        """Let processes that are forked from this one read the windows."""
        for ring, reader in zip(self.rings.members, self._readers, strict=True):
            ring.table.source.prepare_fork()
            _ = reader.to_go  # forked processes share it

    def gather(self, starts: NDArray[np.int64]) -> Fields:
        """Return the windows that start at ``n`` slots."""
        batch, rings = new_batch(self.kinds, len(starts)), self.rings.members
        if len(rings) == 1:
            self._readers[0].read(starts - rings[0].first_slot, batch, None)
        else:
            firsts = [ring.first_slot for ring in rings]
            number = np.searchsorted(firsts, starts, side="right") - 1
            for index, reader in enumerate(self._readers):
                at = np.flatnonzero(number == index)
                if len(at):
                    reader.read(starts[at] - firsts[index], batch, at)
        if self.rings.factors is not None:
            rows = starts[:, None] + np.arange(self.windows.steps)
            batch["weight"][...] = self.rings.factors[rows]
        return batch


class WindowItems:
    """All windows of a dataset by number, as NumPy arrays.

    Window i starts at slot i of the episodes laid end to end; see `offmarl.replay.sampling`. Each
    step is in as many windows as any other. Pickling keeps the path of the vault, and another
    process opens it again. It needs no JAX.

    Parameters
    ----------
    source
        A vault.
    windows
        The windows; the batch size has no meaning.
    episodes
        Numbers of the episodes; all of them by default.

    Raises
    ------
    ShapeError
        There is no step.
    OptionError
        There are no such episodes, or the source is a mixture.
    """

    def __init__(self, source: Source | Mixed, windows: Windows, episodes: Chosen = None):
        self._arguments = source, windows, episodes
        self._source = WindowReader(source, windows, episodes)
        if not isinstance(self._source.rings.starts, Uniform):
            raise OptionError(
                f"{source.path} is a mixture, whose windows cannot be counted through: stream its "
                "batches, or read one of its vaults."
            )
        self._source.prepare_fork()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __len__(self) -> int:
        """Return the number of windows: as many as there are slots."""
        return self._source.rings.num_slots

    def __getitem__(self, number: SupportsIndex) -> Sequence:
        """Return one window; fields are ``(T, ...)``."""
        window: Sequence = map_tree(lambda leaf: leaf[0], self.gather([int(number)]))
        return window

    def gather(self, numbers: Iterable[SupportsIndex]) -> Sequence:
        """Return some windows at once; fields are ``(B, T, ...)``."""
        return self._converted(self._source.arrays(self._checked(np.array([*numbers], np.int64))))

    def _converted(self, sequence: Sequence) -> Sequence:
        """Return windows in the form of this library's arrays."""
        return sequence

    def _checked(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        count = len(self)
        if numbers.size and not (-count <= numbers.min() and numbers.max() < count):
            wrong = numbers[(numbers < -count) | (numbers >= count)][0]
            raise IndexError(f"window {wrong} was requested, and there are {count:,}.")
        return numbers % count

    def __repr__(self) -> str:
        source, windows, _ = self._arguments
        return f"<{type(self).__name__} of {source.path}: {len(self):,} of {windows.steps} steps>"


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
    """Yield a function's result for each argument, in order; threads compute ahead of use."""
    pool = ThreadPoolExecutor(_THREADS, "offmarl-stream")
    try:
        tasks = _ahead.ahead(arguments, lambda argument: pool.submit(produce, argument), most + 1)
        # A loop's variable would hold the last result while the next one is waited for.
        yield from map(_result, tasks)
    except GeneratorExit:
        pool.shutdown(cancel_futures=True)
        raise
    finally:  # after a signal nothing is waited for, such as a network
        pool.shutdown(wait=False, cancel_futures=True)


def _result(task: tuple[object, Future[_Out]]) -> _Out:
    return task[1].result()
