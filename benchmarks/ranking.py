"""Whether fitted Q evaluation orders policies as their returns do: ten checkpoints, two datasets.

The plan was written down before any run. VDN records its training data in two environments, with
two seeds each. Three algorithms learn from the data of the first seed: `bc` and `maicq` keep three
checkpoints each, `iql_cql` four. `offmarl ope` estimates all ten from the data of the second seed,
which none of them has seen, and Spearman's correlation with their returns in the environment is
printed. The aim is above 0.8 on both::

    python benchmarks/ranking.py
    python benchmarks/ranking.py --steps 20000 --updates 1000 --envs swarm/coverage-3
"""

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from offmarl.cli.ope import ope
from offmarl.programs import registry

CHECKPOINTS = {"bc": 3, "maicq": 3, "iql_cql": 4}
"""How many checkpoints each algorithm keeps."""


@dataclass(frozen=True)
class Args:
    envs: tuple[str, ...] = ("swarm/coverage-3", "jaxmarl/mpe/simple_spread_v3")
    """Environments."""
    steps: int = 60_000
    """Steps that VDN records with each seed."""
    every: int = 500
    """Updates between the checkpoints of an algorithm."""
    updates: int = 15_000
    """Updates of the critics of `offmarl ope`."""
    members: int = 1
    """Critics of resampled episodes, for intervals, of which a ranking needs none."""
    episodes: int = 4_096
    """Episodes of the returns: with 256, chance decides the order of similar policies."""
    out: Path = Path("runs/ranking")
    """Directory for the vaults and the runs."""


def record(env: str, args: Args) -> list[Path]:
    """Record what VDN learns from, with two seeds; return the vaults."""
    program = registry.load("recorder", "vdn")
    out = args.out / "vaults"
    program.main(
        program.Args(
            env=env, out=out, tiers="replay", seeds=2, total_steps=args.steps, evaluations=2
        )
    )
    return [out / f"{env}.vlt" / f"vdn-{seed}-replay" for seed in (0, 1)]


def train(name: str, env: str, vault: Path, args: Args) -> Path:
    """Train an algorithm; return its run, which holds all checkpoints."""
    program = registry.load("baseline", name)
    run: Path = program.main(
        program.Args(
            vault=vault,
            out=args.out / "runs" / env / name,
            updates=CHECKPOINTS[name] * args.every,
            eval_every=args.every,
            eval_episodes=args.episodes,
            final_episodes=args.episodes,
            keep="all",
        )
    )
    return run


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    for env in args.envs:
        own, other = record(env, args)
        runs = tuple(train(name, env, own, args) for name in CHECKPOINTS)
        found = ope(
            runs,
            vault=str(other),
            methods=("fqe",),
            checkpoints="all",
            updates=args.updates,
            members=args.members,
        )
        Console(width=120).print(env, found.text)
        ranking = found.data["ranking"]["fqe"]
        print(f"{env}: {ranking['policies']} policies, Spearman {ranking['spearman']:.2f}")


if __name__ == "__main__":
    main()
