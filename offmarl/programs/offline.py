"""Offline training: what a baseline runs, and the files of its run."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray
from numpy.typing import NDArray

from offmarl import settings, tracking
from offmarl._compiling import pinned
from offmarl.paths import below, local
from offmarl.programs.cluster import (
    check_same,
    ends_with_others,
    gathered,
    is_first,
    join,
    on_first,
)
from offmarl.programs.program import (
    Args,
    ArgsT,
    Hyperparameters,
    Program,
    hyperparameters,
    recorded,
    state_shapes,
)
from offmarl.programs.registry import Origin, origin_of, program_of
from offmarl.programs.runs import dataset as data
from offmarl.programs.runs import finite, gathering
from offmarl.programs.runs.compiling import keep_compiled_programs
from offmarl.programs.runs.continuing import Start, start_of_baseline, started
from offmarl.programs.runs.dataset import DatasetStatistics
from offmarl.programs.runs.drawing import Drawing, drawing_of, open_data
from offmarl.programs.runs.evaluate import (
    Evaluator,
    evaluate,
    folded,
    make_evaluator,
    play_ahead,
    summary,
)
from offmarl.programs.runs.identity import made_from
from offmarl.programs.runs.loop import (
    COMPILING,
    LOG_EVERY,
    Learned,
    Learners,
    Schedule,
    build,
    copied,
    learn,
    offline_schedule,
    start,
    start_shapes,
    updates,
    updates_ahead,
)
from offmarl.programs.runs.run import (
    CheckpointTimer,
    Run,
    checkpoint_timer,
    locked,
    no_run_without_checkpoint,
    open_run,
    report,
    settled,
)
from offmarl.programs.runs.sharding import (
    Layout,
    check_divisible,
    check_shards,
    layout_of,
    shards_record,
)
from offmarl.programs.runs.stopping import Stopping, best_of
from offmarl.replay import (
    BatchSource,
    open_batches,
    split_key,
)
from offmarl.replay.device import bytes_of, require_room
from offmarl.replay.priorities import Priorities, Prioritised
from offmarl.trackers import Trackers
from offmarl.trackers import check as check_trackers
from offmarl.types import ArrayTree, EnvSpec
from offmarl.vault import Dataset, Mixture


@pinned()
def train(make: Callable[[EnvSpec, ArgsT, DatasetStatistics], Program], args: ArgsT) -> Path:
    """Train a program on a vault, evaluate it, and write the run.

    The same call resumes a stopped run from its last checkpoint and ends with the same bits as an
    uninterrupted run. A finished run is not changed. SIGINT and SIGTERM save a checkpoint and then
    stop the run.

    Parameters
    ----------
    make
        ``make(spec, args, dataset)`` builds the program. The run records the file that defines it.
    args
        The program's arguments.

    Returns
    -------
    The run's directory.

    Raises
    ------
    VaultError, ShapeError, OptionError
        The vault cannot be read, or does not fit the program or the environment; an argument is
        invalid.
    RunError
        The directory holds a run with other arguments or other code of the environment.
    Stopped
        A signal stopped the run; the message says where it resumes.
    """
    assert isinstance(args, Args)
    join(args)
    keep_compiled_programs()
    where = local(args.out) if args.out else Path("the run")
    with ends_with_others(where), checkpoint_timer(args.checkpoint_seconds, "update") as timer:
        return _train(make, args, timer)


def _train(
    make: Callable[[EnvSpec, Any, DatasetStatistics], Program], args: Args, timer: CheckpointTimer
) -> Path:
    check_trackers(args.track)
    dataset, origin = open_data(args), origin_of(make)
    directory = _directory(origin.name, args, dataset)
    with locked(directory, args.take_over) as lock:
        _train_locked(make, args, timer, dataset, origin, directory, lock)
    return directory


def _train_locked(
    make: Callable[[EnvSpec, Any, DatasetStatistics], Program],
    args: Args,
    timer: CheckpointTimer,
    dataset: Dataset | Mixture,
    origin: Origin,
    directory: Path,
    lock: Callable[[], None],
) -> None:
    job, record = _prepared(make, settled(args, directory), dataset, origin, directory)
    args, evaluator, schedule = job.args, job.evaluator, job.schedule
    check_same("the dataset", record["vault_digest"], "give all of them the same vault.")
    if args.init is not None:
        job.origin.check(job.program, state_shapes(job.program, args))
    run = open_run(directory, record)
    if run.complete and not run.lacks_checkpoint(schedule.updates):
        return
    lock()
    data.save(run.directory / data.STATISTICS_FILE, job.statistics)
    job = job._replace(run=run)
    with ends_with_others(directory), no_run_without_checkpoint(run):
        if (parts := gathering.PARTS.get()) is None:
            _learn(job, dataset, timer)
            stopped = job.stopped()
        else:
            like = job.tree(job.begin(*job.keys()[:2]))
            stopped = gathering.gather(run, like, parts, args.keep, job.evaluate)
            run.write_marl_eval(evaluator.environment)
        run.finish(stopped)
    for seed, step in stopped.items():
        tracking.notice(f"seed {seed} stopped at update {step}: --stop-on {args.stop_on}")


def train_ahead(make: Callable[[EnvSpec, ArgsT, DatasetStatistics], Program], args: ArgsT) -> None:
    """Compile what `train` runs with these arguments, beside other work in another thread."""
    assert isinstance(args, Args)
    dataset, origin = open_data(args), origin_of(make)
    directory = _directory(origin.name, args, dataset)
    if tracking.recorded(directory).get("complete"):
        return
    with pinned():
        job, _ = _prepared(make, args, dataset, origin, directory)
        start_keys, update_keys, _ = job.keys()
        learned = job.begin(start_keys, update_keys)
        with _batches(job, dataset, update_keys, 0) as batches:
            compiling = [
                updates_ahead(job.learners(update_keys), learned, batches),
                job.play_ahead(learned.state),
            ]
            wait([one for one in compiling if one is not None])


def _prepared(
    make: Callable[[EnvSpec, Any, DatasetStatistics], Program],
    args: Args,
    dataset: Dataset | Mixture,
    origin: Origin,
    directory: Path,
) -> tuple["_Job", dict[str, Any]]:
    """Return the constants of a run that is not open yet, and its record."""
    origins = settings.used(args).record()
    args = resolved(args, dataset.spec)
    evaluator = make_evaluator(args, dataset)
    args = replace(args, held_out=evaluator.fraction)
    kept = data.read(directory / data.STATISTICS_FILE)
    begun = start_of_baseline(args, dataset.spec)
    statistics = DatasetStatistics(dataset, kept or begun.statistics, evaluator.learned_from)
    program = build(make, dataset.spec, args, statistics, statistics.freeze)
    at_once = _recorded(directory, "seeds_at_once")
    layout = layout_of(args.seeds, args.batching, at_once, args.devices)
    check_divisible("--batch-size", args.batch_size, layout)
    check_shards(directory, "batches", layout)
    drawing = drawing_of(args, program, dataset, evaluator, _recorded(directory, "priority_lag"))
    sources = digests(dataset, evaluator) | begun.source
    record = {
        "kind": "baseline",
        **made_from(origin, evaluator.env, sources, layout.devices),
        "args": recorded(args),
        **origins,
        "spec": dataset.spec.to_json(),
        "greedy": program.greedy,
        "vault": f"{dataset.name}/{dataset.uid}",
        "seeds": list(range(args.seed, args.seed + args.seeds)),
        "seeds_at_once": layout.at_once,
        **shards_record(layout),
        **drawing.record,
    }
    schedule = offline_schedule(program, args)
    stopping = Stopping(args, evaluator, schedule.starts[-1])
    of_run = args, schedule, layout, drawing, begun, stopping
    return _Job(program, evaluator, statistics.used, *of_run), record


def digests(dataset: Dataset | Mixture, evaluator: Evaluator) -> dict[str, str]:
    """Return what identifies the data that is learned from, and that of the evaluation."""
    found = {"vault_digest": dataset.known_digest()}
    return found | ({"validation_digest": evaluator.validation} if evaluator.validation else {})


def resolved(args: Args, spec: EnvSpec) -> Args:
    """Return arguments with the defaults that depend on the data."""
    small = spec.name.startswith(("classic/", "probe/"))
    updates = (3_000 if small else 100_000) if args.updates is None else args.updates
    every = max(updates // 20, 1) if args.eval_every is None else args.eval_every
    return replace(args, updates=updates, eval_every=every)


def _recorded(directory: Path, name: str) -> int | None:
    """Return a number that an existing run keeps when it is resumed."""
    found: int | None = on_first(lambda: tracking.recorded(directory).get(name))
    return found


def run_directory(args: Args) -> Path:
    """Return the directory of the run that `train` writes."""
    return _directory(program_of(type(args))[0], args, open_data(args))


def _directory(name: str, args: Args, dataset: Dataset | Mixture) -> Path:
    if args.out:
        return local(args.out)
    parts = dataset.spec.name or dataset.name, dataset.uid, name
    return Path("runs") / below(*parts, option="--out")


class _Job(NamedTuple):
    """The constants of a run."""

    program: Program
    evaluator: Evaluator
    statistics: Any
    """What the program used of the statistics of its data."""
    args: Args
    schedule: Schedule
    layout: Layout
    drawing: Drawing
    origin: Start
    stopping: Stopping
    run: Run = None  # type: ignore[assignment]
    """None until it is opened."""

    @property
    def seeds(self) -> NDArray[np.int64]:
        """The training seeds."""
        return self.args.seed + np.arange(self.args.seeds)

    def keys(self) -> tuple[Key[Array, "seeds"], ...]:
        """Return the keys for initial states, updates and evaluations, one for each seed."""
        return _keys(self.seeds)

    def hyper(self) -> Hyperparameters:
        """Return the hyperparameters of each seed."""
        one = hyperparameters(self.args)
        return jax.tree.map(lambda leaf: np.full(self.args.seeds, leaf, leaf.dtype), one)

    def begin(self, keys: Key[Array, "seeds"], update_keys: Key[Array, "seeds"]) -> Learned:
        """Return the states of all seeds before the first update."""
        fresh = self.program, keys, self.hyper()
        shapes = start_shapes(*fresh)
        require_room(bytes_of(shapes), "the networks of all seeds")
        states, draws = start(*fresh), self.drawing.draws
        if self.args.init is not None:
            states = started(self.origin, self.program, states)
        return Learned(states, None if draws is None else _begin_priorities(draws, update_keys))

    @property
    def description(self) -> str:
        """The program, its data and its seeds, for the progress display."""
        first, last = self.seeds[[0, -1]].tolist()
        seeds = f"seeds {first}-{last}" if last > first else f"seed {first}"
        return f"{self.run.record['program']} on {Path(self.run.record['vault']).name}, {seeds}"

    def learners(self, update_keys: Key[Array, "seeds"]) -> Learners:
        """Return the program with what differs between its seeds."""
        return Learners(self.program, self.hyper(), update_keys, self.layout)

    def play_ahead(self, states: ArrayTree) -> "Future[None] | None":
        """Compile what evaluations play episodes with, in a thread."""
        params, keys = self.program.policy_params(states), self.keys()[2]
        return play_ahead(self.evaluator, self.program, self.layout, params, keys)

    def stopped(self) -> dict[str, int]:
        """Return the step at which seeds stopped early, by their numbers."""
        return {str(self.args.seed + seed): step for seed, step in self.stopping.steps.items()}

    def evaluate(
        self, states: ArrayTree, done: int, last: bool
    ) -> dict[str, Float[np.ndarray, "seeds episodes"]]:
        """Evaluate the policies of states after some updates; ``last`` takes more episodes."""
        return self.evaluate_policy(self.program.policy_params(states), done, last)

    def evaluate_policy(
        self, params: ArrayTree, done: int, last: bool = False
    ) -> dict[str, Float[np.ndarray, "seeds episodes"]]:
        """Evaluate as `evaluate`, given the parameters of the policies."""
        episodes = self.args.final_episodes if last else self.args.eval_episodes
        keys = folded(self.keys()[2], done)
        return evaluate(self.evaluator, self.program, self.layout, params, keys, episodes)

    def tree(self, learned: Learned) -> dict[str, ArrayTree]:
        """Return what a checkpoint holds: one state for each seed, without added copies."""
        seeds, learned = self.args.seeds, self.stopping.apply(gathered(learned))
        if len(jax.tree.leaves(learned)[0]) > seeds:
            learned = jax.tree.map(lambda leaf: leaf[:seeds], jax.device_get(learned))
        policy = self.program.policy_params(learned.state)
        found = {"state": learned.state, "policy": policy}
        return found | ({} if learned.priorities is None else {"priorities": learned.priorities})


@jax.jit
def _keys(seeds: Int[Array, "seeds"]) -> tuple[Key[Array, "seeds"], ...]:
    keys = jax.vmap(lambda seed: jax.random.split(jax.random.key(seed), 3))(seeds)
    return keys[:, 0], keys[:, 1], keys[:, 2]


@jax.jit
def _begin_priorities(draws: Prioritised, keys: Key[Array, "seeds"]) -> Priorities:
    def of_seed(key: PRNGKeyArray) -> Priorities:
        first = jax.vmap(lambda step: split_key(key, step)[0])(jnp.arange(draws.lag))
        return draws.begin(first)

    return jax.lax.map(of_seed, keys)


def _learn(job: _Job, dataset: Dataset | Mixture, timer: CheckpointTimer) -> None:
    """Update, log, evaluate and checkpoint until the run is complete."""
    run, schedule = job.run, job.schedule
    start_keys, update_keys, _ = job.keys()
    learners, journal = job.learners(update_keys), _Journal(job, dataset)
    fresh = job.begin(start_keys, update_keys)
    journal.playable = job.play_ahead(fresh.state)
    done, states = journal.begin(fresh)
    timer.begin(done)
    if not journal.over:  # a run that has stopped early may have been killed before its end
        with (
            journal.trackers,
            _batches(job, dataset, update_keys, done) as batches,
            tracking.progress(job.description, schedule.updates, done, note=COMPILING) as advance,
        ):
            work = updates(learners, states, batches, schedule, done)
            elapsed = tracking.last(run.metrics, tracking.WALL_TIME)
            learn(work, journal, schedule, done, timer, advance, elapsed=elapsed)
    journal.close()
    run.write_marl_eval(job.evaluator.environment)


def _batches(
    job: _Job, dataset: Dataset | Mixture, keys: Key[Array, "seeds"], done: int
) -> AbstractContextManager[BatchSource]:
    drawing, total = job.drawing, job.schedule.updates
    return open_batches(
        dataset,
        drawing.kind,
        drawing.windows,
        keys,
        range(done, total, min(LOG_EVERY, total)),
        int(job.args.memory * 1e9),
        job.evaluator.learned_from,
        drawing.weights,
        drawing.draws,
    )


class _Journal:
    """Metrics, evaluations and checkpoints of all seeds."""

    def __init__(self, job: _Job, dataset: Dataset | Mixture):
        self._job, self._dataset = job, dataset
        self._checkpoints = job.run.checkpoints(keep=2)
        self._means = Means()
        self._untrained: ArrayTree | None = None
        self.playable: Future[None] | None = None
        """Done when evaluations are compiled."""
        self.note = ""
        self.keeps = self.over = False

    def begin(self, fresh: Learned) -> tuple[int, Learned]:
        """Return the updates done, and the states after them."""
        found = self._checkpoints.resume(self._job.tree(fresh))
        done, states = 0, fresh
        if found is not None:
            done, states = found.step, Learned(found.tree["state"], found.tree.get("priorities"))
            self._means = Means(found.info.get("sums", {}), found.info.get("count", 0))
            if (stopping := found.info.get("stopping")) is not None:
                self._job.stopping.resume(stopping, states)
                self.over = self._job.stopping.over
        else:  # a copy, because updates donate the states
            self._untrained = copied(self._job.program.policy_params(fresh.state))
        self._by_design = finite.infinities([jax.device_get(gathered(states.state))])
        run = self._job.run
        tracking.cut(run.metrics, -1 if found is None else done)
        if found is not None and self._job.schedule.is_evaluation(done):
            self._complete(done, states)
        track = self._job.args.track if is_first() else ()
        self.trackers = Trackers(track, run.directory, run.record)
        return done, states

    def _complete(self, done: int, learned: Learned) -> None:
        """Evaluate again at the step of a checkpoint if damage has cut the lines of that."""
        job, rows = self._job, tracking.read(self._job.run.metrics)
        lines = [row for row in rows if row["step"] == done and tracking.WALL_TIME not in row]
        if len(lines) < len(job.seeds):
            last = self.over or done == job.schedule.updates
            self._write(done, job.evaluate(job.stopping.apply(learned).state, done, last))

    def check(
        self, done: int, learned: Learned, metrics: Mapping[str, NDArray[Any]], _count: int
    ) -> None:
        """Raise `NotFiniteError` if a seed that has not stopped early is not finite."""
        seeds, stopped = self._job.seeds.tolist(), self._job.stopped()
        found = finite.faults(done, seeds, metrics, learned.state, 1, self._by_design)
        found = {seed: fault for seed, fault in found.items() if str(seed) not in stopped}
        if found:
            where, last = self._job.run.directory, self._checkpoints.latest()
            raise finite.error(found, finite.left_behind(where, last, self._dataset))

    def add(self, _done: int, metrics: Mapping[str, NDArray[Any]], count: int) -> None:
        """Add the metrics of the last updates."""
        self._means.add(metrics, count)

    def log(self, done: int, times: Mapping[str, float]) -> None:
        """Write the means since the last line; after the first line, evaluate the initial policies.

        Learning curves begin with the untrained policy. The line of the first update comes before
        its evaluation, because it comes much sooner and shows that the program works.
        """
        seeds = len(self._job.seeds)
        self._write(
            done,
            self._means.take() | {name: np.full(seeds, value) for name, value in times.items()},
        )
        if self._untrained is not None:
            self._wait()
            self._write(0, found := self._job.evaluate_policy(self._untrained, 0))
            self._untrained, self.note = None, summary(found)

    def evaluate(self, done: int, learned: Learned) -> None:
        """Evaluate the policies of all seeds, with more episodes after the last update."""
        self._wait()
        job, stopping = self._job, self._job.stopping
        states = stopping.apply(learned).state
        found = job.evaluate(states, done, last=done == job.schedule.updates)
        stopping.observe(done, found, learned)
        if stopping.over and done < job.schedule.updates:
            self.over, found = True, job.evaluate(states, done, last=True)
        self._write(done, found)
        if found:
            self.keeps = job.args.keep == "all" or done in self._best()
        report(done, found)
        self.note = summary(found)

    def _wait(self) -> None:
        """Wait until evaluations are compiled."""
        if self.playable is not None:
            wait([self.playable])
            self.playable = None

    def _best(self) -> set[int]:
        """Return the steps of the best evaluation of each seed, if they are kept."""
        if self._job.args.keep != "best":
            return set()
        rows = tracking.read(self._job.run.metrics)
        return {step for seed in self._job.seeds if (step := best_of(rows, int(seed)))}

    def save(self, done: int, learned: Learned) -> None:
        """Write a checkpoint, with the metrics not yet logged."""
        info = {"sums": self._means.sums, "count": self._means.count}
        info |= {"stopping": self._job.stopping.info} if self._job.args.stop_on else {}
        every, schedule = self._job.args.keep == "all", self._job.schedule
        steps = filter(schedule.is_evaluation, self._checkpoints.steps() if every else ())
        self._checkpoints.kept, self.keeps = {*steps, *self._best()}, False
        self._checkpoints.save(done, self._job.tree(learned), info)
        self.trackers.sync()

    def close(self) -> None:
        """Close the files."""
        self._checkpoints.close()

    def _write(self, step: int, metrics: Mapping[str, NDArray[Any]]) -> None:
        """Write a line for each seed if there are metrics, which are ``(seeds, ...)``."""
        if not metrics:
            return
        tracking.append(
            self._job.run.metrics,
            *(
                {"seed": seed, "step": step} | {name: value[i] for name, value in metrics.items()}
                for i, seed in enumerate(self._job.seeds)
            ),
        )


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
