"""The clipped Gaussian against what it is defined by: draws, masses and integrals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import gaussian

PARAMETERS = [(0.0, 0.7), (0.9, 0.3), (-2.0, 0.5), (0.3, 3.0), (0.2, 0.05)]


@pytest.mark.parametrize(("mean", "std"), PARAMETERS)
def test_probabilities_add_up_to_one_and_entropy_is_their_expectation(mean, std):
    action = jnp.linspace(-1, 1, 20_001)
    log_prob = gaussian.log_prob(jnp.full_like(action, mean), jnp.full_like(action, std), action)
    ends, inside = np.float64(log_prob)[[0, -1]], np.float64(log_prob)[1:-1]
    assert np.exp(inside).sum() * 1e-4 + np.exp(ends).sum() == pytest.approx(1, abs=1e-3)
    expected = -(np.exp(inside) * inside).sum() * 1e-4 - (np.exp(ends) * ends).sum()
    entropy = gaussian.entropy(jnp.asarray(mean), jnp.asarray(std))
    assert float(entropy) == pytest.approx(expected, abs=1e-3)


def test_known_numbers():
    """Of the standard normal: density at 0, and the mass beyond 1."""
    log_prob = gaussian.log_prob(jnp.zeros(3), jnp.ones(3), jnp.array([0.0, 1.0, -1.0]))
    np.testing.assert_allclose(jnp.exp(log_prob), [0.398942, 0.158655, 0.158655], rtol=1e-5)


def test_draws_are_in_range_and_at_the_ends_as_often_as_they_should():
    mean, std = jnp.full(50_000, 0.8), jnp.full(50_000, 0.4)
    action = gaussian.sample(mean, std, jax.random.key(0))
    assert (jnp.abs(action) <= 1).all()
    claimed = jnp.exp(gaussian.log_prob(mean[:1], std[:1], jnp.ones(1)))
    assert float((action == 1).mean()) == pytest.approx(float(claimed[0]), abs=0.01)


@pytest.mark.parametrize("mean", [-50.0, 0.0, 50.0])
def test_gradients_are_finite_however_far_the_mean_is(mean):
    def total(mean, std):
        action = jnp.array([-1.0, 0.5, 1.0])
        return (gaussian.log_prob(mean, std, action) + gaussian.entropy(mean, std)).sum()

    slopes = jax.grad(total, argnums=(0, 1))(jnp.full(3, mean), jnp.full(3, 0.01))
    assert all(jnp.isfinite(slope).all() for slope in slopes)
