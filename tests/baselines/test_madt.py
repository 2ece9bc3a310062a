"""MADT: what its transformer sees, its loss by hand, and acting towards a return."""

from functools import cache, partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from baselines import madt
from offmarl.errors import OptionError
from offmarl.networks import DecisionTransformer, Trajectory
from offmarl.programs import DatasetStatistics
from tests.rollouts import sequence

from .building import build, metrics_of

RETURNS = np.array([2.0, 8.0, -4.0], np.float32)
SCORED = np.array([True, True, True, False])


def program_of(**options):
    returns = {"returns": RETURNS, "scored": SCORED, "return_scale": np.array(8.0)}
    returns["best_returns"] = np.array([6.0, 10.0], np.float32)
    sizes = {"length": 3, "hidden": 8} | options
    return build(madt, statistics=DatasetStatistics(None, returns), **sizes)


def trajectory(seed, first=(0,)):
    keys = jax.random.split(jax.random.key(seed), 3)
    return Trajectory(
        jax.random.normal(keys[0], (1, 4, 2)),
        jax.random.normal(keys[1], (1, 4, 2, 2)),
        jax.random.randint(keys[2], (1, 4, 2), 0, 3),
        jnp.arange(4)[None],
        jnp.cumsum(jnp.isin(jnp.arange(4), jnp.array(first)))[None],
    )


@cache
def transformer():
    network = DecisionTransformer(3, width=8)
    params = jax.jit(network.init)(jax.random.key(0), trajectory(0))
    return jax.jit(network.apply), params


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "at", "changed"),
    [
        ("return_to_go", 1, [1, 2, 3]),
        ("observation", 1, [1, 2, 3]),
        ("action", 1, [2, 3]),  # not the step's own prediction
        ("action", 3, []),
    ],
)
def test_predictions_see_what_came_before_of_their_own_agent(field, at, changed):
    apply, params = transformer()
    before, other = trajectory(0), getattr(trajectory(0), field)
    change = (other[:, at, 0] + 1) % 3 if field == "action" else other[:, at, 0] + 1
    after = before._replace(**{field: other.at[:, at, 0].set(change)})
    differs = (apply(params, before) != apply(params, after)).any(-1)[0]
    expected = np.zeros((4, 2), bool)
    expected[changed, 0] = True
    np.testing.assert_array_equal(differs, expected)


@pytest.mark.slow
def test_predictions_see_nothing_of_another_episode():
    apply, params = transformer()
    first, second = trajectory(0, (0, 2)), trajectory(1, (0, 2))
    mixed = jax.tree.map(lambda a, b: jnp.concatenate([a[:, :2], b[:, 2:]], 1), first, second)
    logits = apply(params, mixed)
    np.testing.assert_allclose(logits[:, :2], apply(params, first)[:, :2], rtol=1e-6)
    np.testing.assert_allclose(logits[:, 2:], apply(params, second)[:, 2:], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["recurrent", "feedforward"])
def test_acting_predicts_what_training_does(network):
    """Over five steps, more than the three that are remembered."""
    program, hyper = program_of(network=network)
    keys = jax.random.split(jax.random.key(1), 3)
    observation = jax.random.normal(keys[0], (1, 6, 2, 2))
    action = jax.random.randint(keys[1], (1, 5, 2), 0, 3)
    reward = jax.random.normal(keys[2], (1, 5, 2))
    to_go = jnp.array([6.0, 10.0]) - jnp.cumsum(
        jnp.concatenate([jnp.zeros((1, 1, 2)), reward[:, :-1]], 1), 1
    )

    @jax.jit
    def losses(key):
        state = program.init(key, hyper)
        policy, params = program.policy(False), program.policy_params(state)

        def act(carry, step):
            view, action, reward = step
            log_prob, carry = policy.log_prob(params, carry, view, jnp.ones((2, 3), bool), action)
            return policy.after_step(carry, reward, jnp.zeros(2, bool)), -log_prob.mean()

        def learn(t):
            start = jnp.maximum(t - 2, 0)
            slots, steps = (
                partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=1)
                for size in (4, 3)
            )
            batch = sequence(
                steps(action),
                observation=slots(observation),
                return_to_go=steps(to_go),
                time=slots(jnp.arange(6)[None]),
                episode=jnp.zeros((1, 4), jnp.int32),
                mask=steps(jnp.arange(5)[None]) == t,
            )
            return program.stages[0].update(state, batch, key, hyper)[1]["policy_loss"]

        steps = observation[0, :5], action[0], reward[0]
        acting = jax.lax.scan(act, policy.initial_carry(), steps)[1]
        return acting, jax.vmap(learn)(jnp.arange(5))

    acting, training = losses(jax.random.key(0))
    np.testing.assert_allclose(acting, training, rtol=1e-5)
    assert len(np.unique(np.asarray(acting).round(6))) == 5


def linear(monkeypatch):
    """Replace transformers by logits that are the return-to-go times a vector, plus another."""
    monkeypatch.setattr(
        DecisionTransformer,
        "apply",
        lambda _, params, steps: steps.return_to_go[..., None] * params["kernel"] + params["bias"],
    )
    params = {"kernel": jnp.array([0.0, 1.0, 2.0]), "bias": jnp.zeros(3)}
    monkeypatch.setattr(DecisionTransformer, "init", lambda *_: params)


def windows_of(to_go, mask):
    """One window of two steps whose agents take the actions 0 and 2."""
    batch = sequence([[[0, 2]] * 2], mask=jnp.array([mask]))
    zero = jnp.zeros((1, 3), jnp.int32)
    return batch._replace(return_to_go=jnp.array([to_go]), time=zero, episode=zero)


def test_returns_are_divided_by_their_scale_in_training_and_in_acting(monkeypatch):
    linear(monkeypatch)
    program, hyper = program_of(target_return=4.0)
    state = program.init(jax.random.key(0), hyper)
    batch = windows_of([[4.0, 8.0], [-8.0, jnp.inf]], [True, False])
    metrics = metrics_of(program, state, batch, hyper)

    def log_probs(to_go):  # the scale is 8
        logits = np.arange(3) * to_go / 8
        return logits - np.log(np.exp(logits).sum())

    expected = -(log_probs(4)[0] + log_probs(8)[2]) / 2
    np.testing.assert_allclose(metrics["policy_loss"], expected, rtol=1e-6)
    policy, legal = program.policy(False), jnp.ones((2, 3), bool)
    carry, params = policy.initial_carry(), program.policy_params(state)
    for remaining in (4.0, 1.0):
        result, carry = policy.log_prob(params, carry, jnp.zeros((2, 2)), legal, jnp.array([0, 2]))
        np.testing.assert_allclose(result, log_probs(remaining)[np.array([0, 2])], rtol=1e-5)
        carry = policy.after_step(carry, jnp.full(2, 3.0), jnp.zeros(2, bool))


def test_a_share_of_the_weights_is_removed_in_proportion_to_the_step_size(monkeypatch):
    linear(monkeypatch)
    program, hyper = program_of(weight_decay=0.5, learning_rate=0.1)
    state = program.init(jax.random.key(0), hyper)
    state = state._replace(network={"kernel": jnp.ones(3), "bias": jnp.ones(3)})
    batch = windows_of([[1.0, 1.0]] * 2, [False, False])
    after, _ = jax.jit(program.stages[0].update)(state, batch, jax.random.key(1), hyper)
    np.testing.assert_allclose(after.network["kernel"], 0.95, rtol=1e-6)
    np.testing.assert_allclose(after.network["bias"], 1.0, rtol=1e-6)


def zero(state):
    """A network whose logits are all 0."""
    return state._replace(network=jax.tree.map(jnp.zeros_like, state.network))


def test_the_loss_by_hand(monkeypatch):
    linear(monkeypatch)
    program, hyper = program_of()
    state = zero(program.init(jax.random.key(0), hyper))
    batch = sequence(
        [[[0, 2], [1, 1]], [[2, 0], [0, 0]]],
        legal_actions=jnp.ones((2, 3, 2, 3), bool).at[0, 1, 0, 2].set(False),
        alive=jnp.ones((2, 3, 2), bool).at[0, 1:, 1].set(False),
        mask=jnp.array([[True, True], [True, False]]),
        return_to_go=jnp.zeros((2, 2, 2)),
        time=jnp.zeros((2, 3), jnp.int32),
        episode=jnp.zeros((2, 3), jnp.int32),
    )
    metrics = metrics_of(program, state, batch, hyper)
    expected = (2 * np.log(3) + np.log(2) + 2 * np.log(3)) / 5
    np.testing.assert_allclose(metrics["policy_loss"], expected, rtol=1e-6)


@pytest.mark.slow
def test_incomplete_episodes_are_not_imitated():
    program, hyper = program_of()
    state = jax.jit(program.init)(jax.random.key(0), hyper)
    # The first window ends with an episode without a known return, the second holds a complete one.
    batch = sequence(
        [[[0, 2], [1, 1]], [[2, 0], [0, 1]]],
        return_to_go=jnp.ones((2, 2, 2)).at[0, 1].set(jnp.nan),
        time=jnp.zeros((2, 3), jnp.int32),
        first=jnp.array([[True, True, True]] * 2),
        episode=jnp.array([[2, 3, 3], [0, 1, 1]]),
    )
    update = jax.jit(program.stages[0].update)
    after, metrics = update(state, batch, jax.random.key(1), hyper)
    other = batch._replace(action=batch.action.at[0, 1].set(0))
    chex.assert_tree_all_finite((after, metrics))
    same = update(state, other, jax.random.key(1), hyper)
    chex.assert_trees_all_equal((after, metrics), same)
    other = batch._replace(action=batch.action.at[1, 1].set(0))
    assert update(state, other, jax.random.key(1), hyper)[1] != metrics


def test_acting_remembers_as_many_steps_as_training_sees():
    program, _ = program_of(length=2, burn_in=4)
    carry = program.policy(True).initial_carry()
    assert carry.seen.return_to_go.shape[0] == 6


def test_the_target_is_each_agents_in_the_best_episode_or_the_one_given(monkeypatch):
    """With rewards of their own, the mean of the agents' returns may be that of none."""
    linear(monkeypatch)
    program, hyper = program_of()
    assert program.init(jax.random.key(0), hyper).target_return.tolist() == [6, 10]
    program, hyper = program_of(target_return=-1.5)
    state = program.init(jax.random.key(0), hyper)
    policy, legal = program.policy(True), jnp.ones((2, 3), bool)
    actor, memory, key = program.policy_params(state), policy.initial_carry(), jax.random.key(0)
    for reward in (1.0, 3.0):
        _, _, memory = policy.act(actor, memory, jnp.zeros((2, 2)), legal, key)
        memory = policy.after_step(memory, jnp.array([reward, 0.0]), jnp.zeros(2, bool))
    np.testing.assert_allclose(memory.seen.return_to_go[:, 0], [0, -1.5, -2.5])
    np.testing.assert_allclose(memory.to_go, [-5.5, -1.5])


def test_only_legal_actions_are_taken(monkeypatch):
    linear(monkeypatch)
    program, hyper = program_of()
    state = zero(program.init(jax.random.key(0), hyper))
    actor = program.policy_params(state)
    legal = jnp.array([[False, True, False], [False, True, True]])

    @jax.jit
    def actions(key):
        policy = program.policy(False)
        result = policy.act(actor, policy.initial_carry(), jnp.zeros((2, 2)), legal, key)
        return result[:2]

    action, log_prob = jax.vmap(actions)(jax.random.split(jax.random.key(0), 64))
    assert set(np.unique(action[:, 0])) == {1} and set(np.unique(action[:, 1])) == {1, 2}
    np.testing.assert_allclose(log_prob[:, 1], -np.log(2), rtol=1e-6)


def test_tokens_divide_among_the_heads():
    with pytest.raises(OptionError, match="multiple of twice heads"):
        madt.Args(Path(), hidden=6, heads=2)
