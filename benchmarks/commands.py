"""Duration of short commands, each started in a new process.

    python benchmarks/commands.py [--rounds 20]

The commands are `offmarl --help`, and `offmarl ls` on a directory of 200 small vaults, which are
copies of one. The imports that `ls` needs are measured too, as a lower bound of its duration.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import tyro

from offmarl import vault
from offmarl.types import Discrete, EnvSpec, Transition, View

VAULTS = 200
STEPS = 100
NEEDED = "import numpy, tensorstore, tyro, rich.table, jaxtyping"


@dataclass(frozen=True)
class Args:
    """Settings."""

    rounds: int = 20
    """Times that each command is run, in turn."""


def write_vaults(root: Path) -> None:
    spec = EnvSpec("swarm/coverage-3", 3, 8, 4, Discrete(5))
    agents, last = (1, STEPS, 3), np.arange(STEPS)[None] % 50 == 49
    ends = np.repeat(last[..., None], 3, -1)
    floats = np.zeros(agents, np.float32)
    view = View(
        np.zeros((*agents, 8), np.float32),
        np.zeros((1, STEPS, 4), np.float32),
        np.ones((*agents, 5), bool),
        np.ones(agents, bool),
    )
    data = Transition(
        view,
        np.zeros(agents, np.int32),
        floats,
        ends,
        np.zeros_like(ends),
        last,
        floats,
        np.zeros((1, STEPS), np.int32),
    )
    first = root / "one.vlt" / "0"
    with vault.create(first, spec, rows=1) as writer:
        writer.append(data)
    for number in range(1, VAULTS):
        shutil.copytree(first, root / f"set{number // 4}.vlt" / str(number))


def measure(command: list[str]) -> tuple[float, float]:
    """Run a command; return its seconds by the clock, and of the processor."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_vaults(Path(directory))
        python = [sys.executable]
        commands = {
            "imports": [*python, "-c", NEEDED],
            "offmarl --help": [*python, "-m", "offmarl", "--help"],
            f"offmarl ls, {VAULTS} vaults": [*python, "-m", "offmarl", "ls", directory],
        }
        times = {name: [measure(words)] for name, words in commands.items()}  # and fill the caches
        for _ in range(args.rounds):
            for name, command in commands.items():
                times[name].append(measure(command))
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'':26} {'best':>7} {'median':>7} {'processor, median':>18}   (s)")
    for name, seconds in times.items():
        walls, processor = zip(*seconds[1:], strict=True)
        print(f"{name:26} {min(walls):7.2f} {median(walls):7.2f} {median(processor):18.2f}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
