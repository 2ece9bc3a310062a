"""The datasets and cells of a plan as the blocks of tasks."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from offmarl import benchmark
from offmarl.benchmark import CellsWork
from offmarl.benchmark.tasks import cell_file, noted_vaults, preparation
from offmarl.cli import benchmark as cli
from offmarl.errors import OptionError
from offmarl.launch import Share, join_work, run_share
from offmarl.paths import STREAM_CACHE
from tests.benchmark import stub
from tests.runs import write_run

PLAN = """
[record.cover]
program = "mappo"
env = "swarm/coverage-3"
total_steps = {steps}
[datasets]
"one" = {{ record = "cover", tier = "random" }}
"two" = "some/name/Good"
[baselines]
bc = {{}}
"deep" = {{ program = "iql_cql", hidden = {hidden} }}
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return a function that makes the work of a plan, and the list of the commands it runs."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "template", "t", "data", [[1.0, 3.0]], env="swarm/coverage-3")
    monkeypatch.setenv("TEMPLATE", str(tmp_path / "template"))
    commands = []

    def call(command):
        commands.append(command)
        return stub.call(command)

    def make(hidden=8, steps=100_000):
        (tmp_path / "plan.toml").write_text(PLAN.format(hidden=hidden, steps=steps))
        plan = benchmark.read_plan(tmp_path / "plan.toml", tmp_path / "out")
        return CellsWork(plan, call), commands

    return make


def test_tasks_run_the_cells_and_each_dataset_is_made_once(make):
    work, commands = make()
    plan = work.benchmark_plan
    assert work.plan(2)["missing cells"] == 4 and work.num_blocks == work.tasks(2) == 6
    for index in range(2):
        run_share(work, Share(index, 2))
    assert sorted(command[0] for command in commands) == ["pull", "record"] + ["train"] * 4
    for cell in plan.cells:
        found = json.loads(cell_file(plan, cell).read_text())
        assert (found["dataset"], found["baseline"]) == (cell.data.label, cell.baseline.label)
    configs = [Path(one[3]).read_text() for one in commands if one[0] == "train"]
    assert sum('vaults/mappo-random"' in text for text in configs) == 2
    assert sum('/pulled/some/name/Good"' in text for text in configs) == 2
    assert work.is_complete() and not join_work(work)


def test_datasets_come_first_and_only_those_that_are_needed(make):
    work, commands = make()
    assert [work.label(block) for block in work.missing()[:3]] == [
        "record cover",
        "two",
        "bc on one",
    ]
    assert [list(work.needs(block)) for block in range(6)] == [[], [], [0], [0], [1], [1]]
    run_share(work, Share(4, 6))  # bc on two
    run_share(work, Share(5, 6))
    assert [command[0] for command in commands] == ["pull", "train", "train"]
    assert work.missing() == [0, 2, 3]


@pytest.mark.parametrize("change", ["the recipe", "the vault"])
def test_a_dataset_is_prepared_again_if_something_has_changed(change, make):
    work, _ = make()
    run_share(work, Share(0, 6))
    job = preparation(work.benchmark_plan, work.benchmark_plan.datasets["one"])
    vaults = noted_vaults(job)
    assert list(vaults) == ["one"] and 0 not in work.missing()
    if change == "the vault":
        Path(vaults["one"]).rmdir()
    else:
        work, _ = make(steps=200_000)
    assert 0 in work.missing()


def test_a_cell_that_fails_does_not_stop_the_others(make):
    work, _ = make(hidden=stub.FAILS)
    with pytest.raises(OptionError, match="a message in the log"):
        run_share(work, Share(0, 1))
    assert [work.label(block) for block in work.missing()] == ["deep on one", "deep on two"]


def test_a_benchmark_has_no_steps(make, offmarl):
    make()
    outcome = offmarl("benchmark", "plan.toml", "--block-steps", 100)
    assert outcome.code == 2 and "divided by its cells" in outcome.err


# ---------------------------------------------------------------------------------- one process


@pytest.mark.slow
def test_a_command_leaves_no_variables_for_the_next_one(monkeypatch):
    seen = []

    def train(arguments):
        seen.append(os.environ.get(STREAM_CACHE))
        os.environ[STREAM_CACHE] = "1"
        raise OptionError("no")

    monkeypatch.delenv(STREAM_CACHE, raising=False)
    monkeypatch.setattr("offmarl.cli.programs.train", train)
    for _ in range(2):
        with pytest.raises(OptionError, match="no"):
            cli._call(["train", "bc"])
    assert seen == [None, None]


def test_wrong_options_of_a_cell_are_an_error_of_that_cell():
    with pytest.raises(OptionError, match="colour"):
        cli._call(["train", "bc", "--colour", "red"])


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ([{"seeds": 3}, {"seeds": 5}], 5),
        ([{"seeds": 3}, {"devices": 8}], 8),
        ([{"seeds": 3}, {"seeds": 2, "batching": "vmap"}], 1),
    ],
)
def test_a_cpu_is_split_once_for_all_cells(options, devices):
    data = benchmark.plan.Data("d", "v", "", "", {})
    method = benchmark.plan.Baseline("b", "bc", {}, None)
    plan = SimpleNamespace(cells=[benchmark.Cell(data, method, one) for one in options])
    assert cli._devices_of(plan) == devices
