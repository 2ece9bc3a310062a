"""Windows of steps drawn from the buffer of a recorder, for programs that learn off-policy."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from offmarl._mesh import divide
from offmarl.programs.experience.buffer import Capture
from offmarl.types import Sequence, Transition, View

_TRIALS = 24
"""Candidates for the start of a window. One that lies on no slot is rejected, at most every second;
that all are, which would favour the last one, has a probability of at most 2^-24."""


_PRIOR = 2**31
"""Number of the key for prior data."""


class WindowStart(NamedTuple):
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

    Half of the windows are drawn from the data in ``capture.prior``, if there are some, where the
    loss of a step whose next view is unknown does not count.

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
    count = own_windows(capture, batch_size)
    starts = _uniform_starts(capture, key, count, length)
    return beside_prior(windows_at(capture, starts, length, burn_in), capture, key)


def own_windows(capture: Capture, batch_size: int) -> int:
    """Return how many windows of a batch are drawn from the buffer's own steps."""
    return batch_size if capture.prior is None else batch_size - batch_size // 2


def beside_prior(windows: Sequence, capture: Capture, key: PRNGKeyArray) -> Sequence:
    """Return windows of a buffer, followed by those that are drawn from its prior data."""
    if capture.prior is None:
        return windows
    # Numbers from 0 on give the keys into which `_uniform_starts` splits the same key.
    prior = capture.prior.sample(jax.random.fold_in(key, _PRIOR))
    prior = prior._replace(mask=prior.mask & prior.next_known)
    if windows.weight is not None:  # their mean gives prior data half of the loss, too
        prior = prior._replace(weight=jnp.full(len(prior.mask), windows.weight.mean()))
    beside = {
        name: jax.tree.map(lambda *pair: divide(jnp.concatenate(pair)), leaf, getattr(prior, name))
        for name, leaf in windows._asdict().items()
        if leaf is not None
    }
    return windows._replace(**beside)


def windows_at(capture: Capture, start: WindowStart, length: int, burn_in: int = 0) -> Sequence:
    """Return the windows that start at given places; see `draw_windows`."""
    # Indices and slots of the row's steps, from ``burn_in`` steps before the start on.
    places, filled, row = jnp.arange(-burn_in, length), capture.filled, start.row[:, None]
    age = start.age[:, None] + places
    inside = (age >= 0) & (age < filled)
    experience, oldest = capture.buffer.experience, capture.buffer.current_index - filled
    index = (oldest + jnp.clip(age, 0, filled - 1)) % capture.capacity
    steps: Transition = jax.tree.map(lambda leaf: leaf[row, index], experience.transition)
    stays = steps.last | (age >= filled - 1)
    after, place = (index + 1) % capture.capacity, capture.place_of_next(row, index)

    def next_view(views: Array, finals: Array) -> Array:
        final = stays.reshape(stays.shape + (1,) * (views.ndim - 2))
        return jnp.where(final, finals[row, place], views[row, after])

    next_views = jax.tree.map(next_view, experience.transition.view, capture.next_views)
    last = steps.last & inside
    ends_before = jnp.cumsum(last, axis=1) - last
    slot = places + ends_before - ends_before[:, burn_in, None] - start.after[:, None]
    slot = jnp.where(age < filled, slot, length + 1)
    before = experience.transition.last[row, index - 1]
    slots = jnp.arange(-burn_in, length + 1)
    return divide(_in_slots(steps, next_views, slot, inside, before | (age == 0), slots))


def _uniform_starts(
    capture: Capture, key: PRNGKeyArray, batch_size: int, length: int
) -> WindowStart:
    """Draw starts uniformly over the slots at which a window begins that may hold a step."""
    row_key, age_key, slot_key = jax.random.split(key, 3)
    shape = (_TRIALS if length > 1 else 1, batch_size)
    last = capture.buffer.experience.transition.last
    row = jax.random.randint(row_key, shape, 0, last.shape[0])
    age = jax.random.randint(age_key, shape, 1 - length, capture.filled)
    if length == 1:  # a window of one slot that holds no step would be wasted
        return WindowStart(row[0], age[0], jnp.zeros(batch_size, bool))
    after = jax.random.bernoulli(slot_key, 0.5, shape)
    index = (capture.buffer.current_index - capture.filled + age) % capture.capacity
    exists = ~after | (last[row, index] & (age >= 0))
    trial = exists.argmax(0)
    windows = jnp.arange(batch_size)
    after = after[trial, windows] & exists.any(0)
    return WindowStart(row[trial, windows], age[trial, windows], after)


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
