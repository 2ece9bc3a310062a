"""``--checkpoint`` of ``evaluate`` and ``record --policy``: the policies before the last."""

import numpy as np
import pytest

from offmarl import envs, tracking, vault
from offmarl.networks import PolicyConfig
from offmarl.programs import replay_episode
from tests import plain
from tests.runs import write_policy, write_side

ENV = "classic/bridge"
PROGRAM = "--program", plain.__file__


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two seeds with checkpoints of steps 1 and 2: each seed has another best one."""
    run = tmp_path_factory.mktemp("kept") / "run"
    spec = envs.make(ENV).spec
    write_policy(run, PolicyConfig("feedforward"), spec, [0, 1], later={2: -3.0})
    for seed, returns in enumerate(([9.0, 1.0], [1.0, 9.0])):
        for step, value in enumerate(returns, start=1):
            row = {"seed": seed, "step": step, tracking.RETURN: [value]}
            tracking.append(run / tracking.METRICS_FILE, row)
    return run


@pytest.mark.slow
def test_evaluate_plays_the_policy_of_a_checkpoint(offmarl, run):
    def returns(*options):
        outcome = offmarl("evaluate", run, *PROGRAM, "--eval-episodes", 16, "--json", *options)
        assert outcome.code == 0, outcome.err
        return [row["mean"] for row in outcome.json["seeds"]], outcome.json["checkpoint"]

    last, name = returns()
    assert name == "last" and returns("--checkpoint", 2) == (last, 2)
    first, _ = returns("--checkpoint", 1)
    assert returns("--checkpoint", "best") == ([first[0], last[1]], "best") != (first, "best")
    text = offmarl("evaluate", run, *PROGRAM, "--eval-episodes", 16, "--checkpoint", 1).out
    assert ", step 1 of " in text


def test_each_training_seed_plays_episodes_of_its_own(offmarl, run, monkeypatch):
    """Else the chance of the episodes, common to all, would not be in the interval."""
    played = []

    def play(_, by_seed, __, seeds):
        played.append(seeds)
        return {"team": dict.fromkeys(by_seed, np.zeros(2))}

    monkeypatch.setattr("offmarl.cli.policies.play", play)
    for seed in (0, 0, 1):
        assert offmarl("evaluate", run, *PROGRAM, "--seed", seed).code == 0
    assert played[0] == played[1] and len({*played[0], *played[2]}) == 4


@pytest.mark.slow
def test_a_recording_names_the_checkpoint_of_its_policy(offmarl, run):
    options = "--policy", run, *PROGRAM, "--steps", 20, "--num-envs", 2, "--json"
    for step, name in ((["--checkpoint", 1], "test-0-1"), ([], "test-0")):
        outcome = offmarl.succeeds("record", *options, *step)
        (row,) = outcome.json["vaults"]
        assert row["path"].endswith(f"bridge.vlt/{name}")
        policy = vault.open_vault(row["path"]).provenance["policy"]
        assert policy.get("checkpoint") == (1 if step else None)


@pytest.mark.slow
def test_a_recording_of_a_side_is_that_of_how_it_acts_and_of_its_opponents(offmarl, tmp_path):
    run = write_side(tmp_path / "side")
    sizes = "--steps", 6, "--num-envs", 2, "--json"
    named = "record", "--policy", run, *sizes, "--name", "a"
    outcome = offmarl.succeeds(*named)
    again = offmarl(*named).json
    assert again["vaults"] == outcome.json["vaults"] and "complete already" in again["outcome"]
    path = outcome.json["vaults"][0]["path"]
    replay_episode(vault.open_vault(path), 1)  # opponents draw from the same keys
    for changed, message in (
        (["--act", "sample"], "was started with act='greedy', not 'sample'"),
        (["--opponents", "scripted"], "with opponents.evaders.policy='random', not 'scripted'"),
        (["--env-states"], "was started with extras=None"),
    ):
        refused = offmarl(*named, *changed)
        assert refused.code == 1 and message in refused.json["error"]["message"]
    outcome = offmarl("record", "--policy", run, *sizes, "--act", "sample", "--env-states")
    path = outcome.json["vaults"][0]["path"]
    assert path.endswith(".vlt/mappo-0-sampled"), outcome.err
    data = vault.open_vault(path)
    assert data.spec.num_agents == 3 and {*data.spec.extras} == {"env_key", "env_state"}
    assert replay_episode(data, 0).exact


@pytest.mark.slow
def test_a_checkpoint_that_was_not_kept_is_refused(offmarl, run):
    for command in (("evaluate",), ("record", "--steps", 20, "--policy")):
        refused = offmarl(*command, run, *PROGRAM, "--checkpoint", 5)
        assert refused.code == 1 and "no checkpoint of step 5, but of [1, 2" in refused.err
    assert offmarl("evaluate", run, "--checkpoint", "first").code == 2


@pytest.mark.slow
def test_a_policy_of_a_run_by_its_seed_plays_in_the_environment_of_the_run(offmarl, tmp_path):
    record = "record", "--steps", 40, "--num-envs", 2, "--out", tmp_path
    short = "classic/xor:time_limit=4"
    assert not offmarl(*record, "--policy", "random", "--env", short).code
    vault, run = tmp_path / f"{short}.vlt/random-0", tmp_path / "run"
    assert not offmarl("train", "bc", "--vault", vault, "--updates", 1, "--out", run).code
    outcome = offmarl(*record, "--policy", f"{run}@0", "--json")
    assert outcome.json["vaults"][0]["path"].endswith(f"{short}.vlt/run-0-0")


@pytest.mark.parametrize("policy", ["random", "scripted"])
def test_a_policy_by_its_name_needs_an_environment(offmarl, policy):
    offmarl.refuses("give --env", "record", "--policy", policy)


def test_a_recording_of_named_policies_takes_a_file_of_options(offmarl, tmp_path):
    file = tmp_path / "few.toml"
    file.write_text('steps = 8\nnum_envs = 2\nenv = "classic/xor"\n')
    outcome = offmarl("record", "--policy", "random", "--config", file, "--out", tmp_path, "--json")
    assert outcome.json["vaults"][0]["steps"] == 8, outcome.err
