"""The options that programs with networks share, and the optimisers that they describe.

A program derives its ``Args`` from `LearnerArgs`, and overrides a default where its reference has
another value::

    @dataclass(frozen=True)
    class Args(programs.LearnerArgs):
        learning_rate: Positive = 5e-4

An optimiser is built in every update, from hyperparameters that are arrays and from the number of
updates done, so a new value or a schedule never recompiles. The structure of its state does not
depend on the numbers::

    def init(key, hyper):
        params = init_policy(config, spec, key)
        return State(params, make_optimiser(args, hyper).init(params), jnp.zeros((), jnp.int32))

    def update(state, batch, key, hyper):
        ...
        optimiser = make_optimiser(args, hyper, state.updates)
        step, moments = optimiser.update(gradient, state.optimiser)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.config import Fraction, Layers, Positive, PositiveInt
from offmarl.errors import OptionError
from offmarl.networks import AgentId, PolicyConfig
from offmarl.programs.program import Args, Hyperparameters, OnlineArgs, Program, Stage
from offmarl.types import ArrayTree, Sequence

Number = Float[Array, ""] | float

ScheduleKind = Literal["constant", "linear", "cosine"]
"""How a number changes over the training: not at all, or down to 0 at the end, along a line or half
a cosine."""


@dataclass(frozen=True)
class LearnerArgs(Args):
    """Arguments that all offline programs with networks share."""

    learning_rate: Positive = 3e-4
    """Adam's step size, at the first update."""
    schedule: ScheduleKind = "constant"
    """How the step size changes over the run: not at all, or down to zero at the last update, along
    a line or half a cosine."""
    max_grad_norm: Positive | None = None
    """Largest global norm of the gradients; larger ones are scaled down to it. By default they are
    not clipped."""
    network: Literal["recurrent", "feedforward"] = "recurrent"
    """Networks of the agents: with a memory (a GRU), or without."""
    hidden: PositiveInt = 64
    """Width of the agents' layers."""
    layers: Layers | None = None
    """Number of the agents' hidden layers; by default 2, or 1 beside a GRU."""
    agent_id: AgentId = "onehot"
    """How the network distinguishes the agents. onehot: by their index, which ties it to their
    number; sinusoidal: by 16 sines and cosines of their place in the team; none: not at all."""


@dataclass(frozen=True)
class ValueArgs(LearnerArgs):
    """Arguments of offline programs that learn values from rewards."""

    gamma: Fraction = 0.99
    """Discount γ."""
    scale_rewards: bool = True
    """Multiply rewards so that the largest absolute return of the data's episodes is 20, the unit
    of temperatures and penalties. Otherwise they are in the unit of the data's rewards."""


@dataclass(frozen=True)
class NetworkArgs(OnlineArgs):
    """Arguments that all recorders with networks share."""

    schedule: ScheduleKind = "constant"
    """How the step size changes over the training: not at all, or down to zero at its end, along a
    line or half a cosine."""
    reward_scale: Positive = 1.0
    """Factor of the rewards that are learned from; recorded rewards are not scaled."""
    hidden: PositiveInt = 64
    """Width of the networks' layers."""
    share_parameters: bool = True
    """Let all agents share networks. Otherwise each agent has networks of its own."""
    agent_id: AgentId = "onehot"
    """How shared networks distinguish the agents. onehot: by their index, which ties them to their
    number; sinusoidal: by 16 sines and cosines of their place in the team; none: not at all."""


def require_next_action(length: int, otherwise: str = "") -> None:
    """Raise `OptionError` if windows are too short for targets of the data's next action."""
    if length < 2:
        raise OptionError(
            "targets need the data's next action, which windows of one step do not have: give "
            f"--length 2 or more{otherwise}."
        )


def next_in_window(batch: Sequence) -> Bool[Array, "B T"]:
    """Return steps before a window's last whose next view is known, and those where all terminate.

    The last step of a window has a target in other windows, where it is followed by what the data
    have next: an action, or the view that a truncated episode ended with.
    """
    inside = jnp.arange(batch.mask.shape[1]) < batch.mask.shape[1] - 1
    return batch.next_known & (inside | batch.terminated.all(-1))


_SIZES = ("hidden", "agent_id", "share_parameters", "layers", "activation")
"""Fields of networks that are arguments of programs; not every program has all of them."""


def policy_config(args: Any, head: Any, **other: Any) -> PolicyConfig:
    """Return the description of an agents' network.

    ``args`` are those of a program with ``network``; ``head`` and ``other`` are its other fields.
    """
    sizes = {name: getattr(args, name) for name in _SIZES if hasattr(args, name)}
    return PolicyConfig(args.network, head, **sizes | other)


# ---------------------------------------------------------------------------------- optimisers


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


def make_optimiser(
    args: LearnerArgs,
    hyper: Hyperparameters,
    done: Int[Array, ""] | int = 0,
    *,
    updates: int | None = None,
    separately: bool = False,
) -> optax.GradientTransformation:
    """Return Adam with the step size, the schedule and the clipping of a program's arguments.

    The structure of its state does not depend on ``hyper`` and ``done``. Without clipping, the
    gradients are not touched.

    Parameters
    ----------
    args
        The program's arguments.
    hyper
        Its hyperparameters.
    done
        Number of updates done; at 0 the step size is the full one.
    updates
        Number of updates over which the step size decreases; by default those of the run.
    separately
        Clip each field of the parameters' NamedTuple by its own norm; see `clipped_adam`.
    """
    rate = step_size(args, hyper, done, updates)
    if args.max_grad_norm is None:
        return optax.adam(rate)
    return clipped_adam(rate, args.max_grad_norm, separately=separately)


def step_size(
    args: LearnerArgs,
    hyper: Hyperparameters,
    done: Int[Array, ""] | int,
    updates: int | None = None,
) -> Number:
    """Return the step size of an update; the arguments are those of `make_optimiser`."""
    progress = jnp.asarray(done) / (updates or args.updates or 1)
    return scheduled(hyper.learning_rate, progress, args.schedule)


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


# ---------------------------------------------------------------------------------- target networks


class TargetState(NamedTuple):
    """State of a program with target networks."""

    params: Any
    target: Any
    optimiser: ArrayTree
    updates: Int[Array, ""]


def target_program(
    args: LearnerArgs,
    init: Callable[[PRNGKeyArray], ArrayTree],
    loss: Callable[..., tuple[Float[Array, ""], dict[str, Array]]],
    targets: Callable[[Any], ArrayTree] = lambda params: params,
    separately: bool = False,
    **program: Any,
) -> Program:
    """Build a program that descends one loss, whose target networks follow its networks.

    ``init(key)`` draws the parameters, and ``targets(params)`` returns those that have target
    networks. The loss is ``loss(params, target, batch, key, hyper)``, with metrics that hold
    `TD_ERRORS`. Target networks are copied every ``args.target_every`` updates, or move by the
    fraction ``args.tau`` in each. ``separately`` is as for `make_optimiser`, and ``program`` are
    other fields of the `Program`, whose state is a `TargetState`.
    """

    def begin(key: PRNGKeyArray, hyper: Hyperparameters) -> TargetState:
        params = init(key)
        moments = make_optimiser(args, hyper, separately=separately).init(params)
        return TargetState(params, targets(params), moments, jnp.zeros((), jnp.int32))

    def update(
        state: TargetState, batch: Sequence, key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[TargetState, dict[str, Array]]:
        gradient, metrics = jax.grad(loss, has_aux=True)(
            state.params, state.target, batch, key, hyper
        )
        adam = make_optimiser(args, hyper, state.updates, separately=separately)
        step, moments = adam.update(gradient, state.optimiser)
        params, updates = optax.apply_updates(state.params, step), state.updates + 1
        if every := getattr(args, "target_every", None):
            target = optax.periodic_update(targets(params), state.target, updates, every)
        else:
            target = optax.incremental_update(targets(params), state.target, hyper.tau)
        metrics |= {"grad_norm": grad_norm(gradient)}
        return TargetState(params, target, moments, updates), metrics

    return Program(begin, stages=(Stage(update),), td_errors=True, **program)
