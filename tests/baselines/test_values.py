"""Baselines learn the values and policies of small games, whose answers are known.

The data comes from independent uniform play. So independent learners value an action with the
other agent's uniform behaviour, and joint values are those of the joint actions.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs

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


def first_values(learnt: Learnt, name: str) -> np.ndarray:
    """Return the values of the four joint actions in the first view, one or one for each agent."""
    view = envs.make(name).reset(jax.random.key(0))[1].view
    views = jax.tree.map(lambda leaf: jnp.repeat(leaf[None, None], 4, 0), view)
    critic = learnt.program.values
    first, action = jnp.ones((4, 1), bool), jnp.asarray(JOINT)[:, None]
    found = jax.jit(critic.apply)(critic.params(learnt.state), views, first, action)
    return np.asarray(found)[:, 0]


@pytest.mark.parametrize("network", ["feedforward", pytest.param("recurrent", marks=NIGHTLY)])
def test_independent_values(network: str, random_data: Callable[[str], Path]) -> None:
    """Agent i's reward has the other's half; its own choice is paid now, or a step later."""
    learnt = learn(
        "iql_cql", random_data("probe/two-step"), 600, network=network, **SMALL, **VALUED["iql_cql"]
    )
    gamma = learnt.args.gamma
    expected = np.array([0.25 + 0.125 + gamma * 0.25, 0.125 + gamma * 0.75])
    found = first_values(learnt, "probe/two-step")
    np.testing.assert_allclose(found, expected[JOINT], atol=0.05)


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
            if name != "iql_cql"
            and (name, network)
            not in {("maicq", "feedforward"), ("cfcql", "feedforward"), ("omiga", "feedforward")}
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
    found = first_values(learnt, "probe/two-step")
    np.testing.assert_allclose(found[:, 0], expected, atol=0.05)
    assert mean_return(learnt, "probe/two-step") == pytest.approx(1.0)
