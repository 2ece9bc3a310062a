"""Environments in files of the same name: other code makes another run."""

import json
import sys

import pytest

from offmarl import envs, tracking, vault
from offmarl.errors import RunError
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs import offline, online, record_policy
from recorders import mappo
from tests import plain

CODE = """
from dataclasses import dataclass
import jax.numpy as jnp
from offmarl import Discrete, EnvSpec, View
from offmarl.envs import restart, transition

@dataclass(frozen=True)
class Chase:
    spec = EnvSpec("", 2, 1, 1, Discrete(2), 1)

    def reset(self, key):
        return (), restart(self.view())

    def step(self, key, state, action):
        over = jnp.ones(2, bool)
        return state, transition(self.view(), jnp.full(2, REWARD), ~over, over)

    def view(self):
        return View(jnp.zeros((2, 1)), jnp.zeros(1), jnp.ones((2, 2), bool), jnp.ones(2, bool))
"""


class Ended(KeyboardInterrupt):
    """Work that a test leaves out."""


def leave_out(*_, **__):
    raise Ended


@pytest.fixture(params=["file", "module"])
def chase(request, tmp_path, monkeypatch):
    """Write an environment of some reward, in a directory or a module; return its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])

    def write(directory, reward):
        text = CODE.replace("REWARD", str(reward))
        if request.param == "module":
            (tmp_path / "chase_of_a_module.py").write_text(text)
            sys.modules.pop("chase_of_a_module", None)
            return "chase_of_a_module:Chase"
        (tmp_path / directory).mkdir(exist_ok=True)
        (tmp_path / directory / "chase.py").write_text(text)
        return f"{directory}/chase.py:Chase"

    return write


def record_of(directory):
    (found,) = directory.rglob("run.json")
    return tracking.read_run(found.parent)


def test_a_recorder_refuses_the_run_of_another_environment(chase, tmp_path, monkeypatch):
    monkeypatch.setattr(online, "_train", leave_out)
    for directory in "a", "copy":  # the same code goes on, wherever it is
        with pytest.raises(Ended):
            mappo.main(mappo.Args(env=chase(directory, 1.0), out=tmp_path / "out", num_envs=4))
    record = record_of(tmp_path)
    assert len(record["environment_source"]["sha256"]) == 64
    assert str(tmp_path) not in str(record["environment_source"])
    assert "environment_source" not in record["args"]
    with pytest.raises(RunError, match=r"holds a run with environment_source\.sha256"):
        mappo.main(mappo.Args(env=chase("b", 2.0), out=tmp_path / "out", num_envs=4))


def test_further_tiers_are_recorded_in_the_same_environment_only(chase, tmp_path, monkeypatch):
    monkeypatch.setattr(online, "_train", leave_out)
    monkeypatch.setattr(online, "_versions", leave_out)
    with pytest.raises(Ended):
        mappo.main(mappo.Args(env=chase("a", 1.0), out=tmp_path / "out", num_envs=4))
    (path,) = tmp_path.rglob("run.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"complete": True}))
    with pytest.raises(Ended):
        online.record_from_run(path.parent, "random", env=chase("a", 1.0))
    with pytest.raises(RunError, match="trained with code of the environment that changed since"):
        online.record_from_run(path.parent, "random", env=chase("a", 100.0))


def test_a_baseline_refuses_the_run_of_another_environment(chase, tmp_path, monkeypatch):
    monkeypatch.setattr(offline, "_learn", leave_out)
    record_policy(*acting(chase("a", 1.0)), tmp_path / "data.vlt" / "main", 4, 2)

    def train(reward):
        args = {"env": chase("a", reward), "out": tmp_path / "run", "updates": 1}
        plain.main(plain.Args(vault=tmp_path / "data.vlt" / "main", **args))

    for _ in range(2):
        with pytest.raises(Ended):
            train(1.0)
    with pytest.raises(RunError, match=r"holds a run with environment_source\.sha256"):
        train(2.0)


def acting(name):
    env = envs.make(name)
    return env, make_policy(PolicyConfig("random"), env.spec), ()


def test_a_recording_is_of_one_environment(chase, tmp_path):
    path = tmp_path / "data.vlt" / "main"
    assert record_policy(*acting(chase("a", 1.0)), path, 4, 2)
    assert not record_policy(*acting(chase("copy", 1.0)), path, 4, 2)
    with pytest.raises(RunError, match=r"was started with environment_source\.sha256="):
        record_policy(*acting(chase("b", 2.0)), path, 4, 2)
    recipe = vault.open_vault(path).provenance["recipe"]
    assert str(tmp_path) not in str(recipe)


@pytest.mark.slow
def test_environments_of_offmarl_keep_their_record(tmp_path, monkeypatch):
    monkeypatch.setattr(online, "_train", leave_out)
    with pytest.raises(Ended):
        mappo.main(mappo.Args(env="probe/match", out=tmp_path, num_envs=4))
    assert "environment_source" not in record_of(tmp_path)
    path = tmp_path / "data.vlt" / "main"
    record_policy(*acting("probe/match"), path, 4, 2)
    assert "environment_source" not in vault.open_vault(path).provenance["recipe"]
