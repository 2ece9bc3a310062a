"""Offline to online: does a recorder that continues from an offline run keep what was learned?

    python benchmarks/continuing.py --vault vaults/swarm/coverage-3.vlt/mappo-0-medium
    python benchmarks/continuing.py --vault VAULT --env ENV [--seeds 5] [--out DIR]

Trains `--offline` on the vault, and then `--online` twice: *continued*, with ``--init`` and
``--prefill``, and from *nothing*. Seeds are paired. It prints the greedy returns of each, and two
differences with 95% intervals over the seeds: of *continued* from its first evaluation, before any
update, in that evaluation where it is lowest; and of its last one from that of *nothing*. The same
command goes on after it was stopped.
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
    updates: int = 2000
    """Updates of the baseline."""
    total_steps: int = 30_720
    """Environment steps of the recorder."""
    seeds: int = 5
    """Number of seeds."""
    eval_episodes: int = 256
    """Episodes of an evaluation of the recorder."""
    out: Path = Path("continuing")
    """Directory of the runs."""


def curves(args: Args, name: str, *options: str) -> np.ndarray:
    """Train the recorder, and return the mean returns ``(seeds, evaluations)``."""
    out = args.out / name
    command = f"record {args.online} --env {args.env} --seeds {args.seeds} --evaluations 10"
    sizes = f"--total-steps {args.total_steps} --eval-episodes {args.eval_episodes} --out {out}"
    run(*command.split(), *sizes.split(), "--tiers", "", *options)
    (metrics,) = out.rglob(tracking.METRICS_FILE)
    rows = [row for row in tracking.read(metrics) if tracking.GREEDY_RETURN in row]
    returns = {(row["seed"], row["step"]): np.mean(row[tracking.GREEDY_RETURN]) for row in rows}
    seeds, steps = (sorted(set(values)) for values in zip(*returns, strict=True))
    return np.array([[returns[seed, step] for step in steps] for seed in seeds])


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "offmarl", *arguments], check=True)


def main(args: Args) -> None:
    policy = args.out / "offline"
    sizes = f"--updates {args.updates} --eval-every {args.updates // 2} --seeds {args.seeds}"
    vault = "--vault", str(args.vault)
    run("train", args.offline, *vault, *sizes.split(), "--out", str(policy))
    continued = curves(args, "continued", "--init", str(policy), "--prefill", str(args.vault))
    nothing = curves(args, "nothing")
    for name, returns in (("continued", continued), ("nothing", nothing)):
        print(f"{name:10}", *(f"{value:7.2f}" for value in returns.mean(0)))
    changes = continued - continued[:, :1]
    lowest = changes[:, changes.mean(0).argmin()]
    rows = {
        "offline": mean_interval(continued[:, 0]),
        "lowest minus offline": mean_interval(lowest),
        "last minus nothing": mean_interval(continued[:, -1] - nothing[:, -1]),
    }
    print(json.dumps({"env": args.env, "seeds": args.seeds} | rows, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
