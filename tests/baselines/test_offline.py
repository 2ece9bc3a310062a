"""Offline baselines learn the best policy from data where it is known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import offmarl
from offmarl import envs, tracking, vault
from offmarl.networks import PolicyConfig, agent_network
from offmarl.programs import record_policy, registry
from offmarl.report import final_evaluation

BASELINES = ("bc", "cfcql", "iql_cql", "maicq", "omiga", "qmix_bcq", "qmix_cql")


def train(name: str, data: Path, out: Path, **options: object) -> np.ndarray:
    """Train a baseline and return the final returns of its best actions, ``(seeds, episodes)``."""
    program = registry.load("baseline", name)
    run = program.main(program.Args(vault=data, out=out, final_episodes=64, **options))
    final = final_evaluation(run)
    returns = final.get(tracking.GREEDY_RETURN) or final[tracking.RETURN]
    return np.array(list(returns.values()))


@pytest.fixture(scope="session")
def xor(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("xor") / "xor_02.vlt"
    vault.import_dataset(
        shared_data / "alberdice/xor_02.npz", path, env_spec=envs.make("classic/xor").spec
    )
    return path


@pytest.mark.nightly
@pytest.mark.parametrize("name", BASELINES)
def test_xor_with_one_good_joint_action(name: str, xor: Path, tmp_path: Path) -> None:
    returns = train(
        name, xor, tmp_path / name, updates=600, eval_every=600, length=5, batch_size=32
    )
    np.testing.assert_array_equal(returns, 50.0)


@pytest.mark.nightly
@pytest.mark.parametrize("name", BASELINES[1:])
@pytest.mark.parametrize("probe", ["two-step", "match", "memory"])
def test_probes_from_random_data(
    name: str, probe: str, random_data: Callable[[str], Path], tmp_path: Path
) -> None:
    data = random_data(f"probe/{probe}")
    options = {"updates": 500, "eval_every": 500, "hidden": 32, "length": 3, "batch_size": 32}
    if name.endswith("cql"):  # on uniform data the full penalty makes all values almost equal
        options["cql_weight"] = 0.3
    if name == "omiga":
        options |= {"network": "recurrent", "value_temperature": 0.1, "tau": 0.05}
    returns = train(name, data, tmp_path / name, learning_rate=3e-3, seeds=2, **options)
    np.testing.assert_allclose(returns, 1.0, atol=1e-6)


@pytest.mark.nightly
def test_the_clone_of_two_joint_modes_is_their_independent_mixture(
    shared_data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "bridge.vlt"
    source = shared_data / "alberdice/bridge_optimal.npz"
    env = envs.make("classic/bridge")
    vault.import_dataset(source, path, env_spec=env.spec)
    settled = {"updates": 1500, "learning_rate": 1e-3, "schedule": "linear"}
    returns = train("bc", path, tmp_path / "bc", eval_every=500, seeds=2, **settled)
    # Greedily, both take the way that most of the data takes: one of its three ways, -1.2904.
    np.testing.assert_allclose(returns, -1.2904, atol=1e-4)
    start = env.reset(jax.random.key(0))[1].view
    network = agent_network(PolicyConfig("recurrent"), env.spec)
    for seed in (0, 1):
        params = offmarl.load_policy(tmp_path / "bc", seed).params
        logits, _ = network.apply(params, network.initial_carry(2), start.observation)
        # 259 of the 500 episodes begin with both agents going right, 241 with both going left.
        np.testing.assert_allclose(jax.nn.softmax(logits)[:, 3], 0.518, atol=0.03)
        np.testing.assert_allclose(jax.nn.softmax(logits)[:, 4], 0.482, atol=0.03)


@pytest.mark.nightly
def test_the_clone_of_a_continuous_controller(tmp_path: Path) -> None:
    # Most of its commands are at an end of the range. It gets 20.1, a uniform policy 7.9.
    env = envs.make("swarm/coverage-3", action="continuous")
    path = tmp_path / "scripted.vlt" / "0"
    record_policy(env, env.scripted(), (), path, steps=20_000, num_envs=16)
    settled = {"updates": 600, "learning_rate": 1e-3, "schedule": "linear"}
    returns = train("bc", path, tmp_path / "bc", eval_every=600, **settled)
    assert returns.mean() > 17


def test_the_first_line_is_that_of_the_first_update(
    random_data: Callable[[str], Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options: dict[str, Any] = {"updates": 2, "eval_every": 1, "hidden": 8, "seeds": 2}
    train("bc", random_data("probe/one-step"), run, **options)
    rows = tracking.read(run / tracking.METRICS_FILE)
    lines = [(row["step"], row["seed"], "policy_loss" in row) for row in rows]
    # The untrained policy comes second, and the evaluations are in order.
    kinds = [(1, True), (0, False), (1, False), (2, True), (2, False)]
    assert lines == [(step, seed, is_loss) for step, is_loss in kinds for seed in (0, 1)]
    assert all(np.shape(row[tracking.RETURN]) for row in rows if "policy_loss" not in row)
