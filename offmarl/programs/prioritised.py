"""Prioritised replay from a recorder's buffer; see `offmarl.replay.priorities`.

A window is known by the place of its first step: row * capacity + index on the time axis. Windows
of steps that were just added have the largest priority so far. Those that would begin before the
buffer's newest step and end after it have none.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.programs.buffer import Capture, Step, as_sequence
from offmarl.replay.priorities import Priorities, begin, importance, window_priorities
from offmarl.types import Sequence


def begin_priorities(capture: Capture, num_envs: int, length: int) -> Priorities:
    """Return the priorities of a buffer's windows, which are all alike."""
    valid = _is_start(capture, jnp.arange(capture.capacity), length)
    return begin(jnp.tile(valid.astype(jnp.float32), num_envs))


def admit(
    priorities: Priorities, capture: Capture, num_envs: int, num_steps: int, length: int
) -> Priorities:
    """Return the priorities after ``num_steps`` time steps were added to the buffer.

    Parameters
    ----------
    priorities
        The priorities before.
    capture
        The buffer, with the steps.
    num_envs, length
        Its rows, and the steps of a window.
    """
    newest = jnp.arange(min(num_steps + length - 1, capture.capacity))
    index = (capture.buffer.current_index - 1 - newest) % capture.capacity
    valid = jnp.tile(_is_start(capture, index, length).astype(jnp.float32), num_envs)
    slots = (jnp.arange(num_envs)[:, None] * capture.capacity + index).ravel()
    return priorities._replace(tree=priorities.tree.put(slots, jnp.zeros_like(valid), valid))


def sample(
    priorities: Priorities,
    capture: Capture,
    key: PRNGKeyArray,
    batch_size: int,
    length: int,
    exponent: Float[Array, ""],
) -> tuple[Sequence, Int[Array, "B"]]:
    """Draw windows by their priorities, with importance weights; and return where they start.

    ``exponent`` is β of the weights.
    """
    tree, unit = priorities.tree, priorities.largest
    slots = tree.draw(key, batch_size, unit)
    row, index = slots // capture.capacity, slots % capture.capacity
    time = (index[:, None] + jnp.arange(length)) % capture.capacity
    steps: Step = jax.tree.map(lambda leaf: leaf[row[:, None], time], capture.buffer.experience)
    batch = as_sequence(steps)
    ratios = tree.total(unit) / tree.values(slots, unit)
    return batch._replace(weight=importance(ratios, batch.mask.any(-1), exponent)), slots


def learned(
    priorities: Priorities,
    slots: Int[Array, "B"],
    errors: Float[Array, "B T"],
    counted: Bool[Array, "B T"],
    exponent: float,
) -> Priorities:
    """Return the priorities after an update on some windows; ``exponent`` is α."""
    found = window_priorities(errors, counted, exponent)
    return priorities._replace(
        tree=priorities.tree.put(slots, found, jnp.zeros_like(found)),
        largest=jnp.maximum(priorities.largest, found.max()),
    )


def _is_start(capture: Capture, index: Int[Array, "n"], length: int) -> Bool[Array, "n"]:
    """Whether the buffer holds the whole window from each index of the time axis on."""
    head = capture.buffer.current_index
    age = (head - 1 - index) % capture.capacity + 1  # 1 for the newest step
    return (age >= length) & (capture.buffer.is_full | (index < head))
