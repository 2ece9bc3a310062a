"""``ope``: estimates of runs' policies from a dataset, beside the returns of the runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from offmarl import envs, tracking
from offmarl.cli.ope import view
from offmarl.networks import PolicyConfig
from offmarl.ope.ranking import Candidate, candidates_of, compare_with_returns, notes
from tests import plain
from tests.runs import write_policy

FAST = ("--updates", 40, "--members", 1, "--episodes", 64)


@pytest.fixture
def runs(tmp_path):
    """Two runs of two seeds; the second was evaluated too, with returns that the test knows."""
    spec = envs.make("probe/two-step").spec
    paths = []
    for name in ("first", "second"):
        run = tmp_path / name
        write_policy(run, PolicyConfig("feedforward"), spec, [0, 1], greedy=False)
        paths.append(run)
    return paths


@pytest.fixture
def ope(offmarl, random_data):
    """Estimate returns from the data of an environment."""

    def run(*words, env="probe/two-step"):
        return offmarl("ope", *words, "--vault", random_data(env), "--program", plain.__file__)

    return run


def evaluate(run, returns):
    for seed, values in enumerate(returns):
        row = {"seed": seed, "step": 1, tracking.RETURN: values}
        tracking.append(run / tracking.METRICS_FILE, row)


@pytest.mark.nightly
def test_estimates_without_returns(ope, runs, random_data):
    result = ope(*runs, "--methods", "local", "fqe", "wis", *FAST, "--json").json
    assert result["episodes"] == 64 and result["vault"] == str(random_data("probe/two-step"))
    labels = [f"{run}, seed {seed}" for run in runs for seed in (0, 1)]
    assert list(result["policies"]) == labels
    for estimates in result["policies"].values():
        assert estimates["true_return"] is None and estimates["effective_sample_size"] > 20
        for method in ("local", "fqe", "wis"):
            assert 0 < estimates[method]["value"] < 1.2
    # Both runs have the same parameters, so their estimates are equal: the first is chosen.
    assert result["chosen"]["wis"]["setting"] == str(runs[0])
    assert result["ranking"] == {}
    assert 0 < result["data_return_by_fqe"] < 1.2
    assert result["order"]["fqe"]["ranks"] == {key: [1, 4] for key in labels}  # without intervals
    same = [
        x for x in result["order"]["wis"]["differences"] if len({y[-1] for y in x["policies"]}) < 2
    ]
    assert len(same) == 2 and all(x["value"] == x["low"] == x["high"] == 0 for x in same)


@pytest.mark.slow
def test_estimates_beside_returns(ope, runs):
    evaluate(runs[0], [[0.5, 0.7], [0.2, 0.4]])
    evaluate(runs[1], [[0.9, 0.9], [0.8, 1.0]])
    words = (*runs, "--methods", "wis", *FAST)
    result = ope(*words, "--json").json
    assert result["policies"][f"{runs[0]}, seed 1"]["true_return"] == pytest.approx(0.3)
    choice = result["chosen"]["wis"]
    assert (choice["true_return"], choice["best_true_return"]) == pytest.approx((0.45, 0.9))
    ranking = result["ranking"]["wis"]
    estimates = [row["wis"]["value"] for row in result["policies"].values()]
    lost = 0.9 - [0.6, 0.3][int(np.argmax(estimates[:2]))]
    assert ranking["policies"] == 4 and ranking["regret"]["1"] == pytest.approx(lost)
    assert ranking["chance_regret"] == pytest.approx(0.9 - np.mean([0.6, 0.3, 0.9, 0.9]))
    text = ope(*words).out
    assert "\nfirst, seed 0" in text  # the directory stands in the heading
    assert "chosen by wis" in text and "rank correlation" in text
    assert "rank by wis" in text and "cannot be told from others" in text


def test_a_method_that_evaluated_no_policy_is_left_out_of_the_tables():
    exact = {"value": 1.0, "low": 1.0, "high": 1.0}
    returns = {"runs/a, seed 0": 1.0, "runs/b, seed 0": 2.0}
    settings = {label: [label] for label in returns}
    compared = compare_with_returns({"wis": {}}, settings, {k: np.ones(1) for k in returns})
    data = compared | {
        "gamma": 1.0,
        "episodes": 3,
        "data_return": exact,
        "data_return_by_fqe": None,
        "policies": {
            label: {"wis": None, "effective_sample_size": None, "true_return": value}
            for label, value in returns.items()
        },
        "order": {"wis": {"ranks": {}}},
        "notes": ["wis cannot evaluate runs/a, seed 0"],
    }
    assert data["ranking"]["wis"]["policies"] == 0
    lines = [x for x in view(data) if isinstance(x, str)]
    assert "Policies in runs" in lines and "wis cannot evaluate a, seed 0" in lines


def test_a_ranking_of_policies_that_act_in_different_ways_says_so():
    candidates = [Candidate(Path(run), seed, None) for run in ("bc", "maicq") for seed in (0, 1)]
    draws = {candidate.label: candidate.run.name == "bc" for candidate in candidates}
    (note,) = notes(candidates, draws, {})
    assert note.startswith("Policies of bc sample their actions") and "--act greedy" in note
    alike = {label: draw for label, draw in draws.items() if draw}
    assert [*notes(candidates[:2], alike, {})] == []


def test_a_recorder_has_the_policies_of_all_evaluations(runs):
    run = runs[0]
    tracking.append(run / tracking.METRICS_FILE, {"seed": 0, "step": 32, "loss": 1.0})
    for step in (0, 1, 64):
        tracking.append(
            run / tracking.METRICS_FILE, {"seed": 0, "step": step, tracking.RETURN: [1.0]}
        )
    assert {candidate.step for candidate in candidates_of(run, "all")} == {1}  # its checkpoint
    (run / tracking.POLICIES).mkdir()
    steps = [candidate.step for candidate in candidates_of(run, "all")]
    assert steps == [0, 0, 1, 1, 64, 64]  # of two seeds


@pytest.mark.slow
def test_a_policy_without_a_finite_return_is_left_out_of_the_ranking(ope, runs):
    evaluate(runs[0], [[0.5, 0.7], [0.2, None]])
    evaluate(runs[1], [[0.9, 0.9], [0.8, 1.0]])
    result = ope(*runs, "--methods", "wis", *FAST, "--json").json
    assert result["ranking"]["wis"]["policies"] == 3
    assert result["policies"][f"{runs[0]}, seed 1"]["true_return"] is None
    assert "seed 1 is left out of choices and rankings: its return" in " ".join(result["notes"])


@pytest.mark.nightly
def test_checkpoints_and_other_ways_to_act(ope, runs):
    words = runs[0], *FAST, "--checkpoints", "all", "--act", "greedy", "--json"
    result = ope(*words).json
    assert list(result["policies"]) == [f"{runs[0]}, step 1, seed {seed}" for seed in (0, 1)]


@pytest.mark.slow
def test_what_a_user_gets_wrong(ope, runs, tmp_path):
    refused = ope(runs[0], "--gamma", 2)
    assert refused.code == 2 and "gamma must be from 0 to 1" in refused.err
    wide = replace(envs.make("probe/match").spec, observation_size=9)
    write_policy(tmp_path / "wide", PolicyConfig("feedforward"), wide, [0])
    wrong = ope("wide", env="probe/match")
    assert wrong.code == 1 and "differ in observation (float32 (3,), not float32 (9,))" in wrong.err
