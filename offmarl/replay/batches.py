"""Batches on the device: loaded as a whole, or gathered from disk and put there."""

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise, repeat
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int, Key, PRNGKeyArray
from numpy.typing import NDArray

from offmarl._arrays import largest_divisor
from offmarl._compiling import without_guards
from offmarl.replay import device, threefry
from offmarl.replay.blocks import BLOCK_SEED, BlockReader, BlockTable, check_blocked
from offmarl.replay.device import Replay, load_rings
from offmarl.replay.fields import FINISHED, Fields, finish_fields, to_sequence
from offmarl.replay.host import IN_HAND, WindowReader, ahead, parts_ahead
from offmarl.replay.orders import BlockOrder
from offmarl.replay.priorities import Prioritised
from offmarl.replay.rings import Mixed, Weighting
from offmarl.replay.sampling import Chosen, Source, Windows
from offmarl.replay.starts import Starts, draw_on_host
from offmarl.types import Sequence

Kind = Literal["auto", "device", "stream", "blocks"]

_MOST_AHEAD = 2
_LARGE_BYTES = 512
"""From this size of a slot on, JAX need not copy a field."""


def on_device(reader: WindowReader, starts: list[Int[np.ndarray, "..."]]) -> list[Sequence]:
    """Return windows on the device, ``(*b, T, ...)``, for each of some arrays of slots ``(*b,)``.

    All are gathered at once, which takes less time than one call for each.
    """
    batch = reader.gather(np.concatenate([slots.ravel() for slots in starts]))
    return _put(batch, reader.windows, tuple(slots.shape for slots in starts))


def beginnings(source: Source | Mixed, windows: Windows, episodes: Chosen) -> Sequence:
    """Put the windows on the device that K episodes begin with, ``(K, T, ...)``.

    Where an episode ends before its window, the slot that ends it is repeated.
    """
    reader = WindowReader(source, windows, episodes)
    batch = reader.beginnings()
    (sequence,) = _put(batch, windows, (batch["mask"].shape[:1],))
    return sequence


def whole_episodes(source: Source | Mixed, episodes: NDArray[np.int64]) -> Sequence:
    """Put some episodes on the device, ``(M, T, ...)`` with T the length of the longest."""
    longest = int(source.episodes.length.take(episodes, mode="clip").max(initial=1))
    return beginnings(source, Windows(1, longest), episodes)


_Shapes = tuple[tuple[int, ...], ...]
"""The leading axes of sequences whose windows are gathered together, one after the other."""


@without_guards()
def _put(batch: Fields, windows: Windows, shapes: _Shapes) -> list[Sequence]:
    """Put windows on the device, as sequences.

    Small fields are cut there. Large ones are not copied where the device is a CPU.
    """
    uncut, large = dict(batch), {}
    for name in batch.keys() - FINISHED:
        if batch[name][:1, :1].nbytes >= _LARGE_BYTES:
            large[name] = uncut.pop(name)
    parts = zip(_finished(uncut, windows, shapes), jax.device_put(_cut(large, shapes)), strict=True)
    return [to_sequence(finished | cut) for finished, cut in parts]


def _cut(fields: Fields, shapes: _Shapes) -> list[Fields]:
    """Divide windows into those of each sequence."""
    stops = np.cumsum([0, *map(math.prod, shapes)]).tolist()
    return [
        {name: leaf[i:j].reshape(*shape, *leaf.shape[1:]) for name, leaf in fields.items()}
        for shape, (i, j) in zip(shapes, pairwise(stops), strict=True)
    ]


@partial(jax.jit, static_argnums=(1, 2))
def _finished(fields: Fields, windows: Windows, shapes: _Shapes) -> list[Fields]:
    return [finish_fields(part, windows) for part in _cut(fields, shapes)]


# ---------------------------------------------------------------------------------- loops


class BatchSource(NamedTuple):
    """Data for the updates of a loop, one piece after the other.

    Attributes
    ----------
    updates
        Updates that each piece is for.
    data
        The same replay again and again, or batches ``(seeds, updates, B, T, ...)``.
    draws
        How batches are drawn by priorities from a replay; None without priorities.
    """

    updates: int
    data: Iterator[Replay | Sequence]
    draws: Prioritised | None


def split_key(key: PRNGKeyArray, step: Int[Array, ""] | int) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """Return the key that draws an update's batch, and the key of the update itself."""
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
        A vault or a mixture.
    kind
        Where batches come from. "auto": the device where the data fits into half of what is free,
        and has few enough steps for it. "blocks": a stream that is shuffled by blocks, see
        `offmarl.replay.blocks`; the blocks are the same for all seeds.
    windows
        The windows to draw.
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
        Weights of steps; all the same by default.
    draws
        How to draw by priorities, from the device; by default without priorities.

    Raises
    ------
    ShapeError
        There is no step to draw.
    OptionError
        There is no room for a few batches, there are no such episodes, they weigh nothing, or there
        are too many steps for the device.
    """
    if kind == "blocks":
        check_blocked(source, weights is not None or draws is not None)
        reader, slots_of = _blocked(source, windows, keys, episodes)
    else:
        reader = WindowReader(source, windows, episodes, weights)
        if kind == "device" or (kind == "auto" and device.fits_device(reader.rings)):
            yield BatchSource(steps.step, repeat(load_rings(reader.rings)), draws)
            return
        slots_of = _drawn(reader.rings.starts, keys, windows.batch_size)
    part = len(keys) * reader.batch_bytes  # of an update
    most = parts_ahead(memory, part, "a batch for each seed", _MOST_AHEAD)
    updates = largest_divisor(steps.step, memory // (part * (most + IN_HAND)))
    firsts = range(steps.start - steps.start % updates, steps.stop, updates)

    def gather(first: int) -> Sequence:
        (batches,) = on_device(reader, [slots_of(range(first, first + updates))])
        return batches

    with closing(reader), closing(ahead(gather, firsts, most)) as data:
        yield BatchSource(updates, data, None)


_SlotsOf = Callable[[range], Int[np.ndarray, "seeds updates B"]]
"""Returns the slots that the windows of some updates start at."""


def _drawn(starts: Starts, keys: Key[Array, "seeds"], batch_size: int) -> _SlotsOf:
    """Draw windows from everywhere."""
    words = np.asarray(jax.random.key_data(keys))[:, None, :2]  # of an rbg key, the first half

    def slots_of(numbers: range) -> Int[np.ndarray, "seeds updates B"]:
        pairs = threefry.split(threefry.fold_in(words, np.array(numbers)))  # as `split_key`
        return draw_on_host(starts, pairs[..., 0, :], batch_size)

    return slots_of


def _blocked(
    source: Any, windows: Windows, keys: Key[Array, "seeds"], episodes: Chosen
) -> tuple[WindowReader, _SlotsOf]:
    """Shuffle windows by blocks; each seed has its own order in the buffer.

    The order of blocks does not depend on the seeds: seeds that run side by side read the same
    blocks, and each has the same batches as when it runs alone.
    """
    table = BlockTable(source, windows, episodes)
    words = np.asarray(jax.random.key_data(keys), np.uint32)
    seeds = words.reshape(len(keys), -1)[:, -1].tolist()
    order_of = partial(BlockOrder, block_seed=BLOCK_SEED, per_buffer=table.per_buffer)
    orders = [order_of(table.sizes, windows.batch_size, seed) for seed in seeds]
    reader = BlockReader(source, windows, orders[0], table)
    return reader, lambda numbers: np.stack([[*map(order.slots, numbers)] for order in orders])
