"""Learning from a capture: its windows as sequences, and data from a vault put into it."""

import jax
import jax.numpy as jnp
import numpy as np
from flashbax.buffers.trajectory_buffer import TrajectoryBuffer

from offmarl.errors import ShapeError
from offmarl.programs.buffer import Capture, Step, add, init_capture
from offmarl.replay import load
from offmarl.types import EnvSpec, Sequence, Transition, View
from offmarl.vault import Dataset


def as_sequence(step: Step) -> Sequence:
    """Turn windows sampled from a buffer, ``(B, T, ...)``, into sequences of one episode each.

    A window may start anywhere, so an episode may end inside it: what comes after is masked out.
    Until then each view is the one the step before led to, so the next views are all there is to
    know, the true final view included.
    """
    transition = step.transition
    ended_before = jnp.cumsum(transition.last, axis=1) - transition.last > 0
    view = jax.tree.map(
        lambda first, following: jnp.concatenate([first[:, :1], following], axis=1),
        transition.view,
        step.next_view,
    )
    return Sequence(
        view=view,
        action=transition.action,
        reward=transition.reward,
        terminated=transition.terminated,
        truncated=transition.truncated,
        behaviour_log_prob=transition.behaviour_log_prob,
        mask=~ended_before,
        next_known=jnp.ones_like(transition.last),
    )


def warm_start(
    buffer: TrajectoryBuffer, num_envs: int, capacity: int, spec: EnvSpec, vault: Dataset
) -> Capture:
    """Start a capture with the newest steps of a vault in its buffer.

    The vault's steps are cut into one stretch for each environment; an episode that does not fit
    its stretch is truncated there, with its true next view. Steps whose next view the vault does
    not hold are left out.

    Parameters
    ----------
    buffer, num_envs, capacity
        As given to `make_buffer`.
    spec
        The environment's.
    vault
        Its data; it may have any number of rows.

    Raises
    ------
    ShapeError
        The vault is of other sizes than the environment, or holds fewer steps than there are
        environments.
    """
    if difference := vault.spec.difference(spec):
        raise ShapeError(
            f"{vault.path} and {spec.name} differ in {difference}: warm-start from data recorded "
            f"in {spec.name}."
        )
    replay = load(vault, batch_size=1, length=1)
    starts = np.asarray(replay.starts)
    starts = starts[np.asarray(jax.jit(lambda r: r.windows(r.starts).next_known)(replay))[:, 0]]
    steps = min(len(starts) // num_envs, capacity)
    if steps == 0:
        raise ShapeError(
            f"{vault.path} holds {len(starts)} steps with a known next view, too few to warm-start "
            f"{num_envs} environments: give fewer environments with --num-envs, or more data."
        )
    rows = starts[-steps * num_envs :].reshape(num_envs, steps)
    goes_on = np.pad(rows[:, 1:] == rows[:, :-1] + 1, ((0, 0), (0, 1)))
    sequence = jax.jit(lambda replay, starts: replay.windows(starts))(replay, rows.ravel())
    step = jax.tree.map(
        lambda leaf: leaf.reshape(num_envs, steps, *leaf.shape[1:]).swapaxes(0, 1),
        _as_step(sequence, jnp.asarray(goes_on.ravel())),
    )
    fresh = init_capture(buffer, spec, sampled=True)
    filled = add(buffer, fresh, step.transition, step.next_view)
    return filled._replace(total=fresh.total)  # nothing of this is to be recorded again


def _as_step(sequence: Sequence, goes_on: jax.Array) -> Step:
    """Turn windows of one step, ``(M, 1, ...)``, into the buffer's records, ``(M, ...)``."""

    def only(leaf: jax.Array) -> jax.Array:
        return leaf[:, 0]

    terminated, truncated = only(sequence.terminated), only(sequence.truncated)
    cut = ~goes_on[:, None] & ~terminated
    truncated = truncated | cut
    transition = Transition(
        view=View(*(only(leaf) for leaf in sequence.view_tm1)),
        action=only(sequence.action),
        reward=only(sequence.reward),
        terminated=terminated,
        truncated=truncated,
        last=(terminated | truncated).all(-1),
        behaviour_log_prob=only(sequence.behaviour_log_prob),
        policy_id=jnp.full(goes_on.shape, -1, jnp.int32),
    )
    return Step(transition, View(*(only(leaf) for leaf in sequence.view_t)))
