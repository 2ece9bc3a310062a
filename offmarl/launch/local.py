"""Tasks in processes of this machine.

A process takes one task after the other, so that Python and JAX are started, and programs compiled,
once for each core and not once for each task. Tasks come as lines of JSON on its standard input,
and the state in which each has ended goes to its standard output.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from offmarl.errors import OptionError, RunError
from offmarl.launch.task import Call, State, run_task

_END_SECONDS = 2.0
"""How long a process may take to end once it has nothing to do or nobody waits for its task."""

_SINGLE_THREADED = "--xla_cpu_multi_thread_eigen=false"


class LocalLauncher:
    """Runs tasks in processes, each on cores of its own: one for each core, or 1 on an accelerator.

    A thread for each process waits for its tasks.
    """

    def __init__(
        self, directory: Path, name: str, workers: int | None, options: Mapping[str, Any]
    ) -> None:
        del directory, name
        if options:
            raise OptionError("the launcher local has no --launcher-option.")
        self._groups = core_groups(workers)
        self._threads = ThreadPoolExecutor(len(self._groups))
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._workers: list[_Worker] = []
        self._stopping = False

    def submit(self, calls: Sequence[Call]) -> list["Future[None]"]:
        """Queue tasks."""
        return [self._threads.submit(self._run, call) for call in calls]

    def cancel(self) -> None:
        """Let the running tasks save what they have and stop; drop the others."""
        with self._lock:
            self._stopping = True
            for worker in self._workers:
                worker.interrupt()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._stopping = True
            workers = [*self._workers]
        for worker in workers:
            worker.end()
        self._threads.shutdown()

    def _run(self, call: Call) -> None:
        """Run a task in an idle process, or in a new one; `RunError` if the process dies."""
        with self._lock:
            if self._stopping:
                return
            worker = self._idle.pop() if self._idle else self._new_worker()
        is_over = True
        try:
            is_over = worker.run(call) in ("stopped", "crashed")
        finally:
            with self._lock:
                if is_over:
                    self._workers.remove(worker)
                else:
                    self._idle.append(worker)
            if is_over:
                worker.end()

    def _new_worker(self) -> "_Worker":
        busy = {worker.cores for worker in self._workers}
        self._workers.append(_Worker(next(group for group in self._groups if group not in busy)))
        return self._workers[-1]


class _Worker:
    """A process that runs tasks."""

    def __init__(self, cores: tuple[int, ...]):
        self.cores = cores
        root, pythonpath = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
        path = os.pathsep.join([root, pythonpath] if pythonpath else [root])  # also from a checkout
        self.process = subprocess.Popen(
            # Files of the current directory must not stand in for modules of others.
            [sys.executable, "-P", "-m", "offmarl.launch.local"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(cores) | {"PYTHONPATH": path},
            start_new_session=True,  # signals of the terminal come through this process
        )
        if cores[0] >= 0 and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self.process.pid, cores)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout

    def run(self, call: Call) -> str:
        """Run a task, and return its state; `RunError` says how the process died, if it did."""
        with suppress(BrokenPipeError):  # it has died: its output has ended
            self._input.write(f"{json.dumps(call)}\n".encode())
            self._input.flush()
        if line := self._output.readline():
            state: str = json.loads(line)
            if state in get_args(State):
                return state
            raise RunError(state)
        code = self.process.wait()
        raise RunError(f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}")

    def interrupt(self) -> None:
        """Close the input of the process, which stops a task that runs, and then the process."""
        with suppress(BrokenPipeError):  # it has died
            self._input.close()

    def end(self) -> None:
        """End the process, and wait for it. A task that runs is killed if it does not stop soon."""
        self.interrupt()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # compiled code serves no signals
            self.process.kill()
            self.process.wait()
        self._output.close()


# ---------------------------------------------------------------------------------- cores


def own_cores() -> list[int]:
    """Return the numbers of the cores that this process may use; of all, where that is unknown."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def threads() -> int:
    """Return the number of threads with which XLA computes on a CPU of as many devices or fewer.

    It is the number of cores of this process, unless an environment variable sets another one.
    """
    setting = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or ""
    return int(setting) if setting.isdecimal() and int(setting) else len(own_cores())


def core_groups(count: int | None) -> list[tuple[int, ...]]:
    """Return the cores of each process that runs side by side with the others."""
    cores = own_cores()
    count = count or (1 if _has_accelerator() else len(cores))
    if count > len(cores):
        return [(-1 - place,) for place in range(count)]
    return [tuple(cores[place::count]) for place in range(count)]


def environment(cores: tuple[int, ...]) -> dict[str, str]:
    """Return the variables of a process; on one core, XLA needs no threads of its own."""
    flags = os.environ.get("XLA_FLAGS", "")
    alone = {"XLA_FLAGS": f"{flags} {_SINGLE_THREADED}".strip()} if len(cores) == 1 else {}
    return {name: x for name, x in os.environ.items() if name != "OFFMARL_QUIET"} | alone


def _has_accelerator() -> bool:
    """Whether JAX may find an accelerator; to ask JAX would take its memory."""
    may_use = os.environ.get("JAX_PLATFORMS", "") != "cpu"
    return may_use and any(any(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "accel*"))


# ---------------------------------------------------------------------------------- the process


def main() -> None:
    """Run tasks until standard input ends; then the launcher is gone, and a running task stops."""
    try:
        # Programs replace Python's own handler by one that saves. The signal may have been ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # only answers go to the launcher
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(lines,), daemon=True).start()
        while line := lines.get():
            entry, arguments, *rest = json.loads(line)
            try:
                state: str = run_task(Call(entry, tuple(arguments), *rest))
            except OSError as error:  # of a full disk, which takes neither its log nor its state
                state = str(error)
            answers.write(f"{json.dumps(state)}\n")
            if state in ("stopped", "crashed"):
                break
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    # Libraries hold threads that would delay the end.
    os._exit(0)


def _read(lines: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put("")
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
