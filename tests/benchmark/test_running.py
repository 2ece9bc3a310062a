"""Running a plan: failures, stops and repetitions, with a stub in place of the command line."""

import csv
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from offmarl import benchmark, report, tracking
from offmarl.benchmark import running
from offmarl.benchmark.cells import pack
from offmarl.errors import RunError, Stopped
from tests.runs import write_run

PLAN = """
[training]
seeds = 5
[record.cover]
program = "mappo"
env = "swarm/coverage-3"
[datasets]
"one" = {{ record = "cover", tier = "random" }}
"two" = "some/name/Good"
[baselines]
bc = {{}}
"deep & wide" = {{ program = "iql_cql", hidden = {hidden} }}
"""
RETURNS = [[1.0, 3.0], [2.0, 2.0], [3.0, 1.0], [4.0, 4.0], [5.0, 7.0]]


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Return a function that reads a plan whose second method has a number of hidden units."""
    write_run(tmp_path / "template", "template", "data", RETURNS, env="swarm/coverage-3")
    monkeypatch.setenv("TEMPLATE", str(tmp_path / "template"))
    monkeypatch.setattr(
        running, "OFFMARL", (sys.executable, str(Path(__file__).parent / "stub.py"))
    )
    monkeypatch.setattr(running, "_POLL", 0.01)

    def read(hidden=8):
        (tmp_path / "plan.toml").write_text(PLAN.format(hidden=hidden))
        return benchmark.read_plan(tmp_path / "plan.toml", tmp_path / "out")

    return read


def test_all_cells_run_once_with_their_options_and_vaults(plan):
    whole = plan()
    assert benchmark.run_plan(whole, jobs=3) == (4, {})
    found = json.loads((whole.out / "cells" / "two--deep_wide.json").read_text())
    assert found["run.json"]["args"] == {
        "program": "iql_cql",
        "seeds": 5,
        "hidden": 8,
        "vault": "pulled/some/name/Good",
    }
    one = json.loads((whole.out / "cells" / "one--bc.json").read_text())
    assert one["run.json"]["args"]["vault"].endswith("vaults/mappo-random")
    assert one["options"] == {"seeds": 5} and one["data"] == "cover:random"
    assert one["seeds"] == [0, 1, 2, 3, 4]
    assert benchmark.run_plan(whole, jobs=3) == (0, {})  # nothing is missing


@pytest.mark.slow
def test_a_cell_that_fails_is_named_with_its_log_and_the_others_go_on(plan):
    outcome = benchmark.run_plan(plan(hidden=13), jobs=2)
    assert outcome.finished == 2
    assert set(outcome.failed) == {"deep & wide on one", "deep & wide on two"}
    assert "a message in the log" in outcome.failed["deep & wide on two"].read_text()
    results = benchmark.read_results(plan(hidden=13))
    assert results.missing == ["deep & wide on one", "deep & wide on two"]
    paths = benchmark.write_results(results, outcome.failed)
    text = (results.plan.out / "tables" / "greedy.md").read_text()
    assert "| deep & wide |  |  |" in text and all(path.is_file() for path in paths)
    assert "deep &amp; wide on one failed" in (results.plan.out / "page.html").read_text()
    # With other options, what failed runs again, and only that.
    assert benchmark.run_plan(plan(hidden=8), jobs=2) == (2, {})


def test_a_signal_stops_the_cells_and_the_same_call_continues(plan, tmp_path):
    def interrupt():
        while not (tmp_path / "waiting").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Stopped, match="the same command continues"):
        benchmark.run_plan(plan(hidden=7), jobs=1)
    thread.join()
    (tmp_path / "go").touch()
    assert benchmark.run_plan(plan(hidden=7), jobs=1).failed == {}
    assert not benchmark.read_results(plan(hidden=7)).missing


def test_two_processes_do_not_run_one_benchmark(plan):
    from filelock import FileLock

    whole = plan()
    whole.out.mkdir()
    with FileLock(whole.out / ".lock"), pytest.raises(RunError, match="another process"):
        benchmark.run_plan(whole)


# ---------------------------------------------------------------------------------- results


def cells(plan, tmp_path, scores):
    """Write the cells of methods on a dataset with the final returns of each seed."""
    for (dataset, method), returns in scores.items():
        cell = next(c for c in plan.cells if (c.data.label, c.baseline.label) == (dataset, method))
        pairs = [[value - 1, value + 1] for value in returns]
        program = cell.baseline.program
        run = write_run(tmp_path / cell.slug, program, "data", pairs, env="classic/xor")
        pack(cell, run, running.cell_file(plan, cell))
    return benchmark.read_results(plan)


SCORES = {
    ("one", "bc"): [10.0, 11, 12, 13, 14],
    ("one", "deep & wide"): [10.5, 11, 12, 13, 13],
    ("two", "bc"): [1.0, 2, 3, 4, 5],
    ("two", "deep & wide"): [11.0, 12, 13, 14, 15],
}


def test_bold_is_the_best_and_what_may_be_as_good(plan, tmp_path):
    (table,) = benchmark.score_tables(cells(plan(), tmp_path, SCORES))
    assert {method: [one.bold for one in row] for method, row in table.rows.items()} == {
        "bc": [True, False],  # on the second, every run of the other is better
        "deep & wide": [True, True],
    }
    assert table.rows["bc"][0].estimate.value == 12.0


def test_without_enough_seeds_only_the_best_is_bold(plan, tmp_path):
    few = {key: values[:2] for key, values in SCORES.items()}
    results = cells(plan(), tmp_path, few)
    (table,) = benchmark.score_tables(results)
    assert [row[0].bold for row in table.rows.values()] == [False, True]
    assert "Intervals need at least 3 seeds" in " ".join(benchmark.notes(results, {}))


def test_the_three_forms_of_a_table_hold_the_same_numbers(plan, tmp_path):
    results = cells(plan(), tmp_path, SCORES)
    benchmark.write_results(results)
    tables = {kind: results.plan.out / "tables" / f"greedy.{kind}" for kind in ("md", "tex", "csv")}
    markdown, latex = tables["md"].read_text(), tables["tex"].read_text()
    assert markdown.startswith("| method | one | two |\n| --- | ---: | ---: |\n| bc | **12.00 [")
    assert r"\textbf{12.00} {\scriptsize [" in latex and r"deep \& wide &" in latex
    assert latex.count(r"\\") == 3 and r"\begin{tabular}{lrr}" in latex
    rows = list(csv.DictReader(tables["csv"].read_text().splitlines()))
    assert [float(row["iqm"]) for row in rows] == [12, 3, 12, 13]
    assert [row["bold"] for row in rows] == ["1", "0", "1", "1"]
    assert [float(x) for x in rows[0]["runs"].split()] == SCORES["one", "bc"]
    whole = json.loads((results.plan.out / "marl_eval.json").read_text())
    assert set(whole["classic"]) == {"one", "two"}
    assert set(whole["classic"]["one"]) == {"bc (greedy)", "deep & wide (greedy)"}


def test_compare_reads_cells_as_it_reads_runs(plan, tmp_path):
    cells(plan(), tmp_path, SCORES)
    cell = next(cell for cell in plan().cells if cell.data.label == "one")
    packed, run = running.cell_file(plan(), cell), tmp_path / cell.slug
    assert tracking.read_run(packed) == tracking.read_run(run)
    for read in (report.scores_of, report.best_scores):
        ours, theirs = read(packed), read(run)
        assert str(ours) == str(theirs)
    curves = [report.curves_of(one)["episode_return"] for one in (packed, run)]
    np.testing.assert_array_equal(curves[0].values, curves[1].values)
    with pytest.raises(RunError, match=r"it has no no\.json"):
        tracking.read_json(packed, "no.json")


def test_a_packed_run_scores_its_best_checkpoint_as_the_run_does(plan, tmp_path):
    run = write_run(tmp_path / "run", "bc", "data", RETURNS)
    rng = np.random.default_rng(0)
    for step in (20, 30, 40):
        for seed in range(5):
            values = rng.normal(size=8).tolist()
            tracking.append(
                run / "metrics.jsonl", {"seed": seed, "step": step, "episode_return": values}
            )
    cell = plan().cells[0]
    pack(cell, run, tmp_path / "cell.json")
    best = [report.best_scores(one) for one in (run, tmp_path / "cell.json")]
    np.testing.assert_allclose(*best, rtol=1e-12)


WHOLE = """
name = "whole"
[training]
seeds = 2
updates = 4
evaluate_every = 2
evaluate_episodes = 2
final_episodes = 4
batch_size = 4
length = 4
[record.cover]
program = "random"
env = "swarm/coverage-3"
steps = 1000
num_envs = 8
[datasets]
"random" = { record = "cover", tier = "random" }
[baselines]
bc = {}
broken = { program = "maicq", env = "swarm/coverage-4" }
"""


@pytest.mark.nightly
def test_the_command_from_the_recording_to_the_page(offmarl, tmp_path):
    (tmp_path / "whole.toml").write_text(WHOLE)
    outcome = offmarl("benchmark", "whole.toml", "--json")
    assert outcome.code == 1
    assert outcome.json["finished"] == 1 and set(outcome.json["failed"]) == {"broken on random"}
    out = tmp_path / "runs" / "whole"
    assert "bc" in (out / "tables" / "greedy.md").read_text()
    found = json.loads((out / "cells" / "random--bc.json").read_text())
    assert found["digest"] and found["hardware"]["cores"] and found["versions"]["jax"]
    assert offmarl("compare", *(out / "cells").glob("*.json")).code == 0
    shown = offmarl("benchmark", "whole.toml", "--dry-run")
    assert shown.code == 0 and "Not run, and empty in the tables: broken on random" in shown.out
