"""Deterministic policies: gradients of their actions, and what they record of their noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.distributions import ClippedGaussian, categorical
from offmarl.networks import (
    NoisyParams,
    PolicyConfig,
    agent_network,
    differentiable_action,
    init_policy,
    make_policy,
    squash,
)
from offmarl.types import Continuous, Discrete, EnvSpec

REACH = EnvSpec("reach", 2, 3, 1, Continuous(2))
PICK = EnvSpec("pick", 2, 3, 1, Discrete(3))
LEGAL = jnp.array([[True, True, True], [True, True, False]])


def test_the_gradient_through_tanh_by_hand() -> None:
    legal = jnp.array([True, False])
    value, gradient = jax.value_and_grad(lambda x: (squash(x, legal) * 2).sum())(
        jnp.array([0.5, 9.0])
    )
    assert value == pytest.approx(2 * np.tanh(0.5))
    np.testing.assert_allclose(gradient, [2 * (1 - np.tanh(0.5) ** 2), 0.0], rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.slow
def test_the_straight_through_gradient_is_that_of_the_relaxed_sample(temperature: float) -> None:
    logits, key = jnp.array([[0.3, -0.2, 0.1], [1.0, 0.0, 5.0]]), jax.random.key(3)
    weights = jnp.array([1.0, 2.0, 4.0])
    noise = jax.random.gumbel(key, logits.shape)

    def value(logits: jax.Array) -> jax.Array:
        return differentiable_action(PICK, logits, LEGAL, key, temperature) @ weights

    action = differentiable_action(PICK, logits, LEGAL, key, temperature)
    best = jnp.where(LEGAL, logits + noise, -jnp.inf).argmax(-1)
    np.testing.assert_allclose(action, jnp.eye(3)[best], atol=1e-6)
    jacobian = jax.jacobian(value)(logits)
    for agent in range(2):
        # Of softmax: p_i (w_i - p·w) / τ.
        scores = np.where(LEGAL[agent], (logits + noise)[agent] / temperature, -np.inf)
        p = np.exp(scores - scores.max())
        p /= p.sum()
        by_hand = p * (np.asarray(weights) - p @ np.asarray(weights)) / temperature
        np.testing.assert_allclose(jacobian[agent, agent], by_hand, atol=1e-6)
    assert jacobian[1, 1, 2] == 0  # an illegal action


def acted(spec: EnvSpec, noise: float, uniform: float, count: int, *, greedy: bool = False):
    """Actions and log-probabilities of a policy in one view, and the network's outputs there."""
    config = PolicyConfig("feedforward", "deterministic", hidden=8)
    params = init_policy(config, spec, jax.random.key(0)).network
    params["params"]["Dense_2"]["bias"] = jnp.arange(spec.action_size) - 0.8
    policy, observation = make_policy(config, spec, greedy), jnp.ones((2, 3))
    legal = LEGAL[:, : spec.action_size].at[0, -1].set(spec is PICK)
    noisy = NoisyParams(params, jnp.float32(noise), jnp.float32(uniform))
    act = jax.jit(jax.vmap(lambda key: policy.act(noisy, (), observation, legal, key)))
    action, log_prob, _ = act(jax.random.split(jax.random.key(1), count))
    outputs, _ = agent_network(config, spec).apply(params, (), observation)
    explores = noise > 0 or uniform > 0 or spec is PICK
    assert policy.draws(noisy) is (explores and not greedy)
    return np.asarray(action), np.asarray(log_prob), outputs, legal


@pytest.mark.slow
def test_noise_on_continuous_actions_is_recorded_as_it_was_drawn() -> None:
    action, log_prob, outputs, legal = acted(REACH, 0.5, 0.0, 2000)
    mean = squash(outputs, legal)
    expected = ClippedGaussian(mean, jnp.full((2, 2), 0.5), legal).log_prob(jnp.asarray(action))
    np.testing.assert_allclose(log_prob, expected, rtol=1e-5)
    assert np.isfinite(log_prob).all() and (abs(action) <= 1).all()
    np.testing.assert_allclose(np.median(action[:, 1], 0), mean[1], atol=0.05)
    assert not action[:, 0, 1].any()  # an entry that the agent lacks


@pytest.mark.slow
def test_uniform_actions_and_those_without_noise() -> None:
    action, log_prob, _, _ = acted(REACH, 0.5, 1.0, 2000)
    np.testing.assert_allclose(log_prob[0], np.log([1 / 2, 1 / 4]), rtol=1e-6)
    np.testing.assert_allclose(action[:, 1].std(0), 1 / np.sqrt(3), atol=0.03)
    action, log_prob, outputs, legal = acted(REACH, 0.0, 0.0, 2)
    np.testing.assert_allclose(action[0], squash(outputs, legal), rtol=1e-6)
    np.testing.assert_array_equal(log_prob, 0)
    best, certain, *_ = acted(REACH, 0.5, 0.0, 2, greedy=True)
    np.testing.assert_allclose(best, action)
    np.testing.assert_array_equal(certain, 0)


@pytest.mark.slow
@pytest.mark.parametrize("uniform", [0.0, 1.0])
def test_discrete_actions_are_drawn_as_recorded(uniform: float) -> None:
    action, log_prob, outputs, legal = acted(PICK, 0.1, uniform, 4000)
    expected = jax.nn.softmax(categorical(outputs * (1 - uniform), legal).logits)
    for agent in range(2):
        counts = np.bincount(action[:, agent], minlength=3) / 4000
        np.testing.assert_allclose(counts, expected[agent], atol=0.03)
        np.testing.assert_allclose(
            np.exp(log_prob[:, agent]), np.asarray(expected)[agent][action[:, agent]], rtol=1e-4
        )
