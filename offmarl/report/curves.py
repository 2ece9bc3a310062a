"""Learning curves: evaluations and training metrics of runs over their steps."""

from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from offmarl.report.run_scores import Entry, Results, is_finite
from offmarl.report.tables import Section
from offmarl.statistics import MIN_RUNS, Reference, bootstrap_interval, normalise
from offmarl.terminal import bars, interval
from offmarl.tracking import METRICS_FILE, read, read_run

_RESAMPLES = 1000
_BARS = 30
"""Most bars of a learning curve in a table."""


class Curve(NamedTuple):
    """A metric of the seeds of a run over the steps of its training."""

    steps: Int[np.ndarray, "points"]
    """Updates of a baseline, or environment steps of a recorder."""
    values: Float[np.ndarray, "seeds points"]
    """The mean of each evaluation, or the logged number."""
    dependent: bool = False
    """Whether the seeds are a population, whose members replaced one another."""

    @property
    def runs(self) -> Float[np.ndarray, "runs points"]:
        """Values of independent runs: a population counts as one."""
        return self.mean[None] if self.dependent else self.values

    @property
    def mean(self) -> Float[np.ndarray, "points"]:
        """Mean over the seeds."""
        return np.asarray(self.values.mean(0))

    def interval(self) -> Float[np.ndarray, "2 points"] | None:
        """Return the pointwise 95% bootstrap interval of the mean; None for too few seeds."""
        if len(self.runs) < MIN_RUNS:
            return None
        low, high = bootstrap_interval(
            lambda scores: scores.mean(-2), self.runs, seed=0, resamples=_RESAMPLES
        )
        return np.stack([low, high])

    def data(self) -> dict[str, Any]:
        """Return the points, for JSON."""
        interval = self.interval()
        low, high = (None, None) if interval is None else interval
        return {
            "step": self.steps,
            "mean": self.mean,
            "low": low,
            "high": high,
            "seeds": self.values,
        }


Curves = Mapping[str, Mapping[Entry, Curve]]
"""By dataset and entry."""


def read_curves(results: Results) -> Curves:
    """Return the curves of runs, by dataset and entry; without those that have none.

    Those of returns are of the best actions, for a fair comparison: a program that samples its
    actions has its own returns only where its best actions were not evaluated.
    """
    curves: dict[str, dict[Entry, Curve]] = {}
    for dataset, entries in results.items():
        seen: set[Path] = set()
        for entry, result in entries.items():  # greedy ones first
            if result.directory is None or result.directory in seen:
                continue
            if (curve := curves_of(result.directory).get(result.metric)) is not None:
                seen.add(result.directory)
                curves.setdefault(dataset, {})[entry] = curve
    return curves


def common_curves(
    curves: Curves, references: Mapping[str, Reference]
) -> dict[Entry, tuple[Int[np.ndarray, "points"], Float[np.ndarray, "points runs datasets"]]]:
    """Return the steps and scores of the entries that have a curve on every dataset.

    The numbers of seeds must be equal, and two steps or more in common. With references, scores are
    normalised.
    """
    common = {}
    for entry in next(iter(curves.values())):
        group = {name: entries[entry] for name, entries in curves.items() if entry in entries}
        steps = reduce(np.intersect1d, (curve.steps for curve in group.values()))
        if len(group) < len(curves) or len({len(curve.runs) for curve in group.values()}) > 1:
            continue
        shared = {name: x.runs[:, np.isin(x.steps, steps)].T for name, x in group.items()}
        scaled = [
            normalise(values, references[name]) if references else values
            for name, values in shared.items()
        ]
        if len(steps) > 1:
            common[entry] = steps, np.stack(scaled, axis=-1)
    return common


def curves_of(directory: Path) -> dict[str, Curve]:
    """Return all metrics of a run as curves, over the steps that all of its seeds have.

    Raises
    ------
    RunError
        The directory is not a run.
    """
    record = read_run(directory)
    seeds: list[int] = record["seeds"]
    rows = read(directory / METRICS_FILE)
    names = dict.fromkeys(name for row in rows for name in row if name not in ("seed", "step"))
    dependent = bool(record["args"].get("pbt"))
    curves = {x: _curve([row for row in rows if x in row], x, seeds, dependent) for x in names}
    return {name: curve for name, curve in curves.items() if len(curve.steps)}


def _curve(
    rows: Iterable[Mapping[str, Any]], name: str, seeds: list[int], dependent: bool
) -> Curve:
    points: dict[int, dict[int, float]] = {}
    for row in rows:
        value = row[name]
        if value != [] and is_finite(value):
            points.setdefault(row["step"], {})[row["seed"]] = float(np.mean(value))
    steps = sorted(step for step, by_seed in points.items() if len(by_seed) == len(seeds))
    values = np.array([[points[step][seed] for step in steps] for seed in seeds], float)
    return Curve(np.array(steps, int), values.reshape(len(seeds), len(steps)), dependent)


def learning_curves(curves: Curves) -> Section:
    """Return the curves as a table, whose bars have one scale for each dataset."""
    rows, banded = [], False
    for dataset, by_entry in curves.items():
        means = np.concatenate([curve.mean for curve in by_entry.values()])
        for entry, curve in by_entry.items():
            band = curve.interval()
            ends = (None, None) if band is None else band[:, -1].tolist()
            banded |= band is not None
            blocks = np.array_split(curve.mean, min(len(curve.mean), _BARS))
            heights = [float(block.mean()) for block in blocks]
            line = bars(heights, float(means.min()), float(means.max()))
            last = interval(float(curve.mean[-1]), *ends)
            first = float(curve.mean[0])
            rows.append([dataset, entry.label, first, line, last, int(curve.steps[-1])])
    heading = "last [95% interval]" if banded else "last"
    names = ["data", "run", "first", "mean over seeds", heading, "steps"]
    return Section("Learning curves", names, rows)
