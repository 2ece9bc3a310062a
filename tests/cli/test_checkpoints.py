"""``--checkpoint`` of ``evaluate`` and ``record --policy``: the policies before the last."""

import pytest

from baselines import bc
from offmarl.programs.runs.stopping import best_step

ENV = "classic/bridge"


@pytest.fixture(scope="module")
def run(random_data, tmp_path_factory):
    return bc.main(
        bc.Args(
            vault=str(random_data(ENV)),
            out=tmp_path_factory.mktemp("kept") / "run",
            updates=6,
            eval_every=3,
            eval_episodes=8,
            final_episodes=8,
            learning_rate=0.1,
            batch_size=4,
            length=4,
            seeds=2,
            keep="all",
        )
    )


def returns(offmarl, run, *options):
    played = offmarl("evaluate", run, "--eval-episodes", 16, "--json", *options)
    assert played.code == 0, played.err
    return [row["mean"] for row in played.json["seeds"]], played.json["checkpoint"]


@pytest.mark.slow
def test_evaluate_plays_the_policy_of_a_checkpoint(offmarl, run):
    last, name = returns(offmarl, run)
    assert name == "last" and returns(offmarl, run, "--checkpoint", 6) == (last, 6)
    early, _ = returns(offmarl, run, "--checkpoint", 3)
    assert early != last
    best, name = returns(offmarl, run, "--checkpoint", "best")
    by_step = {3: early, 6: last}
    assert name == "best"
    assert best == [by_step[best_step(run, seed)][seed] for seed in (0, 1)]
    assert ", step 3 of " in offmarl("evaluate", run, "--eval-episodes", 2, "--checkpoint", 3).out


@pytest.mark.slow
def test_a_recording_names_the_checkpoint_of_its_policy(offmarl, run):
    options = "--policy", run, "--steps", 20, "--num-envs", 2, "--json"
    made = offmarl("record", *options, "--checkpoint", 3)
    assert made.code == 0, made.err
    assert made.json["path"].endswith("bridge.vlt/bc-0-3")
    assert made.json["provenance"]["policy"]["checkpoint"] == 3
    last = offmarl("record", *options).json
    assert last["path"].endswith("bridge.vlt/bc-0")
    assert "checkpoint" not in last["provenance"]["policy"]


@pytest.mark.slow
def test_a_checkpoint_that_was_not_kept_is_refused(offmarl, run):
    for command in (("evaluate",), ("record", "--steps", 20, "--policy")):
        refused = offmarl(*command, run, "--checkpoint", 5)
        assert refused.code == 1 and "no checkpoint of step 5, but of [3" in refused.err
    assert offmarl("evaluate", run, "--checkpoint", "first").code == 2
