"""Reading of runs: their final scores, by dataset and algorithm, and which belong together.

Results of other projects in the layout of marl-eval are checked, and kept apart from runs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Float

from offmarl.errors import NotFiniteError, RunError
from offmarl.paths import local
from offmarl.records import as_type, parse
from offmarl.terminal import one_line
from offmarl.tracking import (
    AGREEMENT,
    GREEDY_WON,
    LOG_LIKELIHOOD,
    MARL_EVAL_FILE,
    METRICS_FILE,
    OTHER_RETURN,
    PARTNERS_FILE,
    RETURN,
    RUN_FILE,
    WON,
    Acting,
    acting_of,
    checksum,
    holds,
    labelled,
    other_acting,
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
    """What a benchmark's plan calls the run, or the end of its path if several runs have the same
    algorithm and dataset; empty if that is the algorithm's name, or the run is the only one."""

    @property
    def label(self) -> str:
        """The entry's name in tables and figures, such as "bc (greedy)"."""
        return labelled(self.algorithm, self.run, self.acting)


Scores = Mapping[str, Mapping[Entry, RunScores]]
"""Dataset to entry to scores."""

UNITS = {RETURN: "episode return", AGREEMENT: "agreement with held-out actions"}
"""Metrics that runs can be compared by, and their names in words."""


class ComparedData(NamedTuple):
    """What runs must have in common to be compared."""

    name: str
    """Name of the dataset, ``name/uid``; for runs trained online, of the environment."""
    digest: str
    """Digest of the dataset's content; empty if the run does not record it."""
    environment: str
    """The environment that the policies were evaluated in, or the held-out episodes that their
    actions were compared with."""


class DatasetResult(NamedTuple):
    """What the policies of an entry reached on one dataset."""

    scores: RunScores
    """Of the last policy of each seed."""
    directory: Path | None = None
    """The run; None for results of other projects, of which only the scores are known."""
    metric: str = ""
    """Name of the scores' metric in the run's files."""
    seeds: tuple[int, ...] = ()
    """Training seed of each score: runs of one seed are pairs."""
    played: tuple[int | None, ...] = ()
    """What the episodes of the final evaluation follow from: its step, numbers of episodes, and the
    steps of an update. With equal ones, and of one seed, two programs played the same episodes."""
    best: RunScores | None = None
    """Of the best checkpoint of each seed, if there are several: see `best_scores`."""
    partners: RunScores | None = None
    """Mean return of each seed's policy beside other partners, where it is known."""


Results = Mapping[str, Mapping[Entry, DatasetResult]]
"""Dataset to entry to result."""


class Runs(NamedTuple):
    """Final scores of runs, and the data they were trained on."""

    results: Results
    data: dict[str, ComparedData]
    """By the names of the datasets in ``results``."""
    settings: dict[str, list[str]]
    """The programs that were trained with other settings on one dataset than on another, and the
    settings that differ."""
    outside: frozenset[str] = frozenset()
    """The datasets with results of other projects: see `add_foreign_scores`."""


def scores_in(results: Results) -> Scores:
    """Return the scores of results alone."""
    return {name: {entry: x.scores for entry, x in row.items()} for name, row in results.items()}


def metric_of(directories: Iterable[Path]) -> str:
    """Return the metric that runs can be compared by: returns, or agreement with actions.

    Raises
    ------
    RunError
        The runs have no metric in common, or have not been evaluated.
    """
    paths = [*directories]
    finals = [final_evaluation(directory) for directory in paths]
    for metric in UNITS:
        if all(metric in metrics for metrics in finals):
            return metric
    if any(name.startswith(f"{RETURN}_") for metrics in finals for name in metrics):
        raise RunError(
            "these runs have a return for each team, and no single score to compare: "
            "`offmarl report RUN` shows the returns of each team of a run."
        )
    in_env = [str(x) for x, metrics in zip(paths, finals, strict=True) if RETURN in metrics]
    raise RunError(
        f"only {', '.join(in_env)} of these runs were evaluated in an environment, so they cannot "
        "be compared: compare each kind on its own, or train all with the same --env and "
        "--held-out."
    )


def read_runs(
    directories: Iterable[Path], metric: str = RETURN, pool_settings: bool = False
) -> Runs:
    """Return the final scores of runs, by dataset and entry, greedy entries first.

    Runs belong together if they were trained on the same content, whatever its name, and were
    evaluated in the same environment. Runs of one program on one dataset are distinguished by their
    directories.

    Parameters
    ----------
    directories
        Directories of the runs.
    metric
        A key of `UNITS`.
    pool_settings
        Give a program the same entry on all datasets, although it was trained with other settings
        on one than on another, for example because they were tuned for each. By default the entries
        name the settings that differ.

    Raises
    ------
    RunError
        A directory is not a run, or the run has not been evaluated.
    """
    runs = {path: read_run(path) for path in dict.fromkeys(map(local, directories))}
    data = {path: _data(run, metric) for path, run in runs.items()}
    labels = _labels(data.values())
    groups = _grouped(runs, lambda path: labels[_key(data[path])])
    names, settings = _names(runs, groups.values(), pool_settings)
    entries = {
        label: {entry_of(path, metric, names[path]): path for path in paths}
        for label, paths in groups.items()
    }
    by_label = {label: data[paths[0]] for label, paths in groups.items()}
    return Runs(gather(entries, metric), by_label, settings)


def gather(directories: Mapping[str, Mapping[Entry, Path]], metric: str = RETURN) -> Results:
    """Return the results of runs by dataset and entry, greedy entries first.

    ``directories`` are the runs by dataset and by the entry of the way that their program acts.
    `RunError` if one is no run or not finished, `NotFiniteError` if a loss or a score is not.
    """
    results: dict[str, dict[Entry, DatasetResult]] = {}
    for label, entries in directories.items():
        pairs = [pair for acted, path in entries.items() for pair in _results(acted, path, metric)]
        results[label] = dict(sorted(pairs, key=lambda pair: pair[0].acting == "sampled"))
    return results


def _results(acted: Entry, path: Path, metric: str) -> Iterator[tuple[Entry, DatasetResult]]:
    """Yield the results of a run: of the way that its program acts, and of the other one."""
    require_scores(path)
    by_acting = read_json(path, PARTNERS_FILE) if holds(path, PARTNERS_FILE) else {}
    as_type(by_acting, dict[str, list[float | None] | str], f"{path} ({PARTNERS_FILE})", RunError)
    final, rows, record = final_evaluation(path), read(path / METRICS_FILE), read_run(path)
    metrics = {acted: metric}
    if acted.acting is not None:
        other = other_acting(record)
        metrics[acted._replace(acting=other)] = OTHER_RETURN[other]
    for entry, name in metrics.items():
        if returns := final.get(name):
            last = max((row["step"] for row in rows if name in row), default=0)
            partners = by_acting.get(str(entry.acting))
            result = DatasetResult(
                np.array([values.mean() for values in returns.values()]),
                path,
                name,
                (*returns,),
                (last, *map(record["args"].get, _PLAYED)),
                best_scores(path, name),
                np.array(partners, float) if isinstance(partners, list) else None,
            )
            yield entry, _as_one(result) if record["args"].get("pbt") else result


_PLAYED = "final_episodes", "eval_episodes", "num_envs", "num_steps"
"""Arguments that the episodes of the final evaluation depend on."""


def _as_one(result: DatasetResult) -> DatasetResult:
    """Return the result of a population, whose members replaced one another, as that of one run."""
    means: dict[str, Any] = {
        name: None if (values := getattr(result, name)) is None else values.mean(keepdims=True)
        for name in ("scores", "best", "partners")
    }
    return result._replace(seeds=result.seeds[:1], **means)


def entry_of(directory: Path, metric: str = RETURN, run: str = "") -> Entry:
    """Return a run's entry of the way its program acts."""
    record = read_run(directory)
    return Entry(record["program"], acting_of(record) if metric == RETURN else None, run)


def require_scores(directory: Path) -> None:
    """Raise `NotFiniteError` if a loss or score of a run is not finite in the end."""
    if fault := fault_of(directory):
        raise NotFiniteError(
            f"{fault} in {directory}, so that it has no score: leave the run out, or train it with "
            "other settings, such as a smaller learning rate."
        )


def fault_of(directory: Path) -> str:
    """Describe the losses and scores of a run that are not finite in the end; empty if all are."""
    return "; ".join(
        f"{name} of seed {', '.join(map(str, seeds))} is not finite"
        for name, seeds in broken_of(directory).items()
        if name not in (LOG_LIKELIHOOD, WON, GREEDY_WON)  # which are not scores
    )


def broken_of(directory: Path) -> dict[str, list[int]]:
    """Return the seeds whose last number of a metric is not finite, by metric.

    Curves lack the steps at which a seed has no finite number, so that they end before these.
    """
    last: dict[str, dict[int, Any]] = {}
    for row in read(directory / METRICS_FILE):
        for name in row.keys() - {"seed", "step"}:
            last.setdefault(name, {})[row["seed"]] = row[name]
    broken = {
        name: sorted(seed for seed, value in seeds.items() if not is_finite(value))
        for name, seeds in sorted(last.items())
    }
    return {name: seeds for name, seeds in broken.items() if seeds}


def is_finite(value: Any) -> bool:
    """Whether a number of a metric, or each number of an evaluation, is finite."""
    return value is not None and None not in np.ravel(value).tolist()


def best_scores(directory: Path, metric: str = RETURN) -> RunScores | None:
    """Return the score of the best checkpoint of each seed of a run.

    The best checkpoint is the one with the best evaluation, and the largest of many noisy means is
    too large. So a half of the episodes chooses the checkpoint, all others give its score, and the
    result is the mean over both halves. As many episodes of a large evaluation choose as of a small
    one, which would otherwise be chosen more often for its noise. It still is the score of a policy
    that was chosen in the environment, which is online tuning. The evaluation before the first
    update does not count, as in `offmarl.programs.load_policy`: the untrained policy is no
    checkpoint.

    Returns
    -------
    None if some seed was not evaluated more than once after that, with two episodes or more.

    Raises
    ------
    RunError
        The directory is not a run.
    """
    seeds: dict[int, dict[int, list[float]]] = {seed: {} for seed in read_run(directory)["seeds"]}
    for row in read(directory / METRICS_FILE):
        values = row.get(metric) if row["step"] and row["seed"] in seeds else None
        if isinstance(values, list) and len(values) > 1 and None not in values:
            seeds[row["seed"]][row["step"]] = values
    if not seeds or min(map(len, seeds.values())) < 2:
        return None
    return np.array([_best([np.array(x) for x in steps.values()]) for steps in seeds.values()])


def _best(evaluations: Sequence[Float[np.ndarray, "episodes"]]) -> float:
    count, scores = min(map(len, evaluations)), []
    for half in (slice(0, count, 2), slice(1, count, 2)):
        chosen = max(evaluations, key=lambda values: float(values[half].mean()))
        scores.append(np.delete(chosen, half).mean())
    return float(np.mean(scores))


def final_evaluation(directory: Path) -> dict[str, dict[int, Float[np.ndarray, "episodes"]]]:
    """Return the final evaluation of a run: the values of its episodes, by metric and seed.

    The returns of the way that its program acts are `offmarl.tracking.RETURN`.

    Raises
    ------
    RunError
        The directory is not a run, or the run has not finished its evaluation.
    """
    run = read_run(directory)
    if run.get("complete") and not holds(directory, MARL_EVAL_FILE):
        raise RunError(
            f"{directory} was trained without an evaluation, so it cannot be compared: train it "
            "again, with --env if its environment can be made, or with --held-out."
        )
    other = other_acting(run)
    other_name, other_return = labelled(run["program"], other), OTHER_RETURN[other]
    metrics: dict[str, dict[int, Float[np.ndarray, "episodes"]]] = {}
    file = directory / MARL_EVAL_FILE
    for (*_, algorithm, name), final in _final_metrics(read_json(directory, file.name), file):
        by_metric = as_type(final, dict[str, list[float | None]], str(file), RunError)
        seed = name.removeprefix("seed_")
        for key, values in by_metric.items() if seed.isdecimal() and len(seed) < 11 else ():
            metric = key.replace(RETURN, other_return, 1) if algorithm == other_name else key
            metrics.setdefault(metric, {})[int(seed)] = np.array(values, float)
    if not metrics:
        raise RunError(
            f"{file} holds no final evaluation: repeat the command of the run to finish it."
        )
    return metrics


# ---------------------------------------------------------------------------------- reading


class _Steps(msgspec.Struct):
    """What is read of the evaluations of a run."""

    absolute_metrics: dict[str, Any] = {}


def _final_metrics(
    document: Mapping[str, Any], file: Path
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the metrics of the final evaluations in a document of marl-eval's layout.

    They come with their environment, task, algorithm and run; `RunError` for another layout.
    """
    for levels, steps in _nested(document, 4, str(file)):
        where = ": ".join((str(file), *levels))
        yield levels, as_type(steps, _Steps, where, RunError).absolute_metrics


def _nested(value: Any, depth: int, where: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the entries of nested objects with their keys; `RunError` for anything else."""
    if not isinstance(value, dict):
        raise RunError(
            f"{where} is not of marl-eval's layout, of environments, tasks, algorithms, runs and "
            "steps: it must be a JSON object."
        )
    for key, entry in value.items():
        name = one_line(key)
        inside = _nested(entry, depth - 1, f"{where}: {name}") if depth > 1 else [((), entry)]
        yield from (((name, *keys), leaf) for keys, leaf in inside)


def _data(run: Mapping[str, Any], metric: str) -> ComparedData:
    spec, args = run["spec"]["name"], run["args"]
    environment = args.get("env") or spec
    if metric == AGREEMENT:
        share = f"{args.get('held_out') or 0:.0%} of the episodes"
        digest = run.get("validation_digest") or "unknown"
        environment = f"data {digest[:8]}" if args.get("validation") else share
    elif code := run.get("environment_source", {}).get("sha256"):
        environment = labelled(environment, f"code {code[:8]}")
    return ComparedData(str(run.get("vault") or spec), run.get("vault_digest") or "", environment)


def _key(data: ComparedData) -> tuple[str, str]:
    """Return the key that runs are grouped by; the name replaces an unknown digest."""
    return data.digest or data.name, data.environment


def _labels(data: Iterable[ComparedData]) -> dict[tuple[str, str], str]:
    """Name the groups by their data; equal names are extended by what differs."""
    groups = _grouped(dict.fromkeys(data), _key)
    names = {key: " = ".join(dict.fromkeys(d.name for d in group)) for key, group in groups.items()}
    labels = {}
    for key, name in names.items():
        namesakes = [groups[other][0] for other in groups if names[other] == name]
        first, details = groups[key][0], []
        if len({other.digest for other in namesakes}) > 1:
            details.append(f"data {first.digest[:8] or 'unknown'}")
        if len({other.environment for other in namesakes}) > 1:
            details.append(f"evaluated in {first.environment}")
        labels[key] = labelled(name, *details)
    return labels


def _grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _plan_labels(
    runs: Mapping[Path, Mapping[str, Any]], paths: Sequence[Path]
) -> dict[Path, str] | None:
    """Return the labels of one program's runs in a benchmark's plan; None if these are not unique.

    A label that is the program's name adds nothing, and is empty.
    """
    labels = [runs[path].get("label") for path in paths]
    if None in labels or len(set(labels)) < len(labels):
        return None
    program = runs[paths[0]]["program"]
    return {
        path: "" if label == program else str(label)
        for path, label in zip(paths, labels, strict=True)
    }


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


# ---------------------------------------------------------------------------------- settings

_NO_SETTINGS = (
    *("vault", "time_limit", "env", "validation", "out", "seeds", "seed", "batching", "replay"),
    *("memory", "eval_every", "eval_episodes", "final_episodes", "track"),
    *("checkpoint_seconds", "tiers", "steps", "evaluations"),
)
"""Arguments that do not change what a program computes from its data, or that name the data."""

_SHOWN_SETTINGS = 3


def _names(
    runs: Mapping[Path, Mapping[str, Any]], groups: Iterable[list[Path]], pool_settings: bool
) -> tuple[dict[Path, str], dict[str, list[str]]]:
    """Return `Entry.run` of runs, grouped by dataset, and `Runs.settings`.

    With ``pool_settings`` the settings stay out of the names.
    """
    names: dict[Path, str] = {}
    for alike in groups:
        for group in _grouped(alike, lambda path: runs[path]["program"]).values():
            names |= _plan_labels(runs, group) or _distinguish(group)
    differing: dict[str, list[str]] = {}
    for (program, _), paths in _grouped(names, lambda p: (runs[p]["program"], names[p])).items():
        settings = {path: _settings(runs[path]) for path in paths}
        different = _differing_names(list(settings.values()))
        if different:
            differences = differing.setdefault(program, [])
            differences += [setting for setting in different if setting not in differences]
        for path in paths if different and not pool_settings else ():
            values = [f"{name}={settings[path][name]}" for name in different[:_SHOWN_SETTINGS]]
            if len(different) > len(values):
                values.append(f"settings {checksum(settings[path])}")
            names[path] = ", ".join(filter(None, [names[path], *values]))
    return names, differing


def _settings(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the result of a run depends on besides its data and its seeds."""
    args = {name: x for name, x in run["args"].items() if name not in _NO_SETTINGS}
    return args | ({"code": run["sha256"][:8]} if run.get("sha256") else {})


def _differing_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the settings that differ, of those that all runs have."""
    names = [name for name in settings[0] if all(name in run for run in settings)]
    return [name for name in names if any(run[name] != settings[0][name] for run in settings)]


# ------------------------------------------------------------------------ other projects

_RETURNS = (RETURN, "mean_episode_return", "return")
"""Names of returns, as offmarl, Mava and BenchMARL have them."""
_MOST = 1e30


def is_foreign(path: Path) -> bool:
    """Whether a path is a JSON file, and not a run that a benchmark packed."""
    if path.suffix != ".json" or not path.is_file():
        return False
    return RUN_FILE not in parse(path.read_bytes(), str(path), RunError)


def add_foreign_scores(scores: Runs, paths: Sequence[Path]) -> Runs:
    """Add the results in files to those of runs; `RunError` if a file has another layout.

    A task belongs to the dataset whose runs name the same environment and task in their
    ``marl_eval.json``; other tasks are datasets of their own.
    """
    results = {name: dict(entries) for name, entries in scores.results.items()}
    data, outside, names = dict(scores.data), set[str](), [path.name for path in paths]
    labels = {
        keys[:2]: name
        for name, (run, *_) in ((x, [*by_entry.values()]) for x, by_entry in results.items())
        if run.directory is not None
        for keys, _ in _final_metrics(read_json(run.directory, MARL_EVAL_FILE), run.directory)
    }
    for path in paths:
        file = path.name if names.count(path.name) == 1 else str(path)
        runs: dict[tuple[str, ...], list[float]] = {}
        for keys, final in _final_metrics(parse(path.read_bytes(), str(path), RunError), path):
            runs.setdefault(keys[:3], []).append(_score(final, f"{path}: {': '.join(keys)}"))
        if not runs:
            raise RunError(f"{path} is not of marl-eval's layout: it holds no runs.")
        for (environment, task, algorithm), values in runs.items():
            name = f"{environment}/{task}"
            label = labels.get((environment, task)) or labelled(name, "marl-eval")
            data.setdefault(label, ComparedData(name, "", name))
            results.setdefault(label, {})[Entry(algorithm, None, file)] = DatasetResult(
                np.array(values)
            )
            outside.add(label)
    return scores._replace(results=results, data=data, outside=frozenset(outside))


def _score(final: Mapping[str, Any], where: str) -> float:
    """Return the mean of the final returns of a run."""
    values = next((final[name] for name in _RETURNS if name in final), None)
    numbers: list[Any] = values if isinstance(values, list) else [values]
    if not numbers or not all(type(x) in (int, float) and abs(x) < _MOST for x in numbers):
        raise RunError(
            f"{where} has no finite returns in absolute_metrics: one of "
            f"{', '.join(_RETURNS)} must be a list of numbers, among {', '.join(final)}."
        )
    return float(np.mean(numbers))
