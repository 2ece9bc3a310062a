"""Windows drawn from a recorder's buffer: their content, and how likely each step is in them."""

from collections import Counter
from functools import lru_cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.programs import Capture, add, draw_windows, init_capture, make_buffer
from offmarl.programs.experience.prioritised import (
    admit,
    begin_priorities,
    reprioritise,
    sample,
)
from offmarl.programs.experience.windows import WindowStart, windows_at
from offmarl.replay import Windows, load
from offmarl.types import Discrete, EnvSpec
from tests.rollouts import steps_of, view_of
from tests.vault.experience import written

SPEC = EnvSpec("numbers", 1, 1, 1, Discrete(2))
CAPACITY = 8
ENDS = ((0, 0, 1, 0, 1, 1, 0, 0, 0, 1, 0), (0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1))
"""Whether each step of two rows ends an episode; the first three are overwritten."""


PUT = jax.jit(add, static_argnums=0)
DRAW = jax.jit(draw_windows, static_argnums=(2, 3, 4))
UNPACK = jax.jit(windows_at, static_argnums=(2, 3))
ADMIT = jax.jit(admit, static_argnums=(2, 3))
SAMPLE = jax.jit(sample, static_argnums=(3, 4))


@lru_cache
def capture_of(ends: tuple[tuple[int, ...], ...] = ENDS, capacity: int = CAPACITY) -> Capture:
    """Return a buffer of numbered steps.

    Step t of row e is seen as 100 e + t, and led to the view 1000 + 100 e + t if it ends an
    episode, and to the next step's otherwise.
    """
    last = np.array(ends, bool).T
    rows = last.shape[1]
    number = 100 * np.arange(rows) + np.arange(len(last))[:, None]
    transitions = steps_of(SPEC, last, number, reward=number[..., None].astype(np.float32))
    views = transitions, view_of(SPEC, np.where(last, 1000 + number, number + 1))
    transitions, after = jax.device_get(views)
    buffer = make_buffer(rows, capacity)
    capture = init_capture(buffer, SPEC, sampled=True, num_steps=4)
    for start in range(0, len(last), 4):
        span = slice(start, start + 4)
        added = jax.tree.map(lambda x, span=span: x[span], (transitions, after))
        capture = PUT(buffer, capture, *added)
    return capture


def slots_of(ends: tuple[int, ...], row: int, oldest: int) -> list[tuple[int, bool, bool]]:
    """Return what each slot of a row shows, and whether it holds a step and begins an episode."""
    slots, first = [], True
    for time in range(oldest, len(ends)):
        slots.append((100 * row + time, True, first))
        first = bool(ends[time])
        if first:
            slots.append((1000 + 100 * row + time, False, False))
    return slots


def every_start(
    length: int, burn_in: int
) -> tuple[WindowStart, list[list[tuple[int, bool, bool] | None]]]:
    """Return all starts in a full buffer, and what the window from each of them holds."""
    starts, expected = [], []
    for row, ends in enumerate(ENDS):
        oldest = len(ends) - CAPACITY
        slots, at = slots_of(ends, row, oldest), 0
        blank = [None] * (burn_in + length)
        padded = blank + slots + [None] * length
        for age in range(1 - length, CAPACITY):
            for after in (False, True):
                if after and not (age >= 0 and ends[oldest + age]):
                    continue
                place = at + 1 - length + len(blank)
                starts.append((row, age, after))
                expected.append(padded[place - burn_in : place + length])
                at += 1
    row, age, after = zip(*starts, strict=True)
    return WindowStart(jnp.array(row), jnp.array(age), jnp.array(after)), expected


@pytest.mark.slow
@pytest.mark.parametrize(("length", "burn_in"), [(1, 0), (4, 0), (3, 2), (12, 0)])
def test_windows_hold_what_happened(length: int, burn_in: int) -> None:
    start, expected = every_start(length, burn_in)
    batch = jax.device_get(UNPACK(capture_of(), start, length, burn_in))
    states, mask = batch.view.state[..., 0], batch.mask
    for window, content in enumerate(expected):
        for slot, entry in enumerate(content):
            if entry is not None:
                assert states[window, slot] == entry[0]
                assert batch.first[window, slot] == entry[2]
            counts = entry is not None and entry[1] and slot >= burn_in
            assert mask[window, slot] == counts
            if counts:  # the next slot is the exact next view, also after the newest step
                row, time = divmod(entry[0], 100)
                led_to = 1000 + entry[0] if ENDS[row][time] else entry[0] + 1
                assert states[window, slot + 1] == led_to
                assert batch.reward[window, slot, 0] == entry[0]
    # Each step counts in as many windows as any other: one for each of its places in a window.
    occurrences = Counter(states[:, :-1][mask].tolist())
    assert set(occurrences.values()) == {length}
    assert len(occurrences) == 2 * CAPACITY


@pytest.mark.slow
def test_steps_are_drawn_equally_often() -> None:
    for capture, length in (
        (capture_of(), 1),
        (capture_of(), 4),
        (capture_of(capacity=32), 4),
    ):
        batch = DRAW(capture, jax.random.key(0), 2**16, length, 0)
        count = np.unique(batch.view.state[:, :-1, 0][batch.mask], return_counts=True)[1]
        assert len(count) == 2 * int(capture.filled)
        np.testing.assert_allclose(count / count.mean(), 1, atol=0.05)
        if length == 1:
            assert batch.mask.all()


def test_steps_leave_the_buffer_with_their_final_views(monkeypatch) -> None:
    """A row whose episodes are short limits what all rows hold; draws stay even, and exact."""
    monkeypatch.setattr("offmarl.programs.experience.buffer._SMALL_BYTES", 0)
    ends = ((1,) * 14 + (0, 1), (0,) * 16)
    capture = capture_of.__wrapped__(ends, 12)
    assert (capture.num_finals, int(capture.filled)) == (4, 5)
    for length in (1, 3):
        batch = DRAW(capture, jax.random.key(0), 2**13, length, 0)
        states, after = batch.view_tm1.state[..., 0], batch.view_t.state[..., 0]
        steps, count = np.unique(states[batch.mask], return_counts=True)
        assert steps.tolist() == [11, 12, 13, 14, 15, 111, 112, 113, 114, 115]
        np.testing.assert_allclose(count / count.mean(), 1, atol=0.1)
        for step, led_to in zip(states[batch.mask], after[batch.mask], strict=True):
            row, time = divmod(int(step), 100)
            assert led_to == step + (1000 if ends[row][time] else 1)
    tree = ADMIT(begin_priorities(capture), capture, 4, 3).tree
    values = np.asarray(tree.values(jnp.arange(4 * 12), 1.0)).reshape(2, 12, 2)
    slots = [time % 12 for time in range(11, 16)]
    assert np.flatnonzero(values[1, :, 0]).tolist() == sorted(slots)


@pytest.fixture(scope="module")
def prior(tmp_path_factory):
    """Return steps 500 to 505 and 600 to 605, where nothing is known after the last ones."""
    number = 500 + 100 * np.arange(2)[:, None] + np.arange(6)
    reward = number[..., None].astype(np.float32)
    steps = jax.device_get(steps_of(SPEC, number < 0, number, reward=reward))
    path = tmp_path_factory.mktemp("prior") / "numbers.vlt"
    return load(written(path, (steps, None), spec=SPEC), Windows(60, 2, extras=()))


def test_half_of_a_batch_is_drawn_from_prior_data_however_many_steps_are_added(prior) -> None:
    key, plain = jax.random.key(0), capture_of()
    batch = DRAW(plain._replace(prior=prior), key, 121, 2)
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[:61], batch), DRAW(plain, key, 61, 2))
    # They are drawn apart from own windows, of one step, which the second part of the key draws.
    alike = prior.sample(jax.random.split(key, 3)[1])
    assert not np.array_equal(batch.reward[61:], alike.reward)
    rewards = np.unique(batch.reward[61:][batch.mask[61:]])
    assert rewards.tolist() == [*range(500, 505), *range(600, 605)]
    after = batch.view.state[61:, 1:, 0][batch.mask[61:]]
    np.testing.assert_array_equal(after, batch.reward[61:, :, 0][batch.mask[61:]] + 1)
    buffer, step = make_buffer(2, CAPACITY), plain.buffer.experience.transition
    steps = jax.tree.map(lambda x: x.swapaxes(0, 1), step)
    added = add(buffer, plain._replace(prior=prior), steps, steps.view)
    assert added.prior is prior


def test_prior_data_have_no_priorities(prior) -> None:
    capture = capture_of()
    priorities = begin_priorities(capture)
    batch, slots = SAMPLE(
        priorities, capture._replace(prior=prior), jax.random.key(1), 120, 2, jnp.float32(0.4)
    )
    assert slots.shape == (60,) and batch.weight.shape == batch.mask.shape[:1] == (120,)
    np.testing.assert_allclose(batch.weight[60:], batch.weight[:60].mean(), rtol=1e-6)
    errors = jnp.where(jnp.arange(120)[:, None] < 60, 1.0, 9.0) * jnp.ones((1, 2))
    after = reprioritise(priorities, slots, errors, jnp.ones((120, 2), bool), 0.5)
    np.testing.assert_allclose(after.largest, 1.0, rtol=1e-4)


@pytest.mark.slow
def test_prioritised_windows_start_at_the_slots_of_the_buffer() -> None:
    """They are drawn as the others are, before and after it is full; later ones by their errors."""
    buffer_steps, length = np.array(ENDS), 3
    priorities = None
    for count in (5, 8, 11):
        capture = capture_of(tuple(map(tuple, buffer_steps[:, :count].tolist())))
        if priorities is None:
            priorities = begin_priorities(capture)
        priorities = ADMIT(priorities, capture, 5, length)
        exist = np.zeros((2, CAPACITY, 2))
        for time in range(max(0, count - CAPACITY), count):
            exist[:, time % CAPACITY] = np.stack([np.ones(2), buffer_steps[:, time]], 1)
        values = priorities.tree.values(jnp.arange(4 * CAPACITY), 1.0)
        np.testing.assert_array_equal(values.reshape(exist.shape), exist)
    batch, slots = SAMPLE(priorities, capture, jax.random.key(1), 64, length, jnp.float32(0.4))
    row, remainder = np.divmod(np.asarray(slots), 2 * CAPACITY)
    age = (remainder // 2 - 11) % CAPACITY
    same = UNPACK(capture, WindowStart(row, age, remainder % 2 == 1), length)
    chex.assert_trees_all_equal(batch._replace(weight=None), same)
    np.testing.assert_allclose(batch.weight, 1.0)
    # Whatever they were, windows that now hold new steps are as important as the most important.
    indices, quarter = jnp.arange(4 * CAPACITY), jnp.asarray(0.25 * exist.ravel(), jnp.float32)
    low = priorities.tree.put(indices, quarter, jnp.zeros_like(quarter))
    again = ADMIT(priorities._replace(tree=low), capture, 3, length)
    newest = [(10 - age) % CAPACITY for age in range(3 + length - 1)]
    expected = 0.25 * exist
    expected[:, newest] = exist[:, newest]
    values = again.tree.values(indices, 1.0)
    np.testing.assert_array_equal(values.reshape(exist.shape), expected)
    errors = jnp.full((64, length), 2.0)
    after = reprioritise(priorities, slots, errors, jnp.ones((64, length), bool), 0.5)
    np.testing.assert_allclose(after.largest, np.sqrt(2), rtol=1e-4)
