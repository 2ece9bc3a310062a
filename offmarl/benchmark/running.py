"""Runs the recordings and cells of a plan, each in a process of its own, several side by side.

Every process runs a command that resumes: ``offmarl record``, ``pull`` or ``train``. So a stopped
benchmark continues where it stopped, and a cell that failed is tried again by the same command.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import tomli_w

from offmarl import tracking
from offmarl.benchmark.cells import checksum, is_current, pack
from offmarl.benchmark.plan import Cell, Data, Plan, slug
from offmarl.errors import RunError, Stopped
from offmarl.launch import cores
from offmarl.paths import local
from offmarl.programs.registry import load

_POLL = 0.1

OFFMARL = (sys.executable, "-m", "offmarl")
"""The command line."""


class Outcome(NamedTuple):
    """What became of the cells."""

    finished: int
    """Cells that this call finished."""
    failed: dict[str, Path]
    """The log of each cell or dataset that failed, by name."""


class Job(NamedTuple):
    """A process."""

    name: str
    command: Sequence[str]
    """Arguments of ``offmarl``."""
    log: Path
    answer: Path | None = None
    """File for its standard output; None for the log."""
    cell: Cell | None = None


class _Running(NamedTuple):
    job: Job
    process: subprocess.Popen[bytes]
    cores: tuple[int, ...]
    begun: float


def cell_file(plan: Plan, cell: Cell) -> Path:
    """Return the file of a cell's result."""
    return plan.out / "cells" / f"{cell.slug}.json"


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
                        self._start(self._training(cell))
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
            if data.vault is not None and _exists(data.vault):
                self._vaults[data.label] = data.vault
            elif data.vault is not None:
                place = self._plan.out / "datasets" / slug(data.label)
                command = ["pull", data.vault, "--json"]
                jobs[data.label] = Job(data.label, command, _log(place), _answer(place))
            else:
                jobs[f"record {data.recipe}"] = self._recording(data)
        return [*jobs.values()]

    def _recording(self, data: Data) -> Job:
        recipe = self._plan.recipes[data.recipe]
        place = self._plan.out / "datasets" / slug(recipe.name)
        tiers = [one.tier for one in self._plan.datasets.values() if one.recipe == recipe.name]
        options = dict(recipe.options)
        if any(field.name == "tiers" for field in fields(load("recorder", recipe.program).Args)):
            options.setdefault("tiers", ",".join(dict.fromkeys(tiers)))
        config = _write_config(place, recipe.program, options)
        command = ["record", recipe.program, "--config", str(config)]
        command += ["--out", str(self._plan.out / "vaults"), "--json"]
        return Job(f"record {recipe.name}", command, _log(place), _answer(place))

    def _place(self, cell: Cell) -> Path:
        """Return the directory of a cell; with other options, it has another one."""
        return self._plan.out / "runs" / f"{cell.slug}-{checksum(cell)}"

    def _training(self, cell: Cell) -> Job:
        place = self._place(cell)
        options = {**cell.options, "vault": self._vaults[cell.data.label]}
        config = _write_config(place, cell.baseline.program, options)
        command = ["train", cell.baseline.program, "--config", str(config)]
        return Job(cell.label, [*command, "--out", str(place / "run")], _log(place), None, cell)

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
            pack(job.cell, self._place(job.cell) / "run", cell_file(self._plan, job.cell), seconds)
            self._finished += 1
            return True
        assert job.answer is not None
        answer = json.loads(job.answer.read_text())
        for data in self._plan.datasets.values():
            if data.vault is None and job.name == f"record {data.recipe}":
                paths = [row["path"] for row in answer["vaults"] if row["tier"] == data.tier]
            elif data.label == job.name:
                paths = list(answer["paths"].values())
            else:
                continue
            if len(paths) != 1:
                with job.log.open("a") as log:
                    log.write(f"{data.label} is {len(paths)} vaults, and must be one: {paths}\n")
                return False
            self._vaults[data.label] = paths[0]
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


def _exists(vault: str) -> bool:
    """Whether a dataset is a path here, and not the name of one to pull."""
    place = local(vault)
    return (
        place.exists() or "://" in vault or place.suffix == ".vlt" or vault.startswith((".", "/"))
    )


def _write_config(place: Path, program: str, options: dict[str, Any]) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    path = place / "config.toml"
    named = {} if "/" in program or program.endswith(".py") else {"program": program}
    tracking.replace_file(path, tomli_w.dumps({**named, **options}))
    return path


def _log(place: Path) -> Path:
    return place / "log.txt"


def _answer(place: Path) -> Path:
    return place / "answer.json"
