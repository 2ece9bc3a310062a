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
from scipy.optimize import brentq

from offmarl import envs
from offmarl.networks import mixing_weights
from offmarl.programs import registry

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
    values = jax.jit(critic.apply)(critic.params(learnt.state), views, first, action)
    return np.asarray(values)[:, 0]


@NIGHTLY
@pytest.mark.parametrize("network", ["feedforward", "recurrent"])
def test_independent_values(network: str, random_data: Callable[[str], Path]) -> None:
    """Agent i's reward has the other's half; its own choice is paid now, or a step later."""
    learnt = learn(
        "iql_cql", random_data("probe/two-step"), 600, network=network, **SMALL, **VALUED["iql_cql"]
    )
    gamma = learnt.args.gamma
    expected = np.array([0.25 + 0.125 + gamma * 0.25, 0.125 + gamma * 0.75])
    values = first_values(learnt, "probe/two-step")
    np.testing.assert_allclose(values, expected[JOINT], atol=0.05)


DAILY = {("cfcql", "feedforward"), ("omiga", "feedforward")}
CASES = [
    pytest.param(name, network, marks=[] if (name, network) in DAILY else NIGHTLY)
    for name in VALUED
    for network in ("feedforward", "recurrent")
    if name != "iql_cql"
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "network"), CASES)
def test_joint_values(name: str, network: str, random_data: Callable[[str], Path]) -> None:
    """Q_tot is what both agents get now, and γ times what they get in the second step."""
    learnt = learn(
        name, random_data("probe/two-step"), 800, network=network, **SMALL, **VALUED[name]
    )
    later = JOINT.mean(-1)
    expected = 0.5 * (1 - later) + learnt.args.gamma * later
    values = first_values(learnt, "probe/two-step")
    np.testing.assert_allclose(values[:, 0], expected, atol=0.05)
    assert mean_return(learnt, "probe/two-step") == pytest.approx(1.0)


def penalised(difference: float, weight: float) -> float:
    """Solve d = difference - 2 weight tanh(d / 2).

    On uniform data of two actions, L = ½ Σ (Q - y)² / 2 + weight (logsumexp Q - Σ Q / 2) is
    smallest where Q differs from y by 2 weight (½ - σ(±d)).
    """
    return brentq(lambda d: d + 2 * weight * np.tanh(d / 2) - difference, 0, difference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "weight", "share"),
    [("iql_cql", 0.5, 1.0), pytest.param("cfcql", 1.0, 0.5, marks=NIGHTLY)],
)
def test_values_under_a_penalty(
    name: str, weight: float, share: float, random_data: Callable[[str], Path]
) -> None:
    """The penalty brings the values of both actions closer by a known amount.

    Each action is worth ½ more than the other. In cfcql, half of the penalty is each agent's.
    """
    options = SMALL | VALUED[name] | {"cql_weight": weight, "network": "feedforward"}
    options["schedule"] = "linear"  # so that the last batches do not decide
    learnt = learn(name, random_data("probe/one-step"), 600, **options)
    values = first_values(learnt, "probe/one-step")
    of_first, of_second = (
        (values[2, 0] - values[0, 0], values[1, 1] - values[0, 1])
        if name == "iql_cql"
        else (values[2, 0] - values[0, 0], values[1, 0] - values[0, 0])
    )
    expected = penalised(0.5, weight * share)
    np.testing.assert_allclose([of_first, of_second], expected, atol=0.03)


@NIGHTLY
def test_values_of_omiga_are_soft_maxima_of_the_data(random_data: Callable[[str], Path]) -> None:
    """V_i = α / w_i log E[exp(w_i Q_i / α)], over uniform actions; 0.5 is their mean reward."""
    options = SMALL | {"network": "feedforward", "tau": 0.05, "value_temperature": 0.1}
    learnt = learn("omiga", random_data("probe/one-step"), 800, **options)
    module = registry.load("baseline", "omiga")
    env = envs.make("probe/one-step")
    networks, state = module.Networks.of(env.spec, learnt.args), learnt.state
    batch = jax.tree.map(lambda leaf: leaf[:1, :1], learnt.batch)
    view = env.reset(jax.random.key(0))[1].view
    windows = jax.tree.map(lambda leaf: leaf[None, None], view)
    first, q = jnp.ones((1, 1), bool), []
    for action in (0, 1):
        joint = jnp.full((1, 1, 2), action)
        q.append(networks.action_values(state.target.critic.agent, windows, first, joint)[0, 0])
    v = networks.values(state.params.value, batch._replace(view=windows, first=first))[0, 0]
    weight = mixing_weights(networks.mixer, state.target.critic.mixer, view).w
    alpha = learnt.args.value_temperature
    expected = alpha * np.log(np.exp(weight * jnp.stack(q) / alpha).mean(0))
    np.testing.assert_allclose(weight * v, expected, atol=0.03)
    assert (expected > weight * jnp.stack(q).mean(0) + 0.02).all()  # not the mean
