"""Reading runs, and what is said of them."""

import json

import numpy as np
import pytest

from offmarl import report
from offmarl.errors import RunError
from tests.runs import write_run

LOW, HIGH = np.array([0.0, 1.0, 2.0, 3.0]), np.array([2.0, 3.0, 4.0, 5.0])


def test_runs_are_read_by_dataset_and_algorithm(tmp_path):
    bc = write_run(tmp_path / "bc", "bc", "coverage-3/medium", [[1, 2], [3, 4]])
    online = write_run(tmp_path / "mappo", "mappo", None, [[5, 7]])
    scores = report.read_runs([bc, online, bc])
    assert list(scores) == ["coverage-3/medium", "swarm/coverage-3"]
    np.testing.assert_array_equal(scores["coverage-3/medium"]["bc"], [1.5, 3.5])
    np.testing.assert_array_equal(scores["swarm/coverage-3"]["mappo"], [6.0])


def test_runs_of_one_program_on_one_dataset_are_told_apart(tmp_path):
    runs = [write_run(tmp_path / name, "bc", "a/b", [[1]]) for name in ("small", "large")]
    assert list(report.read_runs(runs)["a/b"]) == ["bc (small)", "bc (large)"]


@pytest.mark.parametrize("content", ["{}", '{"e": {"t": {"bc": {"seed_0": {"step_0": {}}}}}}'])
def test_a_run_without_final_evaluation_is_refused(tmp_path, content):
    run = write_run(tmp_path / "bc", "bc", "a/b", [[1]])
    (run / "marl_eval.json").write_text(content)
    with pytest.raises(RunError, match="no final evaluation"):
        report.read_runs([run])


def test_one_dataset_is_compared_in_its_own_unit():
    comparison = report.compare({"a": {"low": LOW, "high": HIGH}})
    low, high = comparison.datasets["a"]
    assert (low.algorithm, low.runs, low.iqm.value, low.mean, low.median) == (
        "low",
        4,
        1.5,
        1.5,
        1.5,
    )
    assert high.iqm.low < high.iqm.value == 3.5 < high.iqm.high
    assert comparison.overall == [] and not comparison.normalised
    # Of the 16 pairs, high wins 13, two tie and it loses one.
    assert comparison.improvement["high"]["low"].value == (13 + 0.5 * 2) / 16


def test_several_datasets_are_put_on_one_scale():
    scores = {
        "a": {"low": LOW, "high": HIGH, "only here": LOW},
        "b": {"low": 10 * LOW, "high": 10 * HIGH},
    }
    comparison = report.compare(scores)
    low, high = comparison.overall
    assert (low.algorithm, high.algorithm) == ("low", "high")
    assert low.iqm.value == pytest.approx(1.5 / 5) and high.iqm.value == pytest.approx(3.5 / 5)
    assert comparison.common["high"].shape == (4, 2)


def test_algorithms_with_other_numbers_of_seeds_are_left_out_of_what_is_common():
    scores = {"a": {"low": LOW, "high": HIGH}, "b": {"low": LOW[:2], "high": HIGH}}
    assert list(report.compare(scores).common) == ["high"]


def test_equal_scores_do_not_divide_by_zero():
    same = {"bc": np.ones(3), "maicq": np.ones(3)}
    comparison = report.compare({"a": same, "b": same})
    assert [row.iqm for row in comparison.overall] == [(0.0, 0.0, 0.0)] * 2
    assert comparison.improvement["bc"]["maicq"] == (0.5, 0.5, 0.5)


def test_the_same_runs_give_the_same_numbers():
    first, second = (report.compare({"a": {"low": LOW, "high": HIGH}}) for _ in range(2))
    assert json.dumps(first.datasets) == json.dumps(second.datasets)
