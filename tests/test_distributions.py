"""Distributions of actions against draws, probability masses and integrals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from offmarl.distributions import ClippedGaussian, TanhGaussian, categorical

PARAMETERS = [(0.0, 0.7), (0.9, 0.3), (-2.0, 0.5), (0.3, 3.0), (0.2, 0.05)]


def of(kind, mean, std, size=1):
    """A distribution over actions of one entry, ``size`` times; its methods are compiled whole."""
    shape = (size, 1)
    parts = np.full(shape, mean, np.float32), np.full(shape, std, np.float32), np.ones(shape, bool)
    return Compiled(kind(*map(jnp.asarray, parts)))


class Compiled:
    def __init__(self, distribution):
        self._distribution = distribution

    def __getattr__(self, name):
        function = _method(type(self._distribution), name)
        return lambda *args: jax.tree.map(np.asarray, function(self._distribution, *args))


@functools.cache
def _method(kind, name):
    return jax.jit(getattr(kind, name))


@pytest.mark.parametrize(("mean", "std"), PARAMETERS)
def test_clipped_probabilities_add_up_to_one_and_entropy_is_their_expectation(mean, std):
    action = np.linspace(-1, 1, 20_001, dtype=np.float32)
    log_prob = of(ClippedGaussian, mean, std, 20_001).log_prob(action[:, None])
    ends, inside = np.float64(log_prob)[[0, -1]], np.float64(log_prob)[1:-1]
    assert np.exp(inside).sum() * 1e-4 + np.exp(ends).sum() == pytest.approx(1, abs=1e-3)
    expected = -(np.exp(inside) * inside).sum() * 1e-4 - (np.exp(ends) * ends).sum()
    assert of(ClippedGaussian, mean, std).entropy()[0] == pytest.approx(expected, abs=1e-3)


def test_known_numbers_of_the_clipped_gaussian():
    """The standard normal distribution's density at 0, and its mass beyond 1."""
    log_prob = of(ClippedGaussian, 0.0, 1.0, 3).log_prob(jnp.array([[0.0], [1.0], [-1.0]]))
    np.testing.assert_allclose(np.exp(log_prob), [0.398942, 0.158655, 0.158655], rtol=1e-5)


def test_clipped_draws_are_at_the_ends_as_often_as_they_should():
    action = of(ClippedGaussian, 0.8, 0.4, 50_000).sample(jax.random.key(0))
    assert (np.abs(action) <= 1).all()
    claimed = np.exp(of(ClippedGaussian, 0.8, 0.4).log_prob(jnp.ones((1, 1))))
    assert float((action == 1).mean()) == pytest.approx(float(claimed[0]), abs=0.01)


def tanh_density(mean, std):
    """The density of tanh(u) in float64, by the change of variables."""
    return lambda a: stats.norm.pdf(np.arctanh(a), mean, std) / (1 - a**2)


@pytest.mark.parametrize(("mean", "std"), PARAMETERS)
def test_tanh_densities_are_those_of_the_change_of_variables(mean, std):
    action = np.tanh(mean + std * np.linspace(-2, 2, 41))
    action = np.float32(action[np.abs(action) < 0.999])  # where float32 can tell actions apart
    log_prob = of(TanhGaussian, mean, std, len(action)).log_prob(jnp.asarray(action)[:, None])
    expected = np.log(tanh_density(mean, std)(np.float64(action)))
    np.testing.assert_allclose(log_prob, expected, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize(("mean", "std"), PARAMETERS)
def test_the_tanh_entropy_is_the_integral_over_what_is_drawn(mean, std):
    def term(z):
        u = mean + std * z
        log_slope = 2 * (np.log(2) - u - np.logaddexp(0, -2 * u))
        return stats.norm.pdf(z) * -(stats.norm.logpdf(u, mean, std) - log_slope)

    expected, _ = integrate.quad(term, -10, 10, points=[-mean / std])
    assert of(TanhGaussian, mean, std).entropy()[0] == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(("mean", "std"), PARAMETERS)
def test_tanh_draws_have_the_log_probability_they_come_with(mean, std):
    """The mean of the negative is the entropy; both ways to compute it agree."""
    distribution = of(TanhGaussian, mean, std, 20_000)
    action, log_prob = distribution.sample_and_log_prob(jax.random.key(0))
    np.testing.assert_allclose(log_prob, distribution.log_prob(action), rtol=1e-5, atol=1e-5)
    assert -log_prob.mean() == pytest.approx(float(distribution.entropy()[0]), abs=0.05)


def test_tanh_actions_at_the_very_ends_are_finite():
    ends = jnp.array([[-1.0], [1.0]])
    distribution = of(TanhGaussian, 0.3, 0.7, 2)
    assert np.isfinite(distribution.log_prob(ends)).all()
    # The density of the nearest float32, computed in float64.
    u = np.arctanh(1 - 2.0**-24)
    expected = stats.norm.logpdf(u, 0.3, 0.7) - np.log1p(-(np.tanh(u) ** 2))
    assert float(distribution.log_prob(ends)[1]) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("mean", "std"), [(20.0, 0.1), (-20.0, 0.1), (8.0, 0.5), (50.0, 0.7)])
def test_saturated_draws_are_inside_and_stored_with_the_likelihood_that_is_computed(mean, std):
    distribution = of(TanhGaussian, mean, std, 100)
    action, log_prob = distribution.sample_and_log_prob(jax.random.key(0))
    assert (np.abs(action) < 1).all() and (np.abs(distribution.mode()) < 1).all()
    assert np.isfinite(log_prob).all()
    again = distribution.log_prob(jnp.asarray(np.array(action)))
    np.testing.assert_allclose(log_prob, again, rtol=1e-5)


def test_the_density_of_tanh_draws_grows_with_the_distance_of_the_mean_from_zero():
    """Its mean slope is that of -log(1 - tanh²u), 2 E[tanh u], also where actions are clipped."""

    def total(mean):
        shape = (1000, 1)
        parts = jnp.broadcast_to(mean, shape), jnp.full(shape, 0.135), jnp.ones(shape, bool)
        return TanhGaussian(*parts).sample_and_density(jax.random.key(0))[1].mean()

    means = np.array([0.5, 8.0, 9.5, 20.0, -9.5], np.float32)
    slopes = jax.jit(jax.vmap(jax.grad(total)))(means)
    np.testing.assert_allclose(slopes, 2 * np.tanh(means), atol=0.03)


def test_densities_and_log_probabilities_of_tanh_draws_agree_inside():
    distribution, key = of(TanhGaussian, 0.3, 0.7, 1000), jax.random.key(0)
    action, density = distribution.sample_and_density(key)
    expected, log_prob = distribution.sample_and_log_prob(key)
    np.testing.assert_array_equal(action, expected)
    np.testing.assert_allclose(density, log_prob, rtol=1e-3, atol=1e-3)


def test_gradients_flow_through_tanh_draws():
    def drawn(mean):
        return TanhGaussian(mean, jnp.ones(1), jnp.ones(1, bool)).sample(jax.random.key(0)).sum()

    mean = jnp.array([0.2])
    action, slope = jax.jit(jax.value_and_grad(drawn))(mean)
    np.testing.assert_allclose(slope, [1 - action**2], rtol=1e-5)


@pytest.mark.parametrize("kind", [ClippedGaussian, TanhGaussian])
def test_entries_that_an_agent_does_not_have_are_zero_and_do_not_count(kind):
    mean, std = jnp.array([[0.5, 0.9]]), jnp.array([[0.3, 0.2]])
    legal = jnp.array([[True, False]])
    distribution, alone = Compiled(kind(mean, std, legal)), of(kind, 0.5, 0.3)
    action, log_prob = distribution.sample_and_log_prob(jax.random.key(0))
    assert action[0, 1] == distribution.mode()[0, 1] == 0
    np.testing.assert_allclose(log_prob, alone.log_prob(action[:, :1]), rtol=1e-4)
    np.testing.assert_allclose(distribution.entropy(), alone.entropy(), rtol=1e-6)
    if kind is TanhGaussian:
        _, density = distribution.sample_and_density(jax.random.key(0))
        np.testing.assert_allclose(density, log_prob, rtol=1e-4)


@pytest.mark.parametrize("kind", [ClippedGaussian, TanhGaussian])
def test_gradients_are_finite_however_far_the_mean_is(kind):
    def total(mean, std):
        distribution = kind(mean, std, jnp.ones((9, 1), bool))
        action = jnp.tile(jnp.array([[-1.0], [0.5], [1.0]]), (3, 1))
        return (distribution.log_prob(action) + distribution.entropy()).sum()

    means = np.repeat(np.array([-50.0, 0.0, 50.0], np.float32), 3)[:, None]
    slopes = jax.jit(jax.grad(total, argnums=(0, 1)))(means, np.full_like(means, 0.01))
    assert all(np.isfinite(slope).all() for slope in slopes)


def test_illegal_actions_are_never_drawn_and_add_no_entropy():
    legal = np.array([True, False, True])
    distribution = Compiled(
        categorical(jnp.zeros((1000, 3)), jnp.asarray(np.tile(legal, (1000, 1))))
    )
    action, log_prob = distribution.sample_and_log_prob(jax.random.key(0))
    assert set(action.tolist()) == {0, 2}
    np.testing.assert_allclose(log_prob, np.log(0.5), rtol=1e-6)
    np.testing.assert_allclose(distribution.entropy(), np.log(2), rtol=1e-6)
    assert (categorical(jnp.arange(3.0), jnp.array([True, True, False])).mode()) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_illegal_actions_are_masked_in_half_precision(dtype):
    def entropy(logits):
        return categorical(logits, jnp.array([True, True, False])).entropy()

    logits = jnp.zeros(3, dtype)
    assert float(entropy(logits)) == pytest.approx(np.log(2), rel=1e-2)
    assert np.isfinite(np.asarray(jax.grad(entropy)(logits), np.float32)).all()
