"""One step in one row of 32-bit words, the form in which replay keeps and moves data.

All fields of a step are packed into a row, masks as single bits, and every episode is followed by
one row that holds its final view. A window of T steps is then T+1 rows on end: one thing to fetch,
and its last row is the exact next view wherever the window ends.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32
from numpy.typing import NDArray

from offmarl.types import Continuous, EnvSpec, Sequence, Transition, View


class _Field(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str
    """"float32" or "int32": a word an entry. "bool": a bit an entry."""
    start: int
    """First word, or first bit among the bits at the row's end."""

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class Layout:
    """Which words and bits of a row hold which field."""

    words: tuple[_Field, ...]
    bits: tuple[_Field, ...]

    @property
    def num_words(self) -> int:
        """Words before the bits begin."""
        return sum(field.size for field in self.words)

    @property
    def num_bits(self) -> int:
        """Bits behind them."""
        return sum(field.size for field in self.bits)

    @property
    def width(self) -> int:
        """Words a row."""
        return self.num_words + -(-self.num_bits // 32)


def layout_of(spec: EnvSpec) -> Layout:
    """Return how steps of some sizes are packed."""
    agents, actions = spec.num_agents, spec.action_size
    continuous = isinstance(spec.action, Continuous)
    words: dict[str, tuple[tuple[int, ...], str]] = {
        "observation": ((agents, spec.observation_size), "float32"),
        "state": ((spec.state_size,), "float32"),
        "action": ((agents, actions), "float32") if continuous else ((agents,), "int32"),
        "reward": ((agents,), "float32"),
        "behaviour_log_prob": ((agents,), "float32"),
        "remaining": ((), "int32"),
    }
    bits: dict[str, tuple[tuple[int, ...], str]] = {
        "legal_actions": ((agents, actions), "bool"),
        "alive": ((agents,), "bool"),
        "terminated": ((agents,), "bool"),
        "truncated": ((agents,), "bool"),
        "next_known": ((), "bool"),
    }
    return Layout(_place(words), _place(bits))


def _place(fields: dict[str, tuple[tuple[int, ...], str]]) -> tuple[_Field, ...]:
    placed, start = [], 0
    for name, (shape, dtype) in fields.items():
        placed.append(_Field(name, shape, dtype, start))
        start += placed[-1].size
    return tuple(placed)


def pack(fields: dict[str, NDArray[Any]], layout: Layout, count: int) -> NDArray[np.uint32]:
    """Pack ``count`` rows; fields that are left out are zero (false)."""
    rows = np.zeros((count, layout.width), np.uint32)
    for field in layout.words:
        if field.name in fields:
            words = np.ascontiguousarray(fields[field.name], field.dtype).view(np.uint32)
            rows[:, field.start : field.start + field.size] = words.reshape(count, field.size)
    bits = np.zeros((count, 32 * (layout.width - layout.num_words)), bool)
    for field in layout.bits:
        if field.name in fields:
            values = fields[field.name].reshape(count, field.size)
            bits[:, field.start : field.start + field.size] = values
    packed = np.packbits(bits, axis=-1, bitorder="little")
    rows[:, layout.num_words :] = packed.view(np.dtype("<u4"))
    return rows


def unpack(rows: UInt32[Array, "*b W"], layout: Layout) -> dict[str, Array]:
    """Undo `pack`, on the device."""
    words = {
        field.name: jax.lax.bitcast_convert_type(
            rows[..., field.start : field.start + field.size], jnp.dtype(field.dtype)
        ).reshape(*rows.shape[:-1], *field.shape)
        for field in layout.words
    }
    tail = rows[..., layout.num_words :, None]
    flags = ((tail >> jnp.arange(32, dtype=jnp.uint32)) & 1).astype(bool)
    flags = flags.reshape(*rows.shape[:-1], -1)
    bits = {
        field.name: flags[..., field.start : field.start + field.size].reshape(
            *rows.shape[:-1], *field.shape
        )
        for field in layout.bits
    }
    return words | bits


def pack_steps(
    transition: Transition, left: NDArray[Any], final_known: NDArray[np.bool_], layout: Layout
) -> NDArray[np.uint32]:
    """Pack steps ``(n, ...)`` into ``(n, W)``.

    Parameters
    ----------
    transition
        The steps.
    left
        ``(n,)`` steps of the episode that are left, this one included.
    final_known
        ``(n,)`` whether the view that the episode ended with is known.
    """
    known = (left > 1) | final_known | transition.terminated.all(-1)
    fields = transition.view._asdict() | transition._asdict()
    fields |= {"remaining": left, "next_known": known}
    return pack(fields, layout, len(left))


def blank(layout: Layout) -> NDArray[np.uint32]:
    """Return the row ``(W,)`` of an unknown view.

    It allows every action, so that no program meets an agent without one.
    """
    row = np.zeros(layout.width, np.uint32)
    row[layout.num_words :] = np.uint32(0xFFFFFFFF)
    return row


def to_sequence(rows: UInt32[Array, "*b S W"], spec: EnvSpec) -> Sequence:
    """Unpack windows of S = T+1 rows each."""
    fields = unpack(rows, layout_of(spec))
    lead = (slice(None),) * (rows.ndim - 2)
    steps = {name: x[(*lead, slice(None, -1))] for name, x in fields.items()}
    length = rows.shape[-2] - 1
    return Sequence(
        view=View(*(fields[name] for name in View._fields)),
        action=steps["action"],
        reward=steps["reward"],
        terminated=steps["terminated"],
        truncated=steps["truncated"],
        behaviour_log_prob=steps["behaviour_log_prob"],
        mask=jnp.arange(length) < fields["remaining"][(*lead, slice(None, 1))],
        next_known=steps["next_known"],
    )
