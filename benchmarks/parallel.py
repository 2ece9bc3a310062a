"""What running environments side by side gains, and the speed of recording.

    taskset -c 0,1 python benchmarks/parallel.py

1. A program takes and records equal total steps, once in a single environment and once in 64: the
   wall time of both commands, with everything that a user waits for, and their ratio. MAPPO learns
   from all of its steps; the scripted and the random policy only act. Programs are compiled
   before, by a run of a few blocks.
2. Environment steps a second while recording: of a fixed feed-forward policy, and of MAPPO while it
   trains and all of its data is recorded. Beside them the 40,000 a second that MALib's paper quotes
   for 32 cores (Zhou et al. 2023, arXiv 2106.07551), in another environment.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import jax
import tyro

from offmarl import envs
from offmarl.networks import PolicyConfig, init_policy, make_policy
from offmarl.programs import record_policy

QUOTED = 40_000
FIXED = ("random", "scripted")
"""Programs whose policy is not learned."""


@dataclass(frozen=True)
class Args:
    env: str = "swarm/coverage-8"
    """Environment to train in."""
    programs: tuple[str, ...] = ("mappo", "scripted", "random")
    """Programs to run in one environment and in many."""
    steps: int = 1_000_000
    """Total environment steps of each run."""
    num_envs: int = 64
    """Environments to compare with one."""
    recorded: tuple[str, ...] = ("swarm/coverage-8", "jaxmarl/mpe/simple_spread_v3")
    """Environments to record in."""
    recorded_steps: int = 500_000
    """Environment steps of a recording."""
    rounds: int = 3
    """Recordings of each environment; the median counts."""


def record(program: str, env: str, num_envs: int, steps: int, directory: str) -> float:
    """Record in a new process, and train if the program learns; return its wall time."""
    name = ["--policy", program] if program in FIXED else [program]
    command = [sys.executable, "-m", "offmarl", "record", *name, "--env", env]
    command += ["--num-envs", str(num_envs)]
    if program in FIXED:
        command += ["--steps", str(steps)]
    else:
        command += ["--tiers", "replay", "--evaluations", "1", "--eval-episodes", "8"]
        command += ["--total-steps", str(steps)]
    start = time.perf_counter()
    subprocess.run(
        [*command, "--out", directory],
        check=True,
        env=os.environ | {"OFFMARL_QUIET": "1"},
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def wall_time(program: str, env: str, num_envs: int, steps: int) -> float:
    """Return the wall time of a run, compiled before."""
    times = []
    for size in (num_envs * 64, steps):  # 64 time steps are one update
        with tempfile.TemporaryDirectory() as directory:
            times.append(record(program, env, num_envs, size, directory))
    return times[-1]


def recording_speed(name: str, steps: int, rounds: int) -> float:
    """Return environment steps a second while a fixed policy is recorded in 64 environments."""
    env, config = envs.make(name), PolicyConfig("feedforward")
    policy = make_policy(config, env.spec)
    params = init_policy(config, env.spec, jax.random.key(0))

    def seconds() -> float:
        with tempfile.TemporaryDirectory() as directory:
            start = time.perf_counter()
            record_policy(env, policy, params, Path(directory) / "a.vlt" / "main", steps)
            return time.perf_counter() - start

    seconds()  # compiles
    return steps / median(seconds() for _ in range(rounds))


def main(args: Args) -> None:
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, jax {jax.__version__}\n")
    print(f"{args.env}, {args.steps:,} steps, recorded\n")
    print(f"| program | 1 environment, s | {args.num_envs}, s | times as fast |")
    print("|---|---:|---:|---:|")
    for program in args.programs:
        alone, together = (
            wall_time(program, args.env, num, args.steps) for num in (1, args.num_envs)
        )
        print(f"| {program} | {alone:.1f} | {together:.1f} | {alone / together:.1f} |", flush=True)
    print("\n| environment | recorded | env-steps/s | of MALib's 40,000 on 32 cores |")
    print("|---|---|---:|---:|")
    for name in args.recorded:
        speeds = {
            "fixed policy": recording_speed(name, args.recorded_steps, args.rounds),
            "MAPPO in training": args.steps / wall_time("mappo", name, args.num_envs, args.steps),
        }
        for title, speed in speeds.items():
            print(f"| {name} | {title} | {speed:,.0f} | {speed / QUOTED:.2f} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
