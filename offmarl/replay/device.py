"""Replay that lives on the accelerator: a whole dataset, packed, sampled under jit."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32
from numpy.typing import NDArray

from offmarl.errors import OptionError
from offmarl.replay import packing
from offmarl.replay.circles import Circles, Mixed, Part, Weighting
from offmarl.replay.packing import Place
from offmarl.replay.sampling import Chosen, Source, Windows, returns_to_go
from offmarl.replay.starts import Starts
from offmarl.types import EnvSpec, Sequence

_MOST_ROWS = 2**31 - 1
"""Rows that an int32 can count; without ``jax_enable_x64`` JAX has no wider index."""

_Block = tuple[NDArray[np.int64], NDArray[np.uint32]]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "starts", "factors"],
    meta_fields=["spec", "windows"],
)
@dataclass(frozen=True, repr=False)
class Replay:
    """A dataset on the device, and the shape of the batches drawn from it.

    A pytree: pass it to jitted functions as an argument (closed over, it would be compiled in as
    a constant) and call `sample` there.

    Attributes
    ----------
    rows
        ``(R+T, W)`` packed slots: the circle of R, and its first T once more. In a mixture, as much
        for each vault.
    spec
        Sizes of the data.
    windows
        Sizes of the batches.
    starts
        How likely a window is to start at each slot.
    factors
        What each row's step is multiplied by in losses; None for 1.
    """

    rows: UInt32[Array, "rows W"]
    spec: EnvSpec
    windows: Windows
    starts: Starts
    factors: Float[Array, "rows"] | None

    @property
    def num_slots(self) -> int:
        """R: the slots at which a window may start, with those left out in a mixture."""
        return self.rows.shape[0] - self.windows.steps

    def sample(self, key: PRNGKeyArray) -> Sequence:
        """Draw a batch of windows, ``(B, T, ...)``; each step is as likely as it weighs."""
        return self.at(self.starts.draw(key, self.windows.batch_size))

    def at(self, slots: Int[Array, "B"]) -> Sequence:
        """Unpack the windows that start at the given slots."""
        size = (self.windows.slots, self.rows.shape[1])
        rows = jax.vmap(lambda slot: jax.lax.dynamic_slice(self.rows, (slot, 0), size))(slots)
        sequence = packing.to_sequence(rows, self.spec, self.windows)
        if self.factors is None:
            return sequence
        return sequence._replace(
            weight=self.factors[slots[:, None] + jnp.arange(self.windows.steps)]
        )

    def __repr__(self) -> str:
        """Say what is drawn, and not what from."""
        name, shape = self.spec.name or "a dataset", self.windows
        return f"<Replay of {name}: batches of {shape.batch_size} windows of {shape.length} steps>"

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self.rows.nbytes)


def load(
    source: Source | Mixed,
    windows: Windows,
    episodes: Chosen = None,
    weights: Weighting = None,
) -> Replay:
    """Put a whole vault on the device, once, a block after the other; or all vaults of a mixture.

    The host holds one block at a time, some tens of megabytes, and the returns-to-go if batches
    carry them.

    Parameters
    ----------
    source
        What to draw from.
    windows
        What to draw.
    episodes
        Numbers of the episodes to draw from; all of them by default. Only these are loaded.
    weights
        What steps weigh; all the same by default.

    Raises
    ------
    ShapeError
        There is no step to draw.
    OptionError
        There are no episodes of such numbers, they weigh nothing, or there are too many steps for
        the device.
    """
    circles = Circles(source, windows, episodes, weights)
    if circles.num_rows > _MOST_ROWS:
        raise OptionError(
            f"{source.path} has more steps than the {_MOST_ROWS:,} that can be drawn on a device: "
            "stream the batches, or draw from fewer episodes."
        )
    layout = packing.layout_of(source.spec, windows)
    rows = _blank_rows(circles.num_rows, layout.width)
    for part in circles.parts:
        steps = _steps(part, layout, windows, past=circles.num_rows)
        for where, block in chain(_ends(part, layout), steps):
            rows = _put(rows, where, block)
        rows = _close(rows, part.first_slot, part.table.num_slots, windows.steps)
    starts, factors = jax.device_put((circles.starts, circles.factors))
    return Replay(rows, source.spec, windows, starts, factors)


def nbytes(circles: Circles, windows: Windows) -> int:
    """Return the bytes that `load` would take on the device."""
    spec = circles.parts[0].source.spec
    return 4 * circles.num_rows * packing.layout_of(spec, windows).width


def can_index(circles: Circles) -> bool:
    """Whether the data has few enough slots for a device to draw from."""
    return circles.num_rows <= _MOST_ROWS


@partial(jax.jit, static_argnums=(0, 1))
def _blank_rows(count: int, width: int) -> UInt32[Array, "rows W"]:
    return jnp.zeros((count, width), jnp.uint32)


@partial(jax.jit, donate_argnums=0)
def _put(
    rows: UInt32[Array, "rows W"], where: Int[Array, "n"], block: UInt32[Array, "n W"]
) -> UInt32[Array, "rows W"]:
    return rows.at[where].set(block, mode="drop")


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def _close(
    rows: UInt32[Array, "rows W"],
    first: Int[Array, ""] | int,
    num_slots: Int[Array, ""] | int,
    steps: int,
) -> UInt32[Array, "rows W"]:
    """Repeat a circle's beginning after its end, so that windows there are one slice too."""
    past = jnp.arange(steps)
    return rows.at[first + num_slots + past].set(rows[first + past % num_slots])


def _steps(part: Part, layout: packing.Layout, windows: Windows, past: int) -> Iterator[_Block]:
    """Yield the vault's steps packed, and the rows they belong to, by blocks of time.

    Steps that are not drawn belong to rows from ``past`` on, which do not exist.
    """
    source, table, episodes = part.source, part.table, part.source.episodes
    discount = windows.return_to_go
    to_go = None if discount is None else returns_to_go(source, discount)
    offsets = np.full(len(episodes.length), past)
    offsets[table.episodes] = part.first_slot + table.offsets
    # Episodes stand one after the other in each row of the vault, and the rows in order.
    begins = episodes.row * source.length + episodes.start
    for start, stop in source.blocks():
        time = np.tile(np.arange(start, stop), source.rows)
        row = np.repeat(np.arange(source.rows), stop - start)
        episode = np.searchsorted(begins, row * source.length + time, side="right") - 1
        steps: Any = source.transitions(start, stop)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps)
        place = Place(time - episodes.start[episode], episode)
        follows = None if to_go is None else to_go[row, time]
        packed = packing.pack_steps(flat, place, episodes, layout, follows, part.first_episode)
        yield offsets[episode] + place.time, packed


def _ends(part: Part, layout: packing.Layout) -> Iterator[_Block]:
    """Yield the slots that end episodes, packed, and where they belong."""
    table, count = part.table, 2**12
    for first in range(0, len(table.episodes), count):
        some = slice(first, first + count)
        place = Place(table.lengths[some], table.episodes[some])
        packed = packing.pack_ends(place, part.source, layout, part.first_episode)
        yield part.first_slot + table.offsets[some] + place.time, packed
