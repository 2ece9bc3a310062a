"""Cost of launchers: tasks through each, and the same commands through ``xargs -P``.

    python benchmarks/tasks.py [--seconds 30] [--tasks 16] [--workers 2] [--launchers local ray]

A task records one block of a fixed policy. The sizes are chosen such that a block takes about
``--seconds`` beside others. SLURM needs a running cluster. Each way begins with an empty directory
and ends with the joined recording; all of them use one cache of compiled programs, which is filled
before. The ratio is to xargs.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

OFFMARL = (sys.executable, "-m", "offmarl")
ENVS = 64


@dataclass(frozen=True)
class Args:
    """Settings."""

    seconds: float = 30.0
    """Approximate duration of a task, of which one runs on each core."""
    tasks: int = 16
    """Number of tasks."""
    workers: int = 2
    """Tasks that run at the same time."""
    launchers: tuple[str, ...] = ("local", "ray", "slurm")
    """What is compared with xargs; those that are not there are left out."""
    env: str = "jaxmarl/smax/3m"
    """Environment."""
    policy: str = "random"
    """A fixed policy of the environment."""


def command(args: Args, out: Path, block: int) -> list[str]:
    steps = ["--steps", str(block * args.tasks), "--block-steps", str(block)]
    record = ["record", "--policy", args.policy, "--env", args.env, "--num-envs", str(ENVS)]
    return [*OFFMARL, *record, *steps, "--out", str(out)]


def run(words: list[str]) -> float:
    quiet = os.environ | {"OFFMARL_QUIET": "1"}
    begun = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=quiet)
    return time.perf_counter() - begun


def through_xargs(args: Args, out: Path, block: int) -> float:
    words = [*command(args, out, block), "--task", f"{{}}/{args.tasks}"]
    numbers = "\n".join(map(str, range(args.tasks)))
    begun = time.perf_counter()
    subprocess.run(
        ["xargs", f"-P{args.workers}", "-I{}", *words],
        input=numbers,
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    run([*command(args, out, block), "--join"])
    return time.perf_counter() - begun


def block_of(args: Args, root: Path) -> int:
    """Return the steps of a block that takes so long on one core, beside others."""
    least = 256 * ENVS
    small = replace(args, tasks=args.workers)
    times = []
    for size in (2 * least, 8 * least):
        for attempt in ("compile", "measure"):
            out = root / f"{attempt}-{size}"
            words = [*command(small, out, size), "--tasks", str(args.workers)]
            taken = run([*words, "--jobs", str(args.workers)])
            shutil.rmtree(out)
        times.append(taken)
    seconds_per_step = (times[1] - times[0]) / (6 * least)
    return max(round(args.seconds / seconds_per_step / least), 1) * least


def digest(out: Path) -> str:
    (path,) = (file.parent for file in out.rglob("metadata.json") if ".tasks" not in str(file))
    shown = subprocess.run(
        [*OFFMARL, "show", str(path), "--json"], check=True, capture_output=True, text=True
    )
    return str(json.loads(shown.stdout)["digest"])


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        block = block_of(args, root)
        print(f"{args.tasks} tasks of {block:,} steps, {args.workers} at a time")
        base = through_xargs(args, root / "xargs", block)
        digests = {digest(root / "xargs")}
        shutil.rmtree(root / "xargs")
        print(f"xargs -P{args.workers}: {base:.1f} s", flush=True)
        for launcher in args.launchers:
            options = ["--tasks", str(args.tasks), "--jobs", str(args.workers)]
            out = root / launcher
            try:
                taken = run([*command(args, out, block), *options, "--launcher", launcher])
            except subprocess.CalledProcessError:
                print(f"{launcher}: not available here")
                continue
            digests.add(digest(out))
            shutil.rmtree(out)
            print(f"{launcher}: {taken:.1f} s, {taken / base:.3f} of xargs", flush=True)
        print(f"{len(digests)} different digests (1 is expected)")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
