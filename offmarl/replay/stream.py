"""Streams: batches that are gathered from disk ahead of time.

Which windows a batch is made of follows from the seed and its number. So a stream gives the very
batches that the same data on the device would, can begin at any step, and has no state but the
step's number. A thread gathers the next batches from the vault's memory map while the learner
computes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, islice
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Int

from offmarl.config import check_seed
from offmarl.errors import OptionError
from offmarl.replay.blocks import open_reader
from offmarl.replay.host import GATHERED_WINDOWS, IN_HAND, WindowReader, ahead, parts_ahead
from offmarl.replay.orders import Order, check_start
from offmarl.replay.rings import Mixed, Weighting
from offmarl.replay.sampling import Chosen, Source, Windows
from offmarl.types import Sequence

To = Literal["jax", "numpy", "torch"]
"""The library whose arrays batches are made of."""

_MOST_AHEAD = 16
"""Batches ready before they are asked for; more would only take memory."""


class Stream(AbstractContextManager["Stream"]):
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
        read: Callable[[list[Int[np.ndarray, "_"]]], list[Sequence]],
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
        self._together = max(1, min(GATHERED_WINDOWS // windows.batch_size, room))
        most, part = max(1, _MOST_AHEAD // self._together), self._together * reader.batch_bytes
        self._most = parts_ahead(memory, part, "a batch", most)
        self.seed, self.step = check_seed(seed), check_start(start)
        self._begin()

    def _begin(self) -> None:
        """Gather from the next batch on, once one is asked for."""
        firsts = self._order.steps(self.step, self._together)
        self._parts = ahead(self._gather, firsts, self._most)
        self._batches = chain.from_iterable(self._parts)

    def _gather(self, first: int) -> list[Sequence]:
        """Return some batches, from a number on."""
        steps = islice(self._order.steps(first), self._together)
        return self._read([*map(self._order.slots, steps)])

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
    passes = seed, epochs, drop_last
    reader, order = open_reader(source, windows, passes, episodes, weights, shuffle_buffer)
    read = partial(_function_of(to), reader)
    return Stream(read, order, reader, windows, seed=seed, start=start, memory=memory)


def _function_of(to: str) -> Callable[..., list[Sequence]]:
    """Return the function that reads batches, each from its slots."""
    if to == "jax":
        from offmarl.replay.batches import on_device

        return on_device
    if to == "torch":
        from offmarl.replay.torch import each_tensor

        return each_tensor
    return WindowReader.each_array
