"""Streams: batches that are gathered from disk ahead of time.

Which windows a batch is made of follows from the seed and its number. So a stream gives the very
batches that the same data on the device would, can begin at any step, and has no state but the
step's number. A thread gathers the next batches from the vault's memory map while the learner
computes.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain, count
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Int

from offmarl.config import check_seed
from offmarl.errors import OptionError
from offmarl.replay.blocks import BlockGatherer, check_unweighted, plan_blocks
from offmarl.replay.host import (
    GATHERED_WINDOWS,
    IN_HAND,
    WindowReader,
    ahead,
    parts_ahead,
    stack_slots,
)
from offmarl.replay.orders import BlockOrder, Order, check_start, make_order
from offmarl.replay.rings import Mixed, Weighting
from offmarl.replay.sampling import Chosen, Source, Windows
from offmarl.types import Sequence

To = Literal["jax", "numpy", "torch"]
"""The library whose arrays batches are made of."""

_MOST_AHEAD = 16
"""Batches ready before they are asked for; more would only take memory."""


class BlockReader(BlockGatherer, WindowReader):
    """Gathers windows of data on another machine as NumPy arrays."""


class Stream:
    """An iterator over the batches of a dataset, gathered ahead of time; see `EpisodeSet.stream`.

    Without epochs it has no end, and batch number i is the one that the same dataset on the device
    gives for the same seed:
    ``dataset.replay(batch, length).sample(jax.random.fold_in(jax.random.key(seed), i))``.
    Close it, or use it as a context manager, to stop its thread.

    Attributes
    ----------
    seed
        The seed of the batches.
    step
        The number of the batch that comes next.
    """

    def __init__(
        self,
        read: Callable[[Int[np.ndarray, "k B"]], list[Sequence]],
        order: Order,
        reader: Any,
        windows: Windows,
        *,
        seed: int,
        start: int,
        memory: int,
    ):
        self._read, self._order, self._reader = read, order, reader
        room = memory // (reader.batch_bytes * (2 + IN_HAND))
        together = max(1, min(GATHERED_WINDOWS // windows.batch_size, room))
        most = max(1, _MOST_AHEAD // together)
        most = parts_ahead(memory, together * reader.batch_bytes, "a batch", most)
        self.seed, self.step = check_seed(seed), check_start(start)
        self._together, self._most = together, most
        self._begin()

    def _begin(self) -> None:
        """Gather from the next batch on, once one is asked for."""
        stop = self._order.num_batches
        numbers = count(self.step, self._together)
        firsts = numbers if stop is None else range(self.step, stop, self._together)
        self._parts = ahead(partial(self._gather, self._together), firsts, self._most)
        self._batches = chain.from_iterable(self._parts)

    def _gather(self, together: int, first: int) -> list[Sequence]:
        """Return some batches, from a number on."""
        stop = self._order.num_batches
        stop = first + together if stop is None else min(first + together, stop)
        starts = map(self._order.slots, range(first, stop))
        return [batch for part in stack_slots(starts) for batch in self._read(part)]

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Sequence:
        """Return the next batch; fields are ``(B, T, ...)``. After an error, it is read again."""
        try:
            batch = next(self._batches)
        except StopIteration:
            raise
        except BaseException:
            self._begin()  # a generator that raised would seem to be at its end
            raise
        self.step += 1
        return batch

    def __len__(self) -> int:
        """Return the number of batches that are left; `TypeError` if there is no end."""
        return self._order.num_left(self.step)

    def state(self) -> dict[str, int]:
        """Return the arguments of `EpisodeSet.stream` that continue from here; JSON."""
        return {"seed": self.seed, "start": self.step}

    def close(self) -> None:
        """Stop gathering. Idempotent."""
        self._reader.close()
        self._parts.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    kind, blocked_kind, gather = _readers(to)
    reader: Any
    order: Order
    if shuffle_buffer is not None or getattr(source, "is_remote", False):
        check_unweighted(weights is not None, source)
        blocked, table = plan_blocks(source, windows, episodes, shuffle_buffer)
        order = BlockOrder(
            table.sizes, windows.batch_size, seed, epochs, drop_last, per_buffer=table.per_buffer
        )
        reader = blocked_kind(blocked, windows, order, table)
    else:
        reader = kind(source, windows, episodes, weights)
        order = make_order(reader.starts, windows.batch_size, seed, epochs, drop_last)
    read = partial(gather, reader)
    return Stream(read, order, reader, windows, seed=seed, start=start, memory=memory)


def _readers(to: str) -> tuple[Any, Any, Callable[..., list[Sequence]]]:
    """Return the readers of windows, from anywhere and by blocks, and their function of batches."""
    if to == "jax":
        from offmarl.replay.batches import BlockWindowSource, WindowSource

        return WindowSource, BlockWindowSource, WindowSource.each_at
    if to == "numpy":
        return WindowReader, BlockReader, WindowReader.each_array

    from offmarl.replay.torch import each_tensor

    return WindowReader, BlockReader, each_tensor
