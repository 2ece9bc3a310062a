"""What corrects the distribution of the data: soft maxima, ratios and divergences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.distributions import categorical
from offmarl.losses import (
    LEAST_LOG_PROB,
    divergence,
    probability_ratios,
    soft_chi_square_conjugate,
    soft_chi_square_ratio,
    soft_maximum,
    weighted_mean,
)


def test_weighted_mean():
    x, weight = jnp.array([1.0, 5.0, jnp.nan]), jnp.array([3.0, 1.0, 0.0])
    np.testing.assert_allclose(weighted_mean(x, weight), 2.0)
    assert weighted_mean(x, jnp.zeros(3)) == 0


def test_the_soft_maximum():
    x, weight = jnp.array([2.0, 4.0, jnp.nan]), jnp.array([0.25, 0.75, 0.0])
    by_hand = 2 * np.log(0.25 * np.exp(1) + 0.75 * np.exp(2))
    value, gradient = jax.value_and_grad(soft_maximum)(x, weight, 2.0)
    np.testing.assert_allclose(value, by_hand, rtol=1e-6)
    np.testing.assert_allclose(gradient.sum(), 1.0, rtol=1e-6)
    np.testing.assert_allclose(gradient[1] / gradient[0], 3 * np.e, rtol=1e-5)


def test_the_soft_maximum_of_nothing_is_0():
    result = jax.value_and_grad(soft_maximum)(jnp.array([2.0, jnp.nan]), jnp.zeros(2), 2.0)
    np.testing.assert_array_equal(result[0], 0.0)
    np.testing.assert_array_equal(result[1], [0.0, 0.0])


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_the_soft_maximum_of_large_numbers_at_a_low_temperature_is_the_maximum(shift):
    x, weight = shift + jnp.array([2.0, 4.0]), jnp.array([0.5, 0.5])
    np.testing.assert_allclose(soft_maximum(x, weight, 1e-3), shift + 4.0, rtol=1e-5)


def test_ratios_count_the_masked_agents_and_are_bounded():
    log_prob = jnp.log(jnp.array([[0.9, 0.5, 0.2], [0.5, 1.0, 1.0]]))
    data = jnp.log(jnp.array([[0.3, 0.1, 1e-30], [0.0, 1e-3, 1e-3]]))
    mask = jnp.array([[True, True, False], [False, True, True]])
    ratios = probability_ratios(log_prob, data, mask, 100.0)
    np.testing.assert_allclose(ratios, [15.0, 100.0], rtol=1e-5)
    nobody = probability_ratios(log_prob, data, jnp.zeros((2, 3), bool), 100.0)
    np.testing.assert_array_equal(nobody, 1.0)


def test_the_divergence_over_legal_actions():
    legal = jnp.array([[True, True, False], [True, False, True]])
    logits = jnp.log(jnp.array([[1.0, 3.0, 9.0], [1.0, 1.0, 1e-20]]))
    log_probs = jax.nn.log_softmax(categorical(logits, legal).logits)
    data = jax.nn.log_softmax(categorical(jnp.zeros((2, 3)), legal).logits)
    by_hand = [0.25 * np.log(0.5) + 0.75 * np.log(1.5), np.log(2)]
    np.testing.assert_allclose(divergence(log_probs, data), by_hand, rtol=1e-5)


def test_the_divergence_from_data_that_lack_an_action_is_finite():
    result = divergence(jnp.log(jnp.array([1.0, 1e-9])), jnp.array([-1e9, 0.0]))
    np.testing.assert_allclose(result, -LEAST_LOG_PROB, rtol=1e-6)


def test_the_soft_chi_square():
    x = jnp.array([-40.0, -2.0, 0.0, 3.0])
    np.testing.assert_allclose(
        soft_chi_square_ratio(x), [0, np.exp(-2), 1, 4], rtol=1e-6, atol=1e-9
    )
    conjugate = [-1, np.exp(-2) - 1, 0, 7.5]
    np.testing.assert_allclose(soft_chi_square_conjugate(x), conjugate, rtol=1e-6)
    slope = jax.vmap(jax.grad(soft_chi_square_conjugate))(x)
    np.testing.assert_allclose(slope, soft_chi_square_ratio(x), rtol=1e-6)
