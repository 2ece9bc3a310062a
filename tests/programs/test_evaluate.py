"""Policies play the same episodes in one program as one after the other."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from baselines import bc, maicq
from offmarl import envs, tracking
from offmarl.evaluation import evaluate
from offmarl.programs.program import hyperparameters
from offmarl.programs.runs import evaluate as evaluating
from offmarl.programs.runs.sharding import SeedLayout
from offmarl.types import Policy
from offmarl.vault import open_vault

ENV = envs.make("swarm/coverage-2:time_limit=6")
EPISODES, SEEDS = 4, 2
KEYS = jax.random.split(jax.random.key(7), SEEDS)


def separately(module):
    """Return a program, its parameters for each seed, and what each seed returns both ways."""
    args = module.Args(vault="unused", hidden=8)
    program = module.make(ENV.spec, args, None)
    init = partial(program.init, hyper=hyperparameters(args))
    params = jax.device_get(program.policy_params(jax.jit(jax.vmap(init))(KEYS)))

    def play(greedy):
        policy = program.policy(greedy)
        play = jax.jit(lambda *inputs: evaluate(ENV, policy, *inputs, EPISODES).team_returns)
        return [play(jax.tree.map(lambda x, s=s: x[s], params), KEYS[s]) for s in range(SEEDS)]

    return program, params, np.stack([play(True), play(False)], 1)


@pytest.mark.parametrize(("module", "most", "at_once"), [(bc, 0, 1), (maicq, 2**15, SEEDS)])
def test_both_ways_of_acting_play_the_same_episodes(monkeypatch, module, most, at_once):
    monkeypatch.setattr(evaluating, "_MOST_CARRY_BYTES", most)
    program, params, expected = separately(module)
    policies = program.policy(True), program.policy(False)
    returns = evaluating.play(policies, ENV, SeedLayout(at_once), EPISODES, params, KEYS)
    returns = returns.team_returns
    assert returns.shape == (SEEDS, 2, EPISODES, 1)
    np.testing.assert_allclose(returns, expected, rtol=1e-5)
    assert not np.allclose(returns[:, 0], returns[:, 1])


def acting(action, log_prob):
    return Policy(
        lambda: jnp.zeros(2), lambda _params, carry, *_: (action, log_prob * jnp.ones(2), carry + 1)
    )


@pytest.mark.parametrize("which", [0, 1])
def test_a_policy_acts_as_the_one_of_several_that_its_parameters_name(which):
    ways = (acting(jnp.zeros(2, jnp.int32), -1.0), acting(jnp.ones(2, jnp.int8), -2.0))
    policy = evaluating.one_of(ways)
    assert policy is evaluating.one_of(ways)  # so that what plays it is compiled once
    params = jnp.int32(which), ()
    action, log_prob, carries = policy.act(params, policy.initial_carry(), (), (), None)
    np.testing.assert_array_equal(action, [which] * 2)
    np.testing.assert_array_equal(log_prob, [-1.0 - which] * 2)
    np.testing.assert_array_equal(carries[which], [1, 1])
    np.testing.assert_array_equal(carries[1 - which], [0, 0])


def test_an_evaluation_in_a_few_words():
    metrics = {
        tracking.WON: [[1.0, 0.0], [1.0, 1.0]],
        f"{tracking.GREEDY_RETURN}_red_team": [[3.0]],
        tracking.RETURN: [[1.0, 2.0]],
        tracking.LOG_LIKELIHOOD: [[-1.0]],
    }
    words = evaluating.summary({name: np.array(x) for name, x in metrics.items()})
    assert words == "return 1.50, greedy of red_team 3.00, won 75%"


@pytest.mark.parametrize(("most", "chosen"), [(1, [3]), (4, [3, 6, 9, 12]), (99, range(3, 13))])
def test_held_out_episodes_are_spread_evenly(most, chosen):
    assert evaluating._spread(np.arange(3, 13), most).tolist() == [*chosen]


@pytest.mark.parametrize("held_out", [0.0, 0.5])
def test_the_best_episodes_that_are_not_held_out(random_data, held_out):
    data = open_vault(random_data("probe/observation"))
    args = bc.Args(data.path, env="none", held_out=held_out)
    pool = evaluating.make_evaluator(args, data).learned_from
    pool = np.arange(len(data.episodes.row)) if pool is None else pool
    pool = pool[data.episodes.scored[pool]]
    best = evaluating.make_evaluator(replace(args, top=0.1), data).learned_from
    assert len(best) == round(len(pool) / 10) and set(best) <= set(pool)
    returns = data.episodes.episode_returns
    worse = np.setdiff1d(pool, best)
    assert returns[best].min() >= returns[worse].max()
    (index,) = evaluating.make_evaluator(replace(args, top=1e-9), data).learned_from
    assert returns[index] == returns[pool].max()
