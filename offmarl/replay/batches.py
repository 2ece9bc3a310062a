"""The batches of a training loop: drawn on the device, or streamed to it."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import repeat
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, PRNGKeyArray

from offmarl._arrays import largest_divisor
from offmarl.errors import OptionError
from offmarl.replay import device
from offmarl.replay.blocks import BlockOrder, check_unweighted, plan_blocks
from offmarl.replay.circles import Circles, Mixed, Weighting
from offmarl.replay.device import Replay, load_circles
from offmarl.replay.host import IN_HAND, ahead, parts_ahead
from offmarl.replay.priorities import Priorities, Prioritised
from offmarl.replay.sampling import Chosen, Source, Windows
from offmarl.replay.stream import Batches, BlockWindowSource, WindowSource, on_host

Kind = Literal["auto", "device", "stream", "blocks"]

_MOST_AHEAD = 2
_LAG = 32
"""Largest number of updates between the draw of a streamed batch by priorities and its use."""


class BatchSource:
    """Data for the updates of a loop, one piece after the other.

    Parameters
    ----------
    updates
        Updates that each piece is for.
    data
        The same replay again and again, or batches ``(seeds, updates, ...)``.
    draws
        How batches are drawn by priorities; None if they are not.
    """

    def __init__(
        self,
        updates: int,
        data: Iterator[Replay | Batches],
        draws: Prioritised | None = None,
    ):
        self.updates, self.data, self.draws = updates, data, draws

    def take(self, _done: int, _priorities: Priorities | None, _seeds: int) -> Replay | Batches:
        """Return the piece of the update after ``_done``.

        Parameters
        ----------
        _done
            Number of updates done.
        _priorities
            Of all seeds, after these updates.
        _seeds
            Number of seeds; priorities may have copies of the last after them.
        """
        return next(self.data)


class _DrawnAhead(BatchSource):
    """Batches of which the priorities' state has the slots, gathered while the device computes."""

    def __init__(self, drawn: WindowSource, draws: Prioritised, updates: int, last: int):
        super().__init__(updates, iter(()), draws)
        self._drawn, self._lag, self._last = drawn, draws.lag, last
        self._pool = ThreadPoolExecutor(1, "offmarl-stream")
        self._pieces: dict[int, Future[Batches]] = {}

    def take(self, done: int, priorities: Priorities | None, seeds: int) -> Replay | Batches:
        """Return the piece of the update after ``done``, and begin to gather the one after it."""
        assert priorities is not None
        slots = np.asarray(jax.device_get(priorities.slots), np.int64)[:seeds]
        first = done - done % self.updates
        for piece in (first, first + self.updates):
            if piece not in self._pieces and piece < self._last:
                at = np.arange(piece, piece + self.updates) % self._lag
                self._pieces[piece] = self._pool.submit(self._drawn.at, slots[:, at])
        return self._pieces.pop(first).result()

    def close(self) -> None:
        """Stop gathering."""
        self._pool.shutdown(cancel_futures=True)


def split_key(key: PRNGKeyArray, step: Int[Array, ""] | int) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """Return the keys that one update's batch is drawn with, and that the update itself uses."""
    sample_key, update_key = jax.random.split(jax.random.fold_in(key, step))
    return sample_key, update_key


@contextmanager
def open_batches(
    source: Source | Mixed,
    kind: Kind,
    windows: Windows,
    keys: Key[Array, "seeds"],
    steps: range,
    memory: int,
    episodes: Chosen = None,
    weights: Weighting = None,
    draws: Prioritised | None = None,
) -> Iterator[BatchSource]:
    """Open the batches of a loop over ``steps``, each of which stands for ``steps.step`` updates.

    Parameters
    ----------
    source
        What to learn from.
    kind
        Where batches come from. "auto": the device where the data fits into half of what is free,
        and has few enough steps for it. "blocks": a stream that is shuffled by blocks, see
        `offmarl.replay.blocks`; the blocks are the same for all seeds.
    windows
        What to draw.
    keys
        One for each seed.
    steps
        The first update of each block. One that begins inside of a block begins in the middle of
        a piece: pieces start at multiples of their size.
    memory
        Bytes that streamed batches may take at a time.
    episodes
        Numbers of the episodes to draw windows from; all of them by default.
    weights
        What steps weigh; all the same by default.
    draws
        How to draw by priorities, by which no batch is drawn by default. Streams need a lag.

    Raises
    ------
    ShapeError
        There is no step to draw.
    OptionError
        There is no room for a few batches, a stream has no lag, there are no such episodes, they
        weigh nothing, or there are too many steps for the device.
    """
    if kind == "blocks":
        check_unweighted(weights is not None or draws is not None, source)
        with _open_blocks(source, windows, keys, steps, memory, episodes) as blocks:
            yield blocks
        return
    circles = Circles(source, windows, episodes, weights)
    if kind == "device" or (kind == "auto" and device.fits(circles)):
        yield BatchSource(steps.step, repeat(load_circles(circles)), draws)
        return
    drawn, host_keys = WindowSource.of(circles), on_host(keys)
    part = len(keys) * drawn.batch_bytes
    if draws is not None:
        updates = min(draws.lag, lag_of(memory, part)) // 2
        if not updates:
            raise OptionError(
                "this run draws the batch of an update right before it, as only a replay on the "
                "device can: give --replay device, or choose another directory for a new run."
            )
        with closing(_DrawnAhead(drawn, draws, updates, steps.stop)) as ahead_of_use:
            yield ahead_of_use
        return
    most = parts_ahead(memory, part, "a batch for each seed", _MOST_AHEAD)
    updates = largest_divisor(steps.step, memory // (part * (most + IN_HAND)))

    def gather(first: int) -> Batches:
        return drawn.batches(_sample_keys(host_keys, first + jnp.arange(updates)))

    firsts = range(steps.start - steps.start % updates, steps.stop, updates)
    with closing(ahead(gather, firsts, most)) as data:
        yield BatchSource(updates, data)


@contextmanager
def _open_blocks(
    source: Source | Mixed,
    windows: Windows,
    keys: Key[Array, "seeds"],
    steps: range,
    memory: int,
    episodes: Chosen,
) -> Iterator[BatchSource]:
    """Open batches that are shuffled by blocks; each seed has its own order in the buffer."""
    blocked, table = plan_blocks(source, windows, episodes, None)
    words = np.asarray(jax.random.key_data(keys), np.uint32)
    seeds = words.reshape(len(keys), -1)[:, -1].tolist()
    blocks = {"block_seed": seeds[0], "per_buffer": table.per_buffer}
    orders = [BlockOrder(table.sizes, windows.batch_size, seed, **blocks) for seed in seeds]
    drawn = BlockWindowSource(blocked, windows, orders[0], table)
    part = len(keys) * drawn.batch_bytes
    most = parts_ahead(memory, part, "a batch for each seed", _MOST_AHEAD)
    updates = largest_divisor(steps.step, memory // (part * (most + IN_HAND)))

    def gather(first: int) -> Batches:
        numbers = range(first, first + updates)
        return drawn.at(np.stack([[order.slots(one) for one in numbers] for order in orders]))

    firsts = range(steps.start - steps.start % updates, steps.stop, updates)
    with closing(ahead(gather, firsts, most)) as data, closing(drawn):
        yield BatchSource(updates, data)


def lag_of(memory: int, part: int) -> int:
    """Return how many updates before its use a streamed batch is drawn by priorities.

    While the device uses one piece of as many batches as half of this, the next one is gathered.
    """
    parts_ahead(memory, part, "a batch for each seed", 1)  # raises the error if they are too few
    return min(_LAG, 2 * (memory // (part * (1 + IN_HAND))))


@jax.jit
def _sample_keys(keys: Key[Array, "seeds"], steps: Int[Array, "n"]) -> Key[Array, "seeds n"]:
    def of_seed(key: PRNGKeyArray) -> Key[Array, "n"]:
        return jax.vmap(lambda step: split_key(key, step)[0])(steps)

    return jax.vmap(of_seed)(keys)
