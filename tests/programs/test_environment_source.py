"""Environments of one name, with other code or of another release of their package."""

import json
import sys

import pytest

from offmarl import envs, load_policy, tracking, vault
from offmarl.cli.policies import load
from offmarl.cli.programs import PolicyOptions
from offmarl.envs import registry
from offmarl.errors import RunError, ShapeError
from offmarl.launch import Share, join_work, run_share
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs import record_policy
from offmarl.programs.recording import online
from offmarl.programs.recording.blocks import RecordWork
from offmarl.programs.recording.record import Recording
from offmarl.programs.runs import training
from offmarl.programs.runs.continuing import start_of
from recorders import mappo, qmix
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


@pytest.fixture
def chase(request, tmp_path, monkeypatch):
    """Write an environment of some reward, in a file or as a module; return its name."""
    kind = getattr(request, "param", "file")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])

    def write(directory, reward):
        text = CODE.replace("REWARD", str(reward))
        if kind == "module":
            (tmp_path / "chase_of_a_module.py").write_text(text)
            sys.modules.pop("chase_of_a_module", None)
            return "chase_of_a_module:Chase"
        (tmp_path / directory).mkdir(exist_ok=True)
        (tmp_path / directory / "chase.py").write_text(text)
        return f"{directory}/chase.py:Chase"

    return write


def record_of(directory):
    (file,) = directory.rglob("run.json")
    return tracking.read_run(file.parent)


@pytest.mark.parametrize("chase", ["file", "module"], indirect=True)
def test_a_recorder_refuses_the_run_of_another_environment(chase, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "learn", leave_out)
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
    monkeypatch.setattr(training, "learn", leave_out)
    monkeypatch.setattr(online, "_saved_versions", leave_out)
    with pytest.raises(Ended):
        mappo.main(mappo.Args(env=chase("a", 1.0), out=tmp_path / "out", num_envs=4))
    (path,) = tmp_path.rglob("run.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"complete": True}))
    with pytest.raises(Ended):
        online.record_from_run(path.parent, "random", env=chase("a", 1.0))
    with pytest.raises(RunError, match="trained with code of the environment that changed since"):
        online.record_from_run(path.parent, "random", env=chase("a", 100.0))


def test_a_baseline_refuses_the_run_of_another_environment(chase, tmp_path, monkeypatch, notices):
    monkeypatch.setattr(training, "learn", leave_out)
    record_policy(*acting(chase("a", 1.0)), tmp_path / "data.vlt" / "main", 4, 2)

    def train(reward):
        args = {"env": chase("a", reward), "out": tmp_path / "run", "updates": 1}
        plain.main(plain.Args(vault=tmp_path / "data.vlt" / "main", **args))

    for _ in range(2):
        with pytest.raises(Ended):
            train(1.0)
    assert not notices
    with pytest.raises(RunError, match=r"holds a run with environment_source\.sha256"):
        train(2.0)
    assert "Chase has changed since" in notices[0]


def acting(name):
    env = envs.make(name)
    return env, make_policy(PolicyConfig("random"), env.spec), ()


def test_a_recording_is_of_one_environment(chase, tmp_path):
    path, joined = tmp_path / "data.vlt" / "main", tmp_path / "data.vlt" / "joined"
    assert record_policy(*acting(f"{tmp_path}/{chase('a', 1.0)}"), path, 4, 2)
    provenance = vault.open_vault(path).provenance
    assert str(tmp_path) not in str(provenance)
    work = RecordWork(Recording(*acting(chase("a", 1.0)), joined, 4, 2))
    run_share(work, Share(0, 1))
    assert join_work(work)
    source = vault.open_vault(joined).provenance["environment_source"]
    assert source == provenance["environment_source"] and len(source["sha256"]) == 64
    assert not record_policy(*acting(chase("copy", 1.0)), path, 4, 2)
    with pytest.raises(RunError, match=r"was started with environment_source\.sha256="):
        record_policy(*acting(chase("b", 2.0)), path, 4, 2)


@pytest.mark.slow
def test_environments_of_offmarl_keep_their_record(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "learn", leave_out)
    with pytest.raises(Ended):
        mappo.main(mappo.Args(env="probe/match", out=tmp_path, num_envs=4))
    assert "environment_source" not in record_of(tmp_path)
    path = tmp_path / "data.vlt" / "main"
    record_policy(*acting("probe/match"), path, 4, 2)
    assert "environment_source" not in vault.open_vault(path).provenance["recipe"]


# ---------------------------------------------------------------------------------- releases


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install releases of a package; return its environment's name."""
    monkeypatch.chdir(tmp_path)
    site = tmp_path / "site"
    monkeypatch.setattr("sys.path", [str(site), *sys.path])
    info = site / "chase_envs.dist-info"
    info.mkdir(parents=True)
    (site / "chase_of_a_package.py").write_text(CODE.replace("REWARD", "1.0"))
    (info / "top_level.txt").write_text("chase_of_a_package")

    def install(version):
        text = f"Metadata-Version: 2.1\nName: chase-envs\nVersion: {version}\n"
        (info / "METADATA").write_text(text)
        registry.release.cache_clear()
        registry.release_of.cache_clear()
        return "chase_of_a_package:Chase"

    yield install
    registry.release.cache_clear()
    registry.release_of.cache_clear()
    sys.modules.pop("chase_of_a_package", None)


OTHER = r"package \(chase-envs (1.0.0, not chase-envs 2.0|2.0, not chase-envs 1.0.0), .*pip inst"


def train(directory, data, **options):
    args = {"updates": 1, "eval_episodes": 2, "final_episodes": 2, "hidden": 4}
    return plain.main(plain.Args(vault=data, out=directory, **args | options))


def test_a_release_is_recorded_and_another_one_refused_alike(installed, tmp_path):
    """By everything that takes data, a policy or a run of one release to another."""
    old, new = tmp_path / "old.vlt" / "main", tmp_path / "new.vlt" / "main"
    name = installed("1.0.0")
    record_policy(*acting(name), old, 4, 2)
    run = train(tmp_path / "run", old, env=name)
    assert vault.open_vault(old).spec.package == "chase-envs 1.0.0"
    assert tracking.read_run(run)["spec"]["package"] == "chase-envs 1.0.0"
    assert tracking.read_run(run)["versions"]["chase-envs"] == "1.0.0"

    installed("1.0.4")  # alike
    load_policy(run, env=name)
    train(tmp_path / "again", old, env=name, init=run)

    installed("2.0")
    record_policy(*acting(name), new, 4, 2)
    attempts = {
        "cat": lambda: vault.cat([old, new], tmp_path / "both.vlt"),
        "mix": lambda: vault.mix([old, new]),
        "train": lambda: train(tmp_path / "trained", old, env=name),
        "load_policy": lambda: load_policy(run, env=name),
        "evaluate": lambda: load(run, PolicyOptions(env=name), [0], []),
        "init": lambda: train(tmp_path / "new", new, env=name, init=run),
        "replay": lambda: start_of(qmix.Args(env=name, prefill=old), envs.make(name)),
        "validation": lambda: train(tmp_path / "new", new, env="none", validation=old),
    }
    for attempt in attempts.values():
        with pytest.raises(ShapeError, match=OTHER):
            attempt()
    assert not (tmp_path / "both.vlt").exists() and not (tmp_path / "trained").exists()


def test_nothing_is_continued_in_another_release(installed, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "learn", leave_out)
    monkeypatch.setattr(online, "_saved_versions", leave_out)

    def record():
        with pytest.raises(Ended):
            mappo.main(mappo.Args(env=name, out=tmp_path / "out", num_envs=4))

    name = installed("1.0.0")
    record()
    installed("1.0.1")
    record()
    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr("offmarl.programs.recording.record.recorded_return", leave_out)
        record_policy(*acting(name), tmp_path / "data.vlt" / "main", 4, 2)
    installed("1.1")
    with pytest.raises(RunError, match=r"differs in package \(chase-envs 1.0.1, not"):
        record_policy(*acting(name), tmp_path / "data.vlt" / "main", 4, 2)
    with pytest.raises(RunError, match=r"holds a run with spec.package 'chase-envs 1.0.0', not"):
        mappo.main(mappo.Args(env=name, out=tmp_path / "out", num_envs=4))
    (run,) = tmp_path.rglob("run.json")
    run.write_text(json.dumps(json.loads(run.read_text()) | {"complete": True}))
    with pytest.raises(RunError, match=r"differ in package \(chase-envs 1.0.0, not chase-envs 1.1"):
        online.record_from_run(run.parent, "random", env=name)
