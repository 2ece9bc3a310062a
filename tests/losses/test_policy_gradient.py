import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offmarl.distributions import Categorical
from offmarl.losses import (
    clipped_surrogate,
    generalised_advantages,
    vtrace,
)
from offmarl.networks import Moments


def test_advantages_of_one_episode():
    # δ = [1 + .5·2 - 1, 2 + .5·3 - 2, 3 - 3] = [1, 1.5, 0]; A_t = δ_t + .5·.5 A_{t+1}
    advantage = generalised_advantages(
        r_t=jnp.array([1.0, 2.0, 3.0]),
        discount_t=jnp.array([0.5, 0.5, 0.0]),
        last_t=jnp.array([False, False, True]),
        v_tm1=jnp.array([1.0, 2.0, 3.0]),
        v_t=jnp.array([2.0, 3.0, 100.0]),
        lambda_=0.5,
    )
    np.testing.assert_allclose(advantage, [1.375, 1.5, 0.0])


def test_a_truncated_step_bootstraps_from_its_own_next_view_and_nothing_flows_across():
    # The second step is truncated: its next value is 10, not the 7 of the episode that follows.
    advantage = generalised_advantages(
        r_t=jnp.array([1.0, 1.0, 1.0, 1.0]),
        discount_t=jnp.full(4, 0.5),
        last_t=jnp.array([False, True, False, False]),
        v_tm1=jnp.array([4.0, 5.0, 7.0, 2.0]),
        v_t=jnp.array([5.0, 10.0, 2.0, 6.0]),
        lambda_=1.0,
    )
    # δ = [-.5, 1, -5, 2]
    np.testing.assert_allclose(advantage, [-0.5 + 0.5 * 1.0, 1.0, -5.0 + 0.5 * 2.0, 2.0])


RATIO = jnp.array([2.0, 0.5, 0.25, 1.0])
VALUE = jnp.array([1.0, 2.0, -1.0, 0.5, 3.0])


@pytest.mark.parametrize(
    ("lambda_", "errors", "advantages"),
    [
        # δ = [1.8, -2.9, .25, 4.2], times ρ = [1, ½, ¼, 1] where it is below 1; λγρ are its decays.
        (1.0, [0.73293746, -1.185625, 0.5875, 4.2], [0.73293746, -1.185625, 0.5875, 4.2]),
        (0.5, [1.18040625, -1.376875, 0.325, 4.2], [1.18040625, -1.376875, 0.325, 4.2]),
    ],
)
def test_vtrace_has_the_numbers_of_rlax(lambda_, errors, advantages):
    """Those of `rlax.vtrace_td_error_and_advantage`, release 0.1.9, for thresholds of 1."""
    result = vtrace(
        r_t=jnp.array([1.0, 0.0, -1.0, 2.0]),
        discount_t=jnp.array([0.9, 0.9, 0.5, 0.9]),
        last_t=jnp.zeros(4, bool),
        v_tm1=VALUE[:-1],
        v_t=VALUE[1:],
        log_ratio_tm1=jnp.log(RATIO),
        lambda_=lambda_,
    )
    np.testing.assert_allclose(jnp.stack(result), [errors, advantages], rtol=1e-6)


def test_vtrace_at_the_end_of_an_episode_by_hand():
    # The second step is truncated: it bootstraps from 10, and nothing flows across. γ = λ = ½.
    # δ = [1 + ½·2 - 1, 2 + ½·10 - 2, 1 + ½·4 - 7] = [1, 5, -4]; ρ = [½, ½, 1].
    # E = [½·1 + ½·¼·2.5, ½·5, -4], A = [½(1 + ¼·2.5), 2.5, -4].
    result = vtrace(
        r_t=jnp.array([1.0, 2.0, 1.0]),
        discount_t=jnp.full(3, 0.5),
        last_t=jnp.array([False, True, False]),
        v_tm1=jnp.array([1.0, 2.0, 7.0]),
        v_t=jnp.array([2.0, 10.0, 4.0]),
        log_ratio_tm1=jnp.log(jnp.array([0.5, 0.5, 3.0])),
        lambda_=0.5,
    )
    np.testing.assert_allclose(jnp.stack(result), [[0.8125, 2.5, -4.0]] * 2, rtol=1e-6)


def test_vtrace_of_the_policys_own_steps_is_generalised_advantages():
    keys = jax.random.split(jax.random.key(0), 4)
    r, v, w = (jax.random.normal(key, (9,)) for key in keys[:3])
    last = jax.random.bernoulli(keys[3], 0.3, (9,))
    steps = r, jnp.full(9, 0.9), last, v, w
    expected = generalised_advantages(*steps, lambda_=0.7)
    for result in vtrace(*steps, jnp.zeros(9), lambda_=0.7):
        np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside: the gradient of -ρA in log π is -ρA
        (1.5, 2.0, -2.4, 0.0),  # clipped at 1.2
        (0.5, 2.0, -1.0, -1.0),  # a good action made unlikely is always corrected
        (0.5, -2.0, 1.6, 0.0),  # clipped at 0.8
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_the_surrogate_is_clipped_where_it_would_overshoot(ratio, advantage, loss, slope):
    def surrogate(log_prob):
        advantages = jnp.array([advantage])
        return clipped_surrogate(log_prob[None], jnp.array([-1.0]), advantages, 0.2)[0]

    value, grad = jax.value_and_grad(surrogate)(jnp.log(ratio) - 1.0)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    np.testing.assert_allclose(grad, slope, rtol=1e-5, atol=1e-6)


def test_entropy_of_legal_actions_only():
    logits = jnp.array([[0.0, 0.0, -1e9, 0.0], [5.0, -1e9, -1e9, -1e9]])
    np.testing.assert_allclose(Categorical(logits).entropy(), [np.log(3), 0.0], atol=1e-6)
    assert np.isfinite(jax.grad(lambda x: Categorical(x).entropy().sum())(logits)).all()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 99))
def test_running_moments_are_those_of_all_that_was_seen(sizes, seed):
    random, moments, update = np.random.default_rng(seed), Moments.zero(), jax.jit(Moments.update)
    seen = []
    for size in sizes:  # of five numbers in all, so that one program is compiled
        batch = np.where(np.arange(5) < size, random.normal(3.0, 2.0, 5), np.nan)
        mask = np.arange(5) < size
        mask[: size - 1] &= random.random(size - 1) < 0.7
        moments = update(moments, jnp.asarray(batch, jnp.float32), jnp.asarray(mask))
        seen.append(batch[mask])
    values = np.concatenate(seen)
    np.testing.assert_allclose(moments.mean, values.mean(), rtol=1e-4, atol=1e-4)
    deviation = np.sqrt(max(values.var(), 0.01))
    np.testing.assert_allclose(moments.std, deviation, rtol=1e-3, atol=1e-3)
