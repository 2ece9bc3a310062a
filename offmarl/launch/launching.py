"""Starts the tasks of a work, shows how they get on, and joins what they made."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

from offmarl import tracking
from offmarl._lock import writing
from offmarl.errors import OptionError, RunError, Stopped
from offmarl.launch.local import Ended, LocalLauncher
from offmarl.launch.ray import RayLauncher
from offmarl.launch.slurm import SlurmLauncher
from offmarl.launch.table import TaskTable
from offmarl.launch.task import Call, read_status
from offmarl.launch.work import Work, is_ready, join_work

LauncherName = Literal["local", "slurm", "ray"]
LAUNCHERS: tuple[LauncherName, ...] = get_args(LauncherName)

MOST_DEATHS = 3
"""A task that dies this often is given up."""
_POLL_SECONDS = 0.2


class Options(NamedTuple):
    """How tasks are launched."""

    tasks: int
    launcher: LauncherName = "local"
    workers: int | None = None
    """Number of tasks at the same time; by default one for each core, or as the cluster allows."""
    options: Mapping[str, Any] = {}
    """Options of the engine, such as SLURM's partition."""
    take_over: bool = True
    """Whether to go on after a launch of another machine that has not ended by itself."""


@runtime_checkable
class Launcher(Protocol):
    """An engine that runs tasks."""

    @property
    def retries(self) -> bool:
        """Whether the engine itself starts a task again that died."""
        ...

    @property
    def at_once(self) -> int:
        """Number of tasks that run side by side; 0 if it is unknown."""
        ...

    def start(self, calls: Sequence[Call], /) -> None:
        """Start tasks, or queue them."""
        ...

    def poll(self, seconds: float, /) -> list[Ended]:
        """Wait until tasks end, or for some time; return those that ended."""
        ...

    def cancel(self) -> None:
        """Stop the running tasks, which save what they have, and drop the others."""
        ...

    def close(self) -> None:
        """Release what the launcher holds."""
        ...


class Launched(NamedTuple):
    """What became of a launch."""

    fresh: bool
    """False if the result was complete before."""
    failed: Mapping[str, Path] = {}
    """The logs of blocks that failed, by their labels, of work that goes on without them."""


def launch(work: Work, options: Options, entry: str, arguments: Sequence[str]) -> Launched:
    """Run the blocks of a work that are missing in tasks, and join them.

    After a kill at any instant, the same call continues. A task begins when a block of it has all
    that it needs (`Work.needs`).

    Parameters
    ----------
    work
        The work.
    options
        How the tasks are launched.
    entry, arguments
        ``module:function`` of the function that makes the work from the arguments, in each task.

    Raises
    ------
    MissingExtraError
        The engine is not installed.
    RunError
        Another launch of the work is running, the path has other work's result, or tasks failed
        and the work does not go on without them (`Work.goes_on`).
    Stopped
        A signal stopped the launch, after its tasks had stopped.
    """
    if options.tasks < 1 or (options.workers is not None and options.workers < 1):
        raise OptionError("--tasks and --jobs must be at least 1.")
    if work.is_complete():
        work.clean()
        return Launched(fresh=False)
    launcher = _launcher(work, options)
    work.check()
    for note in work.notes(options.tasks):
        tracking.notice(note)
    with writing(work.directory / "launch.lock", work.path, options.take_over):
        if work.is_complete():  # another launch has just ended
            work.clean()
            return Launched(fresh=False)
        failed = _Launch(work, options, entry, tuple(arguments)).run(launcher)
        if not failed:
            join_work(work)
        return Launched(True, failed)


class _Launch:
    """One launch of the tasks that are missing."""

    def __init__(self, work: Work, options: Options, entry: str, arguments: tuple[str, ...]):
        self._work = work
        of = min(options.tasks, max(work.num_blocks, 1))
        self._blocks: dict[int, list[int]] = {}
        """The missing blocks of each task."""
        for block in work.missing():
            self._blocks.setdefault(block % of, []).append(block)
        self._calls = {
            index: Call(entry, arguments, index, of, str(work.directory), str(Path.cwd()))
            for index in sorted(self._blocks)
        }
        self._held = dict(self._calls)
        """The tasks that have not begun, because of what their blocks need."""
        self._deaths = dict.fromkeys(self._calls, 0)
        self._died: dict[int, str] = {}
        """How tasks died that go on without the blocks in which they did."""
        self._failed: dict[int, str] = {}
        self._ended: set[int] = set()

    def run(self, launcher: Launcher) -> dict[str, Path]:
        """Run the tasks; return what failed, as `Launched` has it.

        `RunError` if the work does not go on without what failed; `Stopped` if a signal came.
        """
        if not self._calls:
            return {}
        for call in self._calls.values():
            call.status.unlink(missing_ok=True)
        with ExitStack() as stack:
            stack.callback(launcher.close)
            stopped, cancelled = stack.enter_context(stopping()), False
            names = {number: self._name(number) for number in self._calls}
            table = stack.enter_context(TaskTable(self._work.name, self._calls, names))
            while len(self._ended) < len(self._calls):
                if stopped() and not cancelled:  # not in the handler, which may interrupt `start`
                    launcher.cancel()
                    cancelled = True
                if not stopped() and (ready := self._release()):
                    launcher.start(ready)
                for one in launcher.poll(_POLL_SECONDS):
                    self._take(one, launcher, bool(stopped()))
                table.show(self._failed, over=len(self._ended) == len(self._calls))
                if stopped() and self._is_quiet():
                    break
        if stopped():
            done = self._work.num_blocks - len(self._work.missing())
            raise Stopped(
                f"stopped with {done} of {self._work.num_blocks} blocks done: the same command "
                "continues.",
                stopped(),
            )
        return self._failures()

    def _release(self) -> list[Call]:
        """Return held tasks that can begin now; drop them if nothing makes what they need."""
        if not self._held:
            return []
        done: set[int] = set()
        ready = [call for number, call in self._held.items() if self._can_begin(number, done)]
        for call in ready:
            del self._held[call.number]
        if not ready and len(self._held) + len(self._ended) == len(self._calls):
            self._ended |= self._held.keys()
            self._held.clear()
        return ready

    def _can_begin(self, number: int, done: set[int]) -> bool:
        """Whether a block of a task has what it needs; complete blocks are added to ``done``."""
        for block in self._blocks[number]:
            missing = [need for need in self._work.needs(block) if need not in done]
            complete = [need for need in missing if self._work.is_done(need)]
            done.update(complete)
            if len(complete) == len(missing):
                return True
        return False

    def _is_quiet(self) -> bool:
        """Whether no task runs any more, after the launcher has been told to cancel them."""
        begun = [call for call in self._calls.values() if call.status.exists()]
        states = (read_status(call) for call in begun if call.number not in self._ended)
        return not any(status.state == "running" for status in states)

    def _take(self, one: Ended, launcher: Launcher, is_stopping: bool) -> None:
        """Take a task that has ended; start it again if it died."""
        call = self._calls[one.number]
        status = read_status(call)
        if is_stopping or (status.state == "done" and not one.died):
            self._ended.add(one.number)
            if one.number in self._died and not is_stopping:
                self._failed[one.number] = self._died[one.number]
        elif status.state == "failed" or (status.state == "crashed" and self._work.goes_on):
            # Work that goes on has run its other blocks: to start it again would end alike.
            self._give_up(call, status.error)
        elif status.state == "stopped" and not one.died:  # by a signal from elsewhere
            self._again(call, launcher, "was stopped")
        else:
            self._deaths[one.number] += 1
            how = one.died or status.error or "it ended early"
            if launcher.retries or self._deaths[one.number] == MOST_DEATHS:
                reason = f"it died {MOST_DEATHS} times, at last: {how}"
                self._bury(call, status.block, reason, launcher)
            else:
                self._again(call, launcher, f"died ({how})")

    def _again(self, call: Call, launcher: Launcher, why: str) -> None:
        """Start a task again."""
        tracking.notice(f"{self._name(call.number)} {why} and is started again: {call.log}")
        call.status.unlink(missing_ok=True)
        launcher.start([call])

    def _bury(self, call: Call, block: int | None, reason: str, launcher: Launcher) -> None:
        """Give up a task that died too often, or only the block in which it did."""
        left = [
            one
            for one in self._blocks[call.number]
            if one != block and one not in call.skip and not self._work.is_done(one)
        ]
        if not self._work.goes_on or block is None or self._work.is_done(block) or not left:
            self._give_up(call, reason)
            return
        name = self._work.label(block)
        tracking.notice(f"{name} failed: {reason}. See {call.log}")
        self._died.setdefault(call.number, reason)
        self._deaths[call.number] = 0
        self._calls[call.number] = call._replace(skip=(*call.skip, block))
        self._again(self._calls[call.number], launcher, f"goes on without {name}")

    def _give_up(self, call: Call, reason: str) -> None:
        self._failed[call.number] = reason
        self._ended.add(call.number)
        first, *_ = reason.splitlines() or [""]
        tracking.notice(f"{self._name(call.number)} failed: {first} See {call.log}")

    def _name(self, number: int) -> str:
        """Return the name of a task: that of its block if it has one of its own."""
        of = self._calls[number].of
        if self._work.goes_on and of == self._work.num_blocks:
            return self._work.label(number)
        return f"task {number} of {of}"

    def _failures(self) -> dict[str, Path]:
        if not self._failed:
            return {}
        if self._work.goes_on:
            return {
                self._work.label(block): self._calls[number].log
                for number in sorted(self._failed)
                for block in self._blocks[number]
                if not self._work.is_done(block) and is_ready(self._work, block)
            }
        index = min(self._failed)
        call, reason = self._calls[index], self._failed[index]
        done = self._work.num_blocks - len(self._work.missing())
        others = len(self._failed) - 1
        more = f" So did {others} more." if others else ""
        raise RunError(
            f"task {index} of {call.of} failed: {reason} Its log is {call.log}.{more} {done} of "
            f"{self._work.num_blocks} blocks are done and kept: the same command runs what is "
            "missing."
        )


def _launcher(work: Work, options: Options) -> Launcher:
    """Return the engine; the errors are those of `launch`."""
    if options.launcher == "slurm":
        return SlurmLauncher(work.directory, work.name, options.workers, options.options)
    if options.launcher == "ray":
        return RayLauncher(options.workers, MOST_DEATHS, options.options)
    if options.options:
        raise OptionError("the launcher local has no --launcher-option.")
    return LocalLauncher(options.workers)


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
