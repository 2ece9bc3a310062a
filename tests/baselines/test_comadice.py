"""ComaDICE: its losses by hand, and the weights that it gives to the data."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from baselines import comadice
from offmarl._compiling import QUICKLY
from offmarl.networks import MixedParams
from tests.rollouts import sequence

from .building import THREE_WAYS, blank, build, metrics_of, values_of, weights_of

constant = partial(values_of, layer="Dense_2")


def program_and_state(**options):
    program, hyper = build(comadice, mixer_hidden=4, **options)
    return program, hyper, blank(program, hyper)


def by_hand(**options):
    """A program with α = 2 and γ = ½, Q = (1, 2, 4), ν = 2, and target values of their own."""
    program, hyper, state = program_and_state(gamma=0.5, value_temperature=2.0, **options)
    critic = MixedParams(
        constant(state.params.critic.agent, [1.0, 2.0, 4.0]),
        weights_of(state.params.critic.mixer, [1.0, -3.0], 1.0),  # 1 and 3: never negative
    )
    target = MixedParams(
        constant(critic.agent, [0.0, 1.0, 3.0]), weights_of(critic.mixer, [1.0, 2.0], -1.0)
    )
    params = comadice.Params(
        constant(state.params.actor, [0.0, 0.0, 0.0]),
        constant(state.params.value, [2.0]),
        critic,
    )
    of_target = comadice.Target(constant(state.params.value, [6.0]), target)
    return program, hyper, state._replace(params=params, target=of_target)


def test_comadice_by_hand():
    program, hyper, state = by_hand()
    batch = sequence(
        [[[0, 2], [1, 1]], [[2, 0], [0, 0]], [[1, 1], [1, 1]]],
        legal_actions=jnp.ones((3, 3, 2, 3), bool).at[0, 0, 0, 2].set(False),
        alive=jnp.ones((3, 3, 2), bool).at[0, 2, 1].set(False),
        reward=jnp.array([[[0.0, 2.0], [4.0, 4.0]], [[1.0, 3.0], [9.0, 9.0]], [[9.0] * 2] * 2]),
        **THREE_WAYS,
    )
    metrics = metrics_of(program, state, batch, hyper)
    # Q_tot is 1 + 3 * 4 + 1, 2 + 3 * 2 + 1, 4 + 3 + 1 and 9. The target's ν_tot is 6 + 12 - 1, and
    # 6 - 1 where agent 2 is dead, at the truncation.
    errors = [14 - (1 + 0.5 * 17), 9 - (4 + 0.5 * 5), 8 - 2]
    np.testing.assert_allclose(metrics["critic_loss"], np.square(errors).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["q_tot"], (14 + 9 + 8 + 9) / 4, rtol=1e-6)
    # The target's Q_i are 0, 1 and 3, and ν_i is 2: A is -2 + 2, -1 - 2, 1 - 4 and -1 - 2.
    x = np.array([0, -1.5, -1.5, -1.5])
    nu_tot, conjugate = 2 + 4 - 1, np.exp(x) - 1
    np.testing.assert_allclose(metrics["value_loss"], (nu_tot + 2 * conjugate).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["ratio"], np.exp(x).mean(), rtol=1e-6)
    log_3, log_2 = np.log(3), np.log(2)
    losses = (log_2 + log_3) + 3 * np.exp(-1.5) * 2 * log_3
    np.testing.assert_allclose(metrics["policy_loss"], losses / 8, rtol=1e-6)


def test_a_dead_agent_has_no_part_in_the_policies():
    program, hyper, state = by_hand()
    batch = sequence(
        [[[1, 1], [1, 1]]],
        alive=jnp.ones((1, 3, 2), bool).at[0, 0, 1].set(False),
        legal_actions=jnp.ones((1, 3, 2, 3), bool).at[0, 0, 1, 2].set(False),
    )
    metrics = metrics_of(program, state, batch, hyper)
    # A is 1 - 2, and twice that of the second agent in the second step; three losses are log 3.
    ratios = np.exp([-0.5, -1.5])
    np.testing.assert_allclose(metrics["ratio"], ratios.mean(), rtol=1e-6)
    expected = np.log(3) * (ratios[0] + 2 * ratios[1]) / 3
    np.testing.assert_allclose(metrics["policy_loss"], expected, rtol=1e-6)


@pytest.mark.parametrize(("largest", "ratio"), [({}, 2.0), ({"weight_max": 9.0}, 2.5)])
def test_weights_are_at_most_two(largest, ratio):
    program, hyper, state = by_hand(**largest)
    # A is 1 + 2 above ν_i = 2, so that ω is 1 + 3 / 2, and f* is ½ (3 / 2)² + 3 / 2.
    metrics = metrics_of(program, state, sequence([[[2, 2], [2, 2]]]), hyper)
    np.testing.assert_allclose(metrics["ratio"], ratio)
    np.testing.assert_allclose(metrics["policy_loss"], ratio * np.log(3), rtol=1e-6)
    np.testing.assert_allclose(metrics["value_loss"], 2 + 4 - 1 + 2 * (1.125 + 1.5), rtol=1e-6)


def test_values_follow_the_slope_of_their_loss():
    program, hyper, state = by_hand(max_grad_norm=None)
    batch = sequence([[[2, 2], [2, 2]]])

    def slope(state):
        after, _ = program.stages[-1].update(state, batch, jax.random.key(1), hyper)
        moments = optax.tree_utils.tree_get(after.optimiser, "mu")  # 0.1 of the first gradient
        return 10 * moments.value["params"]["Dense_2"]["bias"]

    # Of 1 ν + 2 ν, and of f* of the weighted sum of advantages, whose slope is 2.5 as above.
    result = jax.jit(slope, compiler_options=QUICKLY)(state)
    np.testing.assert_allclose(result, [3 - 3 * 2.5], rtol=1e-6)
