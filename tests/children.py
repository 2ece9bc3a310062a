"""Processes that tests start, which write nothing on standard error unless a test says what."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

_OF_LIBRARIES = re.compile(
    r"\[Gloo\] Rank|is connected to|peer ranks\."
    r"|Expected number of connected peer ranks is :|[\d\s]"
)
"""Pieces of lines that libraries print, and that tell of no fault: Gloo greets the other processes,
and prints the greetings of several processes into one another, piece by piece."""


def python(*arguments: object, **options: Any) -> str:
    """Run Python with arguments, as `run` does."""
    return run([sys.executable, *arguments], **options)


def run(command: Sequence[object], **options: Any) -> str:
    """Run a command, which must succeed with no standard error, and return its output.

    Parameters
    ----------
    command
        Its words.
    options
        Of `subprocess.run`.
    """
    words = [*map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    is_silent(done.stderr)
    return done.stdout


def stopped(
    command: Sequence[object],
    when: Callable[[], bool],
    signum: int = signal.SIGKILL,
    **options: Any,
) -> str:
    """Send a process a deadly signal once a condition holds; return its standard error."""
    words = [*map(str, command)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes, **options) as process:
        while process.poll() is None and not when():
            time.sleep(0.01)
        process.send_signal(signum)
        errors = process.communicate()[1]
    assert process.returncode == -signum, errors
    return errors


def is_silent(errors: str) -> None:
    """Assert that a process wrote nothing on standard error.

    There Python tells of exceptions that it ignores, such as those at the end of the interpreter:
    the exit code is 0 all the same.
    """
    assert not _OF_LIBRARIES.sub("", errors), errors
