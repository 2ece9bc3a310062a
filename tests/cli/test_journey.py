"""The whole workflow: record, train, evaluate, compare, and record the trained policy."""

from pathlib import Path

import pytest

TRAIN = ("--updates", 4, "--eval-every", 2, "--eval-episodes", 2, "--final-episodes", 3)


@pytest.mark.nightly
def test_from_recording_to_comparison(offmarl):
    recorded = offmarl(
        *("record", "mappo", "--env", "classic/xor", "--tiers", "random,replay", "--json"),
        *("--steps", 400, "--total-steps", 800, "--num-envs", 4, "--num-steps", 50),
        *("--evaluations", 2, "--eval-episodes", 4),
    )
    assert recorded.code == 0, recorded.err
    assert [tier["tier"] for tier in recorded.json["vaults"]] == ["random", "replay"]
    (listed, _) = offmarl("ls", "--json").json["vaults"]
    assert listed["path"] == str(Path("vaults/classic/xor.vlt/mappo-0-random").absolute())

    vault = "vaults/classic/xor.vlt/mappo-0-random"
    trained = offmarl("train", "bc", "--vault", vault, "--seeds", 2, *TRAIN, "--json").json
    run = trained["run"]
    assert run == "runs/classic/xor/mappo-0-random/bc"
    assert [(row["seed"], row["episodes"]) for row in trained["seeds"]] == [(0, 3), (1, 3)]
    again = offmarl("train", "bc", "--vault", vault, "--seeds", 2, *TRAIN, "--json").json
    assert again == trained

    played = offmarl("evaluate", run, "--eval-episodes", 5, "--json").json
    assert [row["episodes"] for row in played["seeds"]] == [5, 5]
    refused = offmarl("evaluate", run, "--env", "swarm/coverage-3")
    assert refused.code == 1 and "observation_size (4, not 58)" in refused.err

    compared = offmarl("compare", run, "--json").json
    assert compared["datasets"]["xor/mappo-0-random"]["bc (sampled)"]["mean"] == pytest.approx(
        sum(row["mean"] for row in trained["seeds"]) / 2
    )

    made = offmarl("record", "--policy", run, "--steps", 100, "--num-envs", 2, "--json").json
    assert made["path"].endswith("vaults/classic/xor.vlt/bc-0")
    assert (made["steps"], made["provenance"]["policy"]["run"]) == (100, run)
