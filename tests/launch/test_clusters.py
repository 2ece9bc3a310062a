"""Tasks on a local cluster of Ray, and on what stands in for SLURM."""

import json
import os
import pickle
import signal
import threading
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

from offmarl import launch as launching
from offmarl import vault
from offmarl.cli.tasks import work_of
from offmarl.errors import OptionError, RunError
from tests.launch.toy import is_whole, signal_task

pytestmark = pytest.mark.nightly

DIGEST = "c38d7aa2a8fe89ff69ef1f5497769ff03e8e785a315b9e1e30db3a887af2b6f4"
"""Of the recording below, in one process or many."""


of_slurm = pytest.mark.parametrize("engine", ["slurm"], indirect=True)


@of_slurm
@pytest.mark.skipif("OFFMARL_REAL_SLURM" not in os.environ, reason="needs SLURM, which requeues")
def test_a_task_that_slurm_preempts_is_queued_again(launch, tmp_path, directory):
    signal_task(directory, signal.SIGUSR2)
    assert launch("wait:5") and is_whole(tmp_path)
    assert (directory / "deaths").read_text() == "xx"  # it ran twice


@of_slurm
def test_a_task_that_slurm_ends_by_sigterm_leaves_no_result(launch, tmp_path, directory):
    signal_task(directory, signal.SIGTERM)
    assert launch("wait:5") and is_whole(tmp_path)  # SLURM did not requeue it: the launcher does
    assert (directory / "deaths").read_text() == "xx"  # it ran twice


class _Forged:
    def __init__(self, ran):
        self.ran = ran

    def __reduce__(self):
        return os.mkdir, (str(self.ran),)


@of_slurm
def test_results_that_were_in_the_directory_are_never_unpickled(launch, tmp_path, directory):
    folder = directory / "slurm"
    folder.mkdir(parents=True)
    for job, task in product(range(1, 5), range(4)):
        file = folder / f"{job}_{task}_0_result.pkl"
        file.write_bytes(pickle.dumps(("success", _Forged(tmp_path / "ran"))))
    assert launch() and is_whole(tmp_path)
    assert not (tmp_path / "ran").exists()


@of_slurm
def test_an_earlier_launch_that_slurm_still_runs_is_refused(launch, tmp_path, monkeypatch):
    submitted = tmp_path / ".out.tasks" / "slurm-jobs.txt"
    submitted.parent.mkdir()
    submitted.write_text("7_0\n7_1\n")
    with monkeypatch.context() as patch:
        patch.setattr("offmarl.launch.slurm._active", lambda jobs: jobs & {"7_1"})
        with pytest.raises(RunError, match="wait for job 7, or cancel it with `scancel 7`"):
            launch()
    assert launch() and is_whole(tmp_path)


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ("slurm", {"colour": "red"}, "submitit refuses it"),
        ("ray", {"colour": "red"}, "Ray refuses it"),
        ("ray", {"num_cpus": 64}, r"num_cpus=64: the cluster .* has 2"),
    ],
    indirect=["engine"],
)
def test_options_that_an_engine_does_not_have(launch, options, message):
    with pytest.raises(OptionError, match=message):
        launch(options=options)


# ---------------------------------------------------------------------------------- recordings


def kill_tasks(directory: Path, count: int, over: threading.Event) -> None:
    """Kill tasks that have begun, each process once."""
    killed: set[int] = set()
    while len(killed) < count and not over.is_set():
        time.sleep(0.2)
        for file in sorted((directory / "state").glob("task-*.json")):
            state = json.loads(file.read_text())
            if state["state"] == "running" and state["pid"] not in killed and len(killed) < count:
                killed.add(state["pid"])
                with suppress(ProcessLookupError):
                    os.kill(state["pid"], signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*fork")  # JAX warns; Ray starts other programs at once
@pytest.mark.parametrize(("tasks", "kills"), [(1, 0), (4, 0), (16, 0), (4, 2), (16, 2)])
@pytest.mark.parametrize("engine", ["local", "slurm", "ray"], indirect=True)
def test_the_digest_of_a_recording(engine, tasks, kills, tmp_path):
    command = ["--policy", "random", "--env", "probe/one-step", "--steps", "512"]
    command += ["--num-envs", "4", "--out", str(tmp_path)]
    arguments = ("record", "32", *command)
    work, over = work_of(arguments), threading.Event()
    assert work.num_blocks == 16
    killer = threading.Thread(target=kill_tasks, args=(work.directory, kills, over))
    killer.start()
    try:
        launching.launch(work, "offmarl.cli.tasks:work_of", arguments, tasks, engine, 2)
    finally:
        over.set()
        killer.join()
    data = vault.open_vault(work.path)
    assert (data.rows, data.num_steps) == (4, 512)
    assert data.digest() == DIGEST
