"""Tasks in processes, which are killed, fail and are interrupted, by all launchers."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from offmarl import launch as launching
from offmarl.errors import MissingExtraError, OptionError, RunError, Stopped
from offmarl.launch import local
from offmarl.launch.launching import MOST_DEATHS
from offmarl.launch.local import LocalLauncher, core_groups, environment, own_cores, threads
from tests.launch.toy import BLOCKS, ENTRY, Squares, Tolerant, is_whole, signal_task

each_engine = pytest.mark.parametrize(
    "engine",
    ["local", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("slurm", "ray"))],
    indirect=True,
)


@each_engine
def test_tasks_are_run_and_joined(launch, tmp_path, directory):
    assert launch() and is_whole(tmp_path)
    logs = sorted((directory / "logs").iterdir())
    assert [log.name for log in logs] == [f"task-{index}.log" for index in range(4)]
    assert "# done" in logs[0].read_text()
    assert not launch()  # complete


def test_a_task_that_cannot_write_says_why(launch, directory):
    directory.mkdir()
    (directory / "logs").touch()  # where its directory of logs would be
    with pytest.raises(RunError, match=r"it died 3 times, at last: .*File exists"):
        launch()


@each_engine
def test_workers_import_nothing_from_the_current_directory(launch, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    (here / "queue.py").write_text("raise SystemExit")
    monkeypatch.chdir(here)
    assert launch() and is_whole(tmp_path)


@each_engine
def test_a_task_that_was_killed_is_run_again(launch, tmp_path, directory):
    assert launch("once:5") and is_whole(tmp_path)
    assert (directory / "deaths").read_text() == "xx"  # it ran twice


def test_a_task_that_was_stopped_from_elsewhere_is_run_again(launch, tmp_path, directory, notices):
    signal_task(directory, signal.SIGINT)
    assert launch("wait:5") and is_whole(tmp_path)
    assert (directory / "deaths").read_text() == "xx"
    assert "task 1 of 4 was stopped and is started again" in "".join(notices)


@pytest.mark.parametrize(
    ("engine", "mishap", "deaths", "message"),
    [
        ("local", "die:5", MOST_DEATHS, "died 3 times, at last: killed by signal 9"),
        ("local", "crash:5", MOST_DEATHS, "died 3 times, at last: RuntimeError: a bug"),
        ("local", "fail:5", 1, "failed: the block cannot be run."),
        ("local", "exit:5", 1, "failed: exit code 3"),
        *(
            pytest.param(name, "die:5", MOST_DEATHS, "died 3 times", marks=pytest.mark.nightly)
            for name in ("slurm", "ray")
        ),
    ],
    indirect=["engine"],
)
def test_a_task_that_fails_is_named_and_the_rest_is_kept(
    mishap, deaths, message, launch, tmp_path, directory
):
    with pytest.raises(RunError, match=message) as error:
        launch(mishap)
    assert "task 1 of 4" in str(error.value) and "task-1.log" in str(error.value)
    assert "7 of 8 blocks are done" in str(error.value)
    assert (directory / "deaths").read_text() == "x" * deaths
    assert launch() and is_whole(tmp_path)  # the same command, without the bug


@pytest.mark.parametrize(("mishap", "deaths"), [("die:2", MOST_DEATHS), ("crash:2", 1)])
def test_work_that_goes_on_leaves_out_only_the_block_in_which_it_dies(
    mishap, deaths, launch, tmp_path, directory
):
    """A bug is not repeated: its other blocks were run."""
    arguments = (str(tmp_path / "out"), str(BLOCKS), mishap)
    entry = ENTRY.replace("make", "make_tolerant")
    work = Tolerant(tmp_path / "out", BLOCKS)
    result = launching.launch(work, entry, arguments)
    assert result.failed == {"block 2": directory / "logs" / "task-2.log"}
    assert work.missing() == [2]
    assert (directory / "deaths").read_text() == "x" * deaths


def test_two_launches_at_once_are_refused_and_each_closes_its_launcher(
    launch, directory, monkeypatch
):
    calls = []
    begin, close = LocalLauncher.__init__, LocalLauncher.close
    monkeypatch.setattr(LocalLauncher, "__init__", lambda *x: calls.append("open") or begin(*x))
    monkeypatch.setattr(LocalLauncher, "close", lambda self: calls.append("close") or close(self))
    directory.mkdir()
    with (
        FileLock(directory / "launch.lock", is_singleton=False),
        pytest.raises(RunError, match="is being written by another process"),
    ):
        launch()
    assert launch()
    assert calls == 2 * ["open", "close"]


def test_a_launch_that_gets_the_lock_as_another_ends_runs_nothing(launch, tmp_path, monkeypatch):
    before = Squares.check

    def end_meanwhile(work):
        before(work)
        work.path.write_text("the result of another launch")

    monkeypatch.setattr(Squares, "check", end_meanwhile)
    assert not launch()
    assert (tmp_path / "out").read_text() == "the result of another launch"


def interrupt_tasks(directory, times):
    """Send this process so many interrupts, 0.5 s apart, once a task waits."""

    def interrupt():
        while not (directory / "deaths").exists():
            time.sleep(0.02)
        for number in range(times):
            time.sleep(0.5 * (number > 0))
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()


@pytest.mark.parametrize(
    ("engine", "mishap", "times"),
    [
        *(("local", "wait:6", 1), ("local", "deaf:6", 2)),
        pytest.param("local", "save:6", 1, marks=pytest.mark.slow),
        *(pytest.param(x, "wait:6", 1, marks=pytest.mark.nightly) for x in ("slurm", "ray")),
    ],
    indirect=["engine"],
)
def test_ctrl_c_stops_the_tasks_and_the_same_command_continues(
    mishap, times, launch, tmp_path, directory
):
    """A second one stops a task that serves no signals; one that can saves what it has."""
    interrupt_tasks(directory, times)
    start = time.monotonic()
    with pytest.raises(Stopped, match="the same command continues"):
        launch(mishap)
    assert time.monotonic() - start < 30  # the task sleeps for longer
    assert (directory / "saved").exists() == mishap.startswith("save")
    assert launch(mishap) and is_whole(tmp_path)


def test_ctrl_c_while_a_worker_starts(launch, tmp_path, monkeypatch, capfd):
    start = LocalLauncher._new_worker

    def interrupted(self):
        worker = start(self)
        os.kill(os.getpid(), signal.SIGINT)
        return worker

    with monkeypatch.context() as patch, pytest.raises(Stopped, match=r"with \d of 8 blocks"):
        patch.setattr(LocalLauncher, "_new_worker", interrupted)
        launch(workers=1)
    assert "Traceback" not in capfd.readouterr().err
    assert launch() and is_whole(tmp_path)


def test_a_launcher_of_ones_own(launch, tmp_path):
    assert launch(launcher="tests.launch.toy:PoolLauncher") and is_whole(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pbs", "--launcher must be one of local, slurm, ray, or MODULE:CLASS"),
        (":X", "--launcher must be one of"),
        (".a:B", "--launcher must be one of"),
        ("nothere:X", "module nothere cannot be imported"),
        ("os.path:pbs", "--launcher os.path has no pbs"),
    ],
)
def test_launchers_that_do_not_exist(name, message, launch):
    with pytest.raises(OptionError, match=message):
        launch(launcher=name)


def test_engines_that_are_not_there(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="sbatch is not on the PATH"):
        launch(launcher="slurm")
    for module, extra in (("submitit", "slurm"), ("ray", "ray")):
        monkeypatch.setitem(__import__("sys").modules, module, None)
        with pytest.raises(MissingExtraError, match=rf"pip install 'offmarl\[{extra}\]'"):
            launch(launcher=extra)
    with pytest.raises(OptionError, match="local has no --launcher-option"):
        launch(options={"partition": "gpu"})
    with pytest.raises(OptionError, match="at least 1"):
        launch(tasks=0)


@pytest.mark.skipif(len(own_cores()) < 2, reason="needs two cores")
def test_workers_run_on_cores_of_their_own():
    launcher = LocalLauncher(Path(), "squares", 2, {})
    try:
        workers = [launcher._new_worker() for _ in range(2)]
        cores = [os.sched_getaffinity(worker.process.pid) for worker in workers]
    finally:
        launcher.close()
    assert cores == [set(group) for group in core_groups(2)]
    assert cores[0] and cores[1] and not cores[0] & cores[1]


@pytest.fixture
def four_cores(monkeypatch):
    """A system of four cores without affinity."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("count", "groups"),
    [
        (None, [(0,), (1,), (2,), (3,)]),
        (2, [(0, 2), (1, 3)]),
        (4, [(0,), (1,), (2,), (3,)]),
        (5, [(-1 - i,) for i in range(5)]),
    ],
)
def test_cores_of_each_process(count, groups, monkeypatch):
    assert core_groups(count) == groups
    monkeypatch.setattr(local, "_has_accelerator", lambda: True)
    assert core_groups(count) == ([(0, 1, 2, 3)] if count is None else groups)


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 4),
        ({"NPROC": "3"}, 3),
        ({"NPROC": "3", "PJRT_NPROC": "2"}, 2),
        ({"NPROC": "0"}, 4),
        ({"PJRT_NPROC": "many"}, 4),
    ],
)
def test_threads_are_those_that_the_user_chose_or_as_many_as_cores(settings, count, monkeypatch):
    for name in ("NPROC", "PJRT_NPROC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert threads() == count


def test_a_process_of_one_core_starts_no_threads_and_tasks_are_not_quiet(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=b")
    monkeypatch.setenv("OFFMARL_QUIET", "1")
    flags = [environment(cores)["XLA_FLAGS"] for cores in ((3,), (0, 1))]
    assert flags == ["--xla_a=b --xla_cpu_multi_thread_eigen=false", "--xla_a=b"]
    assert "OFFMARL_QUIET" not in environment((3,))
