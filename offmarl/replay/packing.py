"""One slot in one row of 32-bit words, the form in which replay keeps and moves data.

All fields of a step are packed into a row, masks as single bits, and every episode is followed by
one row that holds its final view. A window of T steps is then T+1 rows on end: one thing to fetch,
and the row after each step is its exact next view, wherever the window or the episode ends.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32
from numpy.typing import NDArray

from offmarl.replay.sampling import EpisodeTable, Source, Windows
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
        return math.prod(self.shape)


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


def layout_of(spec: EnvSpec, windows: Windows) -> Layout:
    """Return how the slots of windows are packed."""
    agents, actions = spec.num_agents, spec.action_size
    continuous = isinstance(spec.action, Continuous)
    words: dict[str, tuple[tuple[int, ...], str]] = {
        "observation": ((agents, spec.observation_size), "float32"),
        "state": ((spec.state_size,), "float32"),
        "action": ((agents, actions), "float32") if continuous else ((agents,), "int32"),
        "reward": ((agents,), "float32"),
        "behaviour_log_prob": ((agents,), "float32"),
        "time": ((), "int32"),
        "episode": ((), "int32"),
    }
    if windows.return_to_go is not None:
        words["return_to_go"] = ((agents,), "float32")
    bits: dict[str, tuple[tuple[int, ...], str]] = {
        "legal_actions": ((agents, actions), "bool"),
        "alive": ((agents,), "bool"),
        "terminated": ((agents,), "bool"),
        "truncated": ((agents,), "bool"),
        "mask": ((), "bool"),
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


class Place(NamedTuple):
    """Where ``n`` slots are in their episodes."""

    time: NDArray[np.int64]
    """``(n,)`` steps of the episode before each."""
    episode: NDArray[np.int64]
    """``(n,)`` numbers of the episodes."""

    def at(self, index: NDArray[Any]) -> "Place":
        """Return some of them."""
        return Place(self.time[index], self.episode[index])

    def spread(self, index: NDArray[np.int64], count: int) -> "Place":
        """Put them at an index of ``count``; the others are the first step of the first episode."""
        time, episode = np.zeros((2, count), np.int64)
        time[index], episode[index] = self
        return Place(time, episode)


def pack_steps(
    transition: Transition,
    place: Place,
    episodes: EpisodeTable,
    layout: Layout,
    return_to_go: NDArray[np.float32] | None = None,
    first_episode: int = 0,
) -> NDArray[np.uint32]:
    """Pack steps ``(n, ...)`` into ``(n, W)``.

    Parameters
    ----------
    transition
        The steps.
    place
        Where they are.
    episodes
        The table that numbers their episodes.
    layout
        How to pack them.
    return_to_go
        ``(n, N)``; needed where the layout has it.
    first_episode
        What sequences add to the numbers of the episodes.
    """
    is_last = place.time == episodes.length[place.episode] - 1
    known = ~is_last | (episodes.final[place.episode] >= 0) | transition.terminated.all(-1)
    fields = transition.view._asdict() | transition._asdict() | place._asdict()
    fields |= {"mask": np.ones(len(known), bool), "next_known": known}
    fields["episode"] = place.episode + first_episode
    if return_to_go is not None:
        fields["return_to_go"] = return_to_go
    return pack(fields, layout, len(known))


def pack_ends(
    place: Place, source: Source, layout: Layout, first_episode: int = 0
) -> NDArray[np.uint32]:
    """Pack the slots that end some episodes, ``(n, W)``: what their last steps led to.

    A view that is not known allows every action, so that no program meets an agent without one.
    """
    final = source.episodes.final[place.episode]
    known, agents = final >= 0, source.spec.num_agents
    unknown = ~known[:, None, None]
    fields = place._asdict() | {
        "episode": place.episode + first_episode,
        "legal_actions": np.broadcast_to(unknown, (len(final), agents, source.spec.action_size)),
        "alive": np.broadcast_to(unknown[..., 0], (len(final), agents)),
    }
    rows = pack(fields, layout, len(final))
    if known.any():
        views = source.final_views(final[known])._asdict()
        fields = {name: fields[name][known] for name in Place._fields}
        rows[known] = pack(views | fields, layout, int(known.sum()))
    return rows


def to_sequence(rows: UInt32[Array, "*b S W"], spec: EnvSpec, windows: Windows) -> Sequence:
    """Unpack windows of S = T+1 rows each."""
    fields = unpack(rows, layout_of(spec, windows))
    lead = (slice(None),) * (rows.ndim - 2)
    steps = {name: x[(*lead, slice(None, -1))] for name, x in fields.items()}
    return Sequence(
        view=View(*(fields[name] for name in View._fields)),
        action=steps["action"],
        reward=steps["reward"],
        terminated=steps["terminated"],
        truncated=steps["truncated"],
        behaviour_log_prob=steps["behaviour_log_prob"],
        mask=steps["mask"] & (jnp.arange(windows.steps) >= windows.burn_in),
        next_known=steps["next_known"],
        first=fields["time"] == 0,
        time=fields["time"],
        episode=fields["episode"],
        return_to_go=steps.get("return_to_go"),
    )
