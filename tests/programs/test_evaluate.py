"""Policies play the same episodes in one program as one after the other."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from baselines import bc, maicq
from offmarl import envs
from offmarl.evaluation import evaluate
from offmarl.programs import evaluate as evaluating
from offmarl.programs.program import hyperparameters
from offmarl.programs.sharding import Layout
from offmarl.types import Policy

ENV = envs.make("swarm/coverage-2:time_limit=6")
EPISODES, SEEDS = 4, 2
KEYS = jax.random.split(jax.random.key(7), SEEDS)


def separately(program, params, greedy):
    policy = program.policy(greedy)
    play = jax.jit(lambda *given: evaluate(ENV, policy, *given, EPISODES).team_returns)
    of = [play(jax.tree.map(lambda x, s=seed: x[s], params), KEYS[seed]) for seed in range(SEEDS)]
    return np.stack(of)


@pytest.mark.parametrize(
    ("module", "most", "at_once"), [(bc, 2**15, 1), (maicq, 2**15, SEEDS), (maicq, 0, SEEDS)]
)
def test_both_ways_of_acting_play_the_same_episodes(monkeypatch, module, most, at_once):
    monkeypatch.setattr(evaluating, "_MOST_CARRY_BYTES", most)
    args = module.Args(vault="unused", hidden=8)
    program = module.make(ENV.spec, args, None)
    init = partial(program.init, hyper=hyperparameters(args))
    params = program.policy_params(jax.vmap(init)(KEYS))
    found = evaluating.play(program, ENV, Layout(at_once), EPISODES, (True, False), params, KEYS)
    found = found.team_returns
    assert found.shape == (SEEDS, 2, EPISODES, 1)
    for mode, greedy in enumerate((True, False)):
        np.testing.assert_allclose(found[:, mode], separately(program, params, greedy), rtol=1e-5)
    assert not np.allclose(found[:, 0], found[:, 1])


def acting(action, carry):
    return Policy(lambda: carry, lambda _params, carry, *_: (action, jnp.zeros(2), carry))


def test_what_is_put_into_one_program():
    still = acting(jnp.zeros(2, jnp.int32), ())
    alike = partial(evaluating._are_alike, params=(), spec=ENV.spec)
    assert alike([still, acting(jnp.ones(2, jnp.int32), jnp.zeros(100))])
    assert not alike([still, acting(jnp.ones(2, jnp.int8), ())])
    assert not alike([still, acting(jnp.ones(2, jnp.int32), jnp.zeros(2**13 + 1))])
