"""Comparison of runs: which algorithm is better, on what data, and with what confidence."""

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from offmarl import statistics
from offmarl.report.run_scores import UNITS, Entry, RunScores, Scores
from offmarl.statistics import MIN_RUNS, Reference
from offmarl.tracking import RETURN

_SEED = 0  # of all bootstrap draws: the same runs always give the same intervals


class Estimate(NamedTuple):
    """A point estimate and its stratified bootstrap 95% interval."""

    value: float
    low: float | None = None
    """None below `statistics.MIN_RUNS` runs, and so is ``high``."""
    high: float | None = None


class Row(NamedTuple):
    """Scores of one entry on one dataset, or on all of them."""

    entry: Entry
    runs: int
    iqm: Estimate
    mean: float
    median: float
    """Over the runs of one dataset; over the datasets' means where there are several."""
    normalised: Estimate | None = None
    """IQM on the scale from random (0) to expert (1), if the references are known."""
    headline: bool = True
    """Whether this row is the result of its run: the last policy's best actions. Sampled actions
    are the result only of runs whose best actions were not evaluated."""
    best: Estimate | None = None
    """IQM of the best checkpoint of each seed, which is online tuning; see
    `offmarl.report.run_scores.best_scores`. None where it is unknown."""


class Comparison(NamedTuple):
    """Everything that ``offmarl compare`` shows."""

    scores: Scores
    datasets: dict[str, list[Row]]
    """For each dataset, its entries, in the unit of the metric."""
    references: Mapping[str, Reference]
    """Known reference returns, by dataset."""
    common: dict[Entry, Float[np.ndarray, "runs datasets"]]
    """Scores of the entries that ran on every dataset, with the same number of seeds: normalised
    if ``normalised``, else in the unit of the metric."""
    overall: list[Row]
    """The common entries over all datasets; empty for one dataset, or without a common scale."""
    improvement: dict[Entry, dict[Entry, Estimate]]
    """For two common entries that acted in the same way, the probability that a run of the first
    beats a run of the second."""
    unit: str
    """The unit of the scores."""
    normalised: bool
    """Whether the common scores are normalised."""
    pooled: bool
    """Whether the scores of all datasets have the same scale."""


def estimate(scores: RunScores) -> Estimate:
    """Return the interquartile mean of the runs on one dataset."""
    return _estimate(statistics.iqm, scores[:, None])


def compare(
    scores: Scores,
    references: Mapping[str, Reference] | None = None,
    metric: str = RETURN,
    best: Scores | None = None,
) -> Comparison:
    """Compare entries on one or several datasets.

    Parameters
    ----------
    scores
        As `read_runs` returns them.
    references
        Returns to normalise by, for each dataset. Returns of several datasets are summarised only
        if all of them have references.
    metric
        Metric of the scores, a key of `UNITS`; agreement is not normalised.
    best
        Scores of the best checkpoints, as `read_runs` returns them.

    Raises
    ------
    OptionError
        The references are equal or not finite.
    """
    known = references if references and metric == RETURN else {}
    normalised = all(dataset in known for dataset in scores)
    pooled = normalised or len(scores) == 1 or metric != RETURN
    common = _common(scores, known if normalised else {})
    overall = [
        _row(entry, runs, statistics.median(runs))._replace(headline=is_headline(entry, common))
        for entry, runs in common.items()
    ]
    return Comparison(
        scores,
        {
            dataset: _dataset_rows(found, (best or {}).get(dataset, {}), known.get(dataset))
            for dataset, found in scores.items()
        },
        known,
        common,
        overall if pooled and len(scores) > 1 else [],
        _improvement(common),
        UNITS[metric],
        normalised,
        pooled,
    )


def _common(
    scores: Scores, references: Mapping[str, Reference]
) -> dict[Entry, Float[np.ndarray, "runs datasets"]]:
    columns = [
        {
            entry: statistics.normalise(runs, references[dataset]) if references else runs
            for entry, runs in found.items()
        }
        for dataset, found in scores.items()
    ]
    entries = [entry for entry in columns[0] if all(entry in column for column in columns)]
    stacks = {entry: [column[entry] for column in columns] for entry in entries}
    return {
        entry: np.stack(runs, axis=1)
        for entry, runs in stacks.items()
        if len({len(column) for column in runs}) == 1
    }


def _improvement(
    common: Mapping[Entry, Float[np.ndarray, "_ datasets"]],
) -> dict[Entry, dict[Entry, Estimate]]:
    """Compare every two entries that acted alike; returns need no common scale for it."""
    found = {
        first: {
            second: _estimate(statistics.probability_of_improvement, x, y)
            for second, y in common.items()
            if second != first and second.acting == first.acting
        }
        for first, x in common.items()
    }
    return {entry: others for entry, others in found.items() if others}


def _dataset_rows(
    scores: Mapping[Entry, RunScores],
    best: Mapping[Entry, RunScores],
    reference: Reference | None,
) -> list[Row]:
    return [
        _row(entry, runs[:, None], np.median(runs))._replace(
            normalised=estimate(statistics.normalise(runs, reference)) if reference else None,
            headline=is_headline(entry, scores),
            best=estimate(best[entry]) if entry in best else None,
        )
        for entry, runs in scores.items()
    ]


def is_headline(entry: Entry, entries: Container[Entry]) -> bool:
    """Whether an entry is the result of its run; see `Row.headline`."""
    return entry.acting != "sampled" or entry._replace(acting="greedy") not in entries


def _row(entry: Entry, scores: Float[np.ndarray, "runs tasks"], median: Any) -> Row:
    mean = float(statistics.mean(scores))
    return Row(entry, len(scores), _estimate(statistics.iqm, scores), mean, float(median))


def _estimate(function: statistics.Estimate, *scores: Float[np.ndarray, "_ tasks"]) -> Estimate:
    value = float(function(*map(statistics.checked, scores)))
    if min(map(len, scores)) < MIN_RUNS:
        return Estimate(value)
    low, high = statistics.bootstrap_interval(function, *scores, seed=_SEED)
    return Estimate(value, float(low), float(high))
