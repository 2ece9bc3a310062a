"""Trajectories in a flashbax buffer on the device, and taken out of it a chunk at a time."""

from functools import partial
from typing import NamedTuple

import flashbax
import jax
import jax.numpy as jnp
from flashbax.buffers.trajectory_buffer import TrajectoryBuffer, TrajectoryBufferState
from jaxtyping import Array, Bool, Int

from offmarl.types import Continuous, EnvSpec, Transition, View


class Step(NamedTuple):
    """What the buffer holds of each step: with it, the view it truly led to."""

    transition: Transition
    next_view: View


class Capture(NamedTuple):
    """A buffer of the last steps of E environments."""

    buffer: TrajectoryBufferState
    """Of `Step`, ``(E, capacity, ...)``: sample from it with the functions of `make_buffer`."""
    total: Int[Array, ""]
    """Time steps ever added to each row."""


class Chunk(NamedTuple):
    """Steps taken out of a `Capture`: a copy, so that the buffer may be donated or overwritten."""

    step: Step
    """``(E, T, ...)``"""
    stop: Int[Array, ""]
    """Time steps that had been added when this was taken: the chunk ends there."""


def make_buffer(
    num_envs: int, capacity: int, batch_size: int = 1, sequence_length: int = 1
) -> TrajectoryBuffer:
    """Make the functions of a flashbax trajectory buffer for a `Capture`.

    Parameters
    ----------
    num_envs
        E, its rows.
    capacity
        Time steps it holds of each row; the newest replace the oldest.
    batch_size, sequence_length
        What ``sample`` returns, for programs that learn from the buffer.
    """
    return flashbax.make_trajectory_buffer(
        add_batch_size=num_envs,
        max_length_time_axis=capacity,
        min_length_time_axis=sequence_length,
        sample_batch_size=batch_size,
        sample_sequence_length=sequence_length,
        period=1,
    )


def init_capture(buffer: TrajectoryBuffer, spec: EnvSpec) -> Capture:
    """Start with nothing captured."""
    return Capture(buffer.init(_empty_step(spec)), jnp.zeros((), jnp.int32))


def add(
    buffer: TrajectoryBuffer, capture: Capture, transitions: Transition, next_views: View
) -> Capture:
    """Add what a rollout returned, ``(T, E, ...)``; T is at most the buffer's capacity."""
    step = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), Step(transitions, next_views))
    num_steps = transitions.last.shape[0]
    return Capture(buffer.add(capture.buffer, step), capture.total + num_steps)


@partial(jax.jit, static_argnames="num_steps")
def take(capture: Capture, num_steps: int, cut: Bool[Array, ""] | bool = False) -> Chunk:
    """Copy the last ``num_steps`` time steps out of the buffer.

    Parameters
    ----------
    capture
        Left as it is.
    num_steps
        T, at most the buffer's capacity; static.
    cut
        End the running episodes at the last step: truncate the agents that have not terminated.
    """
    experience = capture.buffer.experience
    capacity = experience.transition.last.shape[1]
    times = (capture.buffer.current_index - num_steps + jnp.arange(num_steps)) % capacity
    step = jax.tree.map(lambda leaf: leaf[:, times], experience)
    return Chunk(_end_episodes(step, jnp.asarray(cut)), capture.total)


def _end_episodes(step: Step, cut: Bool[Array, ""]) -> Step:
    transition = step.transition
    running = cut & ~transition.last[:, -1]
    truncated = transition.truncated.at[:, -1].set(
        jnp.where(running[:, None], ~transition.terminated[:, -1], transition.truncated[:, -1])
    )
    last = transition.last.at[:, -1].set(transition.last[:, -1] | running)
    return step._replace(transition=transition._replace(truncated=truncated, last=last))


def _empty_step(spec: EnvSpec) -> Step:
    num_agents = spec.num_agents
    view = View(
        observation=jnp.zeros((num_agents, spec.observation_size)),
        state=jnp.zeros(spec.state_size),
        legal_actions=jnp.zeros((num_agents, spec.action_size), bool),
        alive=jnp.zeros(num_agents, bool),
    )
    continuous = isinstance(spec.action, Continuous)
    transition = Transition(
        view=view,
        action=jnp.zeros((num_agents, spec.action_size))
        if continuous
        else jnp.zeros(num_agents, jnp.int32),
        reward=jnp.zeros(num_agents),
        terminated=jnp.zeros(num_agents, bool),
        truncated=jnp.zeros(num_agents, bool),
        last=jnp.zeros((), bool),
        behaviour_log_prob=jnp.zeros(num_agents),
        policy_id=jnp.zeros((), jnp.int32),
    )
    return Step(transition, view)
