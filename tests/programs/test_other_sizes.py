"""Policies in environments with other numbers of agents than they were trained with."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import numpy as np
import pytest

from offmarl import envs, load_policy
from offmarl.cli import policies
from offmarl.cli.programs import PolicyOptions
from offmarl.errors import ShapeError
from offmarl.networks import PolicyConfig
from offmarl.types import Discrete, EnvSpec
from tests.runs import write_policy

TWO, FIVE = (f"swarm/coverage-{agents}" for agents in (2, 5))


@pytest.mark.parametrize("agent_id", ["sinusoidal", "none"])
@pytest.mark.parametrize("kind", ["feedforward", "recurrent"])
@pytest.mark.slow
def test_a_policy_acts_with_more_agents(tmp_path: Path, kind: Any, agent_id: Any) -> None:
    config = PolicyConfig(kind, hidden=8, agent_id=agent_id)
    write_policy(tmp_path / "run", config, envs.make(TWO).spec, [0])
    few, many = (load_policy(tmp_path / "run", env=env) for env in (TWO, FIVE))
    chex.assert_trees_all_equal(few.params, many.params)
    assert (few.spec.num_agents, many.spec.num_agents) == (2, 5)
    observations = np.random.default_rng(0).normal(size=(5, many.spec.observation_size))
    action, carry = many(observations.astype(np.float32))
    assert action.shape == (5,)
    many(observations.astype(np.float32), carry=carry)
    if agent_id == "none":  # then an agent acts as it would in the smaller team
        np.testing.assert_array_equal(few(observations[:2].astype(np.float32))[0], action[:2])


@pytest.mark.slow
def test_evaluations_play_in_the_larger_team(tmp_path: Path) -> None:
    config = PolicyConfig("feedforward", hidden=8, agent_id="sinusoidal")
    write_policy(tmp_path / "run", config, envs.make(TWO).spec, [3, 4])
    environment, loaded = policies.load(tmp_path / "run", PolicyOptions(env=FIVE), [3, 4], [])
    (returns,) = policies.play(environment, loaded, 2, [0, 0]).values()
    assert environment.spec.num_agents == 5
    assert {seed: values.shape for seed, values in returns.items()} == {3: (2,), 4: (2,)}


def test_a_policy_that_is_tied_to_its_team_says_what_ties_it(tmp_path: Path) -> None:
    config = PolicyConfig("feedforward", hidden=8)
    write_policy(tmp_path / "run", config, envs.make(TWO).spec, [0])
    with pytest.raises(ShapeError, match=r"tied to the 2 agents of .*kernel.*--agent-id sinusoid"):
        load_policy(tmp_path / "run", env=FIVE)
    assert load_policy(tmp_path / "run", env=envs.make(TWO)).spec.num_agents == 2


SPEC = EnvSpec("some", 3, observation_size=4, state_size=5, action=Discrete(2))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"observation_size": 6}, r"observation \(float32 \(4,\), not float32 \(6,\)\)"),
        ({"action": Discrete(3)}, "action"),
        ({"num_agents": 9, "state_size": 2, "teams": (0,) * 8 + (1,)}, None),
    ],
)
def test_only_sizes_that_policies_see_must_be_equal(
    tmp_path: Path, change: dict[str, Any], difference: str | None
) -> None:
    write_policy(tmp_path / "run", PolicyConfig("feedforward", agent_id="none"), SPEC, [0])
    spec = replace(SPEC, name="other", **change)
    env: Any = SimpleNamespace(spec=spec, reset=lambda key: None, step=lambda *_: None)
    if difference is None:
        assert load_policy(tmp_path / "run", env=env).spec.num_agents == 9
        return
    with pytest.raises(ShapeError, match=f"policy of test and other differ in {difference}"):
        load_policy(tmp_path / "run", env=env)
