"""Windows gathered from disk and put on the device; see `offmarl.replay.host`."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int, Key
from numpy.typing import NDArray

from offmarl._compiling import unguarded
from offmarl.replay.blocks import BlockGatherer
from offmarl.replay.circles import Mixed
from offmarl.replay.fields import Fields, finished, to_sequence
from offmarl.replay.gathering import Batch, BatchLayout
from offmarl.replay.host import WindowReader
from offmarl.replay.sampling import Source, Windows
from offmarl.replay.starts import draw_on_host
from offmarl.types import Sequence


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


class WindowSource(WindowReader):
    """Draws windows as `Replay.sample` does, gathers them from disk and puts them on the device."""

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


class BlockWindowSource(BlockGatherer, WindowSource):
    """Gathers windows of data on another machine, and puts them on the device."""


@unguarded()
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


@unguarded()
def on_host(keys: Key[Array, "*b"]) -> Key[Array, "*b"]:
    """Put keys where drawing waits for nothing; nowhere else where JAX knows no processor."""
    try:
        processor = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return keys
    return jax.device_put(keys, processor)
