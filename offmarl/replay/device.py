"""Replay that lives on the accelerator: a whole dataset, packed, sampled under jit."""

import os
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int, PRNGKeyArray

from offmarl._compiling import without_guards
from offmarl.errors import OptionError
from offmarl.replay import packing
from offmarl.replay.fields import check_extras, finish_fields, to_sequence, without_last_slot
from offmarl.replay.gathering import read_slots
from offmarl.replay.packing import Rows
from offmarl.replay.rings import Mixed, SlotRings, Weighting
from offmarl.replay.sampling import Chosen, Source, Windows
from offmarl.replay.starts import WORDS_OF_A_DRAW, Starts, Uniform
from offmarl.replay.threefry import below
from offmarl.types import ArrayTree, EnvSpec, Sequence

_MOST_ROWS = 2**31 - 1
"""Rows that an int32 can count; without ``jax_enable_x64`` JAX has no wider index."""
_READ_BYTES = 2**25
"""Approximate size of the slots that are put on the device at once."""


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
        Packed slots, R+T rows in each array: the ring of R, and its first T once more. In a
        mixture, as much for each vault.
    spec
        Sizes of the data.
    windows
        Sizes of the batches.
    starts
        How likely a window is to start at each slot.
    factors
        The factor of each row's step in losses; None for 1.
    """

    rows: Rows
    spec: EnvSpec
    windows: Windows
    starts: Starts
    factors: Float[Array, "rows"] | None

    @property
    def num_slots(self) -> int:
        """R: the slots at which a window may start, with those left out in a mixture."""
        return self.rows[packing.WORDS].shape[0] - self.windows.steps

    @without_guards()
    def sample(self, key: PRNGKeyArray) -> Sequence:
        """Draw a batch of windows, ``(B, T, ...)``; each step is as likely as it weighs."""
        return self.at(draw(self.starts, key, self.windows.batch_size))

    @without_guards()
    def at(self, slots: Int[Array, "B"]) -> Sequence:
        """Unpack the windows that start at the given slots."""
        layout = packing.layout_of(self.spec, self.windows)
        fields = without_last_slot(packing.unpack(self.rows, layout, slots, self.windows.slots))
        if self.factors is not None:
            rows = slots[:, None] + jnp.arange(self.windows.steps)
            fields["weight"] = self.factors[rows]
        return to_sequence(finish_fields(fields, self.windows))

    def __repr__(self) -> str:
        """Describe the batches."""
        name, shape = self.spec.name or "a dataset", self.windows
        return f"<Replay of {name}: batches of {shape.batch_size} windows of {shape.length} steps>"

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(array.nbytes for array in self.rows.values())


def draw(starts: Starts, key: PRNGKeyArray, count: int) -> Int[Array, "count"]:
    """Draw slots that windows start at; `offmarl.replay.starts.draw_on_host` draws the same."""
    pair = jax.random.key_data(key)[:2]  # the first half of an rbg key is that of a threefry key
    if isinstance(starts, Uniform):
        first, second = jnp.stack(_hash(pair, 2), -1)
        high, low = (jnp.bitwise_xor(*_hash(half, count)) for half in (first, second))
        return below(high, low, jnp.uint32(starts.num_slots)).astype(jnp.int32)
    words = jnp.bitwise_xor(*_hash(pair, WORDS_OF_A_DRAW * count)).reshape(-1, count)
    number = below(words[0], words[1], jnp.uint32(len(starts.share)))
    number = jnp.where(words[2] < starts.threshold[number], number, starts.alias[number])
    inside = below(words[3], words[4], starts.size[number].astype(jnp.uint32))
    return starts.first[number] + inside.astype(starts.first.dtype)


def _hash(pair: Array, num: int) -> tuple[Array, Array]:
    """Encrypt counters as `jax.random` does by default; its functions ask the user's settings."""
    counts = jnp.concatenate([jnp.zeros(num, jnp.uint32), jnp.arange(num, dtype=jnp.uint32)])
    high, low = jnp.split(threefry_2x32((pair[0], pair[1]), counts), 2)
    return high, low


def probability(starts: Starts, slots: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """Return how likely each slot is in a draw."""
    if isinstance(starts, Uniform):
        return jnp.full(slots.shape, 1 / starts.num_slots, jnp.float32)
    number = jnp.searchsorted(starts.first, slots, side="right") - 1
    offset = slots - starts.first[number]
    inside = (offset >= 0) & (offset < starts.size[number])
    return jnp.where(inside, starts.share[number] / starts.size[number], 0.0)


def load(
    source: Source | Mixed,
    windows: Windows,
    episodes: Chosen = None,
    weights: Weighting = None,
) -> Replay:
    """Put a whole vault on the device, once, a block after the other; or all vaults of a mixture.

    The host holds one block at a time, some tens of megabytes, and the returns-to-go if batches
    carry them.

    Raises
    ------
    ShapeError
        There is no step to draw.
    OptionError
        There are no episodes of such numbers, they weigh nothing, or there are too many steps for
        the device.
    """
    return load_rings(SlotRings(source, windows, episodes, weights))


@without_guards()
def load_rings(rings: SlotRings) -> Replay:
    """Put the slots of rings on the device; see `load`."""
    source, windows = rings.source, rings.windows
    check_extras(source.spec, windows, source.path)
    layout = packing.layout_of(source.spec, windows)
    _check_room(rings, layout)
    rows = _blank(source.spec, windows, rings.num_rows)
    for ring in rings.members:
        count = ring.table.num_slots + windows.steps
        parts = read_slots(ring.table, windows, count, _READ_BYTES, ring.first_episode)
        for slots, fields in parts:
            # Each size is compiled: there are eight for each power of two.
            unit = 2 ** max(0, len(slots).bit_length() - 4)
            size = -(-len(slots) // unit) * unit
            index = np.full(size, rings.num_rows)
            np.copyto(index[: len(slots)], ring.first_slot + slots, where=slots < count)
            rows = _put(rows, index, packing.pack(fields, layout, size))
    starts, factors = jax.device_put((rings.starts, rings.factors))
    return Replay(rows, source.spec, windows, starts, factors)


def _check_room(rings: SlotRings, layout: packing.SlotLayout) -> None:
    """Raise `OptionError` if the device has no room for the data, or no numbers for its slots."""
    count, free, path = rings.num_rows, free_bytes(), rings.source.path
    if count > _MOST_ROWS:
        raise OptionError(
            f"{path} has more steps than the {_MOST_ROWS:,} that can be drawn on a device: "
            "stream the batches, or draw from fewer episodes."
        )
    if (size := count * layout.slot_bytes) > free:
        raise OptionError(
            f"{path} is too large for the device: its {count:,} slots need {size:,} bytes, and "
            f"{free:,} are free. Stream the batches, or draw from fewer episodes."
        )


def fits_device(rings: SlotRings) -> bool:
    """Whether `load_rings` takes at most half of what is free on the device."""
    layout = packing.layout_of(rings.source.spec, rings.windows)
    return rings.num_rows <= _MOST_ROWS and 2 * rings.num_rows * layout.slot_bytes <= free_bytes()


def free_bytes() -> int:
    """Return the bytes that are free on the device.

    For a CPU, its memory, of which each of the devices that it is split into has a share.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    if limit := stats.get("bytes_limit"):  # some allocators tell none
        return int(limit - stats["bytes_in_use"])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(jax.local_devices())


def bytes_of(tree: ArrayTree) -> int:
    """Return the size of arrays, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def room_on(devices: int | None = None) -> int:
    """Return the bytes that are free on some of this machine's devices; by default on all."""
    count = len(jax.local_devices())
    return free_bytes() * (count if jax.default_backend() == "cpu" else devices or count)


def require_room(
    needed: int, name: str, devices: int | None = None, hint: str = "give smaller numbers"
) -> None:
    """Raise `OptionError` if the devices have less memory than something needs at least.

    XLA ends the process for sizes that are far too large, and so does the system for others.
    """
    room = room_on(devices)
    if needed > room:
        raise OptionError(
            f"{name} need at least {needed / 1e9:,.1f} GB of memory, and there are "
            f"{room / 1e9:,.1f} GB: {hint}."
        )


@partial(jax.jit, static_argnums=(0, 1, 2))
def _blank(spec: EnvSpec, windows: Windows, count: int) -> Rows:
    return packing.blank(packing.layout_of(spec, windows), count, jnp)


@partial(jax.jit, donate_argnums=0)
def _put(rows: Rows, index: Int[Array, "n"], block: Rows) -> Rows:
    return jax.tree.map(lambda old, new: old.at[index].set(new, mode="drop"), rows, block)
