"""Tasks in processes of this machine.

A process takes one task after the other, so that Python and JAX are started, and programs compiled,
once for each core and not once for each task: see `offmarl.launch.worker`.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import offmarl
from offmarl.launch import cores
from offmarl.launch.task import Call

_END_SECONDS = 2.0
"""How long a process may take to end once it has nothing to do or nobody waits for its task."""


class Ended(NamedTuple):
    """A task whose process or job has ended."""

    number: int
    died: str = ""
    """How, if it did not end by itself, such as "killed by signal 9"."""


def reason(error: BaseException) -> str:
    """Return the last line of an engine's error, which says how a task died."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


class LocalLauncher:
    """Runs tasks in as many processes as there are workers, each on cores of its own.

    Parameters
    ----------
    workers
        Number of processes; by default one for each core, or 1 on an accelerator.
    """

    retries = False
    """Whether the engine itself starts a task again that died."""

    def __init__(self, workers: int | None = None):
        self._groups = cores.core_groups(workers)
        self._waiting: deque[Call] = deque()
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._stopping = False

    @property
    def at_once(self) -> int:
        """Number of tasks that run side by side."""
        return len(self._groups)

    def start(self, calls: Sequence[Call]) -> None:
        """Queue tasks."""
        self._waiting.extend(calls)
        self._hand_out()

    def poll(self, seconds: float) -> list[Ended]:
        """Wait until tasks end, or for some time; return those that ended."""
        ended = []
        for key, _ in self._selector.select(seconds):
            worker: _Worker = key.data
            found = worker.read()
            if found is not None:
                ended.append(found)
            if worker.is_over:
                self._end(worker)
        self._hand_out()
        return ended

    def cancel(self) -> None:
        """Let the running tasks save what they have and stop; drop the others."""
        self._stopping = True
        self._waiting.clear()
        for worker in self._workers:
            worker.signal(signal.SIGINT)

    def close(self) -> None:
        """End the processes."""
        for worker in [*self._workers]:
            self._end(worker)
        self._selector.close()

    def _end(self, worker: "_Worker") -> None:
        self._selector.unregister(worker.output)
        self._workers.remove(worker)
        worker.end()

    def _hand_out(self) -> None:
        """Give waiting tasks to idle workers, and start the workers that are missing."""
        while self._waiting and not self._stopping:
            worker = next((one for one in self._workers if one.call is None), None)
            if worker is None:
                if len(self._workers) == len(self._groups):
                    return
                worker = self._new_worker()
            worker.take(self._waiting.popleft())

    def _new_worker(self) -> "_Worker":
        taken = {worker.cores for worker in self._workers}
        worker = _Worker(next(group for group in self._groups if group not in taken))
        self._workers.append(worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)
        return worker


def _import_path() -> dict[str, str]:
    """Return the variable with which a process imports this offmarl, also from a checkout."""
    root, given = str(Path(offmarl.__file__).parents[1]), os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([root, given] if given else [root])}


class _Worker:
    """A process that runs tasks: calls go in as lines of JSON, and an answer comes for each."""

    def __init__(self, cores_: tuple[int, ...]):
        self.cores = cores_
        self.call: Call | None = None
        self.is_over = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "offmarl.launch.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=cores.environment(cores_) | _import_path(),
            start_new_session=True,  # signals of the terminal come through this process
        )
        cores.bind(self._process.pid, cores_)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout

    def take(self, call: Call) -> None:
        """Hand a task to the process."""
        self.call = call
        with suppress(BrokenPipeError):  # it has died: its output has ended, which `read` finds
            self._input.write(f"{json.dumps(call)}\n".encode())
            self._input.flush()

    def read(self) -> Ended | None:
        """Read an answer, or find out how the process ended."""
        line, call = self.output.readline(), self.call
        self.call = None
        if line:
            state = json.loads(line)
            self.is_over = state in ("stopped", "crashed")
            return Ended(call.number) if call else None
        self.is_over = True
        code = self._process.wait()
        how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return Ended(call.number, how) if call else None

    def signal(self, signum: int) -> None:
        """Send the process a signal."""
        if self._process.poll() is None:
            self._process.send_signal(signum)

    def end(self) -> None:
        """End the process, and wait for it. A task that runs is killed if it does not stop soon."""
        with suppress(BrokenPipeError):  # it has died
            self._input.close()  # it stops a task that runs
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # compiled code serves no signals
            self._process.kill()
            self._process.wait()
        self.output.close()
