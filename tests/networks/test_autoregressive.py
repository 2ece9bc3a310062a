"""Policies in which the agents act in turn."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.networks import (
    PolicyConfig,
    agent_head,
    as_vectors,
    init_agent_sequence,
    make_agent_sequence,
    make_sequence_policy,
    stochastic_head,
)
from offmarl.types import Continuous, Discrete, EnvSpec
from tests.rollouts import random_params

T, N, A = 4, 3, 3
SPECS = {
    "discrete": EnvSpec("", N, 2, 0, Discrete(A)),
    "continuous": EnvSpec("", N, 2, 0, Continuous(A)),
}


class Case:
    """A network with random parameters, and a window of three episodes."""

    def __init__(self, kind, **options):
        self.spec = SPECS[kind]
        self.network = make_agent_sequence(self.spec, hidden=8, heads=2, **options)
        params = random_params(partial(init_agent_sequence, self.network, self.spec))
        self.params = jax.tree.map(lambda leaf: leaf / 2, params)
        rng = np.random.default_rng(0)
        self.head = agent_head(PolicyConfig("recurrent", stochastic_head(self.spec)))
        self.observation = jnp.asarray(rng.normal(size=(T, N, 2)), jnp.float32)
        self.action = jnp.asarray(
            rng.integers(0, A, (T, N)) if kind == "discrete" else rng.uniform(-1, 1, (T, N, A)),
            jnp.int32 if kind == "discrete" else jnp.float32,
        )
        self.first = jnp.array([False, False, True, False])
        self.window = jax.jit(self._window)

    def _window(self, observation, action, first, order):
        """Return the policy's outputs and the values of the data's actions, ``(T, N)``."""
        vector = as_vectors(self.spec, action)
        decoded = self.network.apply(self.params, observation, vector, first, order)
        if self.network.continuous:
            values = self.network.apply(self.params, decoded.features, action, method="value")
        else:
            values = self.network.apply(self.params, decoded.features, method="values")
        return decoded.policy, values


@pytest.fixture(scope="module", params=SPECS)
def case(request):
    return Case(request.param, blocks=2)


def moved(before, after):
    """Return where numbers differ, ``(T, N)``."""
    return np.any(~np.isclose(before, after, atol=1e-6).reshape(T, N, -1), -1)


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_no_agent_depends_on_later_agents_or_steps(case, order):
    order = jnp.array(order)
    before = case.window(case.observation, case.action, case.first, order)
    changed = 1 - case.action if case.network.continuous else (case.action + 1) % A
    for time in range(T):
        for place, agent in enumerate(order.tolist()):
            action = case.action.at[time, agent].set(changed[time, agent])
            after = case.window(case.observation, action, case.first, order)
            policy, value = map(moved, before, after)
            assert not policy[:time].any() and not value[:time].any()
            earlier = order[:place].tolist()
            assert not policy[time, earlier].any() and not value[time, earlier].any()
            # Its own policy does not depend on its action; the value of a continuous one does.
            assert not policy[time, agent]
            assert value[time, agent] == case.network.continuous
            assert policy[time, order[place + 1 :].tolist()].all()
            if time == 1:  # an episode begins with the third step
                assert not policy[2:].any()


def test_every_agent_sees_all_observations_but_no_later_ones(case):
    order = jnp.arange(N)
    before, _ = case.window(case.observation, case.action, case.first, order)
    observation = case.observation.at[2, 1].add(1.0)
    after, _ = case.window(observation, case.action, case.first, order)
    assert moved(before, after)[2:].all()
    assert not moved(before, after)[:2].any()


@pytest.mark.slow
def test_acting_and_windows_give_the_same_numbers(case):
    """The log-probabilities of a joint action, step by step and from windows in any chunks."""
    policy = make_sequence_policy(case.network, case.head, case.spec)
    legal = jnp.ones((T, N, A), bool).at[1, 0, 1].set(False)
    action = case.action.at[1, 0].set(0)

    @jax.jit
    def stepwise():
        def step(memory, x):
            is_first, *inputs = x
            memory = jax.tree.map(lambda leaf: jnp.where(is_first, 0.0, leaf), memory)
            log_prob, memory = policy.log_prob(case.params, memory, *inputs)
            return memory, log_prob

        xs = (case.first, case.observation, legal, action)
        return jax.lax.scan(step, policy.initial_carry(), xs)[1]

    outputs, _ = case.window(case.observation, action, case.first, jnp.arange(N))
    expected = case.head(outputs, legal).log_prob(action)
    np.testing.assert_allclose(stepwise(), expected, atol=1e-5)


@pytest.mark.slow
def test_the_log_probability_is_that_of_the_joint_action(case):
    """That of what was drawn, agent by agent; and illegal actions are never drawn."""
    policy = make_sequence_policy(case.network, case.head, case.spec)
    legal = jnp.ones((N, A), bool).at[1, 2].set(False)

    @jax.jit
    @partial(jax.vmap, in_axes=0)
    def draw(key):
        inputs = case.params, policy.initial_carry(), case.observation[0], legal
        action, log_prob, carry = policy.act(*inputs, key)
        expected, carry_of_data = policy.log_prob(*inputs, action)
        return action, log_prob, expected, carry, carry_of_data

    action, log_prob, expected, *carries = draw(jax.random.split(jax.random.key(0), 2000))
    np.testing.assert_allclose(log_prob, expected, atol=1e-5)
    chex.assert_trees_all_close(*carries, atol=1e-5)
    if case.network.continuous:
        assert (action[:, 1, 2] == 0).all()
        return
    assert (action[:, 1] != 2).all()
    joint, counts = np.unique(action, axis=0, return_counts=True)
    shares = dict(zip(map(tuple, joint.tolist()), counts / 2000, strict=True))
    by_log_prob = dict(zip(map(tuple, action.tolist()), np.exp(log_prob.sum(-1)), strict=True))
    assert sum(by_log_prob.values()) == pytest.approx(1.0, abs=0.01)
    assert all(abs(shares[a] - by_log_prob[a]) < 0.05 for a in shares)


def test_greedy_agents_answer_those_before_them(case):
    policy = make_sequence_policy(case.network, case.head, case.spec, greedy=True)
    assert not policy.draws(case.params)
    inputs = case.params, policy.initial_carry(), case.observation[0], jnp.ones((N, A), bool)
    action, log_prob, _ = jax.jit(policy.act)(*inputs, jax.random.key(0))
    assert not log_prob.any()
    first = jnp.zeros(T, bool)
    data = jnp.broadcast_to(action, (T, *action.shape))
    outputs, _ = case.window(case.observation, data, first, jnp.arange(N))
    expected = case.head(outputs[0], inputs[-1]).mode()
    np.testing.assert_allclose(action, expected, atol=1e-4)


@pytest.mark.parametrize(("agent_id", "matters"), [("onehot", True), ("none", False)])
def test_actions_are_marked_by_who_took_them(agent_id, matters):
    case = Case("discrete", agent_id=agent_id)
    same, alone = jnp.ones_like(case.observation), jnp.ones(T, bool)
    first, _ = case.window(same, jnp.array([[0, 1, 2]] * T), alone, jnp.array([0, 1, 2]))
    second, _ = case.window(same, jnp.array([[1, 0, 2]] * T), alone, jnp.array([1, 0, 2]))
    assert np.allclose(first[0, 2], second[0, 2], atol=1e-5) != matters
