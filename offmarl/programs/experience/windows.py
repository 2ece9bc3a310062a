"""Windows of steps drawn from the buffer of a recorder, for programs that learn off-policy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flashbax.buffers.trajectory_buffer import TrajectoryBuffer
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from offmarl._mesh import divide
from offmarl.errors import ShapeError
from offmarl.programs.experience.buffer import Capture, add, init_capture
from offmarl.replay import Replay, Windows, load
from offmarl.types import EnvSpec, Sequence, Transition, View
from offmarl.vault import Dataset

_TRIALS = 24
"""Candidates for the start of a window. One that lies on no slot is rejected, at most every second;
that all are, which would favour the last one, has a probability of at most 2^-24."""


class Start(NamedTuple):
    """Where windows start: at a step, or at the slot after it if the step ends an episode."""

    row: Int[Array, "B"]
    """Row of the buffer."""
    age: Int[Array, "B"]
    """Place of the step in the row, counted from the oldest step; negative before it."""
    after: Bool[Array, "B"]
    """Whether the window starts at the slot for the view that the step led to."""


def draw_windows(
    capture: Capture, key: PRNGKeyArray, batch_size: int, length: int = 1, burn_in: int = 0
) -> Sequence:
    """Draw windows from a buffer; each of its steps is equally likely to count in each of them.

    The steps of a row follow one another in slots, as in windows of a dataset
    (`offmarl.types.Sequence`): each step that ends an episode is followed by a slot for the view
    that it led to. A window starts at any slot with the same probability, and also before the
    oldest step, so that it may hold fewer steps than ``length`` and run past the newest step.

    Parameters
    ----------
    capture
        The buffer, which holds at least one step in each row.
    key
        Random key.
    batch_size
        B.
    length
        T. With 1, a window is a transition: ``view_tm1``, the step, and ``view_t``.
    burn_in
        Steps added before each window's that only fill the memory of recurrent networks: they do
        not count.

    Returns
    -------
    Sequence
        ``(B, burn_in + T, ...)``. ``mask`` is false for burn-in, for slots after an episode's end
        and for those outside of the buffer. ``first`` marks the beginnings of episodes, and the
        oldest step, before which there is nothing to remember.
    """
    return windows_at(capture, _uniform_starts(capture, key, batch_size, length), length, burn_in)


def windows_at(capture: Capture, start: Start, length: int, burn_in: int = 0) -> Sequence:
    """Return the windows that start at given places; see `draw_windows`."""
    # Of the steps of the row from ``burn_in`` before the start: where they lie, and in which slot.
    places, filled, row = jnp.arange(-burn_in, length), capture.filled, start.row[:, None]
    age = start.age[:, None] + places
    inside = (age >= 0) & (age < filled)
    oldest, held = capture.buffer.current_index - filled, capture.buffer.experience.transition
    index = (oldest + jnp.clip(age, 0, filled - 1)) % capture.capacity
    steps: Transition = jax.tree.map(lambda leaf: leaf[row, index], held)
    stays = steps.last | (age >= filled - 1)
    after, place = (index + 1) % capture.capacity, capture.place_of_next(row, index)

    def next_view(views: Array, finals: Array) -> Array:
        final = stays.reshape(stays.shape + (1,) * (views.ndim - 2))
        return jnp.where(final, finals[row, place], views[row, after])

    next_views = jax.tree.map(next_view, held.view, capture.next_views)
    last = steps.last & inside
    ends_before = jnp.cumsum(last, axis=1) - last
    slot = places + ends_before - ends_before[:, burn_in, None] - start.after[:, None]
    slot = jnp.where(age < filled, slot, length + 1)
    before = held.last[row, index - 1]
    slots = jnp.arange(-burn_in, length + 1)
    return divide(_in_slots(steps, next_views, slot, inside, before | (age == 0), slots))


def _uniform_starts(capture: Capture, key: PRNGKeyArray, batch_size: int, length: int) -> Start:
    """Draw starts uniformly over the slots at which a window begins that may hold a step."""
    row_key, age_key, slot_key = jax.random.split(key, 3)
    shape = (_TRIALS if length > 1 else 1, batch_size)
    last = capture.buffer.experience.transition.last
    row = jax.random.randint(row_key, shape, 0, last.shape[0])
    age = jax.random.randint(age_key, shape, 1 - length, capture.filled)
    if length == 1:  # a window of one slot that holds no step would be wasted
        return Start(row[0], age[0], jnp.zeros(batch_size, bool))
    after = jax.random.bernoulli(slot_key, 0.5, shape)
    index = (capture.buffer.current_index - capture.filled + age) % capture.capacity
    exists = ~after | (last[row, index] & (age >= 0))
    chosen = exists.argmax(0)
    every = jnp.arange(batch_size)
    after = after[chosen, every] & exists.any(0)
    return Start(row[chosen, every], age[chosen, every], after)


def _in_slots(
    steps: Transition,
    next_views: View,
    slot_of_step: Int[Array, "B S"],
    inside: Bool[Array, "B S"],
    first: Bool[Array, "B S"],
    slots: Int[Array, "slots"],
) -> Sequence:
    """Turn steps into a sequence of ``slots``, the last of which only holds a view.

    ``slot_of_step`` increases along a row. A slot without a step shows what the step before it led
    to.
    """
    # The step in each slot; in a slot that holds none, the step before it.
    index = (slot_of_step[:, None] <= slots[:, None]).sum(-1) - 1
    is_step = jnp.take_along_axis(slot_of_step, index, axis=1) == slots
    counts = is_step & jnp.take_along_axis(inside, index, axis=1)

    def take(leaf: Array, index: Array = index[:, :-1]) -> Array:
        return jax.vmap(lambda leaf, index: leaf[index])(leaf, index)

    def view(before: Array, after: Array) -> Array:
        acted = is_step.reshape(is_step.shape + (1,) * (before.ndim - 2))
        return jnp.where(acted, take(before, index), take(after, index))

    return Sequence(
        view=jax.tree.map(view, steps.view, next_views),
        action=take(steps.action),
        reward=take(steps.reward),
        terminated=take(steps.terminated),
        truncated=take(steps.truncated),
        behaviour_log_prob=take(steps.behaviour_log_prob),
        mask=(counts & (slots >= 0))[:, :-1],
        next_known=jnp.ones_like(is_step[:, :-1]),
        first=counts & take(first, index),
    )


def check_warm_start(vault: Dataset, spec: EnvSpec) -> None:
    """Raise `ShapeError` if a vault has other sizes than an environment."""
    if difference := vault.spec.difference(spec, extras=False):
        raise ShapeError(
            f"{vault.path} and {spec.name} differ in {difference}: give a vault recorded in "
            f"{spec.name}."
        )


def warm_start(
    buffer: TrajectoryBuffer,
    num_envs: int,
    capacity: int,
    spec: EnvSpec,
    vault: Dataset,
    num_steps: int | None = None,
) -> Capture:
    """Return a capture whose buffer holds the newest steps of a vault, with extras of zeros.

    The newest steps are the last ones of each row of the vault. They are divided into one interval
    for each environment. An episode that crosses the end of an interval is truncated there, with
    its true next view. Steps without a next view in the vault are left out.

    Parameters
    ----------
    buffer, num_envs, capacity
        The buffer, and its sizes as given to `make_buffer`.
    spec
        Spec of the environment.
    vault
        A dataset with any number of rows.
    num_steps
        As for `init_capture`.

    Raises
    ------
    ShapeError
        The vault has other sizes than the environment, or fewer steps than there are environments.
    """
    check_warm_start(vault, spec)
    replay = load(vault, Windows(batch_size=1, length=1))
    starts, times = _usable(replay, vault)
    steps = min(len(starts) // num_envs, capacity)
    if steps == 0:
        raise ShapeError(
            f"{vault.path} holds {len(starts)} steps with a known next view, too few to warm-start "
            f"{num_envs} environments: give fewer environments with --num-envs, or more data."
        )
    newest = np.argsort(times, kind="stable")[-steps * num_envs :]
    rows = np.sort(starts[newest]).reshape(num_envs, steps)
    goes_on = np.pad(rows[:, 1:] == rows[:, :-1] + 1, ((0, 0), (0, 1)))

    def fill(replay: Replay, slots: Array, goes_on: Array) -> Capture:
        step, next_views = jax.tree.map(
            lambda leaf: leaf.reshape(num_envs, steps, *leaf.shape[1:]).swapaxes(0, 1),
            _as_step(replay.at(slots), goes_on),
        )
        fresh = init_capture(buffer, spec, sampled=True, num_steps=num_steps)
        # Nothing reads the extras of these steps, which the vault may lack.
        extras = jax.tree.map(
            lambda leaf: jnp.zeros((steps, num_envs, *leaf.shape[2:]), leaf.dtype),
            fresh.buffer.experience.transition.extras,
        )
        filled = add(buffer, fresh, step._replace(extras=extras), next_views)
        return filled._replace(total=fresh.total)  # these steps are not recorded again

    return jax.jit(fill)(replay, rows.ravel(), goes_on.ravel())


def _usable(
    replay: Replay, vault: Dataset
) -> tuple[Int[np.ndarray, "usable"], Int[np.ndarray, "usable"]]:
    """Return the slots that hold a step with a known next view, and the time of each in its row."""
    found: dict[str, np.ndarray] = jax.device_get(jax.jit(_places)(replay))
    slots = np.flatnonzero(found["usable"])
    return slots, vault.episodes.start[found["episode"][slots]] + found["time"][slots]


def _places(replay: Replay) -> dict[str, Any]:
    """Return which slots of a replay hold a usable step, in which episode, and when in it."""
    windows = replay.at(jnp.arange(replay.num_slots))
    places: dict[str, Any] = {"episode": windows.episode, "time": windows.time}
    places["usable"] = windows.mask & windows.next_known
    return {name: leaf[:, 0] for name, leaf in places.items()}


def _as_step(sequence: Sequence, goes_on: jax.Array) -> tuple[Transition, View]:
    """Turn windows of one step, ``(M, 1, ...)``, into steps and next views, ``(M, ...)``."""

    def only(leaf: jax.Array) -> jax.Array:
        return leaf[:, 0]

    terminated, truncated = only(sequence.terminated), only(sequence.truncated)
    cut = ~goes_on[:, None] & ~terminated
    truncated = truncated | cut
    transition = Transition(
        view=jax.tree.map(only, sequence.view_tm1),
        action=only(sequence.action),
        reward=only(sequence.reward),
        terminated=terminated,
        truncated=truncated,
        last=(terminated | truncated).all(-1),
        behaviour_log_prob=only(sequence.behaviour_log_prob),
        policy_id=jnp.full(goes_on.shape, -1, jnp.int32),
    )
    return transition, jax.tree.map(only, sequence.view_t)
