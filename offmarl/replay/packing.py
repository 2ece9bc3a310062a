"""The form in which a device keeps slots: a row of 32-bit words, and arrays for large leaves.

Small numbers of 32 bits are packed into the words of a slot's row, and masks as single bits behind
them. Leaves of other types keep their type in arrays of their own, and so do large leaves, which
are then gathered straight into the batch. Every episode is followed by one slot that holds its
final view. A window of T steps is T+1 slots, and the slot after each step is its exact next view,
wherever the window or the episode ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from offmarl.replay.fields import Fields, fields_of
from offmarl.replay.sampling import Windows
from offmarl.types import ArraySpec, EnvSpec, sum_bytes

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
    size: int


@dataclass(frozen=True)
class SlotLayout:
    """The array, the words or the bits of a slot that hold each field."""

    arrays: Mapping[str, ArraySpec]
    """The fields that have an array of their own."""
    words: Mapping[str, Packed]
    bits: Mapping[str, Packed]
    num_words: int
    """Words before the bits begin."""
    width: int
    """W, words a row."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return sum_bytes(self.arrays) + 4 * self.width


@lru_cache(16)
def layout_of(spec: EnvSpec, windows: Windows) -> SlotLayout:
    """Return how the slots of windows are packed."""
    arrays: dict[str, ArraySpec] = {}
    words: dict[str, Packed] = {}
    bits: dict[str, Packed] = {}
    num_words = num_bits = 0
    for name, leaf in fields_of(spec, windows).items():
        size = leaf.size
        if leaf.dtype == "bool":
            bits[name] = Packed(leaf, num_bits, size)
            num_bits += size
        elif leaf.dtype in ("float32", "int32") and 4 * size < _OWN_BYTES:
            words[name] = Packed(leaf, num_words, size)
            num_words += size
        else:
            arrays[name] = leaf
    return SlotLayout(arrays, words, bits, num_words, num_words + -(-num_bits // 32))


def blank(layout: SlotLayout, count: int, xp: Any = np) -> Rows:
    """Return ``count`` rows of zeros, in NumPy or ``jax.numpy``."""
    rows = {
        name: xp.zeros((count, leaf.size), leaf.numpy_dtype) for name, leaf in layout.arrays.items()
    }
    return rows | {WORDS: xp.zeros((count, layout.width), np.uint32)}


def pack(fields: Fields, layout: SlotLayout, count: int) -> Rows:
    """Pack slots to ``count`` rows; later rows, and fields that are left out, are zero (false)."""
    rows, slots = blank(layout, count), len(next(iter(fields.values())))
    for name, leaf in layout.arrays.items():
        if name in fields:
            rows[name][:slots] = fields[name].reshape(slots, leaf.size)
    words = rows[WORDS]
    for name, (leaf, start, size) in layout.words.items():
        if name in fields:
            values = np.ascontiguousarray(fields[name], leaf.numpy_dtype).reshape(slots, size)
            words[:slots, start : start + size] = values.view(np.uint32)
    bits = np.zeros((slots, 32 * (layout.width - layout.num_words)), bool)
    for name, (_, start, size) in layout.bits.items():
        if name in fields:
            bits[:, start : start + size] = fields[name].reshape(slots, size)
    packed = np.packbits(bits, axis=-1, bitorder="little")
    words[:slots, layout.num_words :] = packed.view(np.dtype("<u4"))
    return rows


def unpack(rows: Rows, layout: SlotLayout, starts: Int[Array, "B"], count: int) -> dict[str, Array]:
    """Gather windows of ``count`` slots and undo `pack`, on the device.

    Each field is ``(B, count, ...)``. All slots must exist.
    """
    slots = starts[:, None] + jnp.arange(count)
    arrays = {name: rows[name] for name in layout.arrays}
    windows = jax.lax.platform_dependent(
        arrays,
        slots,
        cpu=_copy_windows,
        default=lambda arrays, slots: jax.tree.map(lambda array: _gather(array, slots), arrays),
    )
    for name, leaf in layout.arrays.items():
        windows[name] = windows[name].reshape(*slots.shape, *leaf.shape)
    return windows | _unpack_words(_gather(rows[WORDS], slots), layout)


def _gather(array: Array, slots: Int[Array, "B S"]) -> Array:
    return array.at[slots].get(mode="promise_in_bounds")


def _copy_windows(arrays: dict[str, Array], slots: Int[Array, "B S"]) -> dict[str, Array]:
    """Copy each window as one block: on a CPU, XLA's gather copies number by number."""
    size = slots.shape[1]

    def window(start: Int[Array, ""]) -> dict[str, Array]:
        return {
            name: jax.lax.dynamic_slice_in_dim(array, start, size) for name, array in arrays.items()
        }

    windows: dict[str, Array] = jax.lax.map(window, slots[:, 0])
    return windows


def _unpack_words(words: UInt32[Array, "*b W"], layout: SlotLayout) -> dict[str, Array]:
    lead = words.shape[:-1]
    fields = {
        name: jax.lax.bitcast_convert_type(
            words[..., start : start + size], jnp.dtype(leaf.dtype)
        ).reshape(*lead, *leaf.shape)
        for name, (leaf, start, size) in layout.words.items()
    }
    tail = words[..., layout.num_words :, None]
    flags = ((tail >> jnp.arange(32, dtype=jnp.uint32)) & 1).astype(bool).reshape(*lead, -1)
    return fields | {
        name: flags[..., start : start + size].reshape(*lead, *leaf.shape)
        for name, (leaf, start, size) in layout.bits.items()
    }
