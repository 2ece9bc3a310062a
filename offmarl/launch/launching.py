"""Launch a work's tasks, show progress, and join the results."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from rich.console import Group, RenderableType
from rich.live import Live

from offmarl import tracking
from offmarl._imports import attribute, import_module
from offmarl._lock import hold_lock
from offmarl.config import PositiveInt, check_rules
from offmarl.errors import OptionError, RunError, Stopped
from offmarl.launch.task import Call, State, Status, read_status
from offmarl.launch.work import Work, join_work
from offmarl.terminal import one_line, table

LAUNCHERS: Mapping[str, str] = {
    "local": "offmarl.launch.local:LocalLauncher",
    "slurm": "offmarl.launch.slurm:SlurmLauncher",
    "ray": "offmarl.launch.ray:RayLauncher",
}

MOST_DEATHS = 3
"""A task that dies this often is given up."""
_POLL_SECONDS = 0.1
_SECONDS_BETWEEN_TABLES = 1.0
_SECONDS_BETWEEN_LINES = 10.0
_OVER = 1.25
"""A running task is expected to take at least this many times its age."""
_ROWS, _NAMED = 12, 4
"""Tasks that are shown in a terminal and in a line; the others are counted."""
_ORDER: tuple[State, ...] = ("failed", "crashed", "running", "stopped", "done", "waiting")
"""The order in which the table shows tasks."""


@runtime_checkable
class Job(Protocol):
    """A task that a launcher runs; a `concurrent.futures.Future` is one."""

    def done(self) -> bool:
        """Whether the process of the task has ended, or another task has its process."""
        ...

    def exception(self) -> BaseException | None:
        """Return how the task died, if it did not end by itself."""
        ...


@runtime_checkable
class Launcher(Protocol):
    """Runs tasks: each calls `offmarl.launch.task.run_task` in a process of its own.

    It is made from the work's directory and name, the number of tasks at the same time, None for as
    many as there is room for, and the options of ``--launcher-option``.
    """

    def __init__(
        self, directory: Path, name: str, workers: int | None, options: Mapping[str, Any]
    ) -> None: ...

    def submit(self, calls: Sequence[Call], /) -> Sequence[Job]:
        """Start tasks, or queue them."""
        ...

    def cancel(self) -> None:
        """Send SIGINT to the running tasks, which save what they have, and drop the others."""
        ...

    def close(self) -> None:
        """Release the launcher's resources."""
        ...


class Launched(NamedTuple):
    """Result of a launch."""

    fresh: bool
    """False if the result was complete before."""
    failed: Mapping[str, Path] = {}
    """The logs of blocks that failed, by their labels, of work that goes on without them."""


def launch(
    work: Work,
    entry: str,
    arguments: Sequence[str],
    tasks: int | None = None,
    launcher: str = "local",
    workers: int | None = None,
    options: Mapping[str, Any] = {},
    take_over: bool = True,
) -> Launched:
    """Run the blocks of a work that are missing in tasks, and join them.

    After a kill at any instant, the same call continues. A task begins when a block of it has all
    that it needs (`Work.needs`). ``launcher`` is a name of `LAUNCHERS`, or ``module:class``. In
    each task, ``entry``, ``module:function``, makes the work from the arguments. ``take_over`` goes
    on after a launch of another machine that has not ended by itself. `RunError` if another launch
    of the work is running, the path has other work's result, or tasks failed and the work does not
    go on without them; `Stopped` after a signal, once the tasks have stopped.
    """
    for option, count in (("--tasks", tasks), ("--jobs", workers)):
        check_rules(option, PositiveInt | None, count)
    if work.is_complete():
        return Launched(join_work(work))
    engine = _launcher(launcher)(work.directory, work.name, workers, options)
    with closing(engine), hold_lock(work.lock, work.path, take_over):
        if work.goes_on:  # its blocks may be others than those of the launch before
            work.forget()
        work.check()
        for note in work.notes(tasks or 1):
            tracking.notice(note)
        if work.is_complete():  # another launch has just ended
            return Launched(join_work(work))
        failed = _Launch(work, tasks, entry, tuple(arguments)).run(engine)
        if not failed:
            join_work(work)
        return Launched(True, failed)


def _launcher(name: str) -> type[Launcher]:
    """Return the class of a launcher, by its name or as MODULE:CLASS."""
    module, _, kind = LAUNCHERS.get(name, name).partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), kind)):
        raise OptionError(
            f"--launcher must be one of {', '.join(LAUNCHERS)}, or MODULE:CLASS: got {name!r}."
        )
    launcher: type[Launcher] = attribute(import_module(module), kind, f"--launcher {module}")
    return launcher


@dataclass(eq=False)
class Task:
    """A task of a launch."""

    call: Call
    name: str
    blocks: Sequence[int]
    """Its blocks that are missing."""
    job: Job | None = None
    """None while it waits for other blocks, and once it has ended."""
    deaths: int = 0
    reason: str = ""
    """Why it was given up, if it was."""
    result: str = ""
    """Description of its result, if the work has one."""
    end: float = 0.0
    """When it was done, in seconds since 1970."""
    status: Status = Status()  # noqa: RUF009 - a named tuple cannot be changed

    def read_status(self) -> None:
        """Read the state that the task has written, unless that was the last one."""
        if self.status.state not in ("done", "failed"):
            self.status = read_status(self.call)
        if self.reason:
            self.status = self.status._replace(state="failed")


class _Launch:
    """One launch of the tasks that are missing."""

    def __init__(self, work: Work, tasks: int | None, entry: str, arguments: tuple[str, ...]):
        self._work, of = work, work.tasks(tasks)
        blocks: dict[int, list[int]] = {}
        for block in work.missing():
            blocks.setdefault(block % of, []).append(block)
        paths = str(work.directory), str(Path.cwd())
        self._tasks = [
            Task(
                Call(entry, arguments, number, of, *paths),
                work.label(number) if work.goes_on else f"task {number} of {of}",
                blocks[number],
            )
            for number in sorted(blocks)
        ]
        self._waiting = [*self._tasks]

    @property
    def _running(self) -> dict[Task, Job]:
        return {task: task.job for task in self._tasks if task.job is not None}

    def run(self, launcher: Launcher) -> dict[str, Path]:
        """Run the tasks; return the logs of failed blocks by their labels."""
        for task in self._tasks:
            task.call.status.unlink(missing_ok=True)
        cancelled = False
        with ExitStack() as stack:
            stopped = stack.enter_context(catch_signals())
            show = stack.enter_context(task_table(self._work.name, self._tasks))
            while self._waiting or self._running:
                if stopped() and not cancelled:  # not in the handler, which may interrupt `submit`
                    launcher.cancel()
                    self._waiting, cancelled = [], True
                self._submit(launcher)
                time.sleep(_POLL_SECONDS)
                for task, job in self._running.items():
                    if job.done():
                        task.job = None
                        if not cancelled:
                            self._end(task, job.exception())
                show(not (self._waiting or self._running))
                states = (read_status(task.call).state for task in self._running)
                if cancelled and "running" not in states:
                    break
        if cancelled:
            raise Stopped(
                f"stopped with {self._done()} done: the same command continues.", stopped()
            )
        return self._failures()

    def _submit(self, launcher: Launcher) -> None:
        """Start the tasks that are ready; drop all if no running task makes what they need."""
        ready = [task for task in self._waiting if any(map(self._work.is_ready, task.blocks))]
        if ready:
            jobs = launcher.submit([task.call for task in ready])
            for task, job in zip(ready, jobs, strict=True):
                task.job = job
                self._waiting.remove(task)
        elif not self._running:
            self._waiting.clear()

    def _end(self, task: Task, died: BaseException | None) -> None:
        """Record how a task ended; one that died or was stopped is queued again."""
        status = read_status(task.call)
        state = "died" if died is not None else status.state
        if state == "done":
            task.result, task.end = self._work.result(task.call.number), time.time()
            if task.result and not tracking.console().is_terminal:  # a terminal has a table
                took = timedelta(seconds=round(task.end - status.since))
                tracking.notice(f"{task.name}: {task.result} after {took}")
            return
        if state == "failed" or (state == "crashed" and self._work.goes_on):
            self._give_up(task, status.error)
        elif state == "stopped":  # by a signal from elsewhere
            self._again(task, "was stopped")
        else:
            how = status.error or "it ended early"
            if died is not None:
                how = (str(died).strip().splitlines() or [type(died).__name__])[-1]
            task.deaths += 1
            if task.deaths == MOST_DEATHS:
                self._give_up(task, f"it died {MOST_DEATHS} times, at last: {how}")
            else:
                self._again(task, f"died ({how})")

    def _again(self, task: Task, why: str) -> None:
        tracking.notice(f"{task.name} {why} and is started again: {task.call.log}")
        task.call.status.unlink(missing_ok=True)
        self._waiting.append(task)

    def _give_up(self, task: Task, reason: str) -> None:
        task.reason = reason
        first, *_ = reason.splitlines() or [""]
        tracking.notice(f"{task.name} failed: {first} See {task.call.log}")

    def _done(self) -> str:
        count = self._work.num_blocks
        return f"{count - len(self._work.missing())} of {count} blocks"

    def _failures(self) -> dict[str, Path]:
        """Return the logs of failed blocks; `RunError` if the work does not go on without them."""
        failed = [task for task in self._tasks if task.reason]
        if not failed:
            return {}
        if self._work.goes_on:
            return {
                task.name: task.call.log
                for task in failed
                if not self._work.is_done(task.call.number)
            }
        first, *others = failed
        more = f" So did {len(others)} more." if others else ""
        raise RunError(
            f"{first.name} failed: {first.reason} Its log is {first.call.log}.{more} "
            f"{self._done()} are done and kept: the same command runs what is missing."
        )


@contextmanager
def task_table(name: str, tasks: Sequence[Task]) -> Iterator[Callable[[bool], None]]:
    """Yield a function that shows the tasks; its argument tells whether all have ended.

    A terminal gets a table; other outputs get a line every few seconds.
    """
    live = Live(console=tracking.console(), auto_refresh=False)
    in_terminal = tracking.console().is_terminal and not tracking.is_quiet()
    interval = _SECONDS_BETWEEN_TABLES if in_terminal else _SECONDS_BETWEEN_LINES
    shown_at = time.monotonic()

    def show(over: bool) -> None:
        nonlocal shown_at
        if not over and time.monotonic() - shown_at < interval:
            return
        shown_at = time.monotonic()
        for task in tasks:
            task.read_status()
        if in_terminal:
            live.update(Group(rows_of(tasks), _summary(tasks)), refresh=True)
        else:
            running = [task.name for task in tasks if task.status.state == "running"]
            now_running = f"; now {', '.join(running[:_NAMED])}" if running else ""
            tracking.notice(f"{name}: {_summary(tasks)}{now_running}")

    with live if in_terminal else nullcontext():
        yield show


def _summary(tasks: Sequence[Task]) -> str:
    states = Counter(task.status.state for task in tasks)
    counts = ", ".join(f"{states[state]} {state}" for state in reversed(_ORDER) if states[state])
    done = sum(task.status.done for task in tasks)
    unit = "task" if len(tasks) == 1 else "tasks"
    blocks = "block" if done == 1 else "blocks"
    return f"{len(tasks)} {unit}: {counts}; {done} {blocks} done{_time_left(tasks)}"


def _time_left(tasks: Sequence[Task]) -> str:
    """Estimate the time left: a running task takes the mean of those with results, or longer.

    Waiting ones take the mean of these. As many tasks run side by side as now.
    """
    took = [max(task.end - task.status.since, 0) for task in tasks if task.result]  # by two clocks
    ages = [time.time() - task.status.since for task in tasks if task.status.state == "running"]
    if not took or not ages:
        return ""
    usual = fmean(took)
    expected = [max(usual, _OVER * age) for age in ages]
    left = [seconds - age for seconds, age in zip(expected, ages, strict=True)]
    later = fmean([*took, *expected]) * sum(task.status.state == "waiting" for task in tasks)
    seconds = max(*left, (sum(left) + later) / len(ages))
    return f"; about {timedelta(seconds=round(seconds))} left"


def rows_of(tasks: Sequence[Task]) -> RenderableType:
    """Return a table of the tasks that matter most now."""
    order = sorted(tasks, key=lambda task: (_ORDER.index(task.status.state), -task.end))
    columns = "task", "state", "blocks", "time", "host", "result, or last line of the log"
    return table(columns, map(_row, order[:_ROWS]))


def _row(task: Task) -> list[str]:
    status, running = task.status, task.status.state == "running"
    return [
        task.name,
        status.state,
        f"{status.done}/{status.total}" if status.total else "",
        f"{max((task.end or time.time()) - status.since, 0):,.0f} s" if running or task.end else "",
        status.host,
        task.result or (_last_line(task.call.log) if status.state != "waiting" else ""),
    ]


def _last_line(log: Path) -> str:
    """Return the last line of a log, without its comments."""
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - 2_000, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    entries = [line for line in lines if line.strip() and not line.startswith("#")]
    return one_line(entries[-1])[:80] if entries else ""


@contextmanager
def catch_signals() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the SIGINT or SIGTERM received, or 0; a second one raises."""
    received = [0]

    def handle(signum: int, _frame: FrameType | None) -> None:
        if received[0]:
            raise Stopped("stopped: the same command continues.", signum)
        received[0] = signum
        if not tracking.is_quiet():  # unbuffered: the program may hold the buffer's lock
            os.write(2, b"\nstopping: tasks save what they have. Again stops at once.\n")

    before = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0]
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
