"""Runs one command in several processes that join one another."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.children import is_silent

OFFMARL = ("-m", "offmarl")

FAULTY = """
from offmarl.cli import main
from offmarl.programs.runs.training import CheckpointTimer

def is_due(self):
    raise ValueError("a bug of the program")

CheckpointTimer.is_due = is_due
main()
"""
"""The command line with a bug that every program runs into."""


def start(
    *arguments: object,
    each: Mapping[int, Sequence[object]] = {},
    programs: Mapping[int, Sequence[str]] = {},
    count: int = 2,
    devices: int = 4,
    patience: int = 20,
) -> list[subprocess.Popen[str]]:
    """Start the processes of a command.

    Parameters
    ----------
    arguments
        Of the command line.
    each
        Further arguments of some processes, by number.
    programs
        Arguments of Python, of processes that do not run the command line itself.
    count, devices
        Number of processes, and of each one's devices.
    patience
        OFFMARL_HEARTBEAT_SECONDS and OFFMARL_JOIN_SECONDS.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": str(devices),
        "OFFMARL_HEARTBEAT_SECONDS": str(patience),
        "OFFMARL_JOIN_SECONDS": str(max(patience, 30)),
    }
    return [
        subprocess.Popen(
            [
                *(sys.executable, *programs.get(number, OFFMARL), *map(str, arguments)),
                *("--coordinator", address, "--processes", str(count), "--process", str(number)),
                *map(str, each.get(number, ())),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]


def finished(started: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Wait for processes, which must succeed without a word; return what they printed."""
    outputs = [process.communicate(timeout=300) for process in started]
    for process, (_, errors) in zip(started, outputs, strict=True):
        assert process.returncode == 0, errors
        is_silent(errors)
    return [printed for printed, _ in outputs]


def ended(started: Sequence[subprocess.Popen[str]], timeout: float = 100) -> list[tuple[int, str]]:
    """Wait for processes; return the exit code and the errors of each."""
    errors = [process.communicate(timeout=timeout)[1] for process in started]
    return [(process.returncode, text) for process, text in zip(started, errors, strict=True)]
