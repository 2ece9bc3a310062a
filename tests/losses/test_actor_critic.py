"""Losses of deterministic and soft actor-critics, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import losses


def test_where_values_stop_bootstrapping() -> None:
    terminated = jnp.array([[False, True], [True, True]])
    individual = losses.bootstrap_discounts(0.9, terminated, shared_reward=False)
    np.testing.assert_allclose(individual, [[0.9, 0.0], [0.0, 0.0]])
    team = losses.bootstrap_discounts(0.9, terminated, shared_reward=True)
    np.testing.assert_allclose(team, [[0.9, 0.9], [0.0, 0.0]])


def test_whose_values_are_learned() -> None:
    # The first agent lives and the second is dead. The episode goes on; it goes on only for the
    # living; the time limit ends it for the living; and it terminates for all.
    terminated = jnp.array([[False, False], [False, True], [False, True], [True, True]])
    alive = jnp.broadcast_to(jnp.array([True, False]), (4, 2))
    truncated = jnp.zeros_like(terminated).at[2, 0].set(True)
    individual = losses.has_value(alive, terminated, truncated, shared_reward=False)
    np.testing.assert_array_equal(individual[:, 0], True)
    np.testing.assert_array_equal(individual[:, 1], [True, False, False, True])
    assert losses.has_value(alive, terminated, truncated, shared_reward=True).all()


def test_the_absence_after_a_lone_truncation_has_no_value() -> None:
    """Agent 0 is truncated in step 1, acts no more, and the limit ends step 3 for both."""
    alive = jnp.array([[True, True], [True, True], [False, True], [False, True]])
    truncated = jnp.array([[False, False], [True, False], [True, False], [True, True]])
    none = jnp.zeros_like(truncated)
    individual = losses.has_value(alive, none, truncated, shared_reward=False)
    np.testing.assert_array_equal(individual[:3, 0], [True, True, False])
    assert individual[:, 1].all()
    assert losses.has_value(alive, none, truncated, shared_reward=True).all()


def test_a_lone_truncation_ends_the_sums_of_its_agent_alone() -> None:
    reward, values = jnp.ones((3, 2)), jnp.full((3, 2), 10.0)
    follows = jnp.array([[False, True], [True, True], [False, False]])
    targets = losses.q_lambda_targets(reward, jnp.full((3, 2), 0.9), values, follows, 0.5)
    np.testing.assert_allclose(targets, 10.0, rtol=1e-6)
    reward = reward.at[1:, 0].set(0.0)  # of an agent that was truncated in the first step
    targets = losses.q_lambda_targets(reward, jnp.full((3, 2), 0.9), values, follows, 0.5)
    np.testing.assert_allclose(targets[0], 10.0, rtol=1e-6)


def test_errors_of_several_critics_are_added() -> None:
    q = jnp.array([[1.0, 2.0, jnp.nan], [3.0, 2.0, 5.0]])
    loss = losses.squared_errors(q, jnp.array([1.0, 4.0, 0.0]), jnp.array([True, True, False]))
    assert loss == pytest.approx((0 + 2) / 2 + (2 + 2) / 2)


def test_windows_of_weight_two_count_twice() -> None:
    q = jnp.array([[[1.0, 2.0], [3.0, 0.0]]])
    mask = jnp.array([[True, True], [True, False]])
    loss = losses.squared_errors(q, jnp.zeros((2, 2)), mask, jnp.array([2.0, 1.0]))
    assert loss == pytest.approx(0.5 * (2 * 1 + 2 * 4 + 9) / 3)


def test_target_smoothing_stays_within_its_limits() -> None:
    action = jnp.array([0.0, 0.3, 0.9, -1.0])
    keys = jax.random.split(jax.random.key(0), 2000)
    actions = np.asarray(
        jax.jit(jax.vmap(lambda key: losses.smoothed_actions(key, action, 0.2, 0.3)))(keys)
    )
    np.testing.assert_allclose(actions.min(0), [-0.3, 0.0, 0.6, -1.0], atol=1e-6)
    np.testing.assert_allclose(actions.max(0), [0.3, 0.6, 1.0, -0.7], atol=1e-6)
    assert actions[:, 0].std() == pytest.approx(0.1765, abs=0.004)  # of N(0, 0.2²) clipped at 1.5 σ
    unsmoothed = losses.smoothed_actions(keys[0], action, 0.0, 0.3)
    np.testing.assert_array_equal(unsmoothed, action)


def test_the_soft_value_of_discrete_actions_by_hand() -> None:
    p, q = np.array([0.5, 0.25, 0.25, 0.0]), np.array([1.0, 2.0, 4.0, 100.0])
    log_probs = jnp.where(jnp.arange(4) < 3, jnp.log(jnp.maximum(p, 1e-9)), -1e9)
    result = losses.soft_values(jnp.array(q), log_probs, 0.1)
    entropy = 0.5 * np.log(2) + 0.5 * np.log(4)
    assert result == pytest.approx(2.0 + 0.1 * entropy)
    # The best policy is the softmax of Q / α, and its value the log-sum-exp.
    best = jax.nn.log_softmax(jnp.array(q[:3]) / 0.5)
    value = losses.soft_values(jnp.array(q[:3]), best, 0.5)
    assert value == pytest.approx(0.5 * float(jax.nn.logsumexp(q[:3] / 0.5)), rel=1e-5)
    slope = jax.grad(lambda x: losses.soft_values(jnp.array(q[:3]), jax.nn.log_softmax(x), 0.5))
    np.testing.assert_allclose(slope(best), 0.0, atol=1e-5)


@pytest.mark.parametrize(("entropy", "sign"), [(0.2, -1), (0.7, 1)])
def test_the_temperature_rises_while_the_policy_has_too_little_entropy(entropy, sign) -> None:
    def of_both(log_temperature: jax.Array, x: jax.Array) -> jax.Array:
        return losses.temperature_loss(log_temperature, x, jnp.float32(0.5))

    log_temperature = jnp.log(0.1)
    value, (slope, none) = jax.value_and_grad(of_both, (0, 1))(
        log_temperature, jnp.float32(entropy)
    )
    assert value == pytest.approx(0.1 * (entropy - 0.5), rel=1e-4)
    assert slope == pytest.approx(0.1 * (entropy - 0.5), rel=1e-4) and np.sign(slope) == sign
    assert none == 0
