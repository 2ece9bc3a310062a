"""Comparison of runs: which algorithm is better, on what data, and with what confidence."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from offmarl import statistics
from offmarl.errors import RunError
from offmarl.paths import local
from offmarl.statistics import MIN_RUNS, Reference
from offmarl.tracking import (
    AGREEMENT,
    GREEDY_RETURN,
    MARL_EVAL_FILE,
    METRICS_FILE,
    RETURN,
    Acting,
    acting_of,
    labelled,
    read,
    read_json,
    read_run,
)

RunScores = Float[np.ndarray, "runs"]
"""One number per training seed: the mean return of its final evaluation."""


class Entry(NamedTuple):
    """What is compared: an algorithm that acted in one way."""

    algorithm: str
    acting: Acting | None = None
    """None if the policy did not act, as for the agreement with held-out actions."""
    run: str = ""
    """The end of the run's path, if several runs have the same algorithm and dataset."""

    @property
    def label(self) -> str:
        """The entry's name in tables and figures, such as "bc (greedy)"."""
        return labelled(self.algorithm, self.run, self.acting)


Scores = Mapping[str, Mapping[Entry, RunScores]]
"""Dataset to entry to scores."""

UNITS = {RETURN: "episode return", AGREEMENT: "agreement with held-out actions"}
"""Metrics that runs can be compared by, and their names in words."""

_SEED = 0  # of all bootstrap draws: the same runs always give the same intervals


class Data(NamedTuple):
    """What runs must have in common to be compared."""

    name: str
    """Name of the dataset, ``name/uid``; for runs trained online, of the environment."""
    digest: str
    """Digest of the dataset's content; empty if the run does not record it."""
    environment: str
    """The environment that the policies were evaluated in."""


class Runs(NamedTuple):
    """Final scores of runs, and the data they were trained on."""

    scores: Scores
    data: dict[str, Data]
    """By the names of the datasets in ``scores``."""
    directories: dict[str, dict[Entry, Path]]
    """By dataset and entry, as the policy acted in training."""


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
    scores: Scores, references: Mapping[str, Reference] | None = None, metric: str = RETURN
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

    Raises
    ------
    OptionError
        The references are equal or not finite.
    """
    known = references if references and metric == RETURN else {}
    normalised = all(dataset in known for dataset in scores)
    pooled = normalised or len(scores) == 1 or metric != RETURN
    common = _common(scores, known if normalised else {})
    overall = [_row(entry, runs, statistics.median(runs)) for entry, runs in common.items()]
    return Comparison(
        scores,
        {
            dataset: [
                _dataset_row(entry, runs, known.get(dataset)) for entry, runs in found.items()
            ]
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


def metric_of(directories: Iterable[Path]) -> str:
    """Return the metric that runs can be compared by: returns, or agreement with actions.

    Raises
    ------
    RunError
        The runs have no metric in common, or have not been evaluated.
    """
    found = [final_metrics(directory) for directory in directories]
    for metric in UNITS:
        if all(metric in metrics for metrics in found):
            return metric
    raise RunError(
        "some of these runs were evaluated in an environment and some with held-out episodes, so "
        "they cannot be compared: train all with the same --env and --held-out."
    )


def read_runs(directories: Iterable[Path], metric: str = RETURN) -> Runs:
    """Return the final scores of runs, by dataset and entry, greedy entries first.

    Runs belong together if they were trained on the same content, whatever its name, and were
    evaluated in the same environment. Runs of one program on one dataset are distinguished by their
    directories.

    Raises
    ------
    RunError
        A directory is not a run, or the run has not been evaluated.
    """
    runs = {path: read_run(path) for path in dict.fromkeys(map(local, directories))}
    data = {path: _data(run) for path, run in runs.items()}
    labels = _labels(data.values())
    scores: dict[str, dict[Entry, RunScores]] = {}
    trained: dict[str, dict[Entry, Path]] = {}
    groups = _grouped(runs, lambda path: labels[_key(data[path])])
    for label, alike in groups.items():
        found: dict[Entry, RunScores] = {}
        for same in _grouped(alike, lambda path: runs[path]["program"]).values():
            for path, name in _distinguish(same).items():
                found |= scores_of(path, metric, name)
                acting = acting_of(runs[path]) if metric == RETURN else None
                entry = Entry(runs[path]["program"], acting, name)
                trained.setdefault(label, {})[entry] = path
        scores[label] = dict(sorted(found.items(), key=lambda item: item[0].acting == "sampled"))
    named = {label: data[alike[0]] for label, alike in groups.items()}
    return Runs(scores, named, trained)


def scores_of(directory: Path, metric: str = RETURN, run: str = "") -> dict[Entry, RunScores]:
    """Return the final scores of one run, by entry; raises what `final_returns` raises.

    Parameters
    ----------
    directory
        Directory of the run.
    metric
        A key of `UNITS`.
    run
        `Entry.run` of its entries.
    """
    record = read_run(directory)
    found: dict[Acting | None, dict[int, Float[np.ndarray, "episodes"]]] = {}
    if metric == RETURN and (greedy := final_returns(directory, GREEDY_RETURN)):
        found["greedy"] = greedy
    acting = acting_of(record) if metric == RETURN else None
    found[acting] = final_returns(directory, metric)
    return {
        Entry(record["program"], how, run): np.array([one.mean() for one in returns.values()])
        for how, returns in found.items()
    }


def final_returns(
    directory: Path, metric: str = RETURN
) -> dict[int, Float[np.ndarray, "episodes"]]:
    """Return the final evaluation of a run: the returns of its episodes, by training seed.

    Empty if the run was not evaluated by this metric.

    Raises
    ------
    RunError
        The directory is not a run, or the run has not finished its evaluation.
    """
    return {
        seed: np.array(metrics[metric], float)
        for seed, metrics in _final(directory).items()
        if metric in metrics
    }


def final_metrics(directory: Path) -> set[str]:
    """Return the metrics of a run's final evaluation; raises what `final_returns` raises."""
    return {name for metrics in _final(directory).values() for name in metrics}


def last_metrics(directory: Path) -> dict[str, float]:
    """Return the training metrics that a run logged last, such as losses: means over seeds."""
    rows = [row for row in read(directory / METRICS_FILE) if not UNITS.keys() & row.keys()]
    last = [row for row in rows if row["step"] == rows[-1]["step"]]
    names = [name for name in last[0] if name not in ("seed", "step")] if last else []
    values = {name: [row[name] for row in last if row.get(name) is not None] for name in names}
    return {name: float(np.mean(value)) for name, value in values.items() if value}


# ---------------------------------------------------------------------------------- reading


def _final(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of a run's final evaluation, by training seed."""
    run = read_run(directory)
    if run.get("complete") and not (directory / MARL_EVAL_FILE).exists():
        raise RunError(
            f"{directory} was trained without an evaluation, so it cannot be compared: "
            + (
                "an older offmarl recorded it; record it again."
                if run.get("kind") == "recorder"
                else "train it again, with --env if its environment can be made, or with "
                "--held-out."
            )
        )
    document = read_json(directory, MARL_EVAL_FILE)
    try:
        found = _absolute_metrics(document, run)
    except (ValueError, KeyError, AttributeError, TypeError):
        found = {}
    if not any(found.values()):
        raise RunError(
            f"{directory / MARL_EVAL_FILE} holds no final evaluation: repeat the command of the "
            "run to finish it."
        )
    return found


def _absolute_metrics(
    document: Mapping[str, Any], run: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """Return the final metrics of all algorithms in a run's document: one for each way of acting.

    Older runs have a single algorithm, whose greedy returns are another metric.
    """
    (tasks,) = document.values()
    (algorithms,) = tasks.values()
    second = labelled(run["program"], "greedy") if acting_of(run) == "sampled" else None
    found: dict[int, dict[str, Any]] = {}
    for name, seeds in algorithms.items():
        for seed, record in seeds.items():
            metrics = record["absolute_metrics"]
            if name == second:
                metrics = {GREEDY_RETURN: metrics[RETURN]}
            found.setdefault(int(seed.removeprefix("seed_")), {}).update(metrics)
    return found


def _data(run: Mapping[str, Any]) -> Data:
    spec = run["spec"]["name"]
    environment = run.get("args", {}).get("env") or spec
    return Data(str(run.get("vault") or spec), run.get("vault_digest") or "", environment)


def _key(data: Data) -> tuple[str, str]:
    """Return the key that runs are grouped by; the name replaces an unknown digest."""
    return data.digest or data.name, data.environment


def _labels(data: Iterable[Data]) -> dict[tuple[str, str], str]:
    """Name the groups by their data; equal names are extended by what differs."""
    groups = _grouped(dict.fromkeys(data), _key)
    names = {key: " = ".join(dict.fromkeys(d.name for d in one)) for key, one in groups.items()}
    labels = {}
    for key, name in names.items():
        alike = [groups[other][0] for other in groups if names[other] == name]
        one, details = groups[key][0], []
        if len({other.digest for other in alike}) > 1:
            details.append(f"data {one.digest[:8] or 'unknown'}")
        if len({other.environment for other in alike}) > 1:
            details.append(f"evaluated in {one.environment}")
        labels[key] = labelled(name, *details)
    return labels


def _grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _distinguish(paths: Sequence[Path]) -> dict[Path, str]:
    """Return the shortest distinguishing suffix of each path; empty for a single path."""
    if len(paths) == 1:
        return {paths[0]: ""}
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(part[-count:]) for part in parts]
        if len(set(ends)) == len(ends):
            break
    return dict(zip(paths, ends, strict=True))


# ---------------------------------------------------------------------------------- estimates


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


def _dataset_row(entry: Entry, runs: RunScores, reference: Reference | None) -> Row:
    normalised = estimate(statistics.normalise(runs, reference)) if reference else None
    return _row(entry, runs[:, None], np.median(runs))._replace(normalised=normalised)


def _row(entry: Entry, scores: Float[np.ndarray, "runs tasks"], median: Any) -> Row:
    mean = float(statistics.mean(scores))
    return Row(entry, len(scores), _estimate(statistics.iqm, scores), mean, float(median))


def _estimate(function: statistics.Estimate, *scores: Float[np.ndarray, "_ tasks"]) -> Estimate:
    value = float(function(*map(statistics.checked, scores)))
    if min(map(len, scores)) < MIN_RUNS:
        return Estimate(value)
    low, high = statistics.bootstrap_interval(function, *scores, seed=_SEED)
    return Estimate(value, float(low), float(high))
