"""The form in which a device keeps slots: a row of 32-bit words, and arrays for large leaves.

Small numbers of 32 bits are packed into the words of a slot's row, and masks as single bits behind
them. Leaves of other types keep their type in arrays of their own, and so do large leaves, which
are then gathered straight into the batch. Every episode is followed by one slot that holds its
final view. A window of T steps is T+1 slots, and the slot after each step is its exact next view,
wherever the window or the episode ends.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from offmarl.replay.fields import Fields, fields_of
from offmarl.replay.sampling import Windows
from offmarl.types import ArraySpec, EnvSpec

WORDS = "words"
"""The name of the array that holds all small fields."""

_OWN_BYTES = 256
"""From this size on a field has an array of its own."""

Rows = dict[str, Any]
"""Packed slots: the words ``(n, W)`` uint32, and ``(n, size)`` of each field with its own array."""


class Packed(NamedTuple):
    """Where a field is among the words, or among the bits behind them."""

    spec: ArraySpec
    start: int


@dataclass(frozen=True)
class Layout:
    """Which array, words or bits of a slot hold which field.

    Attributes
    ----------
    own
        The fields that have an array of their own.
    words, bits
        The fields in words and in single bits of the shared row.
    """

    own: dict[str, ArraySpec]
    words: dict[str, Packed]
    bits: dict[str, Packed]

    @property
    def num_words(self) -> int:
        """Words before the bits begin."""
        return sum(field.spec.size for field in self.words.values())

    @property
    def width(self) -> int:
        """W, words a row."""
        return self.num_words + -(-sum(field.spec.size for field in self.bits.values()) // 32)

    @property
    def bytes_of(self) -> dict[str, int]:
        """Bytes of a slot in each array."""
        return {name: spec.num_bytes for name, spec in self.own.items()} | {WORDS: 4 * self.width}

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return sum(self.bytes_of.values())


def layout_of(spec: EnvSpec, windows: Windows) -> Layout:
    """Return how the slots of windows are packed."""
    fields = fields_of(spec, windows)
    masks = {name: leaf for name, leaf in fields.items() if leaf.dtype == "bool"}
    small = {
        name: leaf
        for name, leaf in fields.items()
        if leaf.dtype in ("float32", "int32") and leaf.num_bytes < _OWN_BYTES
    }
    own = {name: leaf for name, leaf in fields.items() if name not in masks | small}
    return Layout(own, _place(small), _place(masks))


def _place(fields: dict[str, ArraySpec]) -> dict[str, Packed]:
    starts = np.cumsum([0, *(leaf.size for leaf in fields.values())]).tolist()
    return {name: Packed(fields[name], start) for name, start in zip(fields, starts, strict=False)}


def blank(layout: Layout, count: int, xp: Any = np) -> Rows:
    """Return ``count`` rows of zeros, in NumPy or ``jax.numpy``."""
    own = {
        name: xp.zeros((count, leaf.size), leaf.numpy_dtype) for name, leaf in layout.own.items()
    }
    return own | {WORDS: xp.zeros((count, layout.width), np.uint32)}


def pack(fields: Fields, layout: Layout, count: int) -> Rows:
    """Pack ``count`` slots; fields that are left out are zero (false)."""
    rows = blank(layout, count)
    for name, leaf in layout.own.items():
        if name in fields:
            rows[name][...] = fields[name].reshape(count, leaf.size)
    words = rows[WORDS]
    for name, (leaf, start) in layout.words.items():
        if name in fields:
            values = np.ascontiguousarray(fields[name], leaf.numpy_dtype).reshape(count, leaf.size)
            words[:, start : start + leaf.size] = values.view(np.uint32)
    bits = np.zeros((count, 32 * (layout.width - layout.num_words)), bool)
    for name, (leaf, start) in layout.bits.items():
        if name in fields:
            bits[:, start : start + leaf.size] = fields[name].reshape(count, leaf.size)
    packed = np.packbits(bits, axis=-1, bitorder="little")
    words[:, layout.num_words :] = packed.view(np.dtype("<u4"))
    return rows


def unpack(rows: Rows, layout: Layout, slots: Int[Array, "*b S"]) -> dict[str, Array]:
    """Gather slots and undo `pack`, on the device; each field is ``(*b, S, ...)``.

    All slots must exist.
    """
    words = _gather(rows[WORDS], slots)
    any_bit = rows[WORDS][0, 0] > 0
    own = {
        name: _gather_whole(rows[name], slots, any_bit).reshape(*slots.shape, *leaf.shape)
        for name, leaf in layout.own.items()
    }
    return own | _unpack_words(words, layout)


def _gather(array: Array, slots: Int[Array, "*b S"]) -> Array:
    return array.at[slots].get(mode="promise_in_bounds")


def _gather_whole(array: Array, slots: Int[Array, "*b S"], any_bit: Bool[Array, ""]) -> Array:
    """Gather slots ``(*b, S, size)``, each copied as one block.

    On a CPU, XLA would fuse the gather with the reshape that follows it, and copy a slot by its
    innermost axis. It fuses nothing with a conditional. Both branches are the same.
    """

    def on_cpu(array: Array, slots: Int[Array, "*b S"]) -> Array:
        return jax.lax.cond(any_bit, _gather, _gather_clipped, array, slots)

    found: Array = jax.lax.platform_dependent(array, slots, cpu=on_cpu, default=_gather)
    return found


def _gather_clipped(array: Array, slots: Int[Array, "*b S"]) -> Array:
    return array.at[slots].get(mode="clip")


def _unpack_words(words: UInt32[Array, "*b W"], layout: Layout) -> dict[str, Array]:
    lead = words.shape[:-1]
    found = {
        name: jax.lax.bitcast_convert_type(
            words[..., start : start + leaf.size], jnp.dtype(leaf.dtype)
        ).reshape(*lead, *leaf.shape)
        for name, (leaf, start) in layout.words.items()
    }
    tail = words[..., layout.num_words :, None]
    flags = ((tail >> jnp.arange(32, dtype=jnp.uint32)) & 1).astype(bool).reshape(*lead, -1)
    return found | {
        name: flags[..., start : start + leaf.size].reshape(*lead, *leaf.shape)
        for name, (leaf, start) in layout.bits.items()
    }
