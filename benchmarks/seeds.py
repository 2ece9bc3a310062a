"""Time of an update of ten seeds, against that of one: training alone, without the start.

    python benchmarks/seeds.py [--programs bc maicq] [--seeds 10] [--rounds 5]

Windows of 20 steps of 3 agents, 32 in a batch. Seeds are computed as `offmarl train --seeds` does:
on a CPU with several cores, side by side on as many devices. Each number of seeds has a process of
its own, because JAX divides the cores when it starts; the processes take turns.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.windows import make, random_replay
from offmarl.programs.runs import loop
from offmarl.programs.runs.compiling import keep_compiled_programs, use_cores
from offmarl.programs.runs.sharding import SEEDS, layout_of
from offmarl.types import Discrete, EnvSpec

COVERAGE = EnvSpec("coverage", 3, 20, 12, Discrete(5))


@dataclass(frozen=True)
class Args:
    programs: tuple[str, ...] = ("bc", "maicq")
    """Baselines."""
    seeds: int = 10
    """Seeds that are compared with one."""
    rounds: int = 5
    """Measurements of each number of seeds, in turn."""
    updates: int = 20
    """Updates of a measurement."""
    serve: int = 0
    """Seeds of this process, which measures when it reads a line; for the program itself."""


def serve(args: Args) -> None:
    """Print the seconds of some updates for each line of the input."""
    use_cores(args.serve, "auto")
    keep_compiled_programs()
    replay, _ = random_replay(COVERAGE, 20_000, 32)
    program, hyper = make(args.programs[0], COVERAGE)
    layout = layout_of(args.serve, "auto")
    hyper = jax.tree.map(lambda leaf: np.full(args.serve, leaf), hyper)
    keys = jax.random.split(jax.random.key(1), args.serve)
    learned = loop.Learned(loop.start(program, keys, hyper), None)
    learners = loop.Learners(program, hyper, keys, layout)
    learned, rest = layout.place(learned, SEEDS), loop._per_seed(learners)
    data = layout.place(replay)
    done = 0
    for _ in sys.stdin:
        begun = time.perf_counter()
        place = done, 0, args.updates
        learned, metrics = loop._update(program.stages[0], layout, learned, rest, place, data, None)
        jax.block_until_ready(metrics)
        done += args.updates
        print(time.perf_counter() - begun, flush=True)


class Server:
    """A process that trains some seeds of a program when it is asked."""

    def __init__(self, program: str, seeds: int, updates: int):
        options = ["--programs", program, "--serve", str(seeds), "--updates", str(updates)]
        pipe: Any = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, __file__, *options], stdin=pipe, stdout=pipe, text=True
        )

    def seconds(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def main(args: Args) -> None:
    if args.serve:
        serve(args)
        return
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for program in args.programs:
        servers = [Server(program, seeds, args.updates) for seeds in (1, args.seeds)]
        for server in servers:
            server.seconds()  # compiles
        rounds = np.array([[server.seconds() for server in servers] for _ in range(args.rounds)])
        for server in servers:
            server.close()
        single, many = 1e3 * np.median(rounds, axis=0) / args.updates
        ratio = np.median(rounds[:, 1] / rounds[:, 0])
        print(
            f"{program:10} one seed {single:.1f} ms an update, {args.seeds} seeds {many:.1f} ms: "
            f"{ratio:.1f} times as long"
        )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
