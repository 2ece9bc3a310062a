"""Time from the start of a command to its first logged update, on a second start.

    taskset -c 0 python benchmarks/first_update.py vaults/jaxmarl/smax/3m.vlt/random-0

A first start of each program compiles, and keeps what it compiled; those after it are timed. Python
keeps its own compiled files, too, as it does by default. The first logged update is the first line
of ``metrics.jsonl`` with a loss. Before it, a run with an environment evaluates the untrained
policy, whose line comes first. The peer is the same command of an earlier commit, given with
``--checkout``: its package is imported in place of the installed one.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from offmarl import tracking


@dataclass(frozen=True)
class Args:
    """Settings."""

    vault: tyro.conf.Positional[Path]
    """Vault to learn from."""
    programs: tuple[str, ...] = ("bc", "maicq")
    """Baselines."""
    starts: int = 5
    """Starts that are timed, after a first."""
    updates: int = 2000
    """Updates asked for; a run is stopped after its first loss."""
    checkout: Path | None = None
    """Root of another checkout of offmarl."""


def start(args: Args, program: str, extra: tuple[str, ...], directory: Path) -> dict[str, float]:
    """Start a run, and stop it after its first loss; return the times of the first lines."""
    command = [sys.executable, "-P", "-m", "offmarl", "train", program]
    command += ["--vault", str(args.vault.resolve())]
    command += ["--updates", str(args.updates), "--out", str(directory / "run"), *extra]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env |= {"XDG_CACHE_HOME": str(directory.parent / "cache")}
    if args.checkout is not None:
        env |= {"PYTHONPATH": str(args.checkout.resolve())}
    begun, times = time.monotonic(), {}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as run:
        while "loss" not in times:
            if run.poll() is not None:
                raise SystemExit(run.stderr.read().decode() if run.stderr else "")
            for line in tracking.read(directory / "run" / tracking.METRICS_FILE):
                kind = "loss" if any("loss" in name for name in line) else "evaluation"
                times.setdefault(kind, time.monotonic() - begun)
            time.sleep(0.02)
        run.kill()
    return times


def main(args: Args) -> None:
    """Print the seconds of each program, without and with the environment."""
    with tempfile.TemporaryDirectory() as scratch:
        for program in args.programs:
            for extra in (("--env", "none"), ()):
                times = [
                    start(args, program, extra, Path(scratch, f"{program}-{len(extra)}-{number}"))
                    for number in range(args.starts + 1)
                ][1:]
                kind = "with the environment" if not extra else "without"
                for name in sorted(times[0]):
                    seconds = np.array([each[name] for each in times])
                    print(
                        f"{program} {kind}: first {name} after {np.median(seconds):.1f} s "
                        f"({seconds.min():.1f} to {seconds.max():.1f})",
                        flush=True,
                    )


if __name__ == "__main__":
    main(tyro.cli(Args))
