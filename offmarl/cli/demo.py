"""``offmarl demo``: record, train offline and compare, on a small swarm."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from rich.console import Group

from offmarl.cli.output import Report, table
from offmarl.programs import registry
from offmarl.programs.compiling import use_cores
from offmarl.programs.run import more_to_come
from offmarl.report import Entry, estimate, figure_demo, scores_of
from offmarl.statistics import MIN_RUNS
from offmarl.terminal import interval

_ENV = "swarm/coverage-3"
_TIERS = ("random", "medium", "expert", "replay")
_TRAIN_ON = ("medium", "expert")
_RECORDER = {"total_steps": 160_000, "steps": 20_000, "evaluations": 16}
_BASELINE = {"batch_size": 16, "length": 10, "learning_rate": 1e-3, "final_episodes": 96}
_BASELINES: dict[str, dict[str, Any]] = {
    "bc": {"updates": 1_000, "schedule": "linear"},
    "maicq": {"updates": 1_000, "gamma": 0.95},
    "qmix_cql": {"updates": 1_000, "gamma": 0.95},
}


def demo(out: Path = Path("demo"), seeds: int = 3, seed: int = 0) -> Report:
    """Record, train offline and compare on a small swarm, in minutes.

    A swarm is trained online and recorded at four tiers. Policies are trained offline on two of
    them, and compared. If the command is stopped, repeat it to continue.

    Parameters
    ----------
    out
        Directory for the vaults, the runs and the figure.
    seeds
        Number of training seeds of each baseline.
    seed
        Seed of all random numbers.
    """
    use_cores(seeds, "auto")
    with more_to_come():
        _record(out, seed)
        runs = {
            tier: {name: _train(name, tier, out, seeds, seed) for name in _BASELINES}
            for tier in _TRAIN_ON
        }
    tiers = {tier: _returns(_vault(out, tier, seed)) for tier in _TIERS}
    scores = {tier: _scores(runs[tier].values()) for tier in runs}
    figure = out / "demo.png"
    figure_demo(tiers, scores, figure)
    return _report(tiers, scores, out, figure)


def _vault(out: Path, tier: str, seed: int) -> Path:
    return out / "vaults" / f"{_ENV}.vlt" / f"mappo-{seed}-{tier}"


def _record(out: Path, seed: int) -> None:
    mappo = registry.load("recorder", "mappo")
    where = {"env": _ENV, "tiers": ",".join(_TIERS), "out": out / "vaults"}
    mappo.main(mappo.Args(**where, **_RECORDER, seed=seed))


def _train(name: str, tier: str, out: Path, seeds: int, seed: int) -> Path:
    program = registry.load("baseline", name)
    where = {"vault": _vault(out, tier, seed), "out": out / "runs" / tier / name}
    options = _BASELINE | _BASELINES[name]
    run: Path = program.main(program.Args(**where, **options, seeds=seeds, seed=seed))
    return run


def _returns(path: Path) -> list[float]:
    """Return the returns of a vault's complete episodes, the mean over agents."""
    from offmarl.vault import open_vault

    returns: list[float] = open_vault(path).episodes.complete_returns.tolist()
    return returns


def _scores(runs: Iterable[Path]) -> dict[Entry, Float[np.ndarray, "seeds"]]:
    """Return the scores of runs: first of greedy policies, then of sampled ones."""
    found = [item for run in runs for item in scores_of(run).items()]
    return dict(sorted(found, key=lambda item: item[0].acting == "sampled"))


def _report(
    tiers: dict[str, list[float]],
    scores: dict[str, dict[Entry, Float[np.ndarray, "seeds"]]],
    out: Path,
    figure: Path,
) -> Report:
    recorded = {
        tier: {"episodes": len(returns), "mean_return": float(np.mean(returns))}
        for tier, returns in tiers.items()
    }
    trained = {
        tier: {entry.label: estimate(values) for entry, values in found.items()}
        for tier, found in scores.items()
    }
    enough = any(iqm.low is not None for found in trained.values() for iqm in found.values())
    data = {
        "recorded": recorded,
        "trained": {
            tier: {name: iqm._asdict() for name, iqm in trained[tier].items()} for tier in trained
        },
        "figure": figure,
    }
    text = Group(
        table(
            ["tier", "episodes", "mean return"],
            [[tier, *row.values()] for tier, row in recorded.items()],
            f"Recorded: {_ENV}, MAPPO",
        ),
        table(
            ["trained on", "data", *next(iter(trained.values()))],
            [
                [
                    tier,
                    float(np.mean(tiers[tier])),
                    *(interval(*iqm) for iqm in trained[tier].values()),
                ]
                for tier in trained
            ],
            "Trained offline: IQM of the return over seeds"
            + (" [95% interval]" if enough else f"; intervals need at least {MIN_RUNS} seeds"),
        ),
        f"Figure: {figure}   Vaults: {out / 'vaults'}   Runs: {out / 'runs'}",
    )
    return Report(data, text)
