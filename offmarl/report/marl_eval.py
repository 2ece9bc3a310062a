"""Results of other projects in the layout of marl-eval: checked, and kept apart from runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offmarl.errors import RunError
from offmarl.records import parse
from offmarl.report.run_scores import Data, Entry, Runs
from offmarl.terminal import one_line
from offmarl.tracking import MARL_EVAL_FILE, RETURN, RUN_FILE, labelled, read_json

_RETURNS = (RETURN, "mean_episode_return", "return")
"""Names of returns, as offmarl, Mava and BenchMARL have them."""
_MOST = 1e30


def is_foreign(path: Path) -> bool:
    """Whether a path is a JSON file, and not a run that a benchmark packed."""
    return path.suffix == ".json" and path.is_file() and RUN_FILE not in _read(path)


def with_foreign(found: Runs, paths: Sequence[Path]) -> Runs:
    """Add the results in files to those of runs; `RunError` if a file has another layout.

    A task belongs to the dataset whose runs name the same environment and task in their
    ``marl_eval.json``; other tasks are datasets of their own.
    """
    scores = {name: dict(entries) for name, entries in found.scores.items()}
    data, outside, names = dict(found.data), set[str](), [path.name for path in paths]
    ours = {
        keys: name
        for name, directories in found.directories.items()
        for keys, _ in _entries(read_json(next(iter(directories.values())), MARL_EVAL_FILE), 2)
    }
    for path in paths:
        file = path.name if names.count(path.name) == 1 else str(path)
        runs: dict[tuple[str, ...], list[float]] = {}
        for where, run in _entries(_read(path), 4, path):
            runs.setdefault(where[:3], []).append(_score(run, path, *where))
        for (environment, task, algorithm), own in runs.items():
            name = f"{environment}/{task}"
            label = ours.get((environment, task)) or labelled(name, "marl-eval")
            data.setdefault(label, Data(name, "", name))
            scores.setdefault(label, {})[Entry(algorithm, None, file)] = np.array(own)
            outside.add(label)
    return found._replace(scores=scores, data=data, outside=frozenset(outside))


def _read(path: Path) -> Any:
    return parse(path.read_bytes(), str(path), RunError)


def _entries(value: Any, depth: int, *where: object) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the entries of nested objects with their keys; `RunError` for anything else."""
    if not isinstance(value, dict) or not value:
        raise RunError(
            f"{': '.join(map(str, where))} is not of marl-eval's layout, of environments, tasks, "
            "algorithms, runs and steps: it must be a JSON object with entries."
        )
    for key, entry in value.items():
        inside = _entries(entry, depth - 1, *where, key) if depth > 1 else [((), entry)]
        yield from (((one_line(key), *keys), leaf) for keys, leaf in inside)


def _score(run: Any, *where: object) -> float:
    """Return the mean of the final returns of a run."""
    steps = {key: step for (key,), step in _entries(run, 1, *where)}
    final = {key: x for (key,), x in _entries(steps.get("absolute_metrics"), 1, *where, "absolute")}
    values = next((final[name] for name in _RETURNS if name in final), None)
    numbers: list[Any] = values if isinstance(values, list) else [values]
    if not numbers or not all(type(x) in (int, float) and abs(x) < _MOST for x in numbers):
        raise RunError(
            f"{': '.join(map(str, where))} has no finite returns in absolute_metrics: one of "
            f"{', '.join(_RETURNS)} must be a list of numbers, among {', '.join(final)}."
        )
    return float(np.mean(numbers))
