"""Tasks on a local cluster of Ray, and on what stands in for SLURM.

With OFFMARL_REAL_SLURM=1 in the environment they run on the SLURM that is installed.
"""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from offmarl import launch as launching
from offmarl import vault
from offmarl.cli.tasks import work_of
from offmarl.errors import OptionError, RunError, Stopped
from offmarl.launch import slurm as engine
from tests.launch import slurm
from tests.launch.toy import ENTRY, Squares

pytestmark = pytest.mark.nightly

BLOCKS = 6
DIGEST = "c38d7aa2a8fe89ff69ef1f5497769ff03e8e785a315b9e1e30db3a887af2b6f4"
"""Of the recording below, in one process or many."""


@pytest.fixture(params=["slurm", "ray"])
def launch(request, tmp_path, monkeypatch):
    """Launch the work: ``launch("once:3")``."""
    pytest.importorskip({"slurm": "submitit", "ray": "ray"}[request.param])
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(engine, "_LOST_SECONDS", 1.0)
    monkeypatch.setattr(engine, "_ASK_SECONDS", 0.2)
    if "OFFMARL_REAL_SLURM" not in os.environ:
        slurm.install(tmp_path / "bin")
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def run(mishap="", tasks=3, options=None):
        path = tmp_path / "out"
        arguments, work = (str(path), str(BLOCKS), mishap), Squares(path, BLOCKS)
        how = {"tasks": tasks, "launcher": request.param, "workers": 2, "options": options or {}}
        return launching.launch(work, ENTRY, arguments, **how).fresh

    run.engine = request.param
    return run


def signal_task(tmp_path, signum):
    """Send task 1 a signal, once it runs the block with a mishap."""

    def send():
        while not (tmp_path / ".out.tasks" / "deaths").exists():
            time.sleep(0.05)
        state = json.loads((tmp_path / ".out.tasks" / "state" / "task-1.json").read_text())
        os.kill(state["pid"], signum)

    threading.Thread(target=send).start()


def is_whole(tmp_path):
    return (tmp_path / "out").read_text().split() == [str(block**2) for block in range(BLOCKS)]


def test_tasks_are_run_and_joined_also_after_a_kill(launch, tmp_path):
    assert launch("once:4") and is_whole(tmp_path)
    assert (tmp_path / ".out.tasks" / "deaths").read_text() == "xx"  # it ran twice
    assert not launch()


def test_a_task_that_dies_three_times_is_given_up(launch, tmp_path):
    with pytest.raises(RunError, match="task 1 of 3 failed: it died 3 times") as error:
        launch("die:4")
    assert "task-1.log" in str(error.value) and "5 of 6 blocks are done" in str(error.value)
    assert (tmp_path / ".out.tasks" / "deaths").read_text() == "xxx"
    assert launch() and is_whole(tmp_path)


def test_ctrl_c_cancels_the_tasks(launch, tmp_path):
    def interrupt():
        while not (tmp_path / ".out.tasks" / "deaths").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    begun = time.monotonic()
    with pytest.raises(Stopped, match="the same command continues"):
        launch("wait:4")
    assert time.monotonic() - begun < 30  # the task sleeps for longer
    assert launch() and is_whole(tmp_path)


@pytest.mark.skipif("OFFMARL_REAL_SLURM" not in os.environ, reason="needs SLURM, which requeues")
def test_a_task_that_slurm_preempts_is_queued_again(launch, tmp_path):
    if launch.engine != "slurm":
        pytest.skip("a feature of SLURM")

    signal_task(tmp_path, signal.SIGUSR2)
    assert launch("wait:4") and is_whole(tmp_path)
    assert (tmp_path / ".out.tasks" / "deaths").read_text() == "xx"  # it ran twice


def test_a_task_that_slurm_ends_by_sigterm_leaves_no_result(launch, tmp_path):
    if launch.engine != "slurm":
        pytest.skip("a feature of SLURM")
    signal_task(tmp_path, signal.SIGTERM)
    assert launch("wait:4") and is_whole(tmp_path)  # SLURM did not requeue it: the launcher does
    assert (tmp_path / ".out.tasks" / "deaths").read_text() == "xx"  # it ran twice


def test_an_earlier_launch_that_slurm_still_runs_is_refused(launch, tmp_path, monkeypatch):
    if launch.engine != "slurm":
        pytest.skip("a feature of SLURM")
    submitted = tmp_path / ".out.tasks" / "slurm-jobs.txt"
    submitted.parent.mkdir()
    submitted.write_text("7_0\n7_1\n")
    with monkeypatch.context() as patch:
        patch.setattr("offmarl.launch.slurm._active", lambda jobs: jobs & {"7_1"})
        with pytest.raises(RunError, match="wait for job 7, or cancel it with `scancel 7`"):
            launch()
    assert launch() and is_whole(tmp_path)


def test_options_that_an_engine_does_not_have(launch):
    if launch.engine == "slurm":
        with pytest.raises(OptionError, match="submitit refuses it"):
            launch(options={"colour": "red"})
    else:
        with pytest.raises(OptionError, match=r"num_cpus=64: the cluster .* has 2"):
            launch(options={"num_cpus": 64})


# ---------------------------------------------------------------------------------- recordings


def kill_tasks(directory: Path, count: int, over: threading.Event) -> None:
    """Kill tasks that have begun, each process once."""
    killed: set[int] = set()
    while len(killed) < count and not over.is_set():
        time.sleep(0.2)
        for file in sorted((directory / "state").glob("task-*.json")):
            found = json.loads(file.read_text())
            if found["state"] == "running" and found["pid"] not in killed and len(killed) < count:
                killed.add(found["pid"])
                with suppress(ProcessLookupError):
                    os.kill(found["pid"], signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*fork")  # JAX warns; Ray starts other programs at once
@pytest.mark.parametrize(("tasks", "kills"), [(1, 0), (4, 0), (16, 0), (4, 2), (16, 2)])
@pytest.mark.parametrize("engine_name", ["local", "slurm", "ray"])
def test_the_digest_of_a_recording(engine_name, tasks, kills, tmp_path, monkeypatch):
    pytest.importorskip({"slurm": "submitit", "ray": "ray", "local": "offmarl"}[engine_name])
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(engine, "_LOST_SECONDS", 1.0)
    if engine_name == "slurm" and "OFFMARL_REAL_SLURM" not in os.environ:
        slurm.install(tmp_path / "bin")
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    command = ["--policy", "random", "--env", "probe/one-step", "--steps", "512"]
    command += ["--num-envs", "4", "--out", str(tmp_path)]
    arguments = ("record", "32", *command)
    work, over = work_of(arguments), threading.Event()
    assert work.num_blocks == 16
    killer = threading.Thread(target=kill_tasks, args=(work.directory, kills, over))
    killer.start()
    try:
        launching.launch(work, "offmarl.cli.tasks:work_of", arguments, tasks, engine_name, 2)
    finally:
        over.set()
        killer.join()
    found = vault.open_vault(work.path)
    assert (found.rows, found.num_steps) == (4, 512)
    assert found.digest() == DIGEST
