"""A run: its directory, record and checkpoints.

``run.json`` is written first, so that a second call can tell whether to resume the run, to leave a
finished run unchanged, or to raise an error because the arguments differ.
"""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from offmarl import settings, tracking
from offmarl._lock import hold_lock
from offmarl.config import Validated
from offmarl.errors import OptionError, RunError
from offmarl.paths import no_empty_directories
from offmarl.programs.cluster import is_first, on_first
from offmarl.programs.experience.captures import CaptureCheckpoints, remove_buffers
from offmarl.programs.program import ArgsT
from offmarl.programs.runs.dataset import STATISTICS_FILE
from offmarl.programs.runs.identity import MAY_DIFFER, differences, require_same_numerics
from offmarl.records import mark_names
from offmarl.vault.format.layout import MANIFEST

LOCK = "run.lock"
"""File in the directory of a run that a process writes; it names the process."""

_FILES = (STATISTICS_FILE, tracking.METRICS_FILE, tracking.MARL_EVAL_FILE)
"""Files of a run that mean nothing without its record."""


@dataclass(frozen=True)
class Run:
    """An open run."""

    directory: Path
    record: Mapping[str, Any]
    """The content of ``run.json``, without ``complete``."""
    complete: bool
    """Whether the run was finished when it was opened."""

    @property
    def metrics(self) -> Path:
        """The file of JSON lines."""
        return self.directory / tracking.METRICS_FILE

    def files(self) -> list[Path]:
        """Return what a policy consists of, for `offmarl.load_policy`."""
        names = (tracking.RUN_FILE, *_FILES, tracking.CHECKPOINTS)
        return [file for name in names if (file := self.directory / name).exists()]

    def checkpoints(self, keep: int | None = None, last: int | None = None) -> CaptureCheckpoints:
        """Return the run's checkpoints; ``last`` is the step at which the run ends."""
        last = last if self.complete else None
        return CaptureCheckpoints(self.directory / tracking.CHECKPOINTS, keep=keep, last=last)

    def lacks_checkpoint(self, last: int) -> bool:
        """Whether the last checkpoint is missing; users delete damaged ones."""
        place = self.directory / tracking.CHECKPOINTS
        return on_first(lambda: place.is_dir() and self.checkpoints().latest() != last)

    def write_marl_eval(self, env: str) -> None:
        """Write all evaluations in the layout for comparisons; ``env`` is empty if it is unknown.

        The names of algorithms say how they acted. An algorithm that was evaluated both greedily
        and by sampling has two entries.
        """
        rows, algorithms = tracking.read(self.metrics), {}
        for name, metrics in self._by_acting(_evaluated(rows)).items():
            if runs := _evaluations_by_seed(rows, self.record["seeds"], metrics):
                algorithms[name] = runs
        if not algorithms:
            return
        dataset, _, uid = (self.record["vault"] or "").rpartition("/")
        environment, _, task = (env or f"unknown/{dataset}").partition("/")
        task = "/".join(part for part in (task or environment, uid) if part)
        document = {environment: {task: algorithms}}
        tracking.write_json(self.directory / tracking.MARL_EVAL_FILE, document)

    def _by_acting(self, names: list[str]) -> dict[str, dict[str, str]]:
        """Return metrics by the name of the algorithm, with how it acted in the evaluation."""
        program = self.record["program"]
        if not any(name.startswith(tracking.RETURN) for name in names):
            return {program: {name: name for name in names}}
        acting, other = tracking.acting_of(self.record), tracking.other_acting(self.record)
        second = tracking.OTHER_RETURN[other]
        main = {name: name for name in names if not name.startswith(second)}
        extra = {name.replace(second, tracking.RETURN): name for name in names if name not in main}
        entries = {tracking.labelled(program, acting): main}
        if extra:
            # marl-eval's reader expects all algorithms to have the same metrics.
            shared = {name: name for name in main if not name.startswith(tracking.RETURN)}
            entries[tracking.labelled(program, other)] = extra | shared
        return entries

    def finish(self) -> None:
        """Mark the run as finished, so that the same call does not change it."""
        if not is_first():
            return
        tracking.write_json(self.directory / tracking.RUN_FILE, {**self.record, "complete": True})
        remove_buffers(self.directory / tracking.CHECKPOINTS)


@contextmanager
def locked(directory: Path, take_over: bool) -> Iterator[Callable[[], None]]:
    """Hold the lock of a run's directory, which is made, while the block runs.

    A finished run is only locked by the function that is yielded, before something is written. All
    processes call it. `RunError` if another process writes the run, or its record is lost.
    """
    with no_empty_directories(directory), ExitStack() as stack:

        def take() -> None:
            lock = hold_lock(directory / LOCK, directory, take_over)
            on_first(lambda: stack.enter_context(lock))

        if on_first(lambda: _is_finished(directory)):
            yield take
        else:
            take()
            yield lambda: None


def _is_finished(directory: Path) -> bool:
    """Whether a directory holds a finished run; `RunError` if no run can be written there."""
    if (directory / tracking.RUN_FILE).exists():
        return bool(tracking.read_run(directory).get("complete"))
    for place in (directory.resolve(), *directory.resolve().parents):
        holds = [place / MANIFEST, *(place.glob(f"*/{MANIFEST}") if place.suffix == ".vlt" else ())]
        if any(file.exists() for file in holds):
            raise RunError(
                f"{directory} is in the vault {place}: give the run another directory with --out."
            )
    names = (tracking.CHECKPOINTS, tracking.POLICIES, *_FILES)
    if orphans := [name for name in names if (directory / name).exists()]:
        raise RunError(
            f"{directory} holds {' and '.join(orphans)} of a run and no {tracking.RUN_FILE}, which "
            "says of which: restore it from a copy, remove the directory to start again, or choose "
            "another with --out."
        )
    return False


def open_run(directory: Path, record: Mapping[str, Any]) -> Run:
    """Start a run with a record, or open the one in a `locked` directory.

    `RunError` if the directory holds another run; the message names the first difference.
    """
    record, complete, metrics = on_first(lambda: _opened_record(directory, record))
    if not is_first():
        scratch = Path(tempfile.mkdtemp(prefix="offmarl-process-"))
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
        directory = scratch
        (directory / tracking.METRICS_FILE).write_text(metrics)
    return Run(directory, record, complete)


def _opened_record(directory: Path, record: Mapping[str, Any]) -> tuple[dict[str, Any], bool, str]:
    """Return the record of a run, whether it has ended, and its lines of metrics."""
    record = tracking.plain(record)
    if not (directory / tracking.RUN_FILE).exists():
        tracking.write_json(directory / tracking.RUN_FILE, {**record, "complete": False})
        return dict(record), False, ""
    existing = tracking.read_run(directory)
    complete = bool(existing.pop("complete", False))
    resolved = [f"args.{name}" for name in record.get("resolved", ())]  # they follow from others
    for path, theirs, ours in sorted(
        differences(existing, record, MAY_DIFFER), key=lambda x: _order(x[0]) + (x[0] in resolved)
    ):
        same_vault = existing.get("vault") == record.get("vault") and "vaults" not in record
        sources = {"vault_digest": same_vault and record.get("vault"), "sha256": record.get("file")}
        saved = complete or (directory / tracking.CHECKPOINTS).is_dir()
        hint = "" if saved else " It has saved nothing yet: if it is not running, remove it."
        if theirs and (source := sources.get(path)):
            raise RunError(
                f"{directory} holds an earlier run: the content of {source} was another ({path} "
                f"{theirs!r}, now {ours!r}). Choose another --out to train with what it holds "
                f"now.{hint}"
            )
        other = f"{path} {theirs!r}, not {ours!r}"
        if path == "vault_digest":
            other = "other data, or other shares of the same vaults"
        raise RunError(
            f"{directory} holds a run with {other}: choose another "
            f"directory with --out, or give the arguments of that run to resume it.{hint}"
        )
    if not complete:
        require_same_numerics(directory, existing.get("numerics"), record.get("numerics"))
    rows = tracking.read(directory / tracking.METRICS_FILE) if jax.process_count() > 1 else []
    return dict(record), complete, "".join(tracking.to_json(row) + "\n" for row in rows)


def _order(path: str) -> int:
    """Order in which differences are named: the program, its data, the arguments, what follows."""
    if path in ("kind", "program"):
        return 0
    return 3 if path == "weights_digest" else 1 + path.startswith("args.")


@contextmanager
def no_run_without_checkpoint(run: Run, vaults: Callable[[], list[Path]] = list) -> Iterator[None]:
    """Leave no run behind, and none of its unfinished vaults, if it fails before a checkpoint.

    There is nothing to resume then, and ``run.json`` would refuse the command with other arguments,
    by which a user corrects it. A signal is no failure: the same command is repeated.
    """
    try:
        yield
    except Exception:
        if is_first() and not run.complete and not (run.directory / tracking.CHECKPOINTS).is_dir():
            for name in (tracking.POLICIES, tracking.OPPONENTS):
                shutil.rmtree(run.directory / name, ignore_errors=True)
            for vault in vaults():
                shutil.rmtree(vault, ignore_errors=True)
            for name in (*_FILES, tracking.RUN_FILE):
                (run.directory / name).unlink(missing_ok=True)
        raise


def settle(args: ArgsT, directory: Path) -> ArgsT:
    """Return arguments with the packaged settings that the directory's run has, and print them.

    Without a run, they are the arguments. See `offmarl.settings`.
    """
    record = on_first(lambda: tracking.read_run_if_any(directory))
    # A record that another process sent has lost the marks of recorded names.
    args = settings.keep_packaged(args, mark_names(record, str(directory / tracking.RUN_FILE)))
    print_sources(args)
    return args


def print_sources(args: Validated) -> None:
    """Print where the values of arguments came from, if some are from files."""
    for line in settings.origins_of(args).lines(args):
        tracking.notice(f"settings: {line}")


def _evaluations_by_seed(
    rows: list[dict[str, Any]], seeds: list[int], names: Mapping[str, str]
) -> dict[str, Any]:
    """Return the evaluations of each seed as marl-eval's tools expect them; empty without one.

    ``names`` holds the metrics by their names there. Steps that not all seeds have are
    left out: their lines were damaged.
    """
    by_seed: dict[int, dict[int, dict[str, Any]]] = {seed: {} for seed in seeds}
    timed: dict[int, list[dict[str, Any]]] = {seed: [] for seed in seeds}
    for row in rows:
        if tracking.WALL_TIME in row and row["seed"] in timed:
            timed[row["seed"]].append(row)
        values = {label: row[name] for label, name in names.items() if name in row}
        if values and row["seed"] in by_seed:
            by_seed[row["seed"]].setdefault(row["step"], {}).update(values)
    steps = sorted(set.intersection(*({*of_seed} for of_seed in by_seed.values())))
    return {
        f"seed_{seed}": {
            f"step_{k}": {"step_count": step, **_times(timed[seed], step), **of_seed[step]}
            for k, step in enumerate(steps)
        }
        | {"absolute_metrics": of_seed[steps[-1]]}
        for seed, of_seed in by_seed.items()
        if steps
    }


def _times(timed: list[dict[str, Any]], step: int) -> dict[str, float]:
    """Return the times that a seed logged last up to a step, or first; as marl-eval names them."""
    first = timed[0] if timed else {}
    row = next((row for row in reversed(timed) if row["step"] <= step), first)
    names = {"elapsed_time": tracking.WALL_TIME, "steps_per_second": tracking.SPEED}
    return {label: row[name] for label, name in names.items() if name in row}


def _evaluated(rows: list[dict[str, Any]]) -> list[str]:
    """Return the metrics of evaluations among those of a run, the main one first."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [
        name
        for metric in tracking.EVALUATED
        for name in names
        if name == metric or name.startswith(f"{metric}_")
    ]


# ---------------------------------------------------------------------------------- evaluations


def best_of(rows: Sequence[Mapping[str, Any]], seed: int) -> int | None:
    """Return the step of a seed's evaluation with the highest mean, the first of equal ones.

    The means are those of as many episodes as the smallest evaluation has, or the smaller ones
    would be chosen for their noise. ``rows`` are the lines of a run. The evaluation before the
    first update does not count. The metric is the return, of all teams together, or the agreement
    with held-out actions in a run without an environment. None without an evaluation.
    """
    lines = [row for row in rows if row["seed"] == seed and row["step"]]
    for metric in tracking.EVALUATED:
        evaluations = {row["step"]: x for row in lines if (x := _evaluation(row, metric))}
        if evaluations:
            count = min(len(value) for values in evaluations.values() for value in values)
            means = {
                step: float(np.mean([np.mean(value[:count]) for value in values]))
                for step, values in evaluations.items()
            }
            return max(means, key=lambda step: means[step])
    return None


def _evaluation(row: Mapping[str, Any], metric: str) -> list[list[float]]:
    """Return the values of a metric's episodes, by team; none if some value is not finite."""
    entries = (value for name, value in row.items() if name.startswith(metric))
    values = [value for value in entries if isinstance(value, list) and value]  # may be forged
    return [] if any(None in value for value in values) else values


Watcher = Callable[[int, NDArray[Any]], None]
"""Called after an evaluation with the step and the values of the main metric, ``(seeds,
episodes)``; it may end the run by raising an exception."""

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watch_runs(watcher: Watcher) -> Iterator[None]:
    """Call a function after each evaluation of the runs in the block."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def report(step: int, metrics: Mapping[str, NDArray[Any]]) -> None:
    """Report an evaluation to `watch_runs`; `OptionError` if each team has a score."""
    watcher = _watcher.get()
    if watcher is None or not metrics:
        return
    name = next((name for name in tracking.EVALUATED if name in metrics), None)
    if name is None:
        raise OptionError(
            f"the scores are {', '.join(metrics)}, one for each team, and none for all: use "
            "--env none, which scores the agreement with held-out actions."
        )
    watcher(step, metrics[name])
