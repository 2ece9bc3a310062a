"""Comparison of runs: which algorithm is better, on what data, and with what confidence."""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from offmarl.errors import OptionError, RunError, unknown_name
from offmarl.paths import distinct_paths
from offmarl.report.curves import Curves, learning_curves, read_curves
from offmarl.report.run_scores import (
    UNITS,
    DatasetResult,
    Entry,
    Results,
    Runs,
    RunScores,
    Scores,
    add_foreign_scores,
    is_foreign,
    metric_of,
    read_runs,
    scores_in,
)
from offmarl.report.tables import Score, Section, to_csv, to_latex, to_markdown
from offmarl.statistics import (
    ENOUGH_RUNS,
    MIN_RUNS,
    Estimate,
    Reference,
    iqm,
    mean,
    mean_interval,
    median,
    normalise,
    probability_of_improvement,
)
from offmarl.statistics import estimate as estimated
from offmarl.terminal import number
from offmarl.tracking import MARL_EVAL_FILE, RETURN, RUN_FILE, as_dicts, is_run, labelled, read_run

BASELINE = "bc"
"""The program that others are compared with in pairs, unless another is named."""


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
    partners: Estimate | None = None
    """IQM of the mean returns beside other partners; see `offmarl.programs.cross_play`."""
    bold: bool = False
    """Whether it may be the best of several that acted alike on the dataset: the interval of the
    probability that one of its runs beats one of the highest IQM is not entirely below one half.
    With fewer seeds than an interval needs, only the highest."""
    scores: tuple[float, ...] = ()
    """Of the runs on one dataset."""
    difference: Estimate | None = None
    """Mean difference to the baseline that acted in the same way, over pairs of runs of one seed,
    with Student's t interval: what seeds and evaluation episodes add to both is not in it. None
    for the baseline, and where there are no pairs; see `Comparison.unpaired`."""


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
    baseline: str
    """What `Row.difference` is to."""
    unpaired: dict[str, dict[str, str]]
    """Why entries have no difference to the baseline, or what to know of it: by dataset and label.
    """


def estimate(scores: RunScores) -> Estimate:
    """Return the interquartile mean of the runs on one dataset."""
    return estimated(iqm, scores[:, None])


def compare(
    results: Results,
    references: Mapping[str, Reference] | None = None,
    metric: str = RETURN,
    baseline: str = BASELINE,
) -> Comparison:
    """Compare entries on one or several datasets.

    Parameters
    ----------
    results
        Those of `read_runs`.
    references
        Returns to normalise by, for each dataset. Returns of several datasets are summarised only
        if all of them have references.
    metric
        Metric of the scores, a key of `UNITS`; agreement is not normalised.
    baseline
        The program or run whose runs are the second of each pair.

    Raises
    ------
    OptionError
        The references are equal or not finite.
    """
    by_dataset = references if references and metric == RETURN else {}
    normalised = all(dataset in by_dataset for dataset in results)
    pooled = normalised or len(results) == 1 or metric != RETURN
    scores = scores_in(results)
    common = _common(scores, by_dataset if normalised else {})
    datasets, gaps, unpaired, baselines = {}, {}, {}, _entries_named(results, baseline)
    for dataset, by_entry in results.items():
        gaps[dataset], unpaired[dataset] = _pairs(by_entry, baseline, baselines)
        rows = _dataset_rows(by_entry, by_dataset.get(dataset))
        rows = [row._replace(bold=_may_be_best(row, rows)) for row in rows]
        datasets[dataset] = [_with_difference(row, [gaps[dataset].get(row.entry)]) for row in rows]
    scales = {name: x.expert - x.random for name, x in by_dataset.items()} if normalised else {}
    overall = []
    for entry, runs in common.items() if pooled and len(results) > 1 else ():
        scaled = [
            by_entry[entry] / scales.get(dataset, 1.0) if entry in by_entry else None
            for dataset, by_entry in gaps.items()
        ]
        overall.append(_with_difference(_row(entry, runs, common), scaled))
    return Comparison(
        scores,
        datasets,
        by_dataset,
        common,
        overall,
        _improvement(common),
        UNITS[metric],
        normalised,
        pooled,
        baseline,
        unpaired,
    )


def _pairs(
    results: Mapping[Entry, DatasetResult], baseline: str, baselines: Container[Entry]
) -> tuple[dict[Entry, RunScores], dict[str, str]]:
    """Return each entry's differences to the baseline by seed, and remarks on missing pairs.

    Entries are compared with the one of the ``baselines`` that acted in the same way.
    """
    differences, reasons = {}, {}
    for entry, result in results.items():
        peers = [other for other in results if other.acting == entry.acting]
        candidates = [other for other in peers if other in baselines]
        if not candidates or entry in candidates:
            continue
        reference = results[candidates[0]]
        common = [seed for seed in result.seeds if seed in reference.seeds]
        if len(candidates) > 1 or not common:
            reason = "several runs have its name" if len(candidates) > 1 else "no seed is in both"
            reasons[entry.label] = f"has no pairs with {baseline}: {reason}"
            continue
        differences[entry] = (
            result.scores[[result.seeds.index(seed) for seed in common]]
            - reference.scores[[reference.seeds.index(seed) for seed in common]]
        )
        if len(common) < max(len(result.seeds), len(reference.seeds)):
            reasons[entry.label] = f"and {baseline} have only {len(common)} seeds in common"
        elif result.played != reference.played:
            reasons[entry.label] = f"and {baseline} share seeds, but played other episodes"
    return differences, reasons


def _entries_named(results: Results, name: str) -> set[Entry]:
    """Return the entries of a name: those with exactly this name take precedence.

    So a plan's run "bc" is the baseline, and not its run "bc-top" of the same program.
    """
    entries = {entry for by_entry in results.values() for entry in by_entry}
    exact = {entry for entry in entries if name == (entry.run or entry.algorithm)}
    return exact or {x for x in entries if name in (x.algorithm, x.run, x.label)}


def _with_difference(row: Row, differences: Sequence[RunScores | None]) -> Row:
    """Add the mean over datasets of the differences of pairs, if all have as many."""
    samples = [sample for sample in differences if sample is not None]
    if len(samples) < len(differences) or len({len(sample) for sample in samples}) != 1:
        return row
    return row._replace(difference=mean_interval(np.mean(samples, axis=0)))


def _common(
    scores: Scores, references: Mapping[str, Reference]
) -> dict[Entry, Float[np.ndarray, "runs datasets"]]:
    columns = [
        {
            entry: normalise(runs, references[dataset]) if references else runs
            for entry, runs in by_entry.items()
        }
        for dataset, by_entry in scores.items()
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
    probabilities = {
        first: {
            second: estimated(probability_of_improvement, x, y)
            for second, y in common.items()
            if second != first and second.acting == first.acting
        }
        for first, x in common.items()
    }
    return {entry: row for entry, row in probabilities.items() if row}


def _dataset_rows(results: Mapping[Entry, DatasetResult], reference: Reference | None) -> list[Row]:
    return [
        _row(entry, result.scores[:, None], results)._replace(
            normalised=estimate(normalise(result.scores, reference)) if reference else None,
            best=None if result.best is None else estimate(result.best),
            partners=None if result.partners is None else estimate(result.partners),
            scores=tuple(result.scores.tolist()),
        )
        for entry, result in results.items()
    ]


def _may_be_best(row: Row, rows: Sequence[Row]) -> bool:
    peers = [other for other in rows if other.entry.acting == row.entry.acting]
    best = max(peers, key=lambda other: other.iqm.value)
    if row.iqm.value == best.iqm.value:
        return len(peers) > 1
    runs = (np.array(x.scores)[:, None] for x in (row, best))
    high = estimated(probability_of_improvement, *runs, tests=len(peers) - 1).high
    return high is not None and high >= 0.5  # a probability above one half is no reason against it


def _row(entry: Entry, scores: Float[np.ndarray, "runs tasks"], among: Container[Entry]) -> Row:
    """Return the summary of an entry; ``among`` are the entries in the same table."""
    return Row(
        entry,
        len(scores),
        estimated(iqm, scores),
        float(mean(scores)),
        float(median(scores) if scores.shape[1] > 1 else np.median(scores)),
        headline=entry.acting != "sampled" or entry._replace(acting="greedy") not in among,
    )


# ---------------------------------------------------------------------------------- notes


def notes(comparison: Comparison, runs: Runs, metric: str, pool_settings: bool) -> Iterator[str]:
    """Say how scores are normalised, what is missing, and what to be careful about."""
    scales = {runs.data[name].environment: x for name, x in comparison.references.items()}
    for env, reference in scales.items():
        yield (
            f"Returns in {env} are normalised: 0 is random play ({number(reference.random)}), 1 is "
            f"the expert ({number(reference.expert)})."
        )
    if runs.outside:
        yield (
            "Files of marl-eval's layout do not say how their policies acted, so these are "
            "compared only with one another. Unless --references are given, returns are raw on "
            f"{', '.join(sorted(runs.outside))}."
        )
    raw = dict.fromkeys(
        data.environment
        for name, data in runs.data.items()
        if name not in comparison.references and name not in runs.outside
    )
    if metric == RETURN and raw:
        options = " ".join(f"{quote(env)} RANDOM EXPERT" for env in raw)
        yield (
            f"The reference returns of {', '.join(raw)} are unknown, so returns there are not "
            f"normalised: give them with --references {options}."
            + ("" if comparison.pooled else " Without them the datasets are not summarised.")
        )
    names = [data.name for data in runs.data.values()]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"Several datasets or environments are named {name}: each is compared separately."
    for program, settings in runs.settings.items():
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
    yield from about_scores(comparison, "some runs")


def _left_out(comparison: Comparison) -> Iterator[str]:
    """Name the entries that cannot be summarised over the datasets, and why."""
    counts: dict[str, dict[str, int]] = {}
    for dataset, by_entry in comparison.scores.items():
        for entry, runs in by_entry.items():
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
    rows = [row for table in comparison.datasets.values() for row in table]
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


def _about_pairs(comparison: Comparison, rows: Iterable[Row]) -> Iterator[str]:
    """Say what differences are, and which runs cannot be paired."""
    if any(row.difference for row in rows):
        yield (
            f"Minus {comparison.baseline}: the mean difference between runs of one seed, with "
            "Student's t interval. Such runs play the same evaluation episodes, unless a note says "
            "otherwise, so it tells more than two intervals side by side. Each interval stands "
            "alone: in a table of many methods some exclude 0 by chance."
        )
    texts: dict[str, list[str]] = {}
    for dataset, reasons in comparison.unpaired.items():
        for label, reason in reasons.items():
            texts.setdefault(f"{label} {reason}", []).append(dataset)
    yield from (f"{text} ({', '.join(datasets)})." for text, datasets in texts.items())


def about_scores(comparison: Comparison, label: str) -> Iterator[str]:
    """Say what differences, best checkpoints and * are, and warn of few seeds."""
    rows = [row for table in comparison.datasets.values() for row in table]
    yield from _about_pairs(comparison, rows)
    if any(row.best for row in rows):
        yield (
            "Best checkpoint: the best evaluation of each seed, chosen by some of its episodes and "
            "scored by the others."
        ) + (
            " To choose it takes the environment, so it is no result of offline training."
            if comparison.unit == UNITS[RETURN]
            else ""
        )
    fewest = min(row.runs for row in rows)
    if any(row.bold for row in rows):
        yield (
            "* (bold in files): the best of those that acted alike on a dataset, and all whose "
            "probability of improvement over it has an interval that is not entirely below one "
            "half; all of a table's intervals together cover 95%."
        )
    if fewest < MIN_RUNS:
        yield f"Intervals need at least {MIN_RUNS} seeds; without them only the best has a *."
    if fewest < ENOUGH_RUNS:
        yield (
            f"warning: {label} have {fewest} seed{'s' if fewest > 1 else ''}. Below {ENOUGH_RUNS} "
            "seeds, intervals cover less often than 95%, and a difference may be chance."
        )


# ---------------------------------------------------------------------------------- tables


_COLUMNS: Mapping[str, Callable[[Row], Any]] = {
    "seeds": lambda row: row.runs,
    "IQM": lambda row: Score(*row.iqm, row.bold),
    # The JSON also has its interval, which is that of the IQM on another scale.
    "normalised IQM": lambda row: row.normalised and row.normalised.value,
    "mean": lambda row: row.mean,
    "median": lambda row: row.median,
    "best checkpoint": lambda row: row.best and Score(*row.best),
    "with partners": lambda row: row.partners and Score(*row.partners),
}
"""Columns of a dataset's table, with the cell of a row; empty columns are left out."""


def comparison_tables(comparison: Comparison) -> Iterator[Section]:
    """Return a comparison as tables, as the terminal, pages and files have them."""
    for dataset, rows in comparison.datasets.items():
        yield _summary(f"{comparison.unit.capitalize()}: {dataset}", rows)
    yield from [*dataset_tables(comparison)][len(comparison.datasets) == 1 :]
    if comparison.overall:
        scale = "normalised from random (0) to expert (1)"
        title = f"All datasets, {scale if comparison.normalised else comparison.unit}"
        yield _summary(title, comparison.overall)
    for acting in dict.fromkeys(entry.acting for entry in comparison.improvement):
        entries = [entry for entry in comparison.improvement if entry.acting == acting]
        estimates = [x for entry in entries for x in comparison.improvement[entry].values()]
        title = "Probability that a run of the row beats a run of the column"
        yield Section(
            title + (" [95% interval]" if _any_interval(estimates) else ""),
            ["", *(entry.label for entry in entries)],
            [
                [first.label, *(_probability(row.get(second)) for second in entries)]
                for first, row in comparison.improvement.items()
                if first.acting == acting
            ],
        )


def dataset_tables(comparison: Comparison) -> Iterator[Section]:
    """Return scores by methods and datasets, and differences to the baseline if there are some."""
    title = f"IQM over seeds [95% interval], {comparison.unit}"
    yield _by_dataset(title, comparison.datasets.items(), _COLUMNS["IQM"])
    if any(row.partners for rows in comparison.datasets.values() for row in rows):
        title = f"Beside the partners of each dataset, {comparison.unit}"
        yield _by_dataset(title, comparison.datasets.items(), _COLUMNS["with partners"])
    overall = "all, normalised" if comparison.normalised else "all"  # a dataset may be named so
    all_rows = [*comparison.datasets.items(), (overall, comparison.overall)]
    if datasets := [pair for pair in all_rows if any(row.difference for row in pair[1])]:
        title = f"Minus {comparison.baseline}, in pairs of runs of one seed [95% interval]"
        yield _by_dataset(title, datasets, _difference)


def _by_dataset(
    title: str, datasets: Collection[tuple[str, Sequence[Row]]], cell: Callable[[Row], Any]
) -> Section:
    cells = [
        {row.entry.label: value for row in rows if (value := cell(row)) is not None}
        for _, rows in datasets
    ]
    labels = dict.fromkeys(label for column in cells for label in column)
    table = [[label, *(column.get(label) for column in cells)] for label in labels]
    return Section(title, ["method", *(dataset for dataset, _ in datasets)], table)


def _difference(row: Row) -> Score | None:
    """Return the difference to the baseline; None without one."""
    return row.difference and Score(*row.difference, signed=True)


def score_list(datasets: Mapping[str, Sequence[Row]]) -> Section:
    """Return all numbers of the tables with a line for each row, for CSV."""
    columns: dict[str, Callable[[Row], Any]] = {
        "method": lambda row: labelled(row.entry.algorithm, row.entry.run),
        "acting": lambda row: row.entry.acting,
        **_COLUMNS,
        "difference": _difference,
        "bold": lambda row: int(row.bold),
        "runs": lambda row: " ".join(map(repr, row.scores)),
    }
    rows = [
        [x, *(of(row) for of in columns.values())] for x, group in datasets.items() for row in group
    ]
    return Section("Scores", ["dataset", *columns], rows)


def _summary(title: str, rows: Sequence[Row]) -> Section:
    """Return the rows of one dataset, or of all."""
    cells = {name: [cell(row) for row in rows] for name, cell in _COLUMNS.items()}
    cells = {name: column for name, column in cells.items() if any(x is not None for x in column)}
    headings = {"IQM": "IQM [95% interval]"} if _any_interval(row.iqm for row in rows) else {}
    columns = ["algorithm", *(headings.get(name, name) for name in cells)]
    labels = [row.entry.label for row in rows]
    return Section(title, columns, [[*row] for row in zip(labels, *cells.values(), strict=True)])


def _any_interval(estimates: Iterable[Estimate]) -> bool:
    return any(x.low is not None for x in estimates)


def _probability(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    form = "{:.2f}" if estimate.low is None else "{:.2f} [{:.2f}, {:.2f}]"
    return form.format(*estimate)


# ---------------------------------------------------------------------------------- runs


class ComparedRuns(NamedTuple):
    """Everything that ``offmarl compare`` shows."""

    runs: list[Path]
    """Finished runs, without the results of other projects."""
    scores: Runs
    comparison: Comparison
    curves: Curves
    sections: list[Section]
    notes: list[str]
    unfinished: list[Path]
    """Runs that are left out."""

    def _repr_html_(self) -> str:
        return "".join(section._repr_html_() for section in self.sections)

    def latex(self) -> str:
        r"""Return the tables of scores and differences in LaTeX, for the package booktabs."""
        return to_latex(comparison_tables(self.comparison))

    def markdown(self) -> str:
        """Return the tables of scores and differences in Markdown."""
        return to_markdown(comparison_tables(self.comparison))

    def csv(self) -> str:
        """Return the scores in CSV: a line for each dataset, method and way to act."""
        return to_csv(score_list(self.comparison.datasets))

    def data(self) -> dict[str, Any]:
        """Return the comparison for JSON."""
        comparison = self.comparison
        return {
            "datasets": {
                dataset: {row.entry.label: _row_data(row) for row in rows}
                for dataset, rows in comparison.datasets.items()
            },
            "data": {
                name: {**source._asdict(), "references": as_dicts(comparison.references.get(name))}
                for name, source in self.scores.data.items()
            },
            "baseline": comparison.baseline,
            "overall": {row.entry.label: _row_data(row) for row in comparison.overall},
            "probability_of_improvement": {
                first.label: {second.label: value._asdict() for second, value in row.items()}
                for first, row in comparison.improvement.items()
            },
            "notes": self.notes,
            "curves": {
                dataset: {entry.label: curve.data() for entry, curve in by_entry.items()}
                for dataset, by_entry in self.curves.items()
            },
            "unfinished": self.unfinished,
        }


def _row_data(row: Row) -> Mapping[str, Any]:
    fields: dict[str, Any] = as_dicts(row)
    entry, best, partners = (fields.pop(name) for name in ("entry", "best", "partners"))
    del fields["bold"], fields["scores"]
    return {"algorithm": entry["algorithm"], "acting": entry["acting"], **fields} | {
        "best_checkpoint": best,
        "with_partners": partners,
    }


def compare_runs(
    paths: Iterable[Path],
    known: Mapping[str, Reference],
    given: Mapping[str, Reference],
    pool_settings: bool = False,
    baseline: str | None = None,
) -> ComparedRuns:
    """Read runs and compare them; those that are not finished are left out, if others are.

    Parameters
    ----------
    paths
        Directories of runs or of benchmarks, packed runs, and files of marl-eval's layout.
    known
        Reference returns by environment.
    given
        The same of the user, which override the others, and are used for files of other projects.
    pool_settings
        As for `read_runs`.
    baseline
        As for `compare`.

    Raises
    ------
    OptionError
        There are no paths, or no run has the name of ``baseline``.
    RunError
        A path is no run, or the runs have no metric in common.
    """
    all_paths = distinct_paths(run for path in paths for run in _run_paths(path))
    if not all_paths:
        raise OptionError("no runs to compare: give the directory of at least one run.")
    foreign = [path for path in all_paths if is_foreign(path)]
    run_paths = [path for path in all_paths if path not in foreign]
    unfinished = [
        path
        for path in run_paths
        if (path / RUN_FILE).is_file() and not (path / MARL_EVAL_FILE).exists()
        if not read_run(path).get("complete", False)
    ]
    # If none is finished, the error says what to do.
    runs = [path for path in run_paths if path not in unfinished] or run_paths
    metric = metric_of(runs)
    scores = read_runs(runs, metric, pool_settings)
    if foreign and metric != RETURN:
        raise RunError(f"{foreign[0]} holds returns, and the runs have none: compare it alone.")
    scores, scales = add_foreign_scores(scores, foreign), {}
    for name, data in scores.data.items() if metric == RETURN else ():
        scale = given if name in scores.outside else {**known, **given}
        if data.environment in scale:
            scales[name] = scale[data.environment]
    environments = {data.environment for data in scores.data.values()}
    for name in given if metric == RETURN else ():
        if name not in environments:
            raise unknown_name("environment of these runs", name, environments)
    if baseline is not None and not _entries_named(scores.results, baseline):
        entries = dict.fromkeys(entry for by_entry in scores.results.values() for entry in by_entry)
        labels = ", ".join(entry.label for entry in entries)
        raise OptionError(f"no run is named {baseline}: name the program of one of {labels}.")
    comparison = compare(scores.results, scales, metric, baseline or BASELINE)
    curves = read_curves(scores.results)
    sections = [*comparison_tables(comparison), *([learning_curves(curves)] if curves else [])]
    left_out = [f"{run} is not finished, and left out: repeat its command." for run in unfinished]
    all_notes = [*notes(comparison, scores, metric, pool_settings), *left_out]
    return ComparedRuns(runs, scores, comparison, curves, sections, all_notes, unfinished)


def _run_paths(path: Path) -> list[Path]:
    """Return a run, or the packed runs of a benchmark's directory, or of its cells."""
    if is_run(path):
        return [path]
    cells = sorted((path / "cells").glob("*.json")) or sorted(path.glob("*--*.json"))
    return cells or [path]
