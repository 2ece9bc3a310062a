"""Work that takes no time: block b is the file b with the number b * b."""

import json
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from offmarl.errors import OptionError
from offmarl.launch import Work, run_task

ENTRY = "tests.launch.toy:make"
BLOCKS = 8


class Squares(Work):
    def __init__(self, path: Path, count: int, mishap: str = ""):
        self.count, self.mishap = count, mishap
        super().__init__("squares", path, {"count": count}, count)

    def run(self, block):
        kind, _, number = self.mishap.partition(":")
        if kind and block == int(number):
            self.suffer(kind)
        (self.directory / "blocks").mkdir(exist_ok=True)
        (self.directory / "blocks" / str(block)).write_text(f"{block * block}\n")

    def suffer(self, kind):
        """Die, fail or wait, as the mishap says; "once" only the first time."""
        deaths = self.directory / "deaths"
        before = deaths.read_text() if deaths.exists() else ""
        if kind == "save" and not before:
            from offmarl.programs.runs.training import checkpoint_timer  # imports JAX

            with checkpoint_timer(60, "step") as timer:  # as a training does
                timer.work_done()
                deaths.write_text("x")
                while not timer.is_due():
                    time.sleep(0.02)
                (self.directory / "saved").touch()
                timer.saved(1)
        deaths.write_text(f"{before}x")
        if kind == "die" or (kind == "once" and not before):
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exit":
            raise SystemExit(3)
        if kind == "fail":
            raise OptionError("the block cannot be run.")
        if kind == "crash":
            raise RuntimeError("a bug")
        if kind == "deaf" and not before:  # as compiled code is
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(60)
        if kind == "wait" and not before:
            for _ in range(600):  # Ray interrupts tasks between calls
                time.sleep(0.1)

    def is_complete(self):
        return self.path.exists()

    def join(self):
        files = (self.directory / "blocks" / str(block) for block in range(self.count))
        self.path.write_text("".join(file.read_text() for file in files))


def signal_task(directory, signum):
    """Send task 1 a signal, once it runs the block with a mishap."""

    def send():
        deaths = directory / "deaths"
        while not (deaths.exists() and deaths.read_text()):
            time.sleep(0.05)
        os.kill(json.loads((directory / "state" / "task-1.json").read_text())["pid"], signum)

    threading.Thread(target=send, daemon=True).start()


def is_whole(tmp_path):
    """Whether the result is there, of all blocks."""
    return (tmp_path / "out").read_text().split() == [str(block**2) for block in range(BLOCKS)]


class Tolerant(Squares):
    """Goes on after a failure; ``need`` is a block that all others need."""

    goes_on = True
    need: int | None = None

    def needs(self, block):
        return () if self.need in (None, block) else (self.need,)


class PoolLauncher:
    """A launcher as a user may write it."""

    def __init__(self, directory, name, workers, options):
        self.pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))

    def submit(self, calls):
        return [self.pool.submit(run_task, call) for call in calls]

    def cancel(self):
        self.pool.shutdown(wait=False, cancel_futures=True)

    def close(self):
        self.pool.shutdown()


def make_tolerant(arguments):
    path, count, mishap = arguments
    return Tolerant(Path(path), int(count), mishap)


def make(arguments):
    path, count, mishap = arguments
    return Squares(Path(path), int(count), mishap)
