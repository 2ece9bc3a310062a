"""Offline to online: does a recorder that continues from an offline run keep what was learned?

    python benchmarks/continuing.py --vault vaults/swarm/coverage-3.vlt/mappo-0-medium
    python benchmarks/continuing.py --vault VAULT --env ENV [--seeds 5] [--out DIR]

Trains `--offline` on the vault, and then `--online` in three ways: *continued* (``--init`` and
``--prefill``), *data* (``--prefill`` alone) and *nothing*. Seeds are paired. It prints the returns
of each, and two differences with 95% intervals over the seeds: the lowest evaluation of *continued*
minus its first one, before any update, and its last one minus that of *nothing*. The same command
goes on after it was stopped.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from offmarl import tracking
from offmarl.statistics import mean_interval


@dataclass(frozen=True)
class Args:
    vault: Path
    """Data to learn from, recorded in the environment."""
    env: str = "swarm/coverage-3"
    """Environment."""
    offline: str = "qmix_cql"
    """Baseline."""
    online: str = "qmix"
    """Recorder, which learns values with the baseline's networks."""
    updates: int = 5000
    """Updates of the baseline."""
    total_steps: int = 30_720
    """Environment steps of the recorder."""
    seeds: int = 5
    """Number of seeds."""
    out: Path = Path("continuing")
    """Directory of the runs."""


def curves(args: Args, name: str, *options: str) -> np.ndarray:
    """Train the recorder, and return the mean returns ``(seeds, evaluations)``."""
    out = args.out / name
    command = f"record {args.online} --env {args.env} --seeds {args.seeds} --evaluations 10"
    sizes = "--total-steps", str(args.total_steps), "--tiers", "", "--out", str(out)
    run(*command.split(), *sizes, *options)
    (metrics,) = out.rglob(tracking.METRICS_FILE)
    rows = [row for row in tracking.read(metrics) if tracking.RETURN in row]
    found = {(row["seed"], row["step"]): np.mean(row[tracking.RETURN]) for row in rows}
    seeds, steps = (sorted(set(values)) for values in zip(*found, strict=True))
    return np.array([[found[seed, step] for step in steps] for seed in seeds])


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "offmarl", *arguments], check=True)


def main(args: Args) -> None:
    policy, data = args.out / "offline", ("--prefill", str(args.vault))
    sizes = f"--updates {args.updates} --seeds {args.seeds} --out {policy}"
    run("train", args.offline, "--vault", str(args.vault), *sizes.split())
    found = {
        "continued": curves(args, "continued", "--init", str(policy), *data, "--exploration", "0"),
        "data": curves(args, "data", *data),
        "nothing": curves(args, "nothing"),
    }
    for name, returns in found.items():
        print(f"{name:10}", *(f"{value:7.2f}" for value in returns.mean(0)))
    own = found["continued"]
    rows = {
        "lowest minus first": mean_interval(own.min(1) - own[:, 0]),
        "last minus nothing": mean_interval(own[:, -1] - found["nothing"][:, -1]),
    }
    print(json.dumps({"env": args.env, "seeds": args.seeds} | rows, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
