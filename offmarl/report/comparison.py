"""Comparison of runs: which algorithm is better, on what data, and with what confidence."""

from collections.abc import Container, Iterator, Mapping
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from offmarl import statistics
from offmarl.report.run_scores import UNITS, Data, Entry, Runs, RunScores, Scores
from offmarl.statistics import ENOUGH_RUNS, MIN_RUNS, Estimate, Reference
from offmarl.terminal import number
from offmarl.tracking import RETURN

_SEED = 0  # of all bootstrap draws: the same runs always give the same intervals


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


def _estimate(function: statistics.Estimator, *scores: Float[np.ndarray, "_ tasks"]) -> Estimate:
    value = float(function(*map(statistics.checked, scores)))
    if min(map(len, scores)) < MIN_RUNS:
        return Estimate(value)
    low, high = statistics.bootstrap_interval(function, *scores, seed=_SEED)
    return Estimate(value, float(low), float(high))


# ---------------------------------------------------------------------------------- notes


def notes(comparison: Comparison, found: Runs, metric: str, pool_settings: bool) -> Iterator[str]:
    """Say how scores are normalised, what is missing, and what to be careful about."""
    scales = {found.data[name].environment: one for name, one in comparison.references.items()}
    for env, reference in scales.items():
        yield (
            f"Returns in {env} are normalised: 0 is random play ({number(reference.random)}), 1 is "
            f"the expert ({number(reference.expert)})."
        )
    if found.outside:
        yield (
            "Files of marl-eval's layout do not say how their policies acted, so these are "
            "compared only with one another. Unless --references are given, returns are raw on "
            f"{', '.join(sorted(found.outside))}."
        )
    raw = dict.fromkeys(
        data.environment
        for name, data in found.data.items()
        if name not in comparison.references and name not in found.outside
    )
    if metric == RETURN and raw:
        given = " ".join(f"{quote(env)} RANDOM EXPERT" for env in raw)
        yield (
            f"The reference returns of {', '.join(raw)} are unknown, so returns there are not "
            f"normalised: give them with --references {given}."
            + ("" if comparison.pooled else " Without them the datasets are not summarised.")
        )
    yield from _caveats(comparison, found, metric, pool_settings)


def _caveats(
    comparison: Comparison, found: Runs, metric: str, pool_settings: bool
) -> Iterator[str]:
    """Point out equal names, other settings, how policies acted, and too few seeds."""
    names = [data.name for data in found.data.values()]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"Several datasets or environments are named {name}: each is compared separately."
    for program, settings in found.settings.items():
        yield (
            f"{program} was trained with other settings on one dataset than on another "
            f"({', '.join(settings)}): "
            + (
                "its runs are summarised together, because --pool-settings was given."
                if pool_settings
                else "such runs are not summarised together, unless --pool-settings is given."
            )
        )
    yield from _left_out(comparison)
    yield from _about_acting(comparison)
    if any(row.best for rows in comparison.datasets.values() for row in rows):
        yield about_best(metric == RETURN)
    few = min(len(runs) for one in comparison.scores.values() for runs in one.values())
    if few < MIN_RUNS:
        yield f"Intervals need at least {MIN_RUNS} seeds."
    if few < ENOUGH_RUNS:
        yield few_seeds("some runs", few)


def _left_out(comparison: Comparison) -> Iterator[str]:
    """Name the entries that cannot be summarised over the datasets, and why."""
    counts: dict[str, dict[str, int]] = {}
    for dataset, found in comparison.scores.items():
        for entry, runs in found.items():
            if entry not in comparison.common:
                counts.setdefault(entry.label, {})[dataset] = len(runs)
    for label, seeds in counts.items():
        absent = [name for name in comparison.scores if name not in seeds]
        why = (
            f"it was not run on {', '.join(absent)}"
            if absent
            else f"its numbers of seeds differ ({', '.join(map(str, seeds.values()))})"
        )
        yield f"{label} is in no summary over the datasets and no probability: {why}."


def _about_acting(comparison: Comparison) -> Iterator[str]:
    """Say which rows are the headline, and which policies have no greedy evaluation."""
    rows = [row for found in comparison.datasets.values() for row in found]
    if any(not row.headline for row in rows):
        yield (
            "Headline: the last policy's best actions (greedy). Sampled actions are compared with "
            "sampled ones."
        )
    entries = dict.fromkeys(row.entry for row in rows)
    for entry in entries:
        if entry.acting == "sampled" and entry._replace(acting="greedy") not in entries:
            yield (
                f"{entry.label} was not evaluated greedily, so it is compared only with other "
                "sampled policies."
            )


def about_best(in_environment: bool) -> str:
    """Return what the scores of best checkpoints are; see `offmarl.report.best_scores`."""
    return (
        "Best checkpoint: the best evaluation of each seed, chosen by half of its episodes and "
        "scored by the other half."
    ) + (
        " To choose it takes the environment, so it is no result of offline training."
        if in_environment
        else ""
    )


def few_seeds(what: str, count: int) -> str:
    """Return the warning that fewer than `offmarl.statistics.ENOUGH_RUNS` seeds ask for."""
    return (
        f"warning: {what} have {count} seed{'s' if count > 1 else ''}. Below {ENOUGH_RUNS} seeds, "
        "intervals cover less often than 95%, and a difference may be chance."
    )


def comparison_data(comparison: Comparison, found: Runs) -> dict[str, Any]:
    """Return a comparison for JSON."""
    return {
        "datasets": {
            dataset: {row.entry.label: _row_data(row) for row in rows}
            for dataset, rows in comparison.datasets.items()
        },
        "data": {
            name: _source_data(data, comparison.references.get(name))
            for name, data in found.data.items()
        },
        "overall": {row.entry.label: _row_data(row) for row in comparison.overall},
        "probability_of_improvement": {
            first.label: {second.label: value._asdict() for second, value in row.items()}
            for first, row in comparison.improvement.items()
        },
    }


def _row_data(row: Row) -> Mapping[str, Any]:
    return {
        "algorithm": row.entry.algorithm,
        "acting": row.entry.acting,
        "runs": row.runs,
        "iqm": row.iqm._asdict(),
        "normalised": row.normalised._asdict() if row.normalised else None,
        "mean": row.mean,
        "median": row.median,
        "headline": row.headline,
        "best_checkpoint": row.best._asdict() if row.best else None,
    }


def _source_data(data: Data, reference: Reference | None) -> dict[str, Any]:
    return {**data._asdict(), "references": reference._asdict() if reference else None}
