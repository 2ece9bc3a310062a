"""Replay that lives on the accelerator: a whole dataset, packed, sampled under jit."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray, UInt32
from numpy.typing import NDArray

from offmarl.replay import packing
from offmarl.replay.sampling import Chosen, Source, WindowTable, draw
from offmarl.types import EnvSpec, Sequence


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "starts"],
    meta_fields=["spec", "batch_size", "length"],
)
@dataclass(frozen=True, repr=False)
class Replay:
    """A dataset on the device, and the shape of the batches drawn from it.

    A pytree: pass it to jitted functions as an argument (closed over, it would be compiled in as
    a constant) and call `sample` there.

    Attributes
    ----------
    rows
        ``(R, W)`` packed steps and final views.
    starts
        ``(M,)`` rows at which a window may start.
    spec
        Sizes of the data.
    batch_size, length
        Windows in a batch, and steps in a window (B and T).
    """

    rows: UInt32[Array, "R W"]
    starts: Int[Array, "M"]
    spec: EnvSpec
    batch_size: int
    length: int

    def sample(self, key: PRNGKeyArray) -> Sequence:
        """Draw ``batch_size`` windows uniformly, with replacement; fields are ``(B, T, ...)``."""
        return self.windows(self.starts[draw(key, self.batch_size, self.starts.shape[0])])

    def windows(self, starts: Int[Array, "B"]) -> Sequence:
        """Unpack the windows that start at the given rows."""
        size = (self.length + 1, self.rows.shape[1])
        rows = jax.vmap(lambda start: jax.lax.dynamic_slice(self.rows, (start, 0), size))(starts)
        return packing.to_sequence(rows, self.spec)

    def __repr__(self) -> str:
        """Say what is drawn, and not what from."""
        name = self.spec.name or "a dataset"
        return f"<Replay of {name}: batches of {self.batch_size} windows of {self.length} steps>"

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self.rows.nbytes + self.starts.nbytes)


def load(source: Source, batch_size: int, length: int, episodes: Chosen = None) -> Replay:
    """Put a whole vault on the device, once, a block after the other.

    The host holds one block at a time, some tens of megabytes.

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
    table = WindowTable(source, batch_size, length, episodes)
    layout = packing.layout_of(source.spec)
    rows = _blank_rows(table.num_rows, jnp.asarray(packing.blank(layout)))
    for where, block in chain(_finals(source, table, layout), _steps(source, table, layout)):
        rows = _put(rows, where, block)
    starts = jnp.asarray(table.all_starts(), jnp.int32)
    return Replay(rows, starts, source.spec, batch_size, length)


def nbytes(source: Source, length: int) -> int:
    """Return the bytes that `load` would take on the device for windows of a length."""
    table = WindowTable(source, 1, length)
    return 4 * (table.num_rows * packing.layout_of(source.spec).width + table.num_windows)


@partial(jax.jit, static_argnums=0)
def _blank_rows(count: int, row: UInt32[Array, "W"]) -> UInt32[Array, "R W"]:
    return jnp.broadcast_to(row, (count, len(row)))


@partial(jax.jit, donate_argnums=0)
def _put(
    rows: UInt32[Array, "R W"], where: Int[Array, "n"], block: UInt32[Array, "n W"]
) -> UInt32[Array, "R W"]:
    return rows.at[where].set(block, unique_indices=True)


def _steps(
    source: Source, table: WindowTable, layout: packing.Layout
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint32]]]:
    """Yield the vault's steps packed, and the rows they belong to, by blocks of time."""
    episodes = source.episodes
    # Episodes stand one after the other in each row of the vault, and the rows in order.
    begins = episodes.row * source.length + episodes.start
    for start, stop in source.blocks():
        time = np.tile(np.arange(start, stop), source.rows)
        row = np.repeat(np.arange(source.rows), stop - start)
        episode = np.searchsorted(begins, row * source.length + time, side="right") - 1
        done = time - episodes.start[episode]
        left, known = episodes.length[episode] - done, episodes.final[episode] >= 0
        steps: Any = source.transitions(start, stop)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps)
        yield table.offsets[episode] + done, packing.pack_steps(flat, left, known, layout)


def _finals(
    source: Source, table: WindowTable, layout: packing.Layout
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint32]]]:
    """Yield the final views packed, and the rows they belong to."""
    final = source.episodes.final
    known = np.flatnonzero(final >= 0)
    step = 2**12
    for first in range(0, len(known), step):
        some = known[first : first + step]
        views = source.final_views(final[some])
        yield (
            (table.offsets + table.lengths)[some],
            packing.pack(views._asdict(), layout, len(some)),
        )
