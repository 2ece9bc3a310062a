"""MAPPO's own parts, against numbers worked out by hand."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.networks import SOFTMAX
from offmarl.networks.normalisation import Moments
from offmarl.types import Discrete, EnvSpec, Transition, View
from recorders import mappo

SPEC = EnvSpec("", 2, 1, 1, Discrete(2))


def seen(alive: jax.Array) -> View:
    """Views ``(T, E, ...)`` in which there is nothing to see but who is alive."""
    lead = alive.shape[:-1]
    legal = jnp.ones((*lead, 2, 2), bool)
    return View(jnp.zeros((*lead, 2, 1)), jnp.zeros((*lead, 1)), legal, alive)


@pytest.mark.parametrize(("reward", "second"), [("team", [7.0, 6.0, 4.0]), ("individual", [1.0])])
def test_an_agent_that_is_gone_has_its_part_in_what_its_team_still_gets(reward, second):
    # Agent 2 is done in the first of three steps, agent 1 in the last. Values are 0, γ = λ = 1.
    terminated = jnp.array([[[False, True]], [[False, True]], [[True, True]]])
    alive = jnp.array([[[True, True]], [[True, False]], [[True, False]]])
    blank, pay = jnp.zeros((3, 1, 2)), jnp.array([1.0, 2.0, 4.0])
    transitions = Transition(
        seen(alive),
        jnp.zeros((3, 1, 2), int),
        jnp.broadcast_to(pay[:, None, None], (3, 1, 2)),
        terminated,
        jnp.zeros((3, 1, 2), bool),
        terminated.all(-1),
        blank,
        jnp.zeros((3, 1), int),
    )
    networks = SimpleNamespace(value=lambda _params, view: jnp.zeros(view.alive.shape))
    state = SimpleNamespace(params=None, moments=Moments.zero())
    args = mappo.Args(gamma=1.0, gae_lambda=1.0)
    spec = replace(SPEC, reward=reward)
    found, target = mappo.advantages(networks, args, spec, state, transitions, transitions.view)
    np.testing.assert_allclose(found[:, 0, 0], [7.0, 6.0, 4.0])
    np.testing.assert_allclose(found[: len(second), 0, 1], second)
    np.testing.assert_array_equal(found, target)


def test_the_loss_of_a_minibatch_by_hand():
    # Two steps of two agents, the last of which is dead in the second: it has a value, no action.
    outputs = jnp.zeros((2, 2, 2))
    networks = mappo.Networks(
        actor=SimpleNamespace(apply=lambda *_: (outputs, ())),
        head=SOFTMAX,
        critic=SimpleNamespace(apply=lambda *_: (jnp.ones((2, 2, 1)), ())),
    )
    alive = jnp.array([[True, True], [True, False]])
    batch = mappo.Batch(
        view=seen(alive),
        action=jnp.zeros((2, 2), int),
        behaviour_log_prob=jnp.log(jnp.array([[0.5, 0.25], [1.0, 1e-9]])),
        advantage=jnp.array([[1.0, 2.0], [3.0, 1e6]]),
        target=jnp.array([[1.0, 3.0], [1.0, -1.0]]),
    )
    args = mappo.Args(clip=0.2, entropy=0.01)
    total, metrics = mappo.loss(mappo.Params((), ()), networks, args, batch)
    # Ratios 1, 2 (clipped: its advantage is 0) and 1/2; advantages -a, 0, a with a = √1.5.
    a = np.sqrt(1.5)
    np.testing.assert_allclose(metrics["policy_loss"], -(-a + 0 + 0.5 * a) / 3, rtol=1e-5)
    np.testing.assert_allclose(metrics["value_loss"], 0.5 * (0 + 4 + 0 + 4) / 4)
    np.testing.assert_allclose(metrics["entropy"], np.log(2), rtol=1e-6)
    np.testing.assert_allclose(total, a / 6 + 1.0 - 0.01 * np.log(2), rtol=1e-5)
