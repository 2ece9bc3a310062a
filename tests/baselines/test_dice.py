"""AlberDICE, ComaDICE and MADT learn small games whose answers are known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq

from baselines import comadice
from offmarl import envs, vault

from .probes import Learnt, learn, mean_return
from .test_offline import train

NIGHTLY = pytest.mark.nightly
SMALL: dict[str, Any] = {"hidden": 32, "learning_rate": 3e-3, "batch_size": 32, "length": 3}
PROBED: dict[str, dict[str, Any]] = {
    "alberdice": {"alpha_start": 1.0, "alpha_end": 0.02},
    "comadice": {"value_temperature": 0.05, "tau": 0.05},
    # Of windows of three steps, only one in four holds both cue and answer.
    "madt": {"weight_decay": 0.0, "length": 8},
}


def first_probabilities(learnt: Learnt, name: str) -> np.ndarray:
    """Return each agent's probability of action 1 in the first view."""
    view = envs.make(name).reset(jax.random.key(0))[1].view
    policy, params = learnt.program.policy(False), learnt.program.policy_params(learnt.state)
    args = view.observation, view.legal_actions
    log_prob = jax.jit(policy.log_prob)(params, policy.initial_carry(), *args, jnp.ones(2, int))[0]
    return np.exp(log_prob)


PROBES = ["one-step", "two-step", "observation", "match", "memory"]


@NIGHTLY
@pytest.mark.parametrize("name", PROBED)
@pytest.mark.parametrize("probe", PROBES)
def test_probes_from_random_data(name: str, probe: str, random_data: Callable[[str], Path]) -> None:
    network = "recurrent" if probe == "memory" else "feedforward"
    options = SMALL | PROBED[name] | {"network": network}
    updates = 2000 if name == "madt" else 800
    learnt = learn(name, random_data(f"probe/{probe}"), updates, **options)
    assert mean_return(learnt, f"probe/{probe}") == pytest.approx(1.0, abs=1e-6)


@NIGHTLY
def test_policies_of_alberdice_are_those_of_their_temperature(
    random_data: Callable[[str], Path],
) -> None:
    """An agent's choice of action 1 earns 0.5, and the data are uniform: P(1) = σ(0.5 / α)."""
    still = {"alpha_start": 0.5, "alpha_end": 0.5, "cql_weight": 0.0, "gradient_penalty": 0.0}
    options = SMALL | still | {"network": "feedforward", "schedule": "linear"}
    learnt = learn("alberdice", random_data("probe/one-step"), 1000, **options)
    probs = first_probabilities(learnt, "probe/one-step")
    np.testing.assert_allclose(probs, 1 / (1 + np.exp(-1)), atol=0.04)


@NIGHTLY
def test_values_of_comadice_give_the_data_a_mean_weight_of_one(
    random_data: Callable[[str], Path],
) -> None:
    """Q_tot is the share of agents that choose 1, and the mean of (f')⁻¹((Q_tot - ν) / α) is 1."""
    alpha, q = 0.25, np.array([0, 0.5, 0.5, 1])
    options = SMALL | {"network": "feedforward", "tau": 0.05, "value_temperature": alpha}
    learnt = learn("comadice", random_data("probe/one-step"), 1000, schedule="linear", **options)
    networks = comadice.Networks.of(envs.make("probe/one-step").spec, learnt.args)
    batch = jax.tree.map(lambda leaf: leaf[:, :1], learnt.batch)
    batch = learnt.batch._replace(first=jnp.zeros_like(learnt.batch.first))
    target, steps = learnt.state.target, np.asarray(batch.mask)
    view, first = batch.view_tm1, batch.first[:, :-1]
    values = jax.jit(networks.joint_values)(target.critic, view, first, batch.action)[..., 0]
    joint = np.asarray(batch.action).sum(-1) / 2
    np.testing.assert_allclose(values[steps], joint[steps], atol=0.03)
    weights = comadice.mixing_weights(networks.mixer, target.critic.mixer, view)
    nu = comadice.mix_linearly(weights, networks.values(learnt.state.params.value, batch)[:, :-1])

    def excess(nu: float) -> float:
        x = (q - nu) / alpha
        return float(np.where(x < 0, np.exp(x), x + 1).mean() - 1)

    expected = brentq(excess, -5, 5)
    assert expected > 0.55  # above the mean reward
    np.testing.assert_allclose(nu[steps], expected, atol=0.03)


@NIGHTLY
def test_alberdice_solves_the_xor_game(shared_data: Path, tmp_path: Path) -> None:
    data, env = tmp_path / "xor.vlt", envs.make("classic/xor")
    source = shared_data / "alberdice/xor_00_02_20.npz"
    vault.import_dataset(source, data, env_spec=env.spec)
    options = {
        "hidden": 32,
        "learning_rate": 3e-3,
        "schedule": "linear",
        "batch_size": 16,
        "length": 16,
        "network": "feedforward",
        "alpha_start": 1.0,
        "alpha_end": 0.01,
        "gradient_penalty": 0.0,
        "normalise": ("reward",),
    }
    returns = train("alberdice", data, tmp_path / "run", updates=2000, eval_every=2000, **options)
    np.testing.assert_array_equal(returns, 50.0)
