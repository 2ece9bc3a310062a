"""Optimisers and schedules that programs share.

An optimiser is built in every update, from hyperparameters that are arrays, so a new value or a
schedule never recompiles. The structure of its state does not depend on the numbers::

    optimiser = clipped_adam(hyper.learning_rate, hyper.max_grad_norm)
    updates, state = optimiser.update(grads, state)
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from offmarl.types import ArrayTree

Number = Float[Array, ""] | float

ScheduleKind = Literal["constant", "linear", "cosine"]
"""How a number changes over the training: not at all, or down to 0 at the end, along a line or half
a cosine."""


def clipped_adam(
    learning_rate: Number, max_grad_norm: Number, *, eps: float = 1e-8, separately: bool = False
) -> optax.GradientTransformation:
    """Return Adam, preceded by the clipping of gradients.

    Parameters
    ----------
    learning_rate
        Step size.
    max_grad_norm
        Largest global norm of the gradients; those above it are scaled down to it.
    eps
        Added to the root of the second moment.
    separately
        Clip each field of the parameters' NamedTuple, or each entry of their dictionary, by its own
        norm. The gradients of a critic then do not shrink those of an actor.
    """
    clip = clip_separately if separately else optax.clip_by_global_norm
    return optax.chain(clip(max_grad_norm), optax.adam(learning_rate, eps=eps))


def clip_separately(max_norm: Number) -> optax.GradientTransformation:
    """Return a transformation that clips each child of the gradients' root by its own norm."""
    clip = optax.clip_by_global_norm(max_norm)

    def update(
        grads: ArrayTree, state: ArrayTree, _params: ArrayTree = None
    ) -> tuple[ArrayTree, ArrayTree]:
        children, root = jax.tree.flatten(grads, is_leaf=lambda node: node is not grads)
        clipped = [clip.update(child, clip.init(child))[0] for child in children]
        return jax.tree.unflatten(root, clipped), state

    return optax.GradientTransformation(clip.init, update)


def grad_norm(grads: ArrayTree) -> Float[Array, ""]:
    """Return the global norm of gradients, before clipping."""
    norm: Array = optax.tree.norm(grads)
    return norm


# ---------------------------------------------------------------------------------- schedules


def training_progress(args: Any, iteration: Int[Array, ""] | Float[Array, ""]) -> Float[Array, ""]:
    """Return the fraction of a recorder's training that is done, from 0 to 1.

    Parameters
    ----------
    args
        The recorder's arguments, with the time steps of an update as ``num_steps``.
    iteration
        Number of updates done; a part of one counts, too.
    """
    iterations = -(-args.total_steps // (args.num_envs * args.num_steps))
    return jnp.clip(iteration / iterations, 0.0, 1.0)


def linear_schedule(
    progress: Float[Array, "*b"], start: Number, stop: Number, over: Number = 1.0
) -> Float[Array, "*b"]:
    """Return a number that changes linearly from ``start`` to ``stop`` during training.

    Parameters
    ----------
    progress
        Fraction of the training that is done.
    start, stop
        Values at the beginning and from the end of the change on.
    over
        Fraction of the training in which the value changes; 0 for ``stop`` at once.
    """
    changed = jnp.where(over > 0, progress / jnp.where(over > 0, over, 1.0), 1.0)
    return start + (stop - start) * jnp.clip(changed, 0.0, 1.0)


def scheduled(value: Number, progress: Float[Array, ""], schedule: ScheduleKind) -> Number:
    """Return a number, such as a step size, at some progress of a schedule.

    Parameters
    ----------
    value
        The number at the beginning of the training.
    progress
        Fraction of the training that is done.
    schedule
        How it changes.
    """
    if schedule == "constant":
        return value
    remaining = linear_schedule(progress, 1.0, 0.0)
    return value * (remaining if schedule == "linear" else 0.5 * (1 - jnp.cos(jnp.pi * remaining)))
