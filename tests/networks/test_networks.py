"""Torsos, the mixer, and policies that a `PolicyConfig` describes."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.distributions import ClippedGaussian
from offmarl.errors import ShapeError
from offmarl.networks import (
    FeedForward,
    Mixer,
    MixerWeights,
    PolicyConfig,
    QParams,
    Recurrent,
    agent_head,
    agent_network,
    init_policy,
    make_policy,
    mix,
    mixing_coefficients,
    stochastic_head,
)
from offmarl.types import Continuous, Discrete, EnvSpec
from tests.rollouts import dense, numbers, random_params

SPEC = EnvSpec("test", num_agents=3, observation_size=7, state_size=5, action=Discrete(4))
LEGAL = jnp.ones((3, 4), bool).at[0, :3].set(False)


@pytest.mark.parametrize(
    ("kind", "head", "greedy"),
    [
        ("random", "softmax", False),
        ("feedforward", "softmax", True),
        ("feedforward", "q", False),
        ("recurrent", "softmax", False),
        ("recurrent", "q", True),
    ],
)
def test_policies_act_legally(kind: str, head: str, greedy: bool) -> None:
    config = PolicyConfig(kind, head)
    params = init_policy(config, SPEC, jax.random.key(0))
    if isinstance(params, QParams):
        params = params._replace(epsilon=jnp.asarray(0.5))
    policy = make_policy(config, SPEC, greedy)
    act = jax.jit(jax.vmap(policy.act, in_axes=(None, None, None, None, 0)))
    keys = jax.random.split(jax.random.key(1), 500)
    action, log_prob, _ = act(params, policy.initial_carry(), jnp.ones((3, 7)), LEGAL, keys)
    assert (action[:, 0] == 3).all()
    np.testing.assert_allclose(log_prob[:, 0], 0.0, atol=1e-6)
    assert (log_prob <= 1e-6).all()


def test_log_probs_are_those_of_the_distribution_acted_with() -> None:
    config = PolicyConfig("feedforward", "q")
    params = init_policy(config, SPEC, jax.random.key(0))._replace(epsilon=jnp.asarray(0.4))
    policy = make_policy(config, SPEC)
    keys = jax.random.split(jax.random.key(2), 20_000)
    act = jax.jit(jax.vmap(policy.act, in_axes=(None, None, None, None, 0)))
    action, log_prob, _ = map(np.asarray, act(params, (), jnp.ones((3, 7)), LEGAL, keys))
    for agent in range(3):
        for choice in np.unique(action[:, agent]):
            mask = action[:, agent] == choice
            claimed = float(np.exp(log_prob[mask, agent])[0])
            assert mask.mean() == pytest.approx(claimed, abs=0.015)
    # Four legal actions: the best is taken with 0.6 + 0.4 / 4, any other with 0.1.
    np.testing.assert_allclose(np.unique(np.exp(log_prob[:, 1]).round(4)), [0.1, 0.7], rtol=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_an_agent_without_legal_actions_acts_all_the_same(epsilon: float) -> None:
    """The dead may have none."""
    config = PolicyConfig("feedforward", "q")
    params = init_policy(config, SPEC, jax.random.key(0))._replace(epsilon=jnp.asarray(epsilon))
    arguments = params, (), jnp.ones((3, 7)), jnp.zeros((3, 4), bool)
    _, log_prob, _ = make_policy(config, SPEC).act(*arguments, jax.random.key(2))
    np.testing.assert_allclose(log_prob, epsilon * -np.log(4), rtol=1e-6)


def test_greedy_takes_the_best_legal_action() -> None:
    config = PolicyConfig("feedforward")
    network, params = agent_network(config, SPEC), init_policy(config, SPEC, jax.random.key(3))
    observation = jax.random.normal(jax.random.key(4), (3, 7))
    scores, _ = network.apply(params, (), observation)
    legal = jnp.ones((3, 4), bool).at[jnp.arange(3), scores.argmax(-1)].set(False)
    action, _, _ = make_policy(config, SPEC, greedy=True).act(
        params, (), observation, legal, jax.random.key(0)
    )
    np.testing.assert_array_equal(action, jnp.where(legal, scores, -jnp.inf).argmax(-1))


REACH = EnvSpec("reach", 3, 7, 5, Continuous(2))


def test_heads_of_the_other_kind_of_actions_are_refused_by_name() -> None:
    with pytest.raises(ShapeError, match=r"reach has continuous actions of size 2.*continuous"):
        init_policy(PolicyConfig("recurrent"), REACH, jax.random.key(0))
    with pytest.raises(ShapeError, match=r'test has 4 discrete actions.*head "softmax"'):
        init_policy(PolicyConfig("recurrent", "gaussian"), SPEC, jax.random.key(0))


@pytest.mark.parametrize("kind", ["feedforward", "recurrent"])
@pytest.mark.slow
def test_continuous_policies_store_what_their_head_says(kind: str) -> None:
    config = PolicyConfig(kind, stochastic_head(REACH))
    head = agent_head(config)
    network, params = agent_network(config, REACH), init_policy(config, REACH, jax.random.key(0))
    observation, legal = jnp.ones((3, 7)), jnp.ones((3, 2), bool).at[2, 1].set(False)
    carry = network.initial_carry(3)
    action, log_prob, _ = make_policy(config, REACH).act(
        params, carry, observation, legal, jax.random.key(1)
    )
    outputs, _ = network.apply(params, carry, observation)
    unrolled, _ = network.apply(params, observation[None], jnp.ones(1, bool), method="unroll")
    np.testing.assert_allclose(unrolled[0], outputs, atol=1e-6)
    np.testing.assert_array_equal(log_prob, head(outputs, legal).log_prob(action))
    assert action[2, 1] == 0  # an entry that the agent has not
    std = jnp.full(1, jax.nn.softplus(0.0) + 0.01)
    only = ClippedGaussian(outputs[2, :1], std, jnp.ones(1, bool))
    assert log_prob[2] == only.log_prob(action[2, :1])
    best, certain, _ = make_policy(config, REACH, greedy=True).act(
        params, carry, observation, legal, jax.random.key(1)
    )
    np.testing.assert_array_equal(best, jnp.where(legal, outputs[:, :2], 0))
    np.testing.assert_array_equal(certain, 0)


def test_the_random_policy_is_uniform_over_continuous_actions() -> None:
    policy = make_policy(PolicyConfig("random"), REACH)
    keys = jax.random.split(jax.random.key(0), 5_000)
    legal = jnp.ones((3, 2), bool).at[2, 1].set(False)
    act = jax.jit(jax.vmap(lambda key: policy.act((), (), jnp.ones((3, 7)), legal, key)))
    action, log_prob, _ = map(np.asarray, act(keys))
    np.testing.assert_allclose(log_prob[0], np.log([0.25, 0.25, 0.5]), rtol=1e-6)
    counts, _ = np.histogram(action[:, :2], bins=4, range=(-1, 1))
    np.testing.assert_allclose(counts / counts.sum(), 0.25, atol=0.01)
    np.testing.assert_array_equal(action[:, 2, 1], 0)


ACTIVATIONS = {"relu": lambda x: np.maximum(x, 0), "tanh": np.tanh}
LAYERS = pytest.mark.parametrize(("layers", "activation"), [(None, "relu"), (3, "tanh")])


@LAYERS
def test_the_recurrent_torso_is_a_gru_as_flax_has_it(layers: Any, activation: Any) -> None:
    """The layers beside the GRU follow it, except for the first."""
    torso = Recurrent(2, hidden=4, agent_id="none", layers=layers, activation=activation)
    activate, cell = ACTIVATIONS[activation], nn.GRUCell(features=4)
    inputs, carry = numbers(2, 3, 4)
    params = random_params(torso.init, carry, inputs)["params"]
    kernels = zip(
        "rzn",
        np.split(params["input_gates"]["kernel"], 3, 1),
        np.split(params["input_gates"]["bias"], 3),
        np.split(params["recurrent_kernel"], 3, 1),
        strict=True,
    )
    gates: dict[str, dict[str, Any]] = {}
    for gate, kernel, bias, recurrent in kernels:
        gates[f"i{gate}"] = {"kernel": kernel, "bias": bias}
        gates[f"h{gate}"] = {"kernel": recurrent}
    gates["hn"]["bias"] = params["recurrent_bias"]
    embedded = activate(dense(params, "embed", inputs))
    expected, _ = jax.jit(cell.apply)({"params": gates}, carry, embedded)
    outputs, after = jax.jit(torso.apply)({"params": params}, carry, inputs)
    np.testing.assert_allclose(after, expected, atol=1e-6)
    x = activate(expected)
    for index in range(1, layers or 1):
        x = activate(dense(params, f"after_{index - 1}", x))
    np.testing.assert_allclose(outputs, dense(params, "head", x), atol=1e-5)


@LAYERS
def test_the_feed_forward_torso_by_hand(layers: Any, activation: Any) -> None:
    torso = FeedForward(outputs=2, hidden=4, constants=3, layers=layers, activation=activation)
    inputs = numbers(2, 3)
    params = random_params(torso.init, (), inputs)["params"]
    x = np.concatenate([inputs, np.eye(2)], 1)  # and which agent it is
    for index in range(layers or 2):
        x = ACTIVATIONS[activation](dense(params, f"Dense_{index}", x))
    x = dense(params, f"Dense_{layers or 2}", x)
    expected = np.concatenate([x, np.tile(params["_Constants_0"]["constants"], (2, 1))], 1)
    np.testing.assert_allclose(torso.apply({"params": params}, (), inputs)[0], expected, atol=1e-5)


@pytest.mark.parametrize("kind", [FeedForward, Recurrent])
def test_layers_start_orthogonal_with_their_gains_and_constants_at_zero(kind: type) -> None:
    torso = kind(outputs=4, hidden=4, agent_id="none", output_scale=0.01, constants=2)
    init = jax.jit(lambda key: torso.init(key, torso.initial_carry(2), jnp.zeros((2, 4))))
    params = init(jax.random.key(0))["params"]
    constants = params["_Constants_0" if kind is FeedForward else "append"]["constants"]
    assert constants.tolist() == [0, 0]
    first, last = ("Dense_0", "Dense_2") if kind is FeedForward else ("embed", "head")
    for layer, scale in ((first, 2**0.5), (last, 0.01)):
        kernel = params[layer]["kernel"]
        np.testing.assert_allclose(kernel @ kernel.T, scale**2 * np.eye(4), atol=1e-5 * scale)


def test_mixing_is_an_elu_between_two_sums() -> None:
    weights = MixerWeights(
        w1=jnp.array([[1.0, 2.0], [3.0, 0.0]]),
        b1=jnp.array([0.5, -5.0]),
        w2=jnp.array([2.0, 10.0]),
        b2=jnp.array(7.0),
    )
    # Hidden units 1 + 3·2 + ½ and 2 - 5, of which the second is below zero.
    np.testing.assert_allclose(
        mix(weights, jnp.array([1.0, 2.0])), 2 * 7.5 + 10 * (np.exp(-3) - 1) + 7, rtol=1e-6
    )


def test_the_hypernetworks_by_hand() -> None:
    mixer = Mixer(num_agents=2, embed=3, hidden=4)
    state = numbers(6, 5)
    params = random_params(mixer.init, state)["params"]

    def hypernet(layer: int) -> np.ndarray:
        hidden = np.maximum(dense(params, f"Dense_{layer + 1}", state), 0)
        return dense(params, f"Dense_{layer}", hidden)

    assert params["Dense_1"]["kernel"].shape == params["Dense_4"]["kernel"].shape == (5, 4)
    assert params["Dense_6"]["kernel"].shape == (5, 3)
    weights = jax.jit(mixer.apply)({"params": params}, state)
    np.testing.assert_allclose(weights.w1, abs(hypernet(0)).reshape(6, 2, 3), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(weights.b1, dense(params, "Dense_2", state), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(weights.w2, abs(hypernet(3)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(weights.b2, hypernet(5)[:, 0], rtol=1e-4, atol=1e-5)


def test_mixing_coefficients_is_each_agents_part_of_the_weights_and_carries_no_gradient() -> None:
    w1, w2 = jnp.array([[1.0, 2.0], [3.0, 1.0]]), jnp.array([1.0, 3.0])

    def shares(w1: jax.Array) -> jax.Array:
        return mixing_coefficients(MixerWeights(w1, jnp.zeros(2), w2, jnp.zeros(())))

    np.testing.assert_allclose(shares(w1), [7 / 13, 6 / 13], rtol=1e-6)
    np.testing.assert_array_equal(shares(0 * w1), [0, 0])
    assert not jax.jacobian(shares)(w1).any()
