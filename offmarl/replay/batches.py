"""Batches on the device: loaded as a whole, or gathered from disk and put there."""

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, repeat
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.lax import bitcast_convert_type
from jaxtyping import Array, Int, Key, PRNGKeyArray
from numpy.typing import NDArray

from offmarl._arrays import largest_divisor
from offmarl._compiling import without_guards
from offmarl.replay import device, threefry
from offmarl.replay.blocks import BLOCK_SEED, BlockGatherer, BlockTable, check_blocked
from offmarl.replay.device import Replay, load_rings
from offmarl.replay.fields import Fields, finish_fields, to_sequence
from offmarl.replay.gathering import Batch, BatchLayout
from offmarl.replay.host import IN_HAND, WindowReader, ahead, parts_ahead
from offmarl.replay.orders import BlockOrder
from offmarl.replay.priorities import Prioritised
from offmarl.replay.rings import Mixed, Weighting
from offmarl.replay.sampling import Chosen, Source, Windows
from offmarl.replay.starts import draw_on_host
from offmarl.types import Sequence

Kind = Literal["auto", "device", "stream", "blocks"]

_MOST_AHEAD = 2


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
        """Return the batches at an index of the first axis."""
        return jax.tree.map(lambda leaf: leaf[index], self)


class WindowSource(WindowReader):
    """Draws windows as `Replay.sample` does, gathers them from disk and puts them on the device."""

    def at(self, starts: Int[np.ndarray, "*b"]) -> Batches:
        """Return the windows that start at given slots, on the device."""
        (data,) = _on_device(self._gather(starts.ravel()), self._layout, (starts.shape,))
        return Batches(data)

    def each_at(self, starts: list[Int[np.ndarray, "_"]]) -> list[Sequence]:
        """Return batches of windows on the device, each from its slots; see `each_array`."""
        batch = self._gather(np.concatenate(starts))
        return _on_device(batch, self._layout, tuple(slots.shape for slots in starts))

    def beginnings(self) -> Sequence:
        """Return the windows that the episodes begin with, ``(K, T, ...)``, on the device.

        Where an episode ends before its window, the slot that ends it is repeated.
        """
        counts = [len(ring.table.episodes) for ring in self.rings.members]
        batch, first = Batch(self._layout, sum(counts)), 0
        for reader, number in zip(self._readers, counts, strict=True):
            reader.read_beginnings(batch, first + np.arange(number))
            first += number
        (sequence,) = _on_device(batch, self._layout, ((first,),))
        return sequence


class BlockWindowSource(BlockGatherer, WindowSource):
    """Gathers windows of data on another machine, and puts them on the device."""


_Shapes = tuple[tuple[int, ...], ...]
"""The leading axes of sequences whose windows are gathered together, one after the other."""


@without_guards()
def _on_device(batch: Batch, layout: BatchLayout, shapes: _Shapes) -> list[Sequence]:
    """Put windows on the device, as sequences.

    Small fields are transferred together. Large ones are not copied where the device is a CPU.
    """
    stops = np.cumsum([0, *map(math.prod, shapes)]).tolist()
    large = [
        {name: leaf[i:j].reshape(*shape, *leaf.shape[1:]) for name, leaf in batch.large.items()}
        for shape, (i, j) in zip(shapes, pairwise(stops), strict=True)
    ]
    small = _split(batch.shared, layout, shapes)
    return [to_sequence(a | b) for a, b in zip(small, jax.device_put(large), strict=True)]


@partial(jax.jit, static_argnums=(1, 2))
def _split(shared: dict[str, Array], layout: BatchLayout, shapes: _Shapes) -> list[Fields]:
    """Cut the small fields of windows out of the memory that they share."""
    batches: list[Fields] = [{} for _ in shapes]
    for word, fields in layout.shared:
        start = 0
        for field in fields:
            for batch, shape in zip(batches, shapes, strict=True):
                stop = start + math.prod(shape) * field.size
                words = shared[word][start:stop]
                is_mask = field.dtype.kind == "b"
                values = words != 0 if is_mask else bitcast_convert_type(words, field.dtype)
                batch[field.name] = values.reshape(*shape, *field.shape)
                start = stop
    return [finish_fields(batch, layout.windows) for batch in batches]


def whole_episodes(source: Source | Mixed, episodes: NDArray[np.int64]) -> Sequence:
    """Put some episodes on the device, ``(M, T, ...)`` with T the length of the longest."""
    longest = int(source.episodes.length.take(episodes, mode="clip").max(initial=1))
    return WindowSource(source, Windows(1, longest), episodes).beginnings()


# ---------------------------------------------------------------------------------- loops


class BatchSource(NamedTuple):
    """Data for the updates of a loop, one piece after the other.

    Attributes
    ----------
    updates
        Updates that each piece is for.
    data
        The same replay again and again, or batches ``(seeds, updates, ...)``.
    draws
        How batches are drawn by priorities from a replay; None without priorities.
    """

    updates: int
    data: Iterator[Replay | Batches]
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
        with _open_blocks(source, windows, keys, steps, memory, episodes) as blocks:
            yield blocks
        return
    reader = WindowSource(source, windows, episodes, weights)
    if kind == "device" or (kind == "auto" and device.fits_device(reader.rings)):
        yield BatchSource(steps.step, repeat(load_rings(reader.rings)), draws)
        return
    words = np.asarray(jax.random.key_data(keys))[:, None, :2]  # of an rbg key, the first half

    def gather(numbers: range) -> Batches:
        pairs = threefry.split(threefry.fold_in(words, np.array(numbers)))  # as `split_key`
        return reader.at(draw_on_host(reader.rings.starts, pairs[..., 0, :], windows.batch_size))

    with _gathered(gather, len(keys) * reader.batch_bytes, steps, memory) as batches:
        yield batches


@contextmanager
def _open_blocks(
    source: Any,
    windows: Windows,
    keys: Key[Array, "seeds"],
    steps: range,
    memory: int,
    episodes: Chosen,
) -> Iterator[BatchSource]:
    """Open batches that are shuffled by blocks; each seed has its own order in the buffer.

    The order of blocks does not depend on the seeds: seeds that run side by side read the same
    blocks, and each has the same batches as when it runs alone.
    """
    table = BlockTable(source, windows, episodes)
    words = np.asarray(jax.random.key_data(keys), np.uint32)
    seeds = words.reshape(len(keys), -1)[:, -1].tolist()
    order_of = partial(BlockOrder, block_seed=BLOCK_SEED, per_buffer=table.per_buffer)
    orders = [order_of(table.sizes, windows.batch_size, seed) for seed in seeds]
    reader = BlockWindowSource(source, windows, orders[0], table)

    def gather(numbers: range) -> Batches:
        return reader.at(np.stack([[*map(order.slots, numbers)] for order in orders]))

    with (
        closing(reader),
        _gathered(gather, len(keys) * reader.batch_bytes, steps, memory) as batches,
    ):
        yield batches


@contextmanager
def _gathered(
    gather: Callable[[range], Batches], part: int, steps: range, memory: int
) -> Iterator[BatchSource]:
    """Gather the batches of some updates at a time, ahead of use; ``part`` is an update's bytes."""
    most = parts_ahead(memory, part, "a batch for each seed", _MOST_AHEAD)
    updates = largest_divisor(steps.step, memory // (part * (most + IN_HAND)))
    firsts = range(steps.start - steps.start % updates, steps.stop, updates)
    with closing(ahead(lambda x: gather(range(x, x + updates)), firsts, most)) as data:
        yield BatchSource(updates, data, None)
