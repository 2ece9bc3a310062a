"""Networks without shared parameters."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.errors import ShapeError
from offmarl.networks import (
    PolicyConfig,
    agent_network,
    blank_view,
    critic_encoder,
    init_policy,
    make_network,
    make_policy,
    observation_encoder,
)
from offmarl.types import ArraySpec, Discrete, EnvSpec
from tests.rollouts import numbers, random_view

VECTORS = EnvSpec("vectors", 3, 4, 5, Discrete(2))
STATELESS = EnvSpec(
    "stateless", 3, 0, 0, Discrete(2), observation={"a": ArraySpec((2, 2)), "b": ArraySpec((3,))}
)


@pytest.mark.parametrize(
    ("kind", "sees", "spec"),
    [
        ("feedforward", "observation", STATELESS),
        ("feedforward", "view", VECTORS),
        ("recurrent", "observation", VECTORS),
        ("recurrent", "view", STATELESS),
    ],
)
@pytest.mark.slow
def test_equal_networks_for_each_agent_are_one_shared_network(kind, sees, spec):
    config = PolicyConfig(kind, hidden=6, agent_id="none")
    encoder = observation_encoder(spec, 6)
    if sees == "view":
        encoder = critic_encoder(spec, 6)
    shared = make_network(config, spec, 2, encoder, sees)
    apart = PolicyConfig(kind, hidden=6, share_parameters=False)
    unshared = make_network(apart, spec, 2, encoder, sees)
    view = random_view(spec, 5)
    inputs = view.observation if sees == "observation" else view
    blank = blank_view(spec) if sees == "view" else blank_view(spec).observation
    carry = jax.tree.map(lambda leaf: numbers(*leaf.shape), unshared.initial_carry(3))
    params = jax.jit(unshared.init)(jax.random.key(0), unshared.initial_carry(3), blank)
    leaves = jax.tree.leaves(params)
    assert all(len(leaf) == 3 for leaf in leaves)
    assert any((leaf[0] != leaf[1]).any() for leaf in leaves)
    first = jnp.array([False, False, True, False, False])
    unroll = jax.jit(partial(unshared.apply, method="unroll"))
    outputs, carries = unroll(params, inputs, first, carry)
    assert outputs.shape == (5, 3, 2)
    now, apply = carry, jax.jit(unshared.apply)
    for time in range(5):  # as step by step
        now = unshared.initial_carry(3) if first[time] else now
        step, now = apply(params, now, jax.tree.map(lambda x, t=time: x[t], inputs))
        np.testing.assert_allclose(step, outputs[time], atol=2e-6)
    if kind == "recurrent":
        np.testing.assert_allclose(now, carries[-1], atol=2e-6)
    if not (sees == "view" and spec is STATELESS):  # there each encodes all observations anew
        same = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), params)
        single = jax.tree.map(lambda leaf: leaf[0], params)
        expected, result = (
            jax.jit(partial(network.apply, method="unroll"))(p, inputs, first, carry)[0]
            for network, p in ((shared, single), (unshared, same))
        )
        np.testing.assert_allclose(result, expected, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "spec"), [("recurrent", VECTORS), ("feedforward", STATELESS)])
def test_an_agent_without_shared_parameters_learns_from_its_own_steps_only(kind, spec):
    config = PolicyConfig(kind, hidden=4, share_parameters=False)
    network, params = agent_network(config, spec), init_policy(config, spec, jax.random.key(0))
    observation, first = random_view(spec, 2).observation, jnp.zeros(2, bool)

    def loss(params):
        return network.apply(params, observation, first, method="unroll")[0][:, 1].sum()

    grads = jax.tree.leaves(jax.jit(jax.grad(loss))(params))
    sizes = [float(jnp.abs(leaf[agent]).sum()) for leaf in grads for agent in (0, 2)]
    assert not any(sizes) and any(leaf[1].any() for leaf in grads)


def test_policies_without_shared_parameters_act():
    config = PolicyConfig("feedforward", share_parameters=False)
    params = init_policy(config, VECTORS, jax.random.key(0))
    policy, legal = make_policy(config, VECTORS), jnp.ones((3, 2), bool).at[1, 0].set(False)
    act = jax.jit(policy.act)
    action, log_prob, _ = act(params, (), jnp.ones((3, 4)), legal, jax.random.key(1))
    assert action.shape == log_prob.shape == (3,) and action[1] == 1


def test_agents_with_leaves_of_their_own_share_parameters():
    leaf = ArraySpec((2,), agents=(1,))
    spec = EnvSpec("mixed", 2, 0, 1, Discrete(2), observation={"a": ArraySpec((1,)), "b": leaf})
    with pytest.raises(ShapeError, match="agents of mixed have different observations"):
        agent_network(PolicyConfig("feedforward", share_parameters=False), spec)
