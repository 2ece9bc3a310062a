"""Baselines learn the values and policies of small games, whose answers are known.

The data comes from independent uniform play. So independent learners value an action with the
other agent's uniform behaviour, and joint values are those of the joint actions.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs
from offmarl.networks import (
    agent_network,
    linear_weights,
    make_linear_mixer,
    make_mixer,
    mix,
    mix_linearly,
    mixing_weights,
)
from offmarl.programs.learner import policy_config
from offmarl.types import View

from .probes import Learnt, learn, mean_return

NIGHTLY = pytest.mark.nightly
JOINT = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
SMALL: dict[str, Any] = {"hidden": 32, "learning_rate": 3e-3, "batch_size": 32, "length": 3}
VALUED: dict[str, dict[str, Any]] = {
    "iql_cql": {"cql_weight": 0.0, "target_every": 50},
    "qmix_cql": {"cql_weight": 0.0, "target_every": 50},
    "qmix_bcq": {"target_every": 50},
    "maicq": {"target_every": 50},
    "cfcql": {"cql_weight": 0.0, "behaviour_updates": 50},
    "omiga": {"tau": 0.05, "value_temperature": 1.0},
}


SPEC = envs.make("probe/match").spec  # that of all probes


def first_view(name: str) -> View:
    return envs.make(name).reset(jax.random.key(0))[1].view


def local_values(learnt: Learnt, view: View) -> np.ndarray:
    """Return Q_i of all actions in a first view, ``(N, A)``."""
    network = agent_network(policy_config(learnt.args, "q"), SPEC)
    agent = getattr(critic_of(learnt), "agent", critic_of(learnt))
    q, _ = jax.jit(network.apply)(agent, network.initial_carry(2), view.observation)
    return np.asarray(q)


def critic_of(learnt: Learnt) -> Any:
    params = getattr(learnt.state, "params", learnt.state)
    return getattr(params, "critic", params)


def joint_values(learnt: Learnt, view: View) -> np.ndarray:
    """Return Q_tot of the four joint actions in a first view."""
    args, q = learnt.args, local_values(learnt, view)
    taken, mixer_params = jnp.asarray(q[[0, 1], JOINT]), critic_of(learnt).mixer
    if hasattr(args, "mixer_embed"):
        mixer = make_mixer(SPEC, args.mixer_embed, args.mixer_hidden)
        weights = mixing_weights(mixer, mixer_params, view)
        return np.asarray(jax.vmap(partial(mix, weights))(taken))
    weights = linear_weights(make_linear_mixer(SPEC, args.mixer_hidden), mixer_params, view)
    return np.asarray(jax.vmap(partial(mix_linearly, weights))(taken))


@pytest.mark.parametrize(
    "network", ["feedforward", pytest.param("recurrent", marks=NIGHTLY)]
)
def test_independent_values(network: str, random_data: Callable[[str], Path]) -> None:
    """Agent i's reward has the other's half; its own choice is paid now, or a step later."""
    learnt = learn(
        "iql_cql", random_data("probe/two-step"), 600, network=network, **SMALL, **VALUED["iql_cql"]
    )
    gamma = learnt.args.gamma
    expected = [0.25 + 0.125 + gamma * 0.25, 0.125 + gamma * 0.75]
    found = local_values(learnt, first_view("probe/two-step"))
    np.testing.assert_allclose(found, [expected] * 2, atol=0.05)


@pytest.mark.parametrize(
    ("name", "network"),
    [
        ("maicq", "feedforward"),
        ("cfcql", "feedforward"),
        ("omiga", "feedforward"),
        *(
            pytest.param(name, network, marks=NIGHTLY)
            for name in VALUED
            for network in ("feedforward", "recurrent")
            if name != "iql_cql" and (name, network) not in {
                ("maicq", "feedforward"), ("cfcql", "feedforward"), ("omiga", "feedforward")
            }
        ),
    ],
)
def test_joint_values(name: str, network: str, random_data: Callable[[str], Path]) -> None:
    """Q_tot is what both agents get now, and γ times what they get in the second step."""
    learnt = learn(
        name, random_data("probe/two-step"), 800, network=network, **SMALL, **VALUED[name]
    )
    later = JOINT.mean(-1)
    expected = 0.5 * (1 - later) + learnt.args.gamma * later
    found = joint_values(learnt, first_view("probe/two-step"))
    np.testing.assert_allclose(found, expected, atol=0.05)
    assert mean_return(learnt, "probe/two-step") == pytest.approx(1.0)
