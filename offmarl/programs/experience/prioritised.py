"""Prioritised replay from a recorder's buffer; see `offmarl.replay.priorities`.

A window is known by the place of its first slot: 2 (row * capacity + index on the time axis) for
one that starts at a step, and one more for one that starts after a step that ends an episode.
Windows that hold steps that were just added have the largest priority so far.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.programs.experience.buffer import Capture
from offmarl.programs.experience.windows import WindowStart, beside_prior, own_windows, windows_at
from offmarl.replay.priorities import (
    Priorities,
    SumTree,
    begin,
    importance,
    window_priorities,
)
from offmarl.types import Sequence


def begin_priorities(capture: Capture) -> Priorities:
    """Return the priorities of a buffer's windows, which are all alike."""
    return begin(_exist(capture, jnp.arange(capture.capacity)).ravel().astype(jnp.float32))


def admit(priorities: Priorities, capture: Capture, num_steps: int, length: int) -> Priorities:
    """Return the priorities after ``num_steps`` time steps were added to the buffer."""
    newest = jnp.arange(min(num_steps + length - 1, capture.capacity))
    index = (capture.buffer.current_index - 1 - newest) % capture.capacity
    exist = _exist(capture, index)
    row = jnp.arange(len(exist))[:, None, None]
    slots = 2 * (row * capture.capacity + index[:, None]) + jnp.arange(2)
    fresh = exist.ravel().astype(jnp.float32)
    tree = priorities.tree.put(slots.ravel(), jnp.zeros_like(fresh), fresh)
    size = jnp.where(capture.buffer.is_full, capture.capacity, capture.buffer.current_index)
    tree = jax.lax.cond(capture.filled < size, partial(_without_lost, capture), lambda x: x, tree)
    return priorities._replace(tree=tree)


def _without_lost(capture: Capture, tree: SumTree) -> SumTree:
    """Return the tree without the windows of steps that left the buffer before others."""
    exist = _exist(capture, jnp.arange(capture.capacity)).reshape(-1, 1)
    values = tree.levels[0].reshape(-1, 2)[: len(exist)] * exist
    return SumTree.of(values[:, 0], values[:, 1])


def sample(
    priorities: Priorities,
    capture: Capture,
    key: PRNGKeyArray,
    batch_size: int,
    length: int,
    exponent: Float[Array, ""],
    burn_in: int = 0,
) -> tuple[Sequence, Int[Array, "own"]]:
    """Draw windows by their priorities, with importance weights; and return where they start.

    ``exponent`` is β of the weights.
    """
    tree, unit = priorities.tree, priorities.largest
    slots = tree.draw(key, own_windows(capture, batch_size), unit)
    row, index = jnp.divmod(slots // 2, capture.capacity)
    age = (index - capture.buffer.current_index + capture.filled) % capture.capacity
    batch = windows_at(capture, WindowStart(row, age, slots % 2 == 1), length, burn_in)
    ratios = tree.total(unit) / tree.values(slots, unit)
    batch = batch._replace(weight=importance(ratios, batch.mask.any(-1), exponent))
    return beside_prior(batch, capture, key), slots


def reprioritise(
    priorities: Priorities,
    slots: Int[Array, "own"],
    errors: Float[Array, "B T"],
    counted: Bool[Array, "B T"],
    exponent: float,
) -> Priorities:
    """Return the priorities after an update on some windows; ``exponent`` is α."""
    from_buffer = slice(len(slots))  # prior data have no priorities
    values = window_priorities(errors[from_buffer], counted[from_buffer], exponent)
    return priorities._replace(
        tree=priorities.tree.put(slots, values, jnp.zeros_like(values)),
        largest=jnp.maximum(priorities.largest, values.max()),
    )


def _exist(capture: Capture, index: Int[Array, "n"]) -> Bool[Array, "E n 2"]:
    """Return whether windows can start at each index of the time axis, and after it."""
    filled = (capture.buffer.current_index - 1 - index) % capture.capacity < capture.filled
    last = capture.buffer.experience.transition.last[:, index]
    return jnp.stack([jnp.broadcast_to(filled, last.shape), filled & last], -1)
