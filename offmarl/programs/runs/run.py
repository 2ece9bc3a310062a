"""A run: its directory, signals and checkpoints.

``run.json`` is written first, so that a second call can tell whether to resume the run, to leave a
finished run unchanged, or to raise an error because the arguments differ.
"""

import atexit
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from offmarl import settings, tracking
from offmarl._lock import writing
from offmarl.config import Validated
from offmarl.errors import OptionError, RunError, Stopped
from offmarl.paths import no_empty_directories
from offmarl.programs.cluster import Agreement, any_process, is_first, on_first
from offmarl.programs.experience.captures import CaptureCheckpoints, remove_buffers
from offmarl.programs.runs.dataset import STATISTICS_FILE
from offmarl.programs.runs.identity import MAY_DIFFER, differences, require_same_numerics
from offmarl.records import recorded
from offmarl.vault.format.layout import MANIFEST

ArgsT = TypeVar("ArgsT", bound=Validated)

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
    stopped: Mapping[str, int] = field(default_factory=dict)
    """The step at which each seed of a finished run stopped early; empty if none did."""

    @property
    def metrics(self) -> Path:
        """The file of JSON lines."""
        return self.directory / tracking.METRICS_FILE

    def checkpoints(self, keep: int | None = None) -> CaptureCheckpoints:
        """Return the run's checkpoints."""
        return CaptureCheckpoints(self.directory / tracking.CHECKPOINTS, keep=keep)

    def lacks_checkpoint(self, last: int) -> bool:
        """Whether the last checkpoint is missing; users delete damaged ones."""
        return bool(on_first(lambda: self._lacks_checkpoint(last)))

    def _lacks_checkpoint(self, last: int) -> bool:
        checkpoints = self.checkpoints()
        if len(self.stopped) == len(self.record["seeds"]):
            last = max(self.stopped.values())
        return checkpoints.exists() and checkpoints.latest() != last

    def write_marl_eval(self, env: str) -> None:
        """Write all evaluations in the layout for comparisons; ``env`` is empty if it is unknown.

        The names of algorithms say how they acted. An algorithm that was evaluated both greedily
        and by sampling has two entries.
        """
        rows, seeds = tracking.read(self.metrics), self.record["seeds"]
        found = {name: steps for name in _evaluated(rows) if (steps := _by_step(rows, name, seeds))}
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
            others = {metric: steps for metric, steps in metrics.items() if metric != main}
            _add_to_steps(data[where[0]][where[1]][name], others)
            algorithms |= data[where[0]][where[1]]
        document = {where[0]: {where[1]: algorithms}}
        tracking.write_json(self.directory / tracking.MARL_EVAL_FILE, document)

    def _by_acting(self, found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return metrics by the name of the algorithm, with how it acted in the evaluation."""
        program, metrics = self.record["program"], dict(found)
        if not any(name.startswith(tracking.RETURN) for name in metrics):
            return {program: metrics}
        acting, other = tracking.acting_of(self.record), tracking.other_acting(self.record)
        second = tracking.OTHER_RETURN[other]
        others = {
            name.replace(second, tracking.RETURN): metrics.pop(name)
            for name in list(metrics)
            if name.startswith(second)
        }
        entries = {tracking.labelled(program, acting): metrics}
        if others:
            # marl-eval's reader expects all algorithms to have the same metrics.
            shared = {x: y for x, y in metrics.items() if not x.startswith(tracking.RETURN)}
            entries[tracking.labelled(program, other)] = others | shared
        return entries

    def finish(self, stopped: Mapping[str, int] | None = None) -> None:
        """Mark the run as finished, so that the same call does not change it.

        ``stopped`` holds the step of each seed that stopped early, by its number.
        """
        if not is_first():
            return
        ending = {"complete": True} | ({"stopped": dict(stopped)} if stopped else {})
        tracking.write_json(self.directory / tracking.RUN_FILE, {**self.record, **ending})
        remove_buffers(self.directory / tracking.CHECKPOINTS)


@contextmanager
def locked(directory: Path, take_over: bool) -> Iterator[Callable[[], None]]:
    """Hold the lock of a run's directory, which is made, while the block runs.

    A finished run is only locked by the function that is yielded, before something is written. All
    processes call it. `RunError` if another process writes the run, or its record is lost.
    """
    with no_empty_directories(directory), ExitStack() as stack:
        taken = False

        def take() -> None:
            nonlocal taken
            if not taken:
                lock = writing(directory / LOCK, directory, take_over)
                on_first(lambda: stack.enter_context(lock))
            taken = True

        if not on_first(lambda: _is_finished(directory)):
            take()
        yield take


def _is_finished(directory: Path) -> bool:
    """Whether a directory holds a finished run; `RunError` if no run can be written there."""
    if (directory / tracking.RUN_FILE).exists():
        return bool(tracking.read_run(directory).get("complete"))
    for place in (directory.resolve(), *directory.resolve().parents):
        holds = [place / MANIFEST, *(place.glob(f"*/{MANIFEST}") if place.suffix == ".vlt" else ())]
        if any(one.exists() for one in holds):
            raise RunError(
                f"{directory} is in the vault {place}: give the run another directory with --out."
            )
    names = (tracking.CHECKPOINTS, tracking.POLICIES, *_FILES)
    if left := [name for name in names if (directory / name).exists()]:
        raise RunError(
            f"{directory} holds {' and '.join(left)} of a run and no {tracking.RUN_FILE}, which "
            "says of which: restore it from a copy, remove the directory to start again, or choose "
            "another with --out."
        )
    return False


def open_run(directory: Path, record: Mapping[str, Any]) -> Run:
    """Start a run with a record, or open the one in a `locked` directory.

    `RunError` if the directory holds another run; the message names the first difference.
    """
    found, complete, stopped, metrics = on_first(lambda: _opened(directory, record))
    if not is_first():
        scratch = Path(tempfile.mkdtemp(prefix="offmarl-process-"))
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
        directory = scratch
        (directory / tracking.METRICS_FILE).write_text(metrics)
    return Run(directory, found, complete, stopped)


def _opened(directory: Path, record: Mapping[str, Any]) -> tuple[dict[str, Any], bool, Any, str]:
    """Return the record of a run, how it ended, and its lines of metrics."""
    record = tracking.plain(record)
    if not (directory / tracking.RUN_FILE).exists():
        directory.mkdir(parents=True, exist_ok=True)
        tracking.write_json(directory / tracking.RUN_FILE, {**record, "complete": False})
        return dict(record), False, {}, ""
    found = tracking.read_run(directory)
    complete, stopped = bool(found.pop("complete", False)), found.pop("stopped", {})
    for path, theirs, ours in sorted(
        differences(found, record, MAY_DIFFER), key=lambda one: _order(one[0])
    ):
        same_vault = found.get("vault") == record.get("vault") and "vaults" not in record
        if path == "vault_digest" and same_vault:
            raise RunError(
                f"{directory} holds a run on other data: the content of {record['vault']} was "
                f"another ({path} {theirs!r}, now {ours!r}). Choose another directory with --out "
                "to train on what it holds now."
            )
        saved = complete or (directory / tracking.CHECKPOINTS).is_dir()
        rest = "" if saved else " It has saved nothing yet: if it is not running, remove it."
        raise RunError(
            f"{directory} holds a run with {path} {theirs!r}, not {ours!r}: choose another "
            f"directory with --out, or give the arguments of that run to resume it.{rest}"
        )
    if not complete:
        require_same_numerics(directory, found.get("numerics"), record.get("numerics"))
    rows = tracking.read(directory / tracking.METRICS_FILE) if jax.process_count() > 1 else []
    return dict(record), complete, stopped, "".join(tracking.to_json(row) + "\n" for row in rows)


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
            shutil.rmtree(run.directory / tracking.POLICIES, ignore_errors=True)
            for vault in vaults():
                shutil.rmtree(vault, ignore_errors=True)
            for name in (*_FILES, tracking.RUN_FILE):
                (run.directory / name).unlink(missing_ok=True)
        raise


def settled(args: ArgsT, directory: Path) -> ArgsT:
    """Return arguments with the packaged settings that the directory's run has, and print them.

    Without a run, they are the arguments. See `offmarl.settings`.
    """
    record = on_first(lambda: tracking.recorded(directory))
    # What another process sent has lost the mark of what is recorded.
    args = settings.keep(args, recorded(record, str(directory / tracking.RUN_FILE)))
    print_sources(args)
    return args


def print_sources(args: Validated) -> None:
    """Print where the values of arguments came from, if some are from files."""
    for line in settings.used(args).lines(args):
        tracking.notice(f"settings: {line}")


def _by_step(
    rows: list[dict[str, Any]], metric: str, seeds: list[int]
) -> list[tuple[int, Float[np.ndarray, "seeds episodes"]]]:
    """Collect a metric's rows, one for each seed, into an array for each step."""
    found: dict[int, dict[int, list[float]]] = {}
    for row in rows:
        if metric in row:
            found.setdefault(row["step"], {})[row["seed"]] = row[metric]
    return [  # a null of JSON, which stands for a number that is not finite, becomes NaN
        (step, np.array([own[seed] for seed in seeds], float))
        for step, own in sorted(found.items())
        if own.keys() >= {*seeds}  # others were cut, because their lines were damaged
    ]


def _add_to_steps(runs: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
    """Add metrics to the steps of runs in the layout of `tracking.marl_eval`.

    marl-eval's reader expects every metric of the final evaluation in each step.
    """
    for name, steps in metrics.items():
        for k, (_, values) in enumerate(steps):
            for own, record in zip(values, runs.values(), strict=True):
                if f"step_{k}" in record:
                    record[f"step_{k}"][name] = np.asarray(own).tolist()


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

Watcher = Callable[[int, NDArray[Any]], None]
"""Called after an evaluation with the step and the values of the main metric, ``(seeds,
episodes)``; it may end the run by raising an exception."""

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call a function after each evaluation of the runs in the block."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def report(step: int, found: Mapping[str, NDArray[Any]]) -> None:
    """Report an evaluation to `watched`; `OptionError` if each of several teams has a score."""
    watcher = _watcher.get()
    if watcher is None or not found:
        return
    name = next((name for name in tracking.EVALUATED if name in found), None)
    if name is None:
        raise OptionError(
            f"the scores are {', '.join(found)}, one for each team, and none is that of the whole: "
            "use --env none, which scores the agreement with held-out actions."
        )
    watcher(step, found[name])


# ---------------------------------------------------------------------------------- signals

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_more = ContextVar("more to come", default=False)


class CheckpointTimer:
    """Tells when a checkpoint is due, and stops the program after one that a signal requested.

    The first signal requests a checkpoint if there is unsaved work. A second signal, or one without
    unsaved work, raises `Stopped` immediately. Made by `checkpoint_timer`. ``unit`` is that of
    positions, such as "update"; ``work`` what is stopped, if it is a part of what the command does.
    """

    def __init__(self, seconds: float, unit: str, work: str = ""):
        self._seconds, self._unit = seconds, unit
        self._of = f" of {work}" if work else ""
        self._saved: int | None = None
        self._begun = self._unsaved = False
        self._signal: int | None = None
        self._since = time.monotonic()
        self._agreement = Agreement()

    def begin(self, position: int) -> None:
        """Start at a position: that of a checkpoint, or 0."""
        self._saved, self._begun, self._since = position or None, True, time.monotonic()

    def work_done(self) -> None:
        """Record that there is unsaved work."""
        self._unsaved = True

    def is_due(self) -> bool:
        """Whether to save: after the given time, or after a signal.

        Several processes save at the same time: all of them must call this after the same work.
        """
        late = time.monotonic() - self._since > self._seconds
        if jax.process_count() == 1:
            return self._signal is not None or late
        due, signum = self._agreement.reached(late and is_first(), self._signal)
        self._signal = signum or self._signal
        return due

    def saved(self, position: int) -> None:
        """Record that a checkpoint was saved at a position; `Stopped` if a signal requested it."""
        self._saved, self._unsaved, self._since = position, False, time.monotonic()
        if self._signal is not None:
            any_process(False)  # none ends before the first one has saved
            raise self._stopped(self._signal)

    def end(self) -> None:
        """Record that the work is complete.

        `Stopped` if a signal came after the last checkpoint, and other work follows.
        """
        if self._signal is not None and _more.get():
            raise Stopped("stopped: the same command resumes the work.", self._signal)

    def on_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        waiting = jax.process_count() > 1  # the others do, until all of them stop together
        if self._signal is not None or not (self._unsaved or waiting):
            raise self._stopped(signum)
        self._signal = signum
        if not tracking.is_quiet():  # unbuffered: the program may hold the buffer's lock
            os.write(2, b"\nstopping: saving a checkpoint first. A second signal stops at once.\n")

    def _stopped(self, signum: int) -> Stopped:
        if self._saved is not None:
            where = f"at {self._unit} {self._saved:,}{self._of}: the same command resumes there."
        elif self._begun:
            where = (
                f"before the first checkpoint{self._of}: the same command starts at "
                f"{self._unit} 0{self._of}."
            )
        else:
            where = f"before the first {self._unit}: repeat the command to start again."
        return Stopped(f"stopped {where}", signum)


@contextmanager
def more_to_come(more: bool = True) -> Iterator[None]:
    """Declare that the command has other work to do after the block.

    A signal that came too late to stop the block then stops the command after it.
    """
    token = _more.set(more or _more.get())
    try:
        yield
    finally:
        _more.reset(token)


@contextmanager
def checkpoint_timer(seconds: float, unit: str, work: str = "") -> Iterator[CheckpointTimer]:
    """Handle SIGINT and SIGTERM by saving, while the block runs.

    It has no effect outside the main thread, which Python delivers signals to. Signals that are
    ignored, or that the application handles itself, are not changed.
    """
    timer = CheckpointTimer(seconds, unit, work)
    before = {}
    if threading.current_thread() is threading.main_thread():
        for signum in _SIGNALS:
            if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
                before[signum] = signal.signal(signum, timer.on_signal)
    try:
        yield timer
        timer.end()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
