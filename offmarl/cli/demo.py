"""``offmarl demo``: record, train offline and compare, on a small swarm."""

from concurrent.futures import wait
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group

from offmarl import programs, report, vault
from offmarl._ahead import in_thread
from offmarl.cli.output import Report, grid, table
from offmarl.config import SeedCount
from offmarl.programs import registry
from offmarl.statistics import MIN_RUNS
from offmarl.terminal import interval, number
from offmarl.tracking import replace_file

if TYPE_CHECKING:
    from offmarl.report.run_scores import Scores

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


def demo(out: Path = Path("demo"), seeds: SeedCount = 3, seed: int = 0) -> Report:
    """Record, train offline and compare on a small swarm, in minutes.

    A swarm is trained online and recorded at four tiers. Policies are trained offline on two of
    them, and compared in a table, a figure and a page; a film shows one of them. If the command is
    stopped, repeat it to continue.

    Parameters
    ----------
    out
        Directory for the vaults, the runs, the figure, the film and the page.
    seeds
        Number of training seeds of each baseline.
    seed
        Seed of all random numbers.
    """
    from offmarl.programs.runs.compiling import use_cores  # imports JAX, which --help does without
    from offmarl.programs.runs.training import more_to_come
    from offmarl.report.run_scores import entry_of, gather, scores_in

    use_cores(seeds, "auto")
    with more_to_come():
        mappo = registry.load("recorder", "mappo")
        options = {"env": _ENV, "tiers": ",".join(_TIERS), "out": out / "vaults"}
        mappo.main(mappo.Args(**options, **_RECORDER, seed=seed))
        runs = _train_all(out, seeds, seed)
    datasets = {tier: vault.open_vault(_vault(out, tier, seed)) for tier in _TIERS}
    tiers = {tier: data.episodes.complete_returns.tolist() for tier, data in datasets.items()}
    entries = {tier: {entry_of(run): run for run in group.values()} for tier, group in runs.items()}
    scores = scores_in(gather(entries))
    report.figure_demo(tiers, scores, figure := out / "demo.png")
    return _report(tiers, scores, {"figure": figure, **_draw(runs, out)}, out)


def _draw(runs: dict[str, dict[str, Path]], out: Path) -> dict[str, Path]:
    """Draw an episode of a policy, and make the page that `offmarl compare` makes of all runs."""
    from offmarl.hub.card import references
    from offmarl.report import pages, render

    watched = [*runs[_TRAIN_ON[-1]].values()]
    film, page = out / "demo.gif", out / "demo.html"
    render.save(render.play_run(programs.load_policy(watched[min(1, len(watched) - 1)])), film)
    paths = [run for group in runs.values() for run in group.values()]
    compared = report.compare_runs(paths, references(), {})
    replace_file(page, pages.comparison_page(compared, watched=watched))
    return {"film": film, "page": page}


def _vault(out: Path, tier: str, seed: int) -> Path:
    return out / "vaults" / f"{_ENV}.vlt" / f"mappo-{seed}-{tier}"


def _train_all(out: Path, seeds: int, seed: int) -> dict[str, dict[str, Path]]:
    """Train every baseline on each tier, and compile the next baseline meanwhile."""
    from offmarl.programs.offline import train_ahead

    runs: dict[str, dict[str, Path]] = {tier: {} for tier in _TRAIN_ON}
    for name, following in zip_longest(_BASELINES, [*_BASELINES][1:]):
        compiling = []
        if following is not None:
            program, args = _baseline(following, _TRAIN_ON[0], out, seeds, seed)
            work = partial(train_ahead, program.make, args)
            compiling.append(in_thread(work, "offmarl-compile"))
        for tier in _TRAIN_ON:
            program, args = _baseline(name, tier, out, seeds, seed)
            runs[tier][name] = program.main(args)
        wait(compiling)
    return runs


def _baseline(name: str, tier: str, out: Path, seeds: int, seed: int) -> tuple[Any, Any]:
    """Return a baseline and its arguments."""
    program = registry.load("baseline", name)
    paths = {"vault": _vault(out, tier, seed), "out": out / "runs" / tier / name}
    options = _BASELINE | _BASELINES[name]
    return program, program.Args(**paths, **options, seeds=seeds, seed=seed)


def _report(
    tiers: dict[str, list[float]], scores: "Scores", files: dict[str, Path], out: Path
) -> Report:
    recorded = {
        tier: {"episodes": len(returns), "mean_return": float(np.mean(returns))}
        for tier, returns in tiers.items()
    }
    trained = {
        tier: {entry.label: report.estimate(values) for entry, values in by_policy.items()}
        for tier, by_policy in scores.items()
    }
    enough = any(iqm.low is not None for iqms in trained.values() for iqm in iqms.values())
    data = {
        "recorded": recorded,
        "trained": {
            tier: {name: iqm._asdict() for name, iqm in trained[tier].items()} for tier in trained
        },
        **files,
    }
    means = ", ".join(f"{tier} {number(row['mean_return'])}" for tier, row in recorded.items())
    policies = next(iter(trained.values()))
    rows = [["the data", *(number(recorded[tier]["mean_return"]) for tier in trained)]]
    rows += [[name, *(interval(*trained[tier][name]) for tier in trained)] for name in policies]
    text = Group(
        table(
            ["policy", *(f"trained on {tier}" for tier in trained)],
            rows,
            f"Returns in {_ENV}: IQM over seeds"
            + (" [95% interval]" if enough else f"; intervals need at least {MIN_RUNS} seeds"),
        ),
        f"Mean returns of the data: {means}",
        grid({**files, "vaults": out / "vaults", "runs": out / "runs"}),
    )
    return Report(data, text)
