"""Losses that keep a policy near the data."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offmarl.distributions import select_each
from offmarl.losses import (
    conservative_gap,
    cross_entropy,
    sample_legal_actions,
    sampled_conservative_gap,
    softmax_weights,
)


@given(st.integers(0, 2**31 - 1))
def test_sampled_actions_are_legal(seed: int) -> None:
    legal, actions = drawn(seed)
    assert actions.shape == (7, 3, 5)
    assert np.take_along_axis(np.asarray(legal), np.asarray(actions), -1).all()


@jax.jit
def drawn(seed: int) -> tuple[jax.Array, jax.Array]:
    """Return random legal actions, and five choices of each."""
    key, legal_key = jax.random.split(jax.random.key(seed))
    legal = jax.random.bernoulli(legal_key, 0.3, (7, 3, 6)).at[..., 2].set(True)
    return legal, sample_legal_actions(key, legal, 5)


def test_sampled_actions_are_uniform_over_the_legal_ones_and_differ_between_agents() -> None:
    legal = jnp.array([[True, False, True, True], [True, True, True, True]])
    actions = np.asarray(sample_legal_actions(jax.random.key(0), legal, 40_000))
    frequency = [np.bincount(actions[i], minlength=4) / 40_000 for i in range(2)]
    np.testing.assert_allclose(frequency[0], [1 / 3, 0, 1 / 3, 1 / 3], atol=0.01)
    np.testing.assert_allclose(frequency[1], [0.25] * 4, atol=0.01)
    # Independent agents: the joint frequency is the product of the two.
    both = (actions == 0).all(0).mean()
    assert both == pytest.approx(1 / 12, abs=0.01)


def test_the_values_of_several_actions_by_hand() -> None:
    values = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    result = select_each(values, jnp.array([[2, 0], [1, 1]]))
    np.testing.assert_allclose(result, [[3.0, 1.0], [5.0, 5.0]])


def test_conservative_gap_by_hand() -> None:
    # log(e^0 + e^1 + e^2) - 2 with the data's own action worth 2.
    gap = conservative_gap(jnp.array([[0.0, 1.0]]), jnp.array([2.0]))
    np.testing.assert_allclose(gap, np.log(1 + np.e + np.e**2) - 2, rtol=1e-6)


def test_the_gap_of_sampled_actions_by_hand() -> None:
    # Two critics, three samples in two places; the last sample of the second place does not count.
    q = jnp.array([[[1.0, 0.0], [2.0, 1.0], [3.0, 90.0]], [[4.0, 0.0], [0.0, 2.0], [1.0, 90.0]]])
    log_density = jnp.log(jnp.array([[0.5, 0.5], [2.0, 0.25], [1.0, 1.0]]))
    valid = jnp.array([[True, True], [True, True], [True, False]])
    result = sampled_conservative_gap(q, log_density, valid, jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    e = np.exp
    expected = [
        [np.log(2 * e(1) + e(2) / 2 + e(3)) - 1, np.log(2 + 4 * e(1)) - 2],
        [np.log(2 * e(4) + 1 / 2 + e(1)) - 3, np.log(2 + 4 * e(2)) - 4],
    ]
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_the_gap_of_sampled_actions_estimates_an_integral() -> None:
    # Of e^{2a} over [-1, 1]: sinh 2; whatever density the samples have.
    x = (jnp.arange(4000) + 0.5) / 4000
    action = 2 * jnp.sqrt(x) - 1  # of density (1 + a) / 2
    density = (1 + action) / 2
    result = sampled_conservative_gap(
        2 * action[None], jnp.log(density), jnp.ones(4000, bool), jnp.zeros(1)
    )
    np.testing.assert_allclose(result - np.log(4000), np.log(np.sinh(2)), rtol=1e-2)


def test_cross_entropy_normalises_over_legal_actions_only() -> None:
    logits = jnp.array([[[0.0, 0.0, 50.0]]])
    legal = jnp.array([[[True, True, False]]])
    loss = cross_entropy(logits, jnp.array([[0]]), legal)
    np.testing.assert_allclose(loss, np.log(2.0), rtol=1e-6)
    gradient = jax.grad(lambda x: cross_entropy(x, jnp.array([[0]]), legal).sum())(logits)
    np.testing.assert_allclose(gradient, [[[-0.5, 0.5, 0.0]]], atol=1e-6)


def test_softmax_weights_run_over_the_batch_and_have_mean_one() -> None:
    x = jnp.array([[1.0, 3.0, 1.0], [2.0, 100.0, 1.0], [3.0, 4.0, 1.0]])
    mask = jnp.array([[True, True, False], [True, False, False], [True, True, False]])
    e, (first, last) = np.exp([1.0, 2.0, 3.0]), np.exp([3.0, 4.0])
    expected = [3 * e / e.sum(), 2 * np.array([first, 0, last]) / (first + last), [0, 0, 0]]
    np.testing.assert_allclose(softmax_weights(x, mask, 1.0).T, expected, rtol=1e-6)


def test_softmax_weights_count_samples_by_their_weight() -> None:
    """Two draws of weight 1 are one of weight 2, and one of weight 0 is none."""
    x, on = jnp.array([[1.0], [2.0], [2.0], [9.0]]), jnp.array([[True], [True], [True], [False]])
    expected = softmax_weights(x, on, 0.5)
    fewer = softmax_weights(x[jnp.array([0, 1])], on[:2], 0.5, jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(fewer, expected[:2], rtol=1e-6)
    more = softmax_weights(x, jnp.ones((4, 1), bool), 0.5, jnp.array([[1.0], [1.0], [1.0], [0.0]]))
    np.testing.assert_allclose(more[:3], expected[:3], rtol=1e-6)
    chex.assert_tree_all_finite(more)
    same = softmax_weights(x, on, 0.5, jnp.ones(4))
    np.testing.assert_allclose(same, expected, rtol=1e-6)


def test_softmax_weights_pass_no_gradient() -> None:
    gradient = jax.grad(lambda x: softmax_weights(x, jnp.ones((3, 1), bool), 0.1).max())(
        jnp.array([[1.0], [2.0], [3.0]])
    )
    np.testing.assert_array_equal(gradient, 0.0)
