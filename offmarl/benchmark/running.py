"""Runs the recordings and cells of a plan, each in a process of its own, several side by side."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from offmarl import tracking
from offmarl.benchmark.cells import is_current, pack
from offmarl.benchmark.jobs import Job, cell_file, preparation, run_of, training, vaults_of
from offmarl.benchmark.plan import Plan
from offmarl.errors import RunError, Stopped
from offmarl.launch import cores

_POLL = 0.1

OFFMARL = (sys.executable, "-m", "offmarl")
"""The command line."""


class Outcome(NamedTuple):
    """What became of the cells."""

    finished: int
    """Cells that this call finished."""
    failed: dict[str, Path]
    """The log of each cell or dataset that failed, by name."""


class _Running(NamedTuple):
    job: Job
    process: subprocess.Popen[bytes]
    cores: tuple[int, ...]
    begun: float


def run_plan(plan: Plan, jobs: int | None = None) -> Outcome:
    """Run what is missing of a plan.

    Parameters
    ----------
    plan
        The plan.
    jobs
        Number of processes side by side; by default one for each core, or 1 on an accelerator.
        They share out the cores.

    Raises
    ------
    Stopped
        A signal stopped the benchmark, after its processes had saved checkpoints.
    RunError
        Another process runs the same benchmark.
    """
    from filelock import FileLock, Timeout

    plan.out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(plan.out / ".lock", timeout=0):
            return _Pool(plan, jobs).run()
    except Timeout:
        raise RunError(f"another process runs the benchmark in {plan.out}: wait for it.") from None


class _Pool:
    """The processes of a benchmark."""

    def __init__(self, plan: Plan, jobs: int | None):
        self._plan, self._groups = plan, cores.core_groups(jobs)
        self._vaults: dict[str, str] = {}
        """The paths of datasets that are ready, by label."""
        self._running: list[_Running] = []
        self._failed: dict[str, Path] = {}
        self._finished = 0

    def run(self) -> Outcome:
        """Run all jobs that are missing."""
        missing = [
            cell for cell in self._plan.cells if not is_current(cell, cell_file(self._plan, cell))
        ]
        needed = {cell.data.label: cell.data for cell in missing}
        waiting = self._preparations(needed.values())
        total = len(waiting) + len(missing)
        with (
            tracking.progress(f"benchmark {self._plan.name}", total) as advance,
            _stopping(self._interrupt) as stopped,
        ):
            while (waiting or missing or self._running) and not stopped():
                self._collect(advance)
                ready = [cell for cell in missing if cell.data.label in self._vaults]
                while len(self._running) < len(self._groups) and (waiting or ready):
                    if waiting:
                        self._start(waiting.pop(0))
                    else:
                        missing.remove(cell := ready.pop(0))
                        self._start(training(self._plan, cell, self._vaults[cell.data.label]))
                if not waiting and not self._running:
                    break  # the datasets of the other cells have failed
                time.sleep(_POLL)
            while self._running:
                self._collect(advance)
                time.sleep(_POLL)
            if stopped():
                raise Stopped(
                    f"stopped after {self._finished} cells: the same command continues.",
                    stopped(),
                )
        return Outcome(self._finished, self._failed)

    # ------------------------------------------------------------------------ jobs

    def _preparations(self, datasets: Any) -> list[Job]:
        """Return the recordings and downloads that are needed; vaults that exist are ready."""
        jobs: dict[str, Job] = {}
        for data in datasets:
            if (job := preparation(self._plan, data)) is not None:
                jobs[job.name] = job
            else:
                self._vaults[data.label] = data.vault
        return [*jobs.values()]

    # ------------------------------------------------------------------------ processes

    def _start(self, job: Job) -> None:
        taken = {one.cores for one in self._running}
        mine = next(group for group in self._groups if group not in taken)
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as log:
            log.write(f"$ offmarl {' '.join(job.command)}\n".encode())
            log.flush()
            out = log if job.answer is None else job.answer.open("wb")
            process = subprocess.Popen(
                [*OFFMARL, *job.command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env=cores.environment(mine),
                start_new_session=True,  # signals of the terminal come through this process
            )
            if out is not log:
                out.close()
        cores.bind(process.pid, mine)
        self._running.append(_Running(job, process, mine, time.monotonic()))

    def _collect(self, advance: tracking.Advance) -> None:
        """Take the results of processes that have ended."""
        for one in [one for one in self._running if one.process.poll() is not None]:
            self._running.remove(one)
            failed = one.process.returncode != 0 or not self._take(one)
            if failed:
                self._failed[one.job.name] = one.job.log
            if failed and one.process.returncode != -signal.SIGINT:
                tracking.notice(f"{one.job.name} failed: see {one.job.log}")
            advance(1, one.job.name)

    def _take(self, one: _Running) -> bool:
        """Take the result of a process that has succeeded; False if it left none."""
        job, seconds = one.job, time.monotonic() - one.begun
        if job.cell is not None:
            pack(job.cell, run_of(self._plan, job.cell), cell_file(self._plan, job.cell), seconds)
            self._finished += 1
            return True
        assert job.answer is not None
        try:
            self._vaults |= vaults_of(self._plan, job, json.loads(job.answer.read_text()))
        except RunError as error:
            with job.log.open("a") as log:
                log.write(f"{error}\n")
            return False
        return True

    def _interrupt(self, signum: int) -> None:
        """Pass a signal on: the processes save checkpoints and stop."""
        for one in self._running:
            if one.process.poll() is None:
                one.process.send_signal(signum)


@contextmanager
def _stopping(interrupt: Any) -> Iterator[Any]:
    """Handle SIGINT and SIGTERM by a function; yields one that returns the signal, or 0."""
    received = [0]

    def handle(signum: int, _frame: FrameType | None) -> None:
        received[0] = signum
        tracking.notice("stopping: the running cells save checkpoints first.")
        interrupt(signal.SIGINT)

    before = {one: signal.signal(one, handle) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0]
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
