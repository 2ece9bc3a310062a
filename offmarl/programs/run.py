"""The directory of a run: what it was asked to do, and whether it has.

``run.json`` is written before anything else, so that a second call can tell whether it is to go on
with the run, has nothing left to do, or was asked for something different.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from offmarl import checkpoint, tracking
from offmarl.errors import RunError

_EVALUATED = (
    tracking.RETURN,
    tracking.GREEDY_RETURN,
    tracking.AGREEMENT,
    tracking.LOG_LIKELIHOOD,
)
"""What metrics may hold a list of for each evaluation and seed; the first one there is the main."""

_MAY_DIFFER = ("offmarl", "args.vault", "args.time_limit")
"""What may be another when a run is resumed: our version, how the vault's path is written, as the
vault is known by its digest, and where its time limit is from, as ``spec`` has the one in use."""


@dataclass(frozen=True)
class Run:
    """A run under way.

    Attributes
    ----------
    directory
        Where it is kept.
    record
        What ``run.json`` says but for ``complete``.
    complete
        Whether it had ended when it was opened.
    """

    directory: Path
    record: Mapping[str, Any]
    complete: bool

    @property
    def metrics(self) -> Path:
        """The file of JSON lines."""
        return self.directory / tracking.METRICS_FILE

    def checkpoints(self, keep: int | None = None) -> checkpoint.Checkpoints:
        """Return the run's checkpoints."""
        return checkpoint.Checkpoints(self.directory / tracking.CHECKPOINTS, keep=keep)

    def lacks_checkpoint(self, last: int) -> bool:
        """Whether the last checkpoint is gone, as a user deletes a damaged one."""
        checkpoints = self.checkpoints()
        return checkpoints.exists() and checkpoints.latest() != last

    def write_marl_eval(self, env: str) -> None:
        """Arrange the evaluations logged, those before a resume included, for comparison.

        An algorithm is named with how it acted. One that draws its actions is there twice: its
        best actions were evaluated too, at the end.

        Parameters
        ----------
        env
            The environment's name; may be empty where a dataset does not tell.
        """
        rows, seeds = tracking.read(self.metrics), self.record["seeds"]
        found = {name: steps for name in _EVALUATED if (steps := _by_step(rows, name, seeds))}
        if not found:
            return
        dataset, _, uid = (self.record["vault"] or "").rpartition("/")
        environment, _, task = (env or f"unknown/{dataset}").partition("/")
        where = environment, "/".join(part for part in (task or environment, uid) if part)
        algorithms: dict[str, Any] = {}
        for name, metrics in self._by_acting(found).items():
            main = next(iter(metrics))
            final = {metric: steps[-1][1] for metric, steps in metrics.items()}
            data = tracking.marl_eval(*where, name, seeds, metrics[main], final, main)
            algorithms |= data[where[0]][where[1]]
        document = {where[0]: {where[1]: algorithms}}
        tracking.write_json(self.directory / tracking.MARL_EVAL_FILE, document)

    def _by_acting(self, found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return metrics by the name of the algorithm, which says how it acted to be evaluated."""
        program, metrics = self.record["program"], dict(found)
        if tracking.RETURN not in metrics:
            return {program: metrics}
        greedy = metrics.pop(tracking.GREEDY_RETURN, None)
        entries = {tracking.labelled(program, tracking.acting_of(self.record)): metrics}
        if greedy is not None:
            entries[tracking.labelled(program, "greedy")] = {tracking.RETURN: greedy}
        return entries

    def finish(self) -> None:
        """Note that the run has ended, so that the same call does nothing next time."""
        tracking.write_json(self.directory / tracking.RUN_FILE, {**self.record, "complete": True})


def open_run(directory: Path, record: Mapping[str, Any]) -> Run:
    """Begin a run, or take up the one in a directory.

    Parameters
    ----------
    directory
        Made if need be.
    record
        What the run is: its program, arguments, spec, policy and data, as JSON would have it.

    Raises
    ------
    RunError
        The directory holds a run with another record; the message names the first difference.
    """
    record = tracking.plain(record)
    if not (directory / tracking.RUN_FILE).exists():
        directory.mkdir(parents=True, exist_ok=True)
        tracking.write_json(directory / tracking.RUN_FILE, {**record, "complete": False})
        return Run(directory, record, complete=False)
    found = tracking.read_run(directory)
    complete = bool(found.pop("complete", False))
    for path, theirs, ours in _differences(found, record):
        raise RunError(
            f"{directory} holds a run with {path} {theirs!r}, not {ours!r}: choose another "
            "directory with --out, or give the settings it was begun with to go on with it."
        )
    return Run(directory, record, complete)


def _by_step(
    rows: list[dict[str, Any]], metric: str, seeds: list[int]
) -> list[tuple[int, Float[np.ndarray, "seeds episodes"]]]:
    """Collect a metric's rows, of one seed each, into one array for each step."""
    found: dict[int, dict[int, list[float]]] = {}
    for row in rows:
        if metric in row:
            found.setdefault(row["step"], {})[row["seed"]] = row[metric]
    return [(step, np.array([found[step][seed] for seed in seeds])) for step in sorted(found)]


def _differences(found: Any, wanted: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(found, dict) and isinstance(wanted, dict):
        return [
            difference
            for key in sorted(found.keys() | wanted.keys())
            if (full := f"{path}.{key}" if path else key) not in _MAY_DIFFER
            for difference in _differences(found.get(key), wanted.get(key), full)
        ]
    return [] if found == wanted else [(path, found, wanted)]
