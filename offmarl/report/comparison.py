"""Which algorithm is better, on what data, and how sure that is."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from offmarl import statistics
from offmarl.errors import RunError
from offmarl.paths import local
from offmarl.tracking import (
    AGREEMENT,
    MARL_EVAL_FILE,
    METRICS_FILE,
    RETURN,
    read,
    read_json,
    read_run,
)

RunScores = Float[np.ndarray, "runs"]
"""One number per training seed: the mean return of its final evaluation."""

Scores = Mapping[str, Mapping[str, RunScores]]
"""Dataset to algorithm to scores."""

UNITS = {RETURN: "episode return", AGREEMENT: "agreement with held-out actions"}
"""What runs can be compared by: metric to words."""

_SEED = 0  # of all bootstrap draws: the same runs always give the same intervals


class Estimate(NamedTuple):
    """A point estimate and its stratified bootstrap 95% interval."""

    value: float
    low: float
    high: float


class Row(NamedTuple):
    """How one algorithm did on one dataset, or on all of them."""

    algorithm: str
    runs: int
    iqm: Estimate
    mean: float
    median: float
    """Over the runs of one dataset; over the datasets' means where there are several."""


class Comparison(NamedTuple):
    """Everything ``offmarl compare`` shows."""

    scores: Scores
    datasets: dict[str, list[Row]]
    """For each dataset, its algorithms, in the unit of the return."""
    common: dict[str, Float[np.ndarray, "runs datasets"]]
    """Scores of the algorithms that ran on every dataset, with the same number of seeds:
    normalised if there are several datasets, else returns."""
    overall: list[Row]
    """Of these, over all datasets; empty if there is only one dataset."""
    improvement: dict[str, dict[str, Estimate]]
    """Of these, the probability that a run of the first beats a run of the second."""
    unit: str = "episode return"
    """What the scores are."""

    @property
    def normalised(self) -> bool:
        """Whether the common scores are normalised."""
        return len(self.scores) > 1


def estimate(scores: RunScores) -> Estimate:
    """Return the interquartile mean of the runs on one dataset."""
    return _estimate(statistics.iqm, scores[:, None])


def compare(scores: Scores, unit: str = UNITS[RETURN]) -> Comparison:
    """Compare algorithms on one or several datasets.

    Returns of different datasets are made comparable by putting the worst run compared on each at
    0 and the best at 1.
    """
    common = _common(scores)
    datasets = {
        dataset: [_row(name, runs[:, None], np.median(runs)) for name, runs in entries.items()]
        for dataset, entries in scores.items()
    }
    overall = [_row(name, runs, statistics.median(runs)) for name, runs in common.items()]
    improvement = {
        first: {
            second: _estimate(statistics.probability_of_improvement, x, y)
            for second, y in common.items()
            if second != first
        }
        for first, x in common.items()
    }
    return Comparison(
        scores, datasets, common, overall if len(scores) > 1 else [], improvement, unit
    )


def metric_of(directories: Iterable[Path]) -> str:
    """Return what runs can be compared by: their returns, or the actions that they agree with.

    Raises
    ------
    RunError
        They have nothing in common, or have not been evaluated.
    """
    found = [final_metrics(directory) for directory in directories]
    for metric in UNITS:
        if all(metric in metrics for metrics in found):
            return metric
    raise RunError(
        "some of these runs were evaluated in an environment and some with held-out episodes, so "
        "they cannot be compared: train all with the same --env and --held-out."
    )


def read_runs(directories: Iterable[Path], metric: str = RETURN) -> dict[str, dict[str, RunScores]]:
    """Return the final scores of runs, by dataset and algorithm.

    Runs of one program on one dataset are told apart by the name of their directory.

    Raises
    ------
    RunError
        A directory is not that of a run, or its run has not been evaluated.
    """
    runs = [(path, read_run(path)) for path in dict.fromkeys(map(local, directories))]
    labels = [(_dataset(run), run["program"]) for _, run in runs]
    scores: dict[str, dict[str, RunScores]] = {}
    for (path, _), (dataset, program) in zip(runs, labels, strict=True):
        alone = labels.count((dataset, program)) == 1
        name = program if alone else f"{program} ({path.name})"
        means = [values.mean() for values in final_returns(path, metric).values()]
        scores.setdefault(dataset, {})[name] = np.array(means)
    return scores


def final_returns(
    directory: Path, metric: str = RETURN
) -> dict[int, Float[np.ndarray, "episodes"]]:
    """Return the final evaluation of a run: the returns of its episodes, by training seed.

    Nothing where the run has no such metric.

    Raises
    ------
    RunError
        It is not a run's directory, or its run has not been evaluated (to the end).
    """
    return {
        seed: np.array(metrics[metric], float)
        for seed, metrics in _final(directory).items()
        if metric in metrics
    }


def final_metrics(directory: Path) -> set[str]:
    """Return the names of what a run's final evaluation measured; errors as `final_returns`."""
    return {name for metrics in _final(directory).values() for name in metrics}


def last_metrics(directory: Path) -> dict[str, float]:
    """Return the training metrics that a run logged last, losses among them: means over seeds."""
    rows = [row for row in read(directory / METRICS_FILE) if not UNITS.keys() & row.keys()]
    last = [row for row in rows if row["step"] == rows[-1]["step"]]
    names = [name for name in last[0] if name not in ("seed", "step")] if last else []
    values = {name: [row[name] for row in last if row.get(name) is not None] for name in names}
    return {name: float(np.mean(value)) for name, value in values.items() if value}


def _final(directory: Path) -> dict[int, Mapping[str, Any]]:
    """Return the metrics of a run's final evaluation, by training seed."""
    run = read_run(directory)
    if run.get("complete") and not (directory / MARL_EVAL_FILE).exists():
        raise RunError(
            f"{directory} was trained without being evaluated, so there is nothing to compare: "
            + (
                "it was recorded by an older offmarl; record it anew."
                if run.get("kind") == "recorder"
                else "train it anew, with --env where its environment can be made, or with "
                "--held-out."
            )
        )
    document = read_json(directory, MARL_EVAL_FILE)
    try:
        (tasks,) = document.values()
        (algorithms,) = tasks.values()
        (runs,) = algorithms.values()
        found: dict[int, Mapping[str, Any]] = {
            int(name.removeprefix("seed_")): dict(run["absolute_metrics"])
            for name, run in runs.items()
        }
    except (ValueError, KeyError, AttributeError, TypeError):
        found = {}
    if not any(found.values()):
        raise RunError(
            f"{directory / MARL_EVAL_FILE} holds no final evaluation: let the run finish, with the "
            "same command."
        )
    return found


def _dataset(run: Mapping[str, Any]) -> str:
    return str(run.get("vault") or run["spec"]["name"])


def _common(scores: Scores) -> dict[str, Float[np.ndarray, "runs datasets"]]:
    columns = [_normalised(entries) if len(scores) > 1 else entries for entries in scores.values()]
    names = [name for name in columns[0] if all(name in column for column in columns)]
    stacks = {name: [column[name] for column in columns] for name in names}
    return {
        name: np.stack(runs, axis=1)
        for name, runs in stacks.items()
        if len({len(column) for column in runs}) == 1
    }


def _normalised(entries: Mapping[str, RunScores]) -> dict[str, RunScores]:
    everything = np.concatenate(list(entries.values()))
    span = np.ptp(everything) or 1.0
    return {name: (runs - everything.min()) / span for name, runs in entries.items()}


def _row(name: str, scores: Float[np.ndarray, "runs tasks"], median: Any) -> Row:
    mean = float(statistics.mean(scores))
    return Row(name, len(scores), _estimate(statistics.iqm, scores), mean, float(median))


def _estimate(function: statistics.Estimate, *scores: Float[np.ndarray, "_ tasks"]) -> Estimate:
    low, high = statistics.bootstrap_interval(function, *scores, seed=_SEED)
    return Estimate(float(function(*scores)), float(low), float(high))
