"""Estimates by ratios, by hand."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from offmarl.ope import (
    cumulative_ratios,
    effective_sample_size,
    local,
    weighted_importance_sampling,
)
from offmarl.ope.history import at_ends, was_certain_inside
from offmarl.ope.importance import bootstrap, with_interval
from offmarl.ope.local import local_values
from offmarl.types import Sequence, View


def seen(action, legal):
    """Return one episode of one step of one agent, as far as what asks for its actions reads it."""
    legal = jnp.array(legal)[None, None, None]
    view = View(None, None, jnp.repeat(legal, 2, 1), jnp.ones((1, 2, 1), bool))
    mask = jnp.ones((1, 1), bool)
    return Sequence(view, jnp.array(action)[None, None], *[None] * 4, mask, mask, None)


@pytest.mark.parametrize(
    ("action", "legal", "certain"),
    [
        ([1], [False, True], True),
        ([1], [True, True], False),
        ([[0.5]], [True], False),  # any number between -1 and 1 may be taken
        ([[0.5]], [False], True),
    ],
)
def test_whether_there_was_a_choice(action, legal, certain):
    assert seen(action, legal).choices.all() != certain


@pytest.mark.parametrize(
    ("action", "legal", "log_prob", "end", "certain"),
    [
        ([1], [True, True], 0.0, False, False),  # discrete
        ([[0.5, 1.0]], [True, True], -1.0, True, False),
        ([[0.5, 1.0]], [True, False], -1.0, False, False),  # an entry that is not the agent's
        ([[0.5, -1.0]], [True, True], 0.0, True, True),
        ([[1.0, -1.0]], [True, True], 0.0, True, False),  # an end has a probability
        ([[0.0, 0.0]], [False, False], 0.0, False, False),
    ],
)
def test_actions_that_have_a_density_for_some_policies(action, legal, log_prob, end, certain):
    episode = seen(action, legal)._replace(behaviour_log_prob=jnp.full((1, 1, 1), log_prob))
    assert at_ends(episode).all() == end and was_certain_inside(episode).all() == certain
    dead = episode._replace(view=episode.view._replace(alive=jnp.zeros((1, 2, 1), bool)))
    assert not at_ends(dead).any() and not was_certain_inside(dead).any()


def test_agents_are_told_apart():
    """Of two agents, one takes an end of the interval, and the other a sure action inside it."""
    episode = seen([[1.0], [0.5]], [[True], [True]])
    episode = episode._replace(
        view=episode.view._replace(
            legal_actions=jnp.ones((1, 2, 2, 1), bool), alive=jnp.ones((1, 2, 2), bool)
        ),
        behaviour_log_prob=jnp.array([[[-1.0, 0.0]]]),
    )
    assert at_ends(episode).tolist() == [[[True, False]]]
    assert was_certain_inside(episode).tolist() == [[[False, True]]]
    assert episode.choices.all()
    bound = episode.view.legal_actions.at[:, :, 0].set(False)  # of one of them only
    changed = episode._replace(view=episode.view._replace(legal_actions=bound))
    assert changed.choices.tolist() == [[[False, True]]]


# Two episodes of two steps and one of one step; ratios of the steps and rewards.
RATIO = np.array([[2.0, 0.5], [1.0, 3.0], [0.5, 1.0]])
REWARD = jnp.array([[1.0, 4.0], [0.0, 2.0], [6.0, 0.0]])
MASK = jnp.array([[True, True], [True, True], [True, False]])
ALL = jnp.ones(3)


def ratios(ratio=RATIO):
    behaviour = np.log(np.array([[0.1, 0.2], [0.3, 0.1], [0.4, np.nan]]))
    return cumulative_ratios(jnp.log(ratio) + behaviour, jnp.asarray(behaviour), MASK)


def test_weighted_importance_sampling_by_hand():
    # Cumulative ratios 2, 1, .5 at the first step; 1, 3, .5 at the second, where the last episode
    # stays in the end with its ratio.
    first = (2 * 1 + 1 * 0 + 0.5 * 6) / 3.5
    second = (1 * 4 + 3 * 2 + 0.5 * 0) / 4.5
    value = weighted_importance_sampling(ratios(), REWARD, 0.9, ALL)
    np.testing.assert_allclose(value, first + 0.9 * second, rtol=1e-6)


def test_counts_weigh_whole_episodes():
    counts = jnp.array([[1.0, 1, 1], [0, 2, 1]])
    values = weighted_importance_sampling(ratios(), REWARD, 1.0, counts)
    second = (2 * 1 * 0 + 0.5 * 6) / 2.5 + (2 * 3 * 2) / 6.5
    np.testing.assert_allclose(values[1], second, rtol=1e-6)


def test_the_effective_sample_size_is_that_of_whole_episodes():
    np.testing.assert_allclose(effective_sample_size(ratios()), 4.5**2 / (1 + 9 + 0.25), rtol=1e-6)
    assert effective_sample_size(ratios(np.ones((3, 2)))) == pytest.approx(3)
    assert effective_sample_size(ratios(np.zeros((3, 2)))) == 0


def test_an_episode_that_the_policy_would_not_play_has_no_weight():
    ratio = RATIO.copy()
    ratio[0] = [2.0, 0.0]
    value = weighted_importance_sampling(ratios(ratio), REWARD, 1.0, ALL)
    first = (2 * 1 + 1 * 0 + 0.5 * 6) / 3.5
    np.testing.assert_allclose(value, first + (3 * 2) / 3.5, rtol=1e-6)
    assert effective_sample_size(ratios(ratio)) == pytest.approx(3.5**2 / (9 + 0.25))


def test_ratios_of_many_steps_do_not_overflow():
    log_prob = jnp.zeros((2, 500)).at[0].set(3.0)
    cumulative = cumulative_ratios(log_prob, jnp.zeros((2, 500)), jnp.ones((2, 500), bool))
    reward = jnp.zeros((2, 500)).at[0].set(1.0)
    value = weighted_importance_sampling(cumulative, reward, 1.0, jnp.ones(2))
    weights = 1 / (1 + np.exp(-3.0 * np.arange(1, 501)))
    np.testing.assert_allclose(value, weights.sum(), rtol=1e-5)


def test_the_local_approximation_by_hand():
    """Two episodes of two agents: ratios 2 and 1 at first, then 1/2, and 50, which is clipped."""
    behaviour = np.log([[[0.4, 0.5], [0.2, 0.1]], [[0.4, 0.5], [0.2, 0.1]]])
    log_prob = behaviour + np.log([[[2, 1], [0.5, 50]], [[1, 1], [1, 1]]])
    advantage, returns = np.array([[1.0, 2.0], [7.0, 7.0]]), np.array([10.0, 20.0])
    values = local_values(log_prob, behaviour, advantage, returns, 0.9)
    np.testing.assert_allclose(values, [10 + 1 + 0.9 * 2 * (-0.5 + 9), 20])
    never = local_values(np.full_like(behaviour, -np.inf), behaviour, advantage, returns, 1.0)
    np.testing.assert_allclose(never, [10 - 2 * 3, 20 - 2 * 14])


@pytest.mark.parametrize("features", [512, 3])
def test_advantages_by_hand(features, monkeypatch):
    """In two blocks of episodes; more entries than features are projected."""
    monkeypatch.setattr(local, "_FEATURES", features)
    draw, lengths, gamma = np.random.default_rng(0), np.array([3, 2, 3, 1, 3, 2, 3]), 0.8
    mask = np.arange(3) < lengths[:, None]
    reward, folds = draw.normal(size=(7, 3)) * mask, np.array([0, 1, 1, 0, 0, 1, 0])
    counts = np.arange(7) != 2
    observation, state = draw.normal(size=(7, 4, 2, 2)), draw.normal(size=(7, 4, 1))
    view = View(observation, state, np.ones((7, 4, 2, 3), bool), np.ones((7, 4, 2), bool))
    blank = jax.tree.map(lambda leaf: 9 * np.ones_like(leaf[:2]), view)  # fills up the last block
    last = jax.tree.map(lambda x, y: np.concatenate([x[5:], y]), view, blank)
    first = jax.tree.map(lambda leaf: leaf[:5], view)
    blocks = [
        (part, SimpleNamespace(view_tm1=jax.tree.map(lambda leaf: leaf[:, :-1], x)))
        for part, x in ((slice(0, 5), first), (slice(5, 7), last))
    ]
    histories = SimpleNamespace(longest=3, blocks=lambda: iter(blocks))
    result = local.advantages(histories, reward, mask, folds, counts, gamma)

    def sums(x, discount):
        return np.stack([x[:, t:] @ discount ** np.arange(3 - t) for t in range(3)], 1)

    def apart(x):
        return x - (x * kept).sum(0) / kept.sum(0)

    kept, to_go = mask & counts[:, None], sums(reward, gamma)
    x = np.concatenate([observation.reshape(7, 4, 4), state], -1)[:, :3]
    x = (x - x[mask].mean(0)) / x[mask].std(0)
    if features == 3:  # legal actions and flags never change
        normal = np.random.default_rng(0).normal(size=(5 + 6 + 2, 3)) / 3**0.5
        x = x @ normal[:5]
    time = np.broadcast_to(np.arange(3)[:, None] / 3, (7, 3, 1))
    x = np.concatenate([np.ones_like(time), time**2, x], -1)
    x = np.concatenate([x, x * time], -1)
    value = np.zeros((7, 4))
    for episode, t in np.argwhere(mask):
        rows = kept & (folds != folds[episode])[:, None]
        square, product = x[rows].T @ x[rows], x[rows].T @ apart(to_go)[rows]
        weights = np.linalg.solve(square + 0.01 * rows.sum() * np.eye(len(square)), product)
        value[episode, t] = x[episode, t] @ weights + (to_go - apart(to_go))[0, t]
    error = (reward + gamma * value[:, 1:] - value[:, :-1]) * mask
    np.testing.assert_allclose(result, apart(sums(error, gamma * 0.9)) * mask, atol=1e-8)


def test_the_bootstrap_of_a_mean_is_as_wide_as_its_standard_error():
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)

    def mean(counts):
        return (counts * values).sum(-1) / counts.sum(-1)

    resampled = bootstrap(mean, 400, np.random.default_rng(1))
    value, low, high = with_interval(values.mean(), resampled, 400)
    half = norm.ppf(0.975) * values.std() / 400**0.5
    assert value == pytest.approx(values.mean(), rel=1e-5)
    assert [value - low, high - value] == pytest.approx([half, half], rel=0.1)


@pytest.mark.parametrize("shift", [0.0, -2.4841377117503303])  # which ends the interval at 0
def test_the_interval_of_a_few_critics_is_that_of_one(shift):
    critics = np.array([-1.0, 0.0, 1.0]) + shift
    value, low, high = with_interval(5.0, critics, 400)
    half = 4.302653  # Student's t with two degrees of freedom, and a standard deviation of 1
    assert [value, low, high] == pytest.approx([5, 5 - half, 5 + half])


def test_two_episodes_have_no_interval():
    resampled = bootstrap(lambda counts: counts.sum(-1), 2, np.random.default_rng(0))
    assert with_interval(2.0, resampled, 2) == (2, None, None)
    assert with_interval(2.0, np.full(2000, np.nan), 50) == (2, None, None)
    assert not with_interval(2.0, np.array([1.0, np.nan, 3.0]), 50).finite  # a diverged critic


@pytest.mark.parametrize("episodes", [8, 12])
def test_intervals_of_few_episodes_hold_the_truth_as_often_as_they_say(episodes):
    """Of the mean of normal returns; plain percentiles cover less than nine times of ten."""
    rng, held = np.random.default_rng(0), []
    for _ in range(400):
        values = rng.normal(size=episodes)
        resampled = bootstrap(
            lambda counts, x=values: np.asarray(counts) @ x / len(x), episodes, rng
        )
        _, low, high = with_interval(values.mean(), resampled, episodes)
        held.append(low <= 0 <= high)
    assert np.mean(held) == pytest.approx(0.95, abs=0.04)
