"""The cells of a plan as the blocks of tasks."""

import json
import shutil
from pathlib import Path

import pytest

from offmarl import benchmark
from offmarl.benchmark import CellsWork
from offmarl.benchmark.jobs import cell_file
from offmarl.errors import OptionError
from offmarl.launch import Share, join_work, run_share
from tests.runs import write_run

PLAN = """
[record.cover]
program = "mappo"
env = "swarm/coverage-3"
[datasets]
"one" = { record = "cover", tier = "random" }
"two" = "some/name/Good"
[baselines]
bc = {}
"deep" = { program = "iql_cql" }
"""


@pytest.fixture
def made(tmp_path):
    write_run(tmp_path / "template", "t", "data", [[1.0, 3.0]], env="swarm/coverage-3")
    (tmp_path / "plan.toml").write_text(PLAN)
    commands = []

    def call(command):
        commands.append(command)
        if command[0] == "record":
            return {"vaults": [{"tier": "random", "path": "a.vlt/random"}]}
        if command[0] == "pull":
            return {"paths": {"Good": Path("cache/Good")}}
        if "iql_cql" in command and "fails" in (tmp_path / "plan.toml").read_text():
            raise OptionError("it does not fit.")
        shutil.copytree(tmp_path / "template", command[command.index("--out") + 1])
        return {}

    plan = benchmark.read_plan(tmp_path / "plan.toml", tmp_path / "out")
    return plan, CellsWork(plan, call), commands


def test_tasks_run_the_cells_and_each_dataset_is_made_once(made):
    plan, work, commands = made
    assert work.plan(2)["missing cells"] == work.num_blocks == 4
    for index in range(2):
        run_share(work, Share(index, 2))
    assert sorted(command[0] for command in commands) == ["pull", "record"] + ["train"] * 4
    for cell in plan.cells:
        found = json.loads(cell_file(plan, cell).read_text())
        assert (found["dataset"], found["baseline"]) == (cell.data.label, cell.baseline.label)
    configs = [Path(one[3]).read_text() for one in commands if one[0] == "train"]
    assert sum('vault = "a.vlt/random"' in text for text in configs) == 2
    assert sum('vault = "cache/Good"' in text for text in configs) == 2
    assert work.is_complete() and not join_work(work)


def test_a_cell_that_fails_does_not_stop_the_others(made, tmp_path):
    plan, work, _ = made
    with (tmp_path / "plan.toml").open("a") as file:
        file.write("# fails\n")
    with pytest.raises(OptionError, match="it does not fit"):
        run_share(work, Share(0, 1))
    assert [plan.cells[block].baseline.label for block in work.missing()] == ["deep", "deep"]
