"""Flows of joint actions, and one-step policies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.networks import (
    JointFlow,
    PolicyConfig,
    chosen_action,
    init_one_step,
    integrate,
    make_one_step_policy,
    one_step_network,
)
from offmarl.types import Continuous, Discrete, EnvSpec
from tests.rollouts import random_params

N, A = 2, 3
SPECS = {
    "discrete": EnvSpec("", N, 2, 0, Discrete(A)),
    "continuous": EnvSpec("", N, 2, 0, Continuous(A)),
}


def test_a_field_is_followed_in_equal_steps_of_time():
    noise = jnp.array([[[1.0], [2.0]]])
    follow = partial(jax.jit(integrate, static_argnums=(0, 2)), steps=4)
    result = follow(lambda x, t: jnp.full_like(x, 3.0), noise)
    np.testing.assert_allclose(result, noise + 3)
    # The times are 0, ¼, ½ and ¾.
    result = follow(lambda x, t: jnp.ones_like(x) * t[..., None, None], noise)
    np.testing.assert_allclose(result, noise + (0 + 0.25 + 0.5 + 0.75) / 4)
    result = follow(lambda x, t: x, noise)
    np.testing.assert_allclose(result, noise * 1.25**4, rtol=1e-6)


def test_every_velocity_depends_on_all_agents_that_act():
    flow = JointFlow(N, A, hidden=8, layers=2)
    inputs = [jnp.ones((N, 2)), jnp.ones(N, bool), jnp.ones((N, A)), jnp.ones(())]
    params = random_params(flow.init, *inputs)
    apply = jax.jit(flow.apply)

    def moved(index, change, alive):
        changed = [*inputs]
        changed[1] = jnp.array(alive)
        before = apply(params, *changed)
        changed[index] = change(inputs[index])
        return np.any(~np.isclose(before, apply(params, *changed)), -1).tolist()

    for index in (0, 2):
        assert moved(index, lambda x: x.at[1, 0].add(1.0), [True, True]) == [True, True]
        assert moved(index, lambda x: x.at[1, 0].add(1.0), [True, False]) == [False, False]
    assert moved(3, lambda x: x / 2, [True, True]) == [True, True]


def test_the_action_of_outputs():
    outputs = jnp.array([[0.5, -3.0, 2.0], [0.1, 0.2, 0.3]])
    legal = jnp.array([[True, True, False], [True, True, True]])
    assert chosen_action(SPECS["discrete"], outputs, legal).tolist() == [0, 2]
    action = chosen_action(SPECS["continuous"], outputs, legal)
    np.testing.assert_allclose(action, [[0.5, -1.0, 0.0], [0.1, 0.2, 0.3]])


@pytest.mark.parametrize("kind", ["feedforward", "recurrent"])
def test_an_agent_acts_by_its_own_observation_and_noise(kind):
    spec = SPECS["continuous"]
    network = one_step_network(PolicyConfig(kind, "deterministic", hidden=8), spec)
    params = random_params(partial(init_one_step, network, spec))
    params = jax.tree.map(lambda leaf: 0.3 * leaf, params)
    sampled, greedy = (make_one_step_policy(network, spec, greedy) for greedy in (False, True))
    legal = jnp.ones((N, A), bool)

    @partial(jax.jit, static_argnums=0)
    def act(policy, observation, key):
        return policy.act(params, policy.initial_carry(), observation, legal, key)

    observation = jnp.ones((N, 2))
    keys = jax.random.split(jax.random.key(0))
    action, log_prob, _ = act(sampled, observation, keys[0])
    assert np.isnan(log_prob).all()
    # Each has noise of its own.
    assert not np.allclose(act(sampled, observation, keys[1])[0], action, atol=1e-3)
    other, _, _ = act(sampled, observation.at[1].add(1.0), keys[0])
    np.testing.assert_allclose(other[0], action[0], rtol=1e-6)
    assert not np.allclose(other[1], action[1], atol=1e-3)
    # The best action has no noise.
    best = [act(greedy, observation, key) for key in keys]
    np.testing.assert_array_equal(best[0][0], best[1][0])
    assert not best[0][1].any()
    assert sampled.draws(params) and not greedy.draws(params)
    assert sampled.log_prob is None
