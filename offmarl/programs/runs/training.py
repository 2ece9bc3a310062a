"""The training of a run: one loop and one journal, whatever the program learns from.

`carry_out` opens a run and trains it to its end, from its last checkpoint if it has one. What
differs between a dataset and an environment is a `Training`.
"""

import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from offmarl import tracking
from offmarl._memory import collect_as_before
from offmarl.errors import Stopped, raise_stopped
from offmarl.programs.cluster import agree, gather_all, is_first
from offmarl.programs.program import Args, Keep, OnlineArgs
from offmarl.programs.runs import dataset, finite
from offmarl.programs.runs.evaluate import summary
from offmarl.programs.runs.loop import Schedule, copy_arrays
from offmarl.programs.runs.run import (
    Run,
    best_of,
    no_run_without_checkpoint,
    open_run,
    report,
)
from offmarl.trackers import Trackers, facts_of_run, give_run
from offmarl.types import ArrayTree

COMPILING = "compiling"
"""What a progress display says until the first update is done."""

Evaluated = dict[str, Float[np.ndarray, "seeds _"]]
"""Metrics of the episodes of an evaluation, by name."""

Work = Iterator[tuple[int, Any, dict[str, Any]]]
"""Yields the number of updates done, the states after them, and the metrics ``(seeds, n)`` of the n
updates since the last yield."""

T = TypeVar("T")


# ---------------------------------------------------------------------------------- signals

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_UNSAVING = (signal.SIG_DFL, signal.default_int_handler, raise_stopped)

_more = ContextVar("more to come", default=False)


class CheckpointTimer:
    """Tells when a checkpoint is due, and stops the program after one that a signal requested.

    The first signal requests a checkpoint if there is unsaved work. A second signal, or one without
    unsaved work, raises `Stopped` immediately. Made by `checkpoint_timer`. ``unit`` is that of
    positions, such as "update"; ``work`` what is stopped, if it is a part of what the command does.
    """

    def __init__(self, seconds: float, unit: str, work: str):
        self._seconds, self._unit = seconds, unit
        self._of = f" of {work}" if work else ""
        self._saved: int | None = None
        self._begun = self._unsaved = False
        self._signal: int | None = None
        self._since = self._asked = time.monotonic()
        self._calls = self._interval = 1
        # Not in the handler, which would wait for ever for the lock that JAX holds while it starts.
        self._has_others = jax.process_count() > 1

    def begin(self, position: int) -> None:
        """Start at a position: that of a checkpoint, or 0."""
        self._saved, self._begun, self._since = position or None, True, time.monotonic()

    def work_done(self) -> None:
        """Record that there is unsaved work."""
        self._unsaved = True

    def is_due(self) -> bool:
        """Whether to save: after the given time, or after a signal.

        Several processes save at the same time: all of them must call this after the same work.
        They ask one another about once a second.
        """
        late = (now := time.monotonic()) - self._since > self._seconds
        if not self._has_others:
            return self._signal is not None or late
        self._calls -= 1
        if self._calls:
            return False
        fitting = int(self._interval / max(now - self._asked, 1e-6))
        interval = max(1, min(2 * self._interval, fitting))
        due, _, self._interval = agree(late and is_first(), self._signal, interval)
        self._calls, self._asked = self._interval, now
        return due

    def saved(self, position: int) -> None:
        """Record that a checkpoint was saved at a position; `Stopped` if a signal requested it."""
        self._saved, self._unsaved, self._since = position, False, time.monotonic()
        signum = self._signal
        if self._has_others:  # all of them stop, once the first one has saved
            _, signum, _ = agree(False, signum)
        if signum is not None:
            raise self._stopped(signum)

    def end(self) -> None:
        """Record that the work is complete.

        `Stopped` if a signal came after the last checkpoint, and other work follows.
        """
        if self._signal is not None and _more.get():
            raise Stopped("stopped: the same command continues.", self._signal)

    def on_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        # Other processes wait, until all of them stop together.
        if self._signal is not None or not (self._unsaved or self._has_others):
            raise self._stopped(signum)
        self._signal = signum
        if not tracking.is_quiet():  # unbuffered: the program may hold the buffer's lock
            os.write(2, b"\nstopping: saving a checkpoint first. A second signal stops at once.\n")

    def _stopped(self, signum: int) -> Stopped:
        if self._saved is not None:
            place = f"at {self._unit} {self._saved:,}{self._of}: the same command resumes there."
        elif self._begun:
            place = f"before the first checkpoint{self._of}: the same command starts again."
        else:  # it may have a checkpoint
            place = f"before the first {self._unit} of this command: the same command continues."
        return Stopped(f"stopped {place}", signum)


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
            if signal.getsignal(signum) in _UNSAVING:
                before[signum] = signal.signal(signum, timer.on_signal)
    try:
        yield timer
        timer.end()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# ---------------------------------------------------------------------------------- training


class Training(ABC):
    """A program in training, and what it learns from. States are those of all seeds."""

    args: Args | OnlineArgs
    record: Mapping[str, Any]
    """What ``run.json`` holds."""
    seeds: Sequence[int]
    schedule: Schedule
    description: str
    """The program, its data and its seeds, for the progress display."""
    environment: str
    """Name of the environment of its evaluations, or of its data."""
    unit: int = 1
    """Number of steps of an update, as metrics count them."""
    unit_name: str = "update"
    statistics: dict[str, NDArray[Any]]
    """What it used of the statistics of the dataset."""
    evaluations: list[tuple[int, Evaluated]]
    """The evaluations so far, each with its number of updates."""
    keep: Keep = "last"

    @abstractmethod
    def shapes(self) -> dict[str, ArrayTree]:
        """Return the shapes of what a checkpoint holds."""

    @abstractmethod
    def begin(self) -> Any:
        """Return the states before the first update."""

    @abstractmethod
    def resume(self, tree: Mapping[str, ArrayTree]) -> Any:
        """Return the states of a checkpoint, whose evaluations are in `evaluations`."""

    @abstractmethod
    def checkpoint(self, states: Any) -> dict[str, ArrayTree]:
        """Return the tree of a checkpoint, before which data are on disk."""

    @abstractmethod
    def learned(self, states: Any) -> Iterator[tuple[slice, ArrayTree, int]]:
        """Yield what must be finite: the places of seeds, their arrays, and the axes of seeds."""

    @abstractmethod
    def policies(self, states: Any) -> Any:
        """Return the parameters of the policies of all seeds."""

    @abstractmethod
    def play_ahead(self, policies: Any) -> "list[Future[None]]":
        """Compile the evaluation in a thread, unless several processes or none do."""

    @abstractmethod
    def evaluate(self, policies: Any, done: int) -> Evaluated:
        """Evaluate policies after some updates; after the last one, perhaps on more episodes."""

    def observe(self, _done: int, _states: Any, evaluation: Evaluated) -> Evaluated:
        """Take an evaluation, which may change the states; return what is written of it."""
        return evaluation

    @abstractmethod
    def work(self, states: Any, done: int) -> AbstractContextManager[Work]:
        """Open what it learns from, and update; the states are donated."""

    def unfinished(self) -> list[Path]:
        """Return the vaults that the training has begun to write."""
        return []


def named_seeds(seeds: Sequence[int]) -> str:
    """Return seeds that follow one another in words."""
    return f"seeds {seeds[0]}-{seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"


def carry_out(
    training: Training,
    directory: Path,
    lock: Callable[[], None],
    is_complete: Callable[[], bool] = lambda: True,
    train: Callable[[Training, Run, CheckpointTimer], None] | None = None,
) -> bool:
    """Train a run to its end; return whether it was not finished already.

    A finished run, of which ``is_complete`` says whether nothing else is missing, is not changed.
    ``lock`` is from `locked`; ``train`` replaces `learn`.
    """
    run = open_run(directory, training.record)
    if run.complete and not run.lacks_checkpoint(training.schedule.updates) and is_complete():
        return False
    lock()
    dataset.save(run.directory / dataset.STATISTICS_FILE, training.statistics)
    seconds, unit = training.args.checkpoint_seconds, training.unit_name
    with no_run_without_checkpoint(run, training.unfinished), checkpoint_timer(seconds, unit) as t:
        (train or learn)(training, run, t)
    run.write_marl_eval(training.environment)
    run.finish()
    if is_first() and training.args.track:
        give_run(training.args.track, facts_of_run(run.directory, run.record), files=run.files())
    return True


def learn(training: Training, run: Run, timer: CheckpointTimer) -> None:
    """Update, log, evaluate and save until a run is complete."""
    journal, unit = _Journal(training, run), training.unit
    done, states = journal.begin()
    timer.begin(done * unit)
    total = training.schedule.updates * unit
    with (
        journal.trackers,
        training.work(states, done) as work,
        tracking.progress(training.description, total, done * unit, note=COMPILING) as advance,
    ):
        del states  # they are donated
        journal.follow(work, done, timer, advance)


class _Journal:
    """Metrics, evaluations and checkpoints of all seeds."""

    def __init__(self, training: Training, run: Run):
        self._training, self._run, self._schedule = training, run, training.schedule
        self.checkpoints = run.checkpoints(keep=2, last=training.schedule.updates)
        self._means = Means()
        self._untrained: Any = None
        self._playable = list[Future[None]]()
        """Done when evaluations are compiled."""
        self._note = ""
        self._keeps = False
        """Whether the last evaluation asks for a checkpoint."""

    def begin(self) -> tuple[int, Any]:
        """Return the updates done, and the states after them."""
        training, done = self._training, 0
        checkpoint = self.checkpoints.resume(training.shapes())
        if checkpoint is None:
            states = training.begin()
        else:
            self._means = Means(checkpoint.info["sums"], checkpoint.info["count"])
            training.evaluations += [
                (step, {name: np.array(x, float) for name, x in of_step.items()})
                for step, of_step in checkpoint.info["evaluations"]
            ]
            done, states = checkpoint.step, training.resume(checkpoint.tree)
        policies = training.policies(states)
        if checkpoint is None:
            self._untrained = copy_arrays(policies)  # updates donate the states
        self._playable = training.play_ahead(policies)
        trees = (jax.device_get(gather_all(tree)) for _, tree, _ in training.learned(states))
        self._by_design = finite.infinities([*trees])
        tracking.cut(self._run.metrics, -1 if checkpoint is None else done * training.unit)
        if training.evaluations:
            self._write_lost()
        track = training.args.track if is_first() else ()
        self.trackers = Trackers(track, self._run.directory, self._run.record)
        return done, states

    def _write_lost(self) -> None:
        """Write again the evaluations whose lines were lost to damage."""
        rows = tracking.read(self._run.metrics)
        written = {(row["seed"], row["step"]) for row in rows if tracking.WALL_TIME not in row}
        for done, evaluation in self._training.evaluations:
            rows = [*self._rows(done * self._training.unit, evaluation)]
            lost = (row for row in rows if (row["seed"], row["step"]) not in written)
            tracking.append(self._run.metrics, *lost)

    def follow(
        self, work: Work, done: int, timer: CheckpointTimer, advance: tracking.Advance
    ) -> None:
        """Log, evaluate and save while the training works.

        Raises `NotFiniteError` at the first block that is not finite, before it is logged.
        """
        training, schedule, unit = self._training, self._schedule, self._training.unit
        clock = _Clock(tracking.last(self._run.metrics, tracking.WALL_TIME), done * unit)
        for step, states, logs in clock.timed(work):
            collect_as_before()
            timer.work_done()
            metrics = jax.device_get(logs)  # `work` has waited for the device
            self._check(step, states, metrics)
            self._log(step, metrics, step - done, clock)
            if self._untrained is not None:
                # Learning curves begin with the initial policies. The line of the first update
                # comes before, because it comes much sooner and shows that the program works.
                self._evaluate(0, self._untrained)
                self._untrained = None
            if schedule.is_evaluation(step):
                self._evaluate(step, training.policies(states), states)
            advance((step - done) * unit, self._note)
            done = step
            if timer.is_due() or self._keeps or step == schedule.updates:
                self._save(step, states)
                timer.saved(step * unit)

    def _check(self, done: int, states: Any, metrics: Mapping[str, NDArray[Any]]) -> None:
        """Raise `NotFiniteError` if a seed is not finite."""
        training, faults = self._training, dict[int, str]()
        for place, tree, axes in training.learned(states):
            seed_metrics = {name: values[place] for name, values in metrics.items()}
            seeds = training.seeds[place]
            faults |= finite.faults(done, seeds, seed_metrics, tree, axes, self._by_design)
        if faults:
            raise finite.not_finite_error(faults, self._run.directory, self.checkpoints.latest())

    def _log(
        self, done: int, metrics: Mapping[str, NDArray[Any]], count: int, clock: "_Clock"
    ) -> None:
        """Write lines of metrics that are due: of each update, or the means of a block of them."""
        unit = self._training.unit
        if self._schedule.log_every > 1:
            self._means.add(metrics, count)
            if done == self._schedule.next_log(done - 1):
                self._write(done * unit, self._means.take(), clock.times(done * unit))
            return
        times = clock.times(done * unit)
        for index in range(count):
            later = (count - 1 - index) * unit
            then = times[tracking.WALL_TIME] - later / times[tracking.SPEED]
            row = {name: values[:, index] for name, values in metrics.items()}
            self._write(done * unit - later, row, times | {tracking.WALL_TIME: then})

    def _evaluate(self, done: int, policies: Any, states: Any = None) -> None:
        """Evaluate policies; the training may change the states that come with them."""
        training = self._training
        wait(self._playable)
        evaluation = training.evaluate(policies, done)
        if states is not None:
            evaluation = training.observe(done, states, evaluation)
        if evaluation:
            training.evaluations.append((done, evaluation))
            self._write(done * training.unit, evaluation)
        self._note = summary(evaluation)
        if states is not None and evaluation:
            keep = training.keep
            self._keeps = keep == "all" or (keep == "best" and done in self._best())
            report(done, evaluation)

    def _best(self) -> set[int]:
        """Return the updates of the best evaluation of each seed."""
        rows = tracking.read(self._run.metrics)
        return {step for seed in self._training.seeds if (step := best_of(rows, seed))}

    def _save(self, done: int, states: Any) -> None:
        """Write a checkpoint, with the evaluations and the metrics not yet logged."""
        training, checkpoints = self._training, self.checkpoints
        if training.keep == "all":
            checkpoints.kept = {*filter(self._schedule.is_evaluation, checkpoints.steps())}
        elif training.keep == "best":
            checkpoints.kept = self._best()
        self._keeps = False
        tree, means = training.checkpoint(states), self._means
        evaluations = tracking.plain(training.evaluations)
        info = {"sums": means.sums, "count": means.count, "evaluations": evaluations}
        checkpoints.save(done, tree, info)
        self.trackers.sync()

    def _write(self, step: int, *metrics: Mapping[str, Any]) -> None:
        tracking.append(self._run.metrics, *self._rows(step, *metrics))

    def _rows(self, step: int, *metrics: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
        """Return a line for each seed: its entries of metrics ``(seeds, ...)``, and plain ones."""
        for place, seed in enumerate(self._training.seeds):
            row: dict[str, Any] = {"seed": seed, "step": step}
            for name, x in (item for group in metrics for item in group.items()):
                row[name] = x[place] if isinstance(x, np.ndarray) else x
            yield row


class _Clock:
    """Measures `tracking.TIMES`."""

    def __init__(self, elapsed: float, steps: int):
        self._begun, self._steps, self._worked = time.monotonic() - elapsed, steps, 0.0

    def timed(self, work: Iterator[T]) -> Iterator[T]:
        """Measure the time that an iterator takes, without that of the loop around it."""
        while True:
            start = time.monotonic()
            item = next(work, None)
            self._worked += time.monotonic() - start
            if item is None:
                return
            yield item

    def times(self, steps: int) -> dict[str, float]:
        """Return the time since the run began, and the speed since the last call."""
        speed = (steps - self._steps) / max(self._worked, 1e-9)
        self._steps, self._worked = steps, 0.0
        return {tracking.WALL_TIME: time.monotonic() - self._begun, tracking.SPEED: speed}


class Means:
    """Means of metrics over a block of updates, independent of how the block is divided.

    ``sums``, JSON, has those of each metric, one for each seed, over ``count`` updates.
    """

    def __init__(self, sums: Mapping[str, list[float]] | None = None, count: int = 0):
        self.sums = dict(sums or {})
        self.count = count

    def add(self, metrics: Mapping[str, Float[np.ndarray, "seeds n"]], count: int) -> None:
        """Add the metrics of ``count`` updates, one after the other."""
        for name, values in metrics.items():
            before = np.array(self.sums.get(name, [0.0] * len(values)))[:, None]
            # The order of additions in a cumulative sum, unlike in a sum, does not depend on their
            # number, so that a run that was interrupted within a block has the same bits.
            self.sums[name] = np.cumsum(np.hstack([before, values]), axis=1)[:, -1].tolist()
        self.count += count

    def take(self) -> dict[str, Float[np.ndarray, "seeds"]]:
        """Return the means, and reset them."""
        sums = {name: np.array(values) for name, values in self.sums.items()}
        means = {name: (value / self.count).astype(np.float32) for name, value in sums.items()}
        self.sums, self.count = {}, 0
        return means
