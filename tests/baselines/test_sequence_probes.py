"""What Oryx and MAC-Flow learn of uniform play in the probes, against the exact answers."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from baselines import mac_flow, oryx
from offmarl import envs
from offmarl.evaluation import evaluate
from offmarl.types import Sequence

from .building import build, repeated
from .probes import uniform_play

nightly = pytest.mark.nightly
SHARED = {"learning_rate": 3e-3, "schedule": "linear", "gamma": 0.9, "tau": 0.05, "hidden": 16}
OPTIONS: dict[Any, dict[str, Any]] = {
    oryx: SHARED | {"hidden": 32, "policy_temperature": 0.05},
    mac_flow: SHARED
    | {"hidden": 32, "layers": 2, "critic_hidden": 32, "flow_steps": 4, "distillation_weight": 0.1},
}


def learn(module: Any, env: Any, updates: int, **options: Any) -> tuple[Any, Any, Sequence]:
    """Return a program, what it learns of the same batch again and again, and the batch."""
    program, hyper = build(module, env.spec, updates=updates, **OPTIONS[module] | options)
    batch = uniform_play(env)
    return program, repeated(program, hyper, batch, updates), batch


def mean_return(program: Any, state: Any, env: Any, greedy: bool) -> float:
    play = jax.jit(partial(evaluate, env, program.policy(greedy)), static_argnums=2)
    return float(play(program.policy_params(state), jax.random.key(1), 64).returns.mean())


def probe(name: str, action: str = "discrete") -> Any:
    return envs.make(f"probe/{name}", action=action)


@nightly
def test_oryx_values_what_agents_have_chosen_so_far() -> None:
    env = probe("match")
    program, state, batch = learn(oryx, env, 500)
    inputs = program.values.params(state), batch.view_tm1, batch.first[:, :-1], batch.action
    values = np.asarray(jax.jit(program.values.apply)(*inputs))[:, 0]
    # The second agent knows both choices, the first its own; uniform play makes the other's.
    reward, choice = batch.reward[:, 0, 1], np.asarray(batch.action)[:, 0, 0]
    of_first = [reward[choice == either].mean() for either in (0, 1)]
    np.testing.assert_allclose(values[:, 0], np.take(of_first, choice), atol=0.05)
    np.testing.assert_allclose(values[:, 1], reward, atol=0.05)
    assert mean_return(program, state, env, greedy=True) == 1.0


CASES = [
    (oryx, "observation", "discrete", 1.0),
    (oryx, "two-step", "discrete", 1.0),
    (oryx, "memory", "discrete", 1.0),
    (oryx, "observation", "continuous", 0.8),
    (mac_flow, "observation", "discrete", 1.0),
    (mac_flow, "two-step", "discrete", 1.0),
    (mac_flow, "observation", "continuous", 0.95),
    (mac_flow, "two-step", "continuous", 0.95),
]


@nightly
@pytest.mark.parametrize(("module", "name", "action", "least"), CASES)
def test_the_best_is_learnt_of_uniform_play(
    module: Any, name: str, action: str, least: float
) -> None:
    # Implicit constraints weigh the data's continuous actions, so the clone stays behind the best.
    options = {"policy_temperature": 0.02} if module is oryx and action == "continuous" else {}
    env = probe(name, action)
    program, state, _ = learn(module, env, 300, **options)
    for greedy in (True, False):
        assert mean_return(program, state, env, greedy) >= (least if greedy else 0.9 * least)
