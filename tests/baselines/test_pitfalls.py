"""Faults that programs of this kind have had: gradients, keys and actions that are not legal."""

from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.types import Continuous
from tests.rollouts import SPEC, differ, sequence

from .building import build, values_of
from .test_updates import sum_of, update

NIGHTLY = pytest.mark.nightly
DISCRETE = ("bc", "cfcql", "iql_cql", "maicq", "omiga", "qmix_bcq", "qmix_cql")
SAMPLED = ("bc", "maicq", "omiga")


@pytest.mark.slow
def test_the_policy_gradient_of_maicq_does_not_reach_the_mixer() -> None:
    program, hyper, state = of_maicq()
    # In windows of one step that does not terminate, no target of the critic is known.
    batch = sequence([[[0, 2]], [[2, 1]]])
    after, metrics = update(program, state, batch, hyper)
    assert metrics["critic_loss"] == 0 and metrics["policy_loss"] > 0
    chex.assert_trees_all_equal(after.critic, state.critic)
    assert differ(after.actor, state.actor)


def of_maicq() -> tuple[Any, Any, Any]:
    """Return MAICQ with a mixer in which both agents have the share ½."""
    program, hyper = build("maicq", mixer_embed=1)
    state = jax.jit(program.init)(jax.random.key(0), hyper)
    critic = state.critic._replace(mixer=sum_of(state.critic.mixer))
    return program, hyper, state._replace(critic=critic)


@pytest.mark.slow
def test_impossible_actions_have_a_finite_loss_and_gradient() -> None:
    program, hyper, state = of_maicq()
    # The data's actions have the probability e^-200, which is 0 in float32.
    state = state._replace(actor=values_of(state.actor, [0.0, 200.0, 0.0]))
    after, metrics = update(program, state, sequence([[[0, 2]], [[2, 0]]]), hyper)
    np.testing.assert_allclose(metrics["policy_loss"], 0.5 * 200, rtol=1e-4)
    chex.assert_tree_all_finite(after)


def acts(program: Any, hyper: Any, greedy: bool, legal: jax.Array) -> np.ndarray:
    """Return the actions of 256 keys in the same view, ``(256, N)``."""

    @jax.jit
    def choose(keys: jax.Array) -> jax.Array:
        params = program.policy_params(program.init(jax.random.key(0), hyper))
        policy = program.policy(greedy)
        carry, observation = policy.initial_carry(), jnp.ones((2, 2))
        return jax.vmap(lambda key: policy.act(params, carry, observation, legal, key)[0])(keys)

    return np.asarray(choose(jax.random.split(jax.random.key(1), 256)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "greedy"),
    [
        pytest.param(name, greedy, marks=[] if (name, greedy) in DAILY else NIGHTLY)
        for DAILY in [{("bc", False), ("qmix_cql", True)}]
        for name in DISCRETE
        for greedy in (False, True)
    ],
)
def test_only_legal_actions_are_taken(name: str, greedy: bool) -> None:
    program, hyper = build(name)
    for legal in ([[True, False, True], [False, True, True]], [[False, True, False]] * 2):
        actions = acts(program, hyper, greedy, jnp.array(legal))
        assert np.take_along_axis(np.array(legal), actions.T, axis=1).all()
        if greedy or name not in SAMPLED:  # the other policies do not explore
            assert (actions == actions[0]).all()


@pytest.mark.parametrize("name", ["omiga", *(pytest.param(x, marks=NIGHTLY) for x in SAMPLED[:2])])
def test_agents_draw_their_actions_independently(name: str) -> None:
    program, hyper = build(name, agent_id="none")
    actions = acts(program, hyper, False, jnp.ones((2, 3), bool))
    # Agents that observe the same have the same, almost uniform policy.
    counts = np.zeros((3, 3))
    np.add.at(counts, tuple(actions.T), 1)
    np.testing.assert_allclose(counts / 256, 1 / 9, atol=0.07)


def test_agents_draw_continuous_actions_independently() -> None:
    spec = replace(SPEC, action=Continuous(1))
    program, hyper = build("omiga", spec, agent_id="none")
    actions = acts(program, hyper, False, jnp.ones((2, 1), bool))[..., 0]
    assert abs(np.corrcoef(actions.T)[0, 1]) < 0.2 and actions.std(0).min() > 0.3
