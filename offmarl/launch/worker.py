"""A process of `offmarl.launch.local`: ``python -m offmarl.launch.worker``.

Tasks come as lines of JSON on standard input, and the state in which each has ended goes to
standard output.
"""

import json
import os
import queue
import signal
import sys
import threading
from types import FrameType

from offmarl.launch.task import Call, run_task


def main() -> None:
    """Run tasks until standard input ends; then the launcher is gone, and a running task stops."""
    try:
        signal.signal(signal.SIGINT, _interrupt)
        answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # only answers go to the launcher
        calls: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(calls,), daemon=True).start()
        while line := calls.get():
            state = run_task(Call.read(line))
            answers.write(f"{json.dumps(state)}\n")
            if state in ("stopped", "crashed"):
                break
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    # Libraries hold threads that would delay the end.
    os._exit(0)


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    """Stop once: a second signal would interrupt the end of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _read(calls: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        calls.put(line)
    calls.put("")
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
