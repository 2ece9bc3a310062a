"""Replay that lives on the accelerator: a whole dataset, packed, sampled under jit.

All fields of a step are packed into one row of 32-bit words, masks as single bits, and every
episode is followed by one row that holds its final view. A window of T steps is then a single
contiguous slice of T+1 rows: the fastest thing to fetch, and its last row is the exact next view
wherever the window ends.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray, UInt32
from numpy.typing import NDArray

from offmarl.errors import ShapeError
from offmarl.replay.windows import window_starts
from offmarl.types import Continuous, EnvSpec, Sequence, Transition, View
from offmarl.vault import Vault

_READ_STEPS = 4096
"""Time steps read from disk at once: large enough for whole chunks, small beside the data."""


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
class _Layout:
    """Which words and bits of a row hold which field; static under jit."""

    words: tuple[_Field, ...]
    bits: tuple[_Field, ...]

    @property
    def num_words(self) -> int:
        """Words before the bits begin."""
        return sum(field.size for field in self.words)

    @property
    def num_bits(self) -> int:
        return sum(field.size for field in self.bits)

    @property
    def width(self) -> int:
        """Words a row."""
        return self.num_words + -(-self.num_bits // 32)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "starts"],
    meta_fields=["spec", "batch_size", "length"],
)
@dataclass(frozen=True)
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
        Windows a batch, and steps a window (B and T).
    """

    rows: UInt32[Array, "R W"]
    starts: Int[Array, "M"]
    spec: EnvSpec
    batch_size: int
    length: int

    def sample(self, key: PRNGKeyArray) -> Sequence:
        """Draw ``batch_size`` windows uniformly, with replacement; fields are ``(B, T, ...)``."""
        index = jax.random.randint(key, (self.batch_size,), 0, self.starts.shape[0])
        return self.windows(self.starts[index])

    def windows(self, starts: Int[Array, "B"]) -> Sequence:
        """Unpack the windows that start at the given rows."""
        size = (self.length + 1, self.rows.shape[1])
        rows = jax.vmap(lambda start: jax.lax.dynamic_slice(self.rows, (start, 0), size))(starts)
        fields = _unpack(rows, _layout(self.spec))
        steps = {name: x[:, :-1] for name, x in fields.items()}
        view = View(*(fields[name] for name in View._fields))
        mask = jnp.arange(self.length) < fields["remaining"][:, :1]
        return Sequence(
            view=view,
            action=steps["action"],
            reward=steps["reward"],
            terminated=steps["terminated"],
            truncated=steps["truncated"],
            behaviour_log_prob=steps["behaviour_log_prob"],
            mask=mask,
            next_known=steps["next_known"],
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self.rows.nbytes + self.starts.nbytes)


def load(vault: Vault, batch_size: int, length: int) -> Replay:
    """Put a whole vault on the device, once.

    Parameters
    ----------
    vault
        The dataset.
    batch_size, length
        Windows a batch, and steps a window.

    Raises
    ------
    ShapeError
        Where the vault holds no step, or a size is not positive.
    """
    if batch_size < 1 or length < 1:
        raise ShapeError(
            f"batches of {batch_size} windows of {length} steps cannot be drawn: both must be "
            "at least 1."
        )
    if vault.num_steps == 0:
        raise ShapeError(f"{vault.path} holds no steps yet: record into it first.")
    episodes, layout = vault.episodes, _layout(vault.spec)
    offsets = np.cumsum(episodes.length + 1) - (episodes.length + 1)
    rows = np.zeros((int((episodes.length + 1).sum()) + length, layout.width), np.uint32)
    # Rows that hold no view allow every action, so that no program meets an agent without one.
    rows[:, layout.num_words :] = np.uint32(0xFFFFFFFF)
    _fill_steps(rows, layout, vault, offsets)
    _fill_finals(rows, layout, vault, offsets)
    starts = window_starts(offsets, episodes.length, length)
    return Replay(
        jax.device_put(rows),
        jnp.asarray(starts, jnp.int32),
        vault.spec,
        batch_size,
        length,
    )


def _layout(spec: EnvSpec) -> _Layout:
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
    return _Layout(_place(words), _place(bits))


def _place(fields: dict[str, tuple[tuple[int, ...], str]]) -> tuple[_Field, ...]:
    placed, start = [], 0
    for name, (shape, dtype) in fields.items():
        placed.append(_Field(name, shape, dtype, start))
        start += placed[-1].size
    return tuple(placed)


def _pack(fields: dict[str, NDArray[Any]], layout: _Layout, count: int) -> NDArray[np.uint32]:
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


def _unpack(rows: UInt32[Array, "*b W"], layout: _Layout) -> dict[str, Array]:
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


def _fill_steps(
    rows: NDArray[np.uint32], layout: _Layout, vault: Vault, offsets: NDArray[np.int64]
) -> None:
    """Copy the vault's transitions to their places, a block of time after the other."""
    episodes = vault.episodes
    destination = np.full((vault.rows, vault.length), -1, np.int64)
    remaining = np.zeros((vault.rows, vault.length), np.int32)
    for row, start, length, offset in zip(
        episodes.row, episodes.start, episodes.length, offsets, strict=True
    ):
        destination[row, start : start + length] = np.arange(offset, offset + length)
        remaining[row, start : start + length] = np.arange(length, 0, -1)
    final_known = np.zeros(len(rows), bool)
    final_known[(offsets + episodes.length)[episodes.final >= 0]] = True
    for start in range(0, vault.length, _READ_STEPS):
        stop = min(start + _READ_STEPS, vault.length)
        transition = vault.transitions(start, stop)
        where, left = destination[:, start:stop], remaining[:, start:stop]
        inside = (left > 1) | final_known[where + 1] | transition.terminated.all(-1)
        fields = _transition_fields(transition) | {"remaining": left, "next_known": inside}
        there = where >= 0
        chosen = {name: value[there] for name, value in fields.items()}
        rows[where[there]] = _pack(chosen, layout, int(there.sum()))


def _fill_finals(
    rows: NDArray[np.uint32], layout: _Layout, vault: Vault, offsets: NDArray[np.int64]
) -> None:
    episodes = vault.episodes
    known = episodes.final >= 0
    finals = {
        name: np.asarray(value)[episodes.final[known]]
        for name, value in vault.finals._asdict().items()
    }
    rows[(offsets + episodes.length)[known]] = _pack(finals, layout, int(known.sum()))


def _transition_fields(transition: Transition) -> dict[str, NDArray[Any]]:
    fields = transition.view._asdict() | transition._asdict()
    return {name: np.asarray(value) for name, value in fields.items() if name != "view"}
