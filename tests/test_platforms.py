"""What runs on a device lowers for every platform: no host callback, no 64-bit value.

These tests need no device, because JAX lowers for platforms that are not here.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import accelerator
from benchmarks.windows import random_replay
from offmarl import envs
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs import DatasetStatistics, Program, hyperparameters, registry
from offmarl.programs.program import structure
from offmarl.rollout import init_rollout, rollout
from offmarl.types import Continuous, Discrete, EnvSpec

pytestmark = pytest.mark.slow

PLATFORMS = ("cuda", "tpu")
ENVIRONMENTS = (
    *("classic/xor", "classic/bridge", "probe/memory", "probe/match"),
    *(f"swarm/{name}" for name in ("search-3", "delivery-3", "pursuit-3-2", "coverage-100")),
    *("swarm/flock-3", "swarm/hover-3", "matrax/climbing", "jumanji/lbf"),
    *(f"jaxmarl/{name}" for name in ("mpe/simple_spread_v3", "smax/3m", "coin_game")),
)
OF_CONTINUOUS = ("maddpg", "masac", "maddpg_cql", "matd3_bc", "omar")


def lowers(function: Any, *args: Any) -> None:
    """Assert that a function lowers for each platform, and moves no 64-bit value."""
    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=PLATFORMS)
    text = lowered.as_text()
    assert "callback" not in text
    assert "f64" not in text


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_lowers(name: str) -> None:
    env = envs.make(name)
    auto, policy = envs.autoreset(env), make_policy(PolicyConfig("random"), env.spec)

    def play(key: Any) -> Any:
        state = init_rollout(auto, policy, key, num_envs=2)
        return rollout(auto, policy, (), state, key, num_steps=4)

    lowers(play, jax.random.key(0))


@pytest.mark.parametrize("name", sorted({*registry.find("recorder")} - {"random", "psro"}))
def test_a_recorder_lowers(name: str) -> None:
    module = registry.load("recorder", name)
    action = "continuous" if name in OF_CONTINUOUS else "discrete"
    env = envs.make(f"swarm/coverage-2:time_limit=5,action={action}")
    args = module.Args(env=env.spec.name, num_envs=2)
    updates_lower(module.make(env.spec, args, env), hyperparameters(args), lambda _key: None)


@pytest.mark.parametrize("name", sorted(registry.find("baseline")))
def test_a_baseline_lowers(name: str) -> None:
    module = registry.load("baseline", name)
    args = module.Args(vault=Path(), updates=10)
    action = Continuous(2) if name in OF_CONTINUOUS else Discrete(3)
    spec = EnvSpec("shapes", 2, 4, 4, action, time_limit=8)
    returns = {"returns": np.ones(6), "return_scale": np.ones(()), "scored": np.ones(6, bool)}
    returns["best_returns"] = np.ones(spec.num_agents, np.float32)
    statistics = DatasetStatistics(None, returns)
    program = module.make(spec, structure(args), statistics)
    replay, _ = random_replay(spec, 200, 4)

    def sample(key: Any) -> Any:
        batch = replay.sample(key)
        return batch._replace(return_to_go=jnp.zeros_like(batch.reward))

    updates_lower(program, hyperparameters(args), sample)


def updates_lower(program: Program, hyper: Any, sample: Callable[[Any], Any]) -> None:
    """Assert that a program's start and the updates of all stages lower; batches are sampled."""

    def train(key: Any, hyper: Any) -> Any:
        state = program.init(key, hyper)
        for stage in program.stages:
            state, _ = stage.update(state, sample(key), key, hyper)
        return state

    lowers(train, jax.random.key(0), hyper)


def test_the_benchmark_of_an_accelerator_runs_with_tiny_sizes(tmp_path: Path) -> None:
    out = accelerator.main(accelerator.Args(tiny=True, rounds=1, out=tmp_path))
    parts = json.loads(out.read_text())["parts"]
    assert set(parts) == set(accelerator.MEASURES)
    assert all(part["rows"] and part["device"] for part in parts.values())
    assert not [row for part in parts.values() for row in part["rows"] if "failed" in row]
