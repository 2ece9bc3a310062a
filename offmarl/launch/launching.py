"""Launch a work's tasks, show progress, and join the results."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

from offmarl import tracking
from offmarl._imports import attribute, import_module
from offmarl._lock import writing
from offmarl.errors import OptionError, RunError, Stopped
from offmarl.launch.table import TaskTable
from offmarl.launch.task import Call, read_status
from offmarl.launch.work import Work, join_work

LAUNCHERS: Mapping[str, str] = {
    "local": "offmarl.launch.local:LocalLauncher",
    "slurm": "offmarl.launch.slurm:SlurmLauncher",
    "ray": "offmarl.launch.ray:RayLauncher",
}

MOST_DEATHS = 3
"""A task that dies this often is given up."""
_POLL_SECONDS = 0.1


class Job(Protocol):
    """A task that a launcher runs; a `concurrent.futures.Future` is one."""

    def done(self) -> bool:
        """Whether the process of the task has ended, or another task has its process."""
        ...

    def exception(self) -> BaseException | None:
        """Return how the task died, if it did not end by itself."""
        ...


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
        """Release what the launcher holds."""
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
    if any(one is not None and one < 1 for one in (tasks, workers)):
        raise OptionError("--tasks and --jobs must be at least 1.")
    if work.is_complete():
        work.clean()
        return Launched(fresh=False)
    engine = _launcher(launcher)(work.directory, work.name, workers, options)
    work.check()
    for note in work.notes(tasks or 1):
        tracking.notice(note)
    with writing(work.directory / "launch.lock", work.path, take_over):
        if work.is_complete():  # another launch has just ended
            work.clean()
            return Launched(fresh=False)
        failed = _Launch(work, tasks, entry, tuple(arguments)).run(engine)
        if not failed:
            join_work(work)
        return Launched(True, failed)


def _launcher(name: str) -> type[Launcher]:
    """Return a launcher by its name, or of another module."""
    module, _, kind = LAUNCHERS.get(name, name).partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), kind)):
        raise OptionError(
            f"--launcher must be one of {', '.join(LAUNCHERS)}, or MODULE:CLASS: got {name!r}."
        )
    found: type[Launcher] = attribute(import_module(module), kind, f"--launcher {module}")
    return found


class _Launch:
    """One launch of the tasks that are missing."""

    def __init__(self, work: Work, tasks: int | None, entry: str, arguments: tuple[str, ...]):
        self._work, of = work, work.tasks(tasks)
        self._blocks: dict[int, list[int]] = {}
        """The missing blocks of each task."""
        for block in work.missing():
            self._blocks.setdefault(block % of, []).append(block)
        self._calls = {
            number: Call(entry, arguments, number, of, str(work.directory), str(Path.cwd()))
            for number in sorted(self._blocks)
        }
        self._names = {
            number: work.label(number) if work.goes_on else f"task {number} of {of}"
            for number in self._calls
        }
        self._held = {*self._calls}
        """The tasks that have not begun, because of what their blocks need."""
        self._jobs: dict[int, Job] = {}
        self._deaths = dict.fromkeys(self._calls, 0)
        self._failed: dict[int, str] = {}

    def run(self, launcher: Launcher) -> dict[str, Path]:
        """Run the tasks; return what failed, as `Launched` has it."""
        for call in self._calls.values():
            call.status.unlink(missing_ok=True)
        cancelled = False
        with ExitStack() as stack:
            stack.callback(launcher.close)
            stopped = stack.enter_context(stopping())
            table = TaskTable(self._work.name, self._calls, self._names)
            stack.enter_context(table.shown())
            while self._held or self._jobs:
                if stopped() and not cancelled:  # not in the handler, which may interrupt `submit`
                    launcher.cancel()
                    self._held, cancelled = set(), True
                self._submit(launcher, self._released())
                time.sleep(_POLL_SECONDS)
                for number in [one for one, job in self._jobs.items() if job.done()]:
                    self._take(number, launcher, cancelled)
                table.show(self._failed, over=not (self._held or self._jobs))
                if cancelled and self._is_quiet():
                    break
        if cancelled:
            raise Stopped(
                f"stopped with {self._done()} done: the same command continues.", stopped()
            )
        return self._failures()

    def _submit(self, launcher: Launcher, numbers: Sequence[int]) -> None:
        if numbers:
            jobs = launcher.submit([self._calls[number] for number in numbers])
            self._jobs |= zip(numbers, jobs, strict=True)

    def _released(self) -> list[int]:
        """Return held tasks that can begin now; drop them if nothing makes what they need."""
        ready = [
            number
            for number in sorted(self._held)
            if any(map(self._work.is_ready, self._blocks[number]))
        ]
        self._held -= {*ready}
        if not ready and not self._jobs:
            self._held.clear()
        return ready

    def _is_quiet(self) -> bool:
        """Whether no task runs any more, after the launcher has been told to cancel them."""
        return all(read_status(self._calls[one]).state != "running" for one in self._jobs)

    def _take(self, number: int, launcher: Launcher, cancelled: bool) -> None:
        """Take a task that has ended; start it again if it died."""
        job, call = self._jobs.pop(number), self._calls[number]
        if cancelled:
            return
        status, died = read_status(call), job.exception()
        how = status.error or "it ended early"
        if died is not None:
            how = (str(died).strip().splitlines() or [type(died).__name__])[-1]
        elif status.state == "done":
            return
        elif status.state == "failed" or (status.state == "crashed" and self._work.goes_on):
            self._give_up(number, status.error)
            return
        elif status.state == "stopped":  # by a signal from elsewhere
            self._again(number, launcher, "was stopped")
            return
        self._deaths[number] += 1
        if self._deaths[number] == MOST_DEATHS:
            self._give_up(number, f"it died {MOST_DEATHS} times, at last: {how}")
        else:
            self._again(number, launcher, f"died ({how})")

    def _again(self, number: int, launcher: Launcher, why: str) -> None:
        """Start a task again."""
        call = self._calls[number]
        tracking.notice(f"{self._names[number]} {why} and is started again: {call.log}")
        call.status.unlink(missing_ok=True)
        self._submit(launcher, [number])

    def _give_up(self, number: int, reason: str) -> None:
        self._failed[number] = reason
        first, *_ = reason.splitlines() or [""]
        tracking.notice(f"{self._names[number]} failed: {first} See {self._calls[number].log}")

    def _done(self) -> str:
        count = self._work.num_blocks
        return f"{count - len(self._work.missing())} of {count} blocks"

    def _failures(self) -> dict[str, Path]:
        if not self._failed:
            return {}
        if self._work.goes_on:
            return {
                self._names[number]: self._calls[number].log
                for number in sorted(self._failed)
                if not self._work.is_done(number)
            }
        number, others = min(self._failed), len(self._failed) - 1
        more = f" So did {others} more." if others else ""
        raise RunError(
            f"{self._names[number]} failed: {self._failed[number]} Its log is "
            f"{self._calls[number].log}.{more} {self._done()} are done and kept: the same command "
            "runs what is missing."
        )


@contextmanager
def stopping() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the SIGINT or SIGTERM that came, or 0; a second one raises."""
    received = [0]

    def handle(signum: int, _frame: FrameType | None) -> None:
        if received[0]:
            raise Stopped("stopped: the same command continues.", signum)
        received[0] = signum
        if not tracking.is_quiet():  # unbuffered: the program may hold the buffer's lock
            os.write(2, b"\nstopping: tasks save what they have. Again stops at once.\n")

    before = {one: signal.signal(one, handle) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0]
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
