"""AlberDICE: losses by hand, the bounds of its weights, and coordination that clones lack."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from baselines import alberdice, bc
from offmarl._compiling import QUICKLY
from offmarl.errors import OptionError
from offmarl.networks import Inputs, OwnCritic, view_of_agent
from offmarl.programs import Hyperparameters, hyperparameters
from tests.rollouts import SPEC, sequence

from .building import THREE_WAYS, blank, build, repeated

LEGAL = jnp.ones((4, 4, 2, 3), bool).at[..., 2].set(False)


def xor(*actions):
    """Windows of the XOR game, whose third action is not legal, with the actions of some steps."""
    reward = jnp.array([[[a[0] != a[1]] * 2 for a in actions]] * 4, jnp.float32)
    return sequence([actions] * 4, legal_actions=LEGAL[:, : len(actions) + 1], reward=reward)


def probabilities(program_of, batch, updates, **options):
    """Learn from one batch again and again; return each agent's probabilities of its actions."""
    options = {"hidden": 16, "learning_rate": 1e-2, "network": "feedforward"} | options
    program, hyper = build(program_of, updates=updates, **options)
    policy = program.policy(False)
    params = program.policy_params(repeated(program, hyper, batch, updates))
    of = partial(policy.log_prob, params, policy.initial_carry(), jnp.zeros((2, 2)), LEGAL[0, 0])
    return np.exp(np.stack([of(jnp.full(2, action))[0] for action in range(3)], -1))


@pytest.mark.slow
def test_agents_agree_on_one_of_two_ways_which_clones_mix():
    batch = xor((0, 1), (1, 0))
    clones = probabilities(bc, batch, 300)
    np.testing.assert_allclose(clones, [[0.5, 0.5, 0]] * 2, atol=0.02)
    probs = probabilities(alberdice, batch, 400)
    assert probs.argmax(-1).sum() == 1  # one agent takes action 0, and the other 1
    np.testing.assert_allclose(probs.max(-1), 1.0, atol=0.01)


def ramp(critic):
    """Parameters of a critic of one hidden layer, whose values are the first of the state."""
    view = view_of_agent(sequence([[[0, 0]]]).view, 0)
    params = jax.tree.map(jnp.zeros_like, critic.init(jax.random.key(0), view))
    layers = params["params"]["torso"]
    for name in ("Dense_0", "Dense_1"):
        kernel = layers[name]["kernel"]
        layers[name]["kernel"] = (
            kernel.at[0].set(1.0) if name == "Dense_1" else kernel.at[0, 0].set(1.0)
        )
    return params


def turn(**fields):
    """A turn of agent 0, over a step that goes on, one that is cut off, one that terminates, and
    one whose next view is not known; the slot between is not part of an episode."""
    state = jnp.array([[1.0, 2.0, 5.0], [3.0, 7.0, 9.0], [4.0, 9.0, 9.0]])
    batch = sequence(
        [[[0, 2], [1, 1]], [[2, 0], [0, 0]], [[1, 1], [1, 1]]],
        reward=jnp.array([[[0.0, 2.0], [4.0, 4.0]], [[1.0, 3.0], [9.0, 9.0]], [[8.0] * 2] * 2]),
        **THREE_WAYS,
        **fields,
    )
    view = batch.view._replace(state=jnp.stack([state, 0 * state], -1))
    return alberdice.Turn(
        batch._replace(view=view),
        jnp.zeros((), jnp.int32),
        reward=batch.reward.mean(-1),
        ratio=jnp.array([[2.0, 1.0], [4.0, 9.0], [3.0, 9.0]]),
        cloned=jnp.log(jnp.broadcast_to(jnp.array([0.5, 0.25, 0.25]), (3, 2, 3))),
        alpha=jnp.float32(2.0),
    )


HYPER = Hyperparameters(
    gamma=jnp.float32(0.5), gradient_penalty=jnp.float32(3.0), cql_weight=jnp.float32(0.5)
)
DELTA = np.array([1 + 0.5 * 2 - 1, 4 + 0.5 * (1 + 2 + 3 + 4) / 4 - 2, 2 - 3])
"""Residuals of the three steps that count, with ν(s) the first number of the state. After the one
that is cut off comes the mean over the steps of the data."""


@pytest.mark.parametrize("weight", [None, jnp.array([1.0, 2.0, 1.0])])
def test_the_loss_of_values_by_hand(weight):
    critic = OwnCritic(SPEC, 1, 1, layers=1)

    @jax.jit
    def loss():
        learnt = turn(weight=weight)
        return alberdice.value_loss(ramp(critic), critic, learnt, jax.random.key(0), HYPER)

    result, delta = loss()
    first, middle, last = (1, 1, 1) if weight is None else weight
    np.testing.assert_allclose(delta[jnp.array([0, 0, 1]), jnp.array([0, 1, 0])], DELTA, rtol=1e-6)
    # A third of the steps terminates, so the absorbing state weighs γ / (1 - γ) / 3.
    total = (np.array([2, 1, 4]) * np.exp(DELTA / 2)).sum() / 3 + middle / 3
    start = 0.5 * (first * (1 + 2) + middle * 3 + last * 4) / 4
    slope = 3.0 * 1  # ν rises by the first number of the state
    np.testing.assert_allclose(result, 2 * np.log(total) + start + slope, rtol=1e-6)


@pytest.mark.untyped
def test_the_slope_of_values_is_taken_between_pairs_of_steps():
    """ν(s) = s² / 2, whose squared slope is s², with half of the states at 0 and half at 2."""

    class Square:
        def apply(self, params, inputs, method):
            return (inputs.shared**2 / 2).sum(-1)

    state = jnp.tile(jnp.array([0.0, 2.0]), (100, 20))[..., None]
    inputs, mask = Inputs(state, jnp.zeros((100, 40, 1, 1))), jnp.ones((100, 40), bool)
    slope = alberdice.squared_slope({}, Square(), inputs, mask, jax.random.key(0))
    # Half of the pairs are equal, with the mean 2; between 0 and 2 the mean of s² is 4 / 3.
    np.testing.assert_allclose(slope, (2 + 4 / 3) / 2, rtol=0.03)
    masked = alberdice.squared_slope(
        {}, Square(), inputs, mask & (state[..., 0] > 0), jax.random.key(0)
    )
    np.testing.assert_allclose(masked, 4, rtol=1e-6)  # only pairs of steps that exist


def test_the_loss_of_advantages_by_hand():
    critic = OwnCritic(SPEC, 3, 1, layers=1)
    legal = jnp.ones((3, 3, 2, 3), bool).at[0, 0, 0, 2].set(False)
    alive = jnp.ones((3, 3, 2), bool).at[0, 1, 0].set(False)
    learnt = turn(legal_actions=legal, alive=alive)
    delta = jnp.array([[1.0, 7.0], [2.0, 7.0], [7.0, 7.0]])

    @jax.jit
    def loss(params):
        return alberdice.advantage_loss(params, critic, learnt, delta, HYPER)

    result, e = loss(ramp(critic))
    np.testing.assert_allclose(e[0, 0], [1.0] * 3)
    # Of the steps with a known next view agent 0 is dead in one; in one it has two actions.
    error = (2 * (1 - 1) ** 2 + 4 * (3 - 2) ** 2) / 6
    gap = (2 * np.log(2) + 4 * np.log(3)) / 6
    np.testing.assert_allclose(result, error + 0.5 * gap, rtol=1e-6)


def test_the_loss_of_the_policy_by_hand():
    args = alberdice.Args(Path(), hidden=4, network="feedforward")
    program, hyper = alberdice.make(SPEC, args, None), hyperparameters(args)
    state = blank(program, hyper)
    params = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), state.agents.policy.params)
    params["params"]["Dense_2"]["bias"] = jnp.log(jnp.array([0.2, 0.3, 0.5]))
    legal = jnp.ones((3, 3, 2, 3), bool).at[0, 0, 0, 2].set(False)
    alive = jnp.ones((3, 3, 2), bool).at[0, 1, 0].set(False)
    learnt = turn(legal_actions=legal, alive=alive)
    learnt = learnt._replace(cloned=jnp.where(legal[:, :2, 0], learnt.cloned, -1e9))
    # α is 2, so these multiply the clone's odds of 2 : 1 : 1 by 1, 4 and 2.
    e = jnp.broadcast_to(2 * jnp.log(jnp.array([1.0, 4.0, 2.0])), (3, 2, 3))
    policies = alberdice.agent_network(
        alberdice.policy_config(args, "softmax", share_parameters=False), SPEC
    )

    @jax.jit
    def loss():
        return alberdice.policy_loss(params, policies, learnt, e)[0]

    of_two = -np.log([0.4, 0.6]) @ [2 / 6, 4 / 6]
    of_three = -np.log([0.2, 0.3, 0.5]) @ [2 / 8, 4 / 8, 2 / 8]
    # Weights are ρ of the steps in which agent 0 acts, whatever they lead to.
    np.testing.assert_allclose(loss(), (2 * of_two + (4 + 3) * of_three) / 9, rtol=1e-6)


def test_rewards_lose_the_divergence_of_the_others_and_ratios_are_bounded():
    batch = sequence(
        [[[0, 1], [0, 1]]],
        reward=jnp.array([[[1.0, 3.0], [1.0, 3.0]]]),
        alive=jnp.ones((1, 3, 2), bool).at[0, 1, 1].set(False),
    )
    policies = jnp.log(
        jnp.broadcast_to(jnp.array([[0.2, 0.3, 0.5], [0.0, 0.5, 0.5]]), (1, 2, 2, 3))
    )
    policies = jnp.maximum(policies, -1e9)
    data = jnp.log(jnp.broadcast_to(jnp.array([0.5, 0.001, 0.499]), (1, 2, 2, 3)))

    @jax.jit
    def found(ratio_max):
        agent, alpha = jnp.zeros((), jnp.int32), jnp.float32(2.0)
        return alberdice.turn_of(agent, batch, policies, data, data, alpha, ratio_max)

    divergence = 0.5 * np.log(0.5 / 0.001) + 0.5 * np.log(0.5 / 0.499)
    bounded = found(jnp.float32(100.0))
    # The other agent is dead in the second step.
    np.testing.assert_allclose(bounded.reward, [[2 - 2 * divergence, 2]], rtol=1e-5)
    np.testing.assert_allclose(bounded.ratio, [[100, 1]], rtol=1e-5)
    np.testing.assert_allclose(found(jnp.float32(1e6)).ratio, [[500, 1]], rtol=1e-5)


def test_the_weight_of_staying_near_the_data_falls_by_the_same_factor_in_every_update():
    alpha = {"alpha_start": 4.0, "alpha_end": 1.0}
    program, hyper = build(alberdice, hidden=2, network="feedforward", **alpha)
    state, batch = blank(program, hyper), sequence([[[0, 2]]])

    @jax.jit
    def alpha(updates):
        now = state._replace(updates=updates)
        after, metrics = program.stages[0].update(now, batch, jax.random.key(1), hyper)
        return metrics["alpha"], after.updates

    for done, expected in ((0, 4.0), (5, 2.0), (10, 1.0), (15, 1.0)):
        weight, count = alpha(jnp.int32(done))
        np.testing.assert_allclose(weight, expected, rtol=1e-6)
        assert count == done + 1


@pytest.mark.slow
def test_the_second_agent_learns_beside_the_new_policy_of_the_first(monkeypatch):
    options = {"updates": 1, "hidden": 2, "learning_rate": 1.0, "network": "feedforward"}
    program, hyper = build(alberdice, **options)
    state = jax.jit(program.init)(jax.random.key(0), hyper)
    batch = sequence([[[0, 2]]])
    by_agent, turn_of = {}, alberdice.turn_of

    def spy(agent, batch, log_probs, *rest):
        jax.debug.callback(lambda agent, p: by_agent.update({int(agent): p}), agent, log_probs)
        return turn_of(agent, batch, log_probs, *rest)

    monkeypatch.setattr(alberdice, "turn_of", spy)
    update = jax.jit(program.stages[0].update, compiler_options=QUICKLY)
    after, _ = update(state, batch, jax.random.key(1), hyper)
    jax.effects_barrier()
    policy = program.policy(False)

    def first_agent(state):
        arguments = state.agents.policy.params, (), jnp.zeros((2, 2)), jnp.ones((2, 3), bool)
        return [policy.log_prob(*arguments, jnp.full(2, a))[0][0] for a in range(3)]

    before, now = first_agent(state), first_agent(after)
    np.testing.assert_allclose(by_agent[0][0, 0, 0], before, rtol=1e-4)
    np.testing.assert_allclose(by_agent[1][0, 0, 0], now, rtol=1e-4)
    assert abs(before[0] - now[0]) > 0.1


def test_gamma_is_below_one():
    with pytest.raises(OptionError, match="gamma must be below 1"):
        alberdice.Args(Path(), gamma=1.0)
