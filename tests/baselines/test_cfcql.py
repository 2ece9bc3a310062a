"""CFCQL: an update by hand, and each agent's part of the penalty."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl._compiling import QUICKLY
from offmarl.networks import MixedParams, MixedValues, MixerWeights
from offmarl.programs import registry
from offmarl.programs.runs.loop import stage_starts
from tests.rollouts import differ, sequence

from .building import blank, build, metrics_of, values_of
from .test_updates import with_sum

cfcql = registry.load("baseline", "cfcql")
Q, TARGET = np.array([1.0, 2.0, 4.0]), [1.0, 3.0, 2.0]
CLONED = np.array([0.2, 0.3, 0.5])
GREEDY = cfcql.Args(Path(), bootstrap="greedy")


@pytest.mark.parametrize(
    ("divergence_weight", "shares"),
    [
        (0.0, [1 / 2, 1 / 2]),
        # exp(2 (3/4 log 3/2 + 1/4 log 1/2)) = (3/2)^(3/2) / 2^(1/2) = 3√3/4, against 1.
        (2.0, [3**1.5 / (3**1.5 + 4), 4 / (3**1.5 + 4)]),
        (1e4, [1.0, 0.0]),
    ],
)
def test_the_agent_that_deviates_most_has_the_largest_share(divergence_weight, shares) -> None:
    # Agent 1 prefers its first action 3 : 1, agent 2 neither; the data has both equally often. The
    # third agent would deviate most, but is dead. The third action is illegal.
    q_own = jnp.log(jnp.array([[3.0, 1.0, 1e6], [5.0, 5.0, 1e6], [1e6, 1.0, 1.0]]))
    behaviour = jnp.log(jnp.array([[1.0, 1.0, 1e3]] * 3))
    legal = jnp.array([[True, True, False]] * 3)
    alive = jnp.array([True, True, False])
    result = jax.jit(cfcql.penalty_shares)(q_own, behaviour, legal, alive, divergence_weight)
    np.testing.assert_allclose(result, [*shares, 0.0], atol=1e-4)


def divergence(legal: list[int]) -> float:
    """Return KL(softmax of the values ‖ clone) over some actions."""
    probs, cloned = np.exp(Q[legal]), CLONED[legal]
    probs, cloned = probs / probs.sum(), cloned / cloned.sum()
    return float((probs * np.log((probs + 1e-5) / (cloned + 1e-5))).sum())


def test_an_update_by_hand() -> None:
    options = {"td_lambda": 0.5, "divergence_weight": 3.0, "mixer_embed": 1}
    program, hyper = build("cfcql", gamma=0.5, bootstrap="greedy", **options)
    state = blank(program, hyper)
    state = state._replace(
        params=with_sum(state.params, Q.tolist()),
        target=with_sum(state.target, TARGET),
        behaviour=values_of(state.behaviour, np.log(CLONED).tolist()),
    )
    batch = sequence(
        [[[0, 2], [1, 1]], [[2, 2], [0, 0]], [[0, 0], [1, 2]]],
        legal_actions=jnp.ones((3, 3, 2, 3), bool).at[0, 0, 0, 2].set(False),
        alive=jnp.ones((3, 3, 2), bool).at[0, 2, 1].set(False),
        reward=jnp.array([[[0.0, 2.0], [2.0, 0.0]], [[4.0, 0.0]] * 2, [[3.0, 3.0], [9.0, 9.0]]]),
        terminated=jnp.zeros((3, 2, 2), bool).at[1, 0].set(True).at[2, 0, 0].set(True),  # of one
        truncated=jnp.zeros((3, 2, 2), bool).at[0, 1].set(True),
        mask=jnp.array([[True, True], [True, False], [True, True]]),
        next_known=jnp.array([[True, True], [True, True], [True, False]]),
    )
    metrics = metrics_of(program, state, batch, hyper)
    # First window: the truncated step bootstraps from the living agent of its own last view, 4
    # against 1 + ½ 2; the first 5 against 1 + ½ (½ 4 + ½ 2). Second: 8 against 2, terminated.
    # Third: what its second step led to is not known, so the first looks one step ahead, 2 against
    # 3 + ½ 4.
    errors = [5 - 2.5, 4 - 2, 8 - 2, 2 - 5]
    np.testing.assert_allclose(metrics["td_loss"], 0.5 * np.square(errors).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["q_tot"], (5 + 4 + 8 + 2 + 6) / 5, rtol=1e-6)
    # The penalty of an agent is log Σ exp(Q_i + Q_other) - Q_tot. Only in the first step do the
    # agents differ: there, the first may not take its best action.
    of_all, of_legal = np.log(np.exp(Q).sum()), np.log(np.exp(Q[:2]).sum())
    scores = np.exp(3 * np.array([divergence([0, 1]), divergence([0, 1, 2])]))
    shares = scores / scores.sum()
    first = shares @ [of_legal + 4, of_all + 1] - 5
    alike = [of_all - 2, of_all - 4, of_all - 1, (of_all - 2 + of_all - 4) / 2]
    np.testing.assert_allclose(metrics["cql_loss"], np.mean([first, *alike]), rtol=1e-5)
    expected = (shares.max() + 4 * 0.5) / 5
    np.testing.assert_allclose(metrics["largest_share"], expected, rtol=1e-5)


# Agents value their actions at the number of a slot times their parameters; Q_tot is the sum.
NETWORKS = cfcql.Networks(
    MixedValues(
        SimpleNamespace(apply=lambda params, seen, first, method: seen * params),
        SimpleNamespace(
            apply=lambda params, state: MixerWeights(
                jnp.ones((*state.shape[:-1], 2, 1)),
                jnp.zeros((*state.shape[:-1], 1)),
                jnp.ones((*state.shape[:-1], 1)),
                jnp.zeros(state.shape[:-1]),
            )
        ),
    ),
    SimpleNamespace(apply=lambda params, seen, first, method: 0 * seen + params),
)


def test_the_loss_has_the_weighted_penalty() -> None:
    """Of two steps, in the second of which the second agent is dead, and the episode terminates."""
    number = jnp.broadcast_to(jnp.array([1.0, 2.0, 9.0])[:, None, None], (1, 3, 2, 1))
    batch = sequence(
        [[[0, 2], [2, 1]]],
        alive=jnp.ones((1, 3, 2), bool).at[0, 1:, 1].set(False),
        terminated=jnp.ones((1, 2, 2), bool).at[0, 0].set(False),
    )
    batch = batch._replace(view=batch.view._replace(observation=number))
    values = {"gamma": 0.5, "td_lambda": 0.0, "divergence_weight": 0.0}
    mixed = MixedParams(jnp.array(Q), None)

    @partial(jax.jit, compiler_options=QUICKLY)
    @partial(jax.value_and_grad, has_aux=True)
    def loss(agent: jax.Array, weight: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        params, hyper = mixed._replace(agent=agent), SimpleNamespace(**values, cql_weight=weight)
        return cfcql.loss(NETWORKS, GREEDY, params, mixed, jnp.zeros(3), batch, hyper)

    # 1 + 4 against ½ 2·4, and 2·4 against nothing. The penalty replaces the action of one agent at
    # a time, of those that are alive.
    gap = (np.log(np.exp(Q + 4).sum()) + np.log(np.exp(Q + 1).sum())) / 2 - 5
    gap = (gap + np.log(np.exp(2 * Q).sum()) - 8) / 2
    td_loss = 0.5 * (1 + 8**2) / 2
    first, second = np.array([1.0, 0.0, 1.0]), np.array([0.0, 0.0, 2.0])
    share, twice = np.exp(Q) / np.exp(Q).sum(), np.exp(2 * Q) / np.exp(2 * Q).sum()
    of_gap = (share + first / 2 - first + 2 * twice - second) / 2
    for weight in (0.0, 2.0):
        (total, metrics), slope = loss(mixed.agent, jnp.float32(weight))
        np.testing.assert_allclose(metrics["td_loss"], td_loss, rtol=1e-6)
        np.testing.assert_allclose(metrics["cql_loss"], gap, rtol=1e-5)
        np.testing.assert_allclose(total, td_loss + weight * gap, rtol=1e-6)
        np.testing.assert_allclose(slope, (first + 8 * second) / 2 + weight * of_gap, rtol=1e-5)


def test_improbable_actions_have_finite_divergences() -> None:
    """One agent prefers what the data never do, the other what they do."""
    q, data = np.array([[0.0, 60.0], [60.0, 0.0]]), np.array([[60.0, 0.0]] * 2)
    legal, alive = jnp.ones((2, 2), bool), jnp.ones(2, bool)
    shares = cfcql.penalty_shares(jnp.array(q), jnp.array(data), legal, alive, 0.25)
    # Of probabilities 0 and 1, to which 1e-5 is added in the logarithms.
    scores = np.exp(0.25 * np.array([np.log((1 + 1e-5) / 1e-5), 0.0]))
    np.testing.assert_allclose(shares, scores / scores.sum(), rtol=1e-4)


def test_the_step_size_falls_over_the_updates_of_each_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, hyper = build("cfcql", behaviour_updates=4)  # of ten
    state, batch, counts = blank(program, hyper), sequence([[[0, 2]]]), []
    make_optimiser = cfcql.programs.make_optimiser

    def spy(*args: Any, updates: int) -> Any:
        counts.append(updates)
        return make_optimiser(*args, updates=updates)

    monkeypatch.setattr(cfcql.programs, "make_optimiser", spy)
    for stage in program.stages:
        jax.eval_shape(stage.update, state, batch, jax.random.key(1), hyper)
    assert counts == [4, 6]


def test_a_state_without_live_agents_is_not_penalised() -> None:
    program, hyper = build("cfcql")
    state = blank(program, hyper)
    alive = jnp.zeros((1, 3, 2), bool)
    batch = sequence([[[0, 2], [1, 1]]], alive=alive)
    metrics = metrics_of(program, state, batch, hyper)
    assert metrics["cql_loss"] == 0


def test_no_gradient_through_the_shares_reaches_the_values() -> None:
    # The penalty of each agent is the same, so shares that the loss could change would not matter;
    # at other values they would.
    q = jnp.array([[1.0, 2.0, 4.0], [0.0, 1.0, 0.0]])
    inputs = jnp.zeros((2, 3)), jnp.ones((2, 3), bool), jnp.ones(2, bool), 2.0
    slope = jax.jit(jax.grad(lambda q: cfcql.penalty_shares(q, *inputs)[0]))(q)
    np.testing.assert_array_equal(slope, 0.0)


@pytest.mark.slow
def test_behaviour_is_cloned_first_and_then_kept() -> None:
    program, hyper = build("cfcql")
    clone, learn = (jax.jit(stage.update) for stage in program.stages)
    assert stage_starts(program.stages, 10) == (0, 1)
    before = jax.jit(program.init)(jax.random.key(0), hyper)
    reward = jnp.ones((2, 2, 2))
    batch = sequence([[[0, 2], [1, 1]], [[2, 2], [0, 0]]], reward=reward)
    after, metrics = clone(before, batch, jax.random.key(1), hyper)
    # An untrained policy is close to uniform.
    np.testing.assert_allclose(metrics["behaviour_loss"], np.log(3), atol=0.01)
    chex.assert_trees_all_equal(after.params, before.params)
    last, _ = learn(after, batch, jax.random.key(1), hyper)
    chex.assert_trees_all_equal(last.behaviour, after.behaviour)
    assert differ(before.behaviour, after.behaviour) and differ(after.params, last.params)


@pytest.mark.parametrize(("given", "first"), [(None, 300), (500, 500)])
def test_the_length_of_the_first_stage(given, first) -> None:
    program, _ = build("cfcql", updates=3000, behaviour_updates=given)
    assert stage_starts(program.stages, 3000) == (0, first)
