"""One task in its process: it runs a share of the blocks, and writes a log and its state."""

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

from offmarl import _imports, tracking
from offmarl.errors import OffmarlError, repeat_lost_interrupts
from offmarl.launch.work import Share, Work, run_share
from offmarl.paths import hide_all_credentials

State = Literal["waiting", "running", "done", "failed", "stopped", "crashed"]
"""failed: an error that the user can fix, so the task is not repeated. crashed: any other."""


class Call(NamedTuple):
    """What a process needs to run a task."""

    entry: str
    """``module:function``; the function makes the work from the arguments."""
    arguments: tuple[str, ...]
    number: int
    of: int
    directory: str
    """That of the work."""
    cwd: str

    @property
    def log(self) -> Path:
        """The task's log."""
        return Path(self.directory) / "logs" / f"task-{self.number}.log"

    @property
    def status(self) -> Path:
        """The file of the task's state."""
        return Path(self.directory) / "state" / f"task-{self.number}.json"


class Status(NamedTuple):
    """The state of a task, as its file has it."""

    state: State = "waiting"
    done: int = 0
    total: int = 0
    error: str = ""
    host: str = ""
    pid: int = 0
    since: float = 0.0
    """When the task was started, in seconds since 1970."""


def read_status(call: Call) -> Status:
    """Return the state of a task; "waiting" if its file does not exist yet."""
    try:
        return Status(**json.loads(call.status.read_text()))
    except FileNotFoundError:
        return Status()


def run_task(call: Call) -> State:
    """Run a task in this process, with the standard outputs in its log."""
    repeat_lost_interrupts()
    os.chdir(call.cwd)
    status = Status("running", host=socket.gethostname(), pid=os.getpid(), since=time.time())

    def report(done: int, total: int) -> None:
        nonlocal status
        status = status._replace(done=done, total=total)
        tracking.write_json(call.status, status._asdict())

    with _logging_to(call.log):
        words = " ".join(hide_all_credentials(call.arguments))
        sys.stdout.write(f"# task {call.number} of {call.of}: {words}\n")
        tracking.write_json(call.status, status._asdict())
        state, error = _outcome(call, report)
        tracking.write_json(call.status, {**status._asdict(), "state": state, "error": error})
        sys.stdout.write(f"# {state}: {error}\n" if error else f"# {state}\n")
    return state


def _outcome(call: Call, report: Callable[[int, int], None]) -> tuple[State, str]:
    try:
        run_share(_work(call.entry, call.arguments), Share(call.number, call.of), report)
    except OffmarlError as error:
        return "failed", str(error)
    except KeyboardInterrupt as stop:
        return "stopped", str(stop)
    except SystemExit as stop:
        return "failed", f"exit code {stop.code}"
    except Exception as error:
        traceback.print_exc()
        return "crashed", f"{type(error).__name__}: {error}"
    return "done", ""


@lru_cache(maxsize=1)
def _work(entry: str, arguments: tuple[str, ...]) -> Work:
    """Make the work; a process that runs several tasks of it compiles its programs once."""
    module, _, name = entry.partition(":")
    try:
        home = import_module(module)
    except ModuleNotFoundError as error:  # the user's own, in the current directory
        if error.name != module.partition(".")[0]:
            raise
        home = _imports.import_module(module)
    make: Callable[[tuple[str, ...]], Work] = getattr(home, name)
    return make(arguments)


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Append what this process and its libraries print to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    before = [os.dup(descriptor) for descriptor in (1, 2)]
    streams: Any = sys.stdout, sys.stderr
    try:
        with path.open("a", buffering=1) as log:
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
            sys.stdout = sys.stderr = log
            yield
    finally:
        sys.stdout, sys.stderr = streams
        for descriptor, saved in zip((1, 2), before, strict=True):
            os.dup2(saved, descriptor)
            os.close(saved)
