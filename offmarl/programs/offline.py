"""Offline training: what a baseline runs, and the files of its run."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from offmarl import settings, tracking
from offmarl._compiling import pinned
from offmarl.paths import local_output, safe_path
from offmarl.programs.cluster import (
    check_same,
    ends_with_others,
    gather_all,
    join,
    on_first,
)
from offmarl.programs.program import (
    Args,
    ArgsT,
    Program,
    hyperparameters,
    recorded_args,
    state_shapes,
)
from offmarl.programs.registry import ProgramOrigin, origin_of
from offmarl.programs.runs import dataset as data
from offmarl.programs.runs import gathering
from offmarl.programs.runs.compiling import keep_compiled_programs
from offmarl.programs.runs.continuing import begin_states, start_of_baseline
from offmarl.programs.runs.dataset import DatasetStatistics
from offmarl.programs.runs.drawing import drawing_of, open_data
from offmarl.programs.runs.evaluate import (
    Evaluator,
    evaluate,
    fold_in,
    make_evaluator,
    play_ahead,
)
from offmarl.programs.runs.identity import made_from
from offmarl.programs.runs.loop import (
    LOG_EVERY,
    Learned,
    Learners,
    build,
    offline_schedule,
    start,
    start_shapes,
    updates,
    updates_ahead,
)
from offmarl.programs.runs.normalisation import SCALE, scale_of
from offmarl.programs.runs.run import locked, settle
from offmarl.programs.runs.sharding import (
    SeedLayout,
    check_divisible,
    check_shards,
    layout_of,
    shards_record,
)
from offmarl.programs.runs.training import (
    Evaluated,
    Training,
    Work,
    carry_out,
    named_seeds,
)
from offmarl.replay import BatchSource, open_batches
from offmarl.replay.device import bytes_of, require_room
from offmarl.replay.priorities import Priorities, Prioritised
from offmarl.trackers import check_trackers
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
    check_trackers(args.track)
    with ends_with_others(local_output(args.out) if args.out else Path("the run")):
        dataset, origin = open_data(args), origin_of(make)
        directory = run_directory(make, args, dataset)
        with locked(directory, args.take_over) as lock:
            training = _Training(make, settle(args, directory), dataset, origin, directory)
            with closing(training.evaluator):
                training.check()
                parts = gathering.PARTS.get()  # runs of single seeds, of tasks
                gather: Any = parts and (lambda work, run, _: gathering.gather(work, run, parts))
                carry_out(training, directory, lock, train=gather)
    return directory


def train_ahead(make: Callable[[EnvSpec, ArgsT, DatasetStatistics], Program], args: ArgsT) -> None:
    """Compile what `train` runs with these arguments, beside other work in another thread."""
    assert isinstance(args, Args)
    dataset, origin = open_data(args), origin_of(make)
    directory = run_directory(make, args, dataset)
    if tracking.read_run_if_any(directory).get("complete"):
        return
    with pinned():
        training = _Training(make, args, dataset, origin, directory)
        states = training.begin()
        with closing(training.evaluator), training.batches(0) as batches:
            compiling = updates_ahead(training.learners, states, batches)
            wait([compiling, *training.play_ahead(training.policies(states))])


def digests(dataset: Dataset | Mixture, evaluator: Evaluator) -> dict[str, str]:
    """Return the checksums of the data that is learned from, and of that of the evaluation."""
    validation = {"validation_digest": evaluator.validation} if evaluator.validation else {}
    return {"vault_digest": dataset.known_digest()} | validation


def resolve_args(args: Args, spec: EnvSpec, evaluations: int = 20) -> Args:
    """Return arguments with the defaults that depend on the data."""
    small = spec.name.startswith(("classic/", "probe/"))
    updates = (3_000 if small else 100_000) if args.updates is None else args.updates
    eval_every = max(updates // evaluations, 1) if args.eval_every is None else args.eval_every
    return replace(args, updates=updates, eval_every=eval_every)


def run_directory(
    make: Callable[..., Program], args: Args, dataset: Dataset | Mixture | None = None
) -> Path:
    """Return the directory of the run that `train` writes."""
    if args.out:
        return local_output(args.out)
    dataset = open_data(args) if dataset is None else dataset
    place = dataset.spec.name or dataset.name
    # All vaults of transforms and conversions are called "main".
    is_main = dataset.uid == "main" and dataset.name != place.rpartition("/")[2]
    parts = place, dataset.name if is_main else dataset.uid, origin_of(make).name
    return Path("runs") / safe_path(*parts, option="--out")


class _Training(Training):
    """A baseline in training; states are `Learned`."""

    args: Args
    data: Dataset | Mixture

    def __init__(
        self,
        make: Callable[[EnvSpec, Any, DatasetStatistics], Program],
        args: Args,
        dataset: Dataset | Mixture,
        origin: ProgramOrigin,
        directory: Path,
    ):
        origins, original = settings.origins_of(args).record(), args
        self._start = start_of_baseline(args, dataset.spec)
        args = replace(args, **self._start.scale)
        self.data, self.evaluations = dataset, []
        self.evaluator = evaluator = make_evaluator(args, dataset)
        args = resolve_args(args, dataset.spec, evaluator.evaluations)
        args = replace(args, eval_episodes=evaluator.episodes, held_out=evaluator.fraction)
        unset = [name for name, value in vars(original).items() if value is None]
        self.args = args = replace(args, final_episodes=evaluator.final_episodes)
        self._resolved = [name for name in unset if getattr(args, name) is not None]
        earlier = data.read(directory / data.STATISTICS_FILE) or self._start.statistics
        statistics = DatasetStatistics(dataset, earlier, self.evaluator.learned_from)
        self.program = build(make, dataset.spec, args, statistics, statistics.identity)
        is_scaled = getattr(args, SCALE, False)
        hyper = hyperparameters(args, {SCALE: scale_of(statistics)} if is_scaled else {})
        statistics.freeze()
        self.statistics = statistics.used
        # An existing run keeps the number of seeds that were trained side by side.
        at_once = on_first(lambda: tracking.read_run_if_any(directory).get("seeds_at_once"))
        layout = layout_of(args.seeds, args.batching, at_once, args.devices)
        check_divisible("--batch-size", args.batch_size, layout)
        check_shards(directory, "batches", layout)
        self._drawing = drawing_of(args, self.program, dataset, self.evaluator)
        self.seeds = list(range(args.seed, args.seed + args.seeds))
        self.record = self._record(origin, origins, layout)
        self.schedule = offline_schedule(self.program, args)
        self.environment, self.keep = self.evaluator.environment, args.keep
        self.description = f"{origin.name} on {dataset.uid}, {named_seeds(self.seeds)}"
        self._keys, update_keys, self._evaluation_keys = _keys(np.array(self.seeds))
        hyper = jax.tree.map(lambda leaf: np.full(args.seeds, leaf, leaf.dtype), hyper)
        self.learners = Learners(self.program, hyper, update_keys, layout)

    def _record(
        self, origin: ProgramOrigin, origins: Mapping[str, Any], layout: SeedLayout
    ) -> dict[str, Any]:
        sources = digests(self.data, self.evaluator) | self._start.source
        return {
            "kind": "baseline",
            **made_from(origin, self.evaluator.env, sources, layout.devices),
            "args": recorded_args(self.args),
            "resolved": self._resolved,
            **origins,
            "spec": self.data.spec.to_json(),
            "greedy": self.program.greedy,
            "vault": f"{self.data.name}/{self.data.uid}",
            "seeds": self.seeds,
            "seeds_at_once": layout.at_once,
            **shards_record(layout),
            **self._drawing.record,
        }

    def check(self) -> None:
        """Raise what would stop the training, before anything is written."""
        check_same("the dataset", self.record["vault_digest"], "give all of them the same vault.")
        if self.args.init is not None:
            self._start.check(self.program, state_shapes(self.program, self.args))

    def shapes(self) -> dict[str, ArrayTree]:
        fresh = self.program, self._keys, self.learners.hyper
        require_room(bytes_of(shapes := start_shapes(*fresh)), "the networks of all seeds")
        shapes = Learned(shapes, jax.eval_shape(self._priorities))
        return self._parts(shapes, jax.eval_shape(self.policies, shapes))

    def begin(self) -> Learned:
        states = start(self.program, self._keys, self.learners.hyper)
        if self.args.init is not None:
            states = begin_states(self._start, self.program, states, self.seeds)
        return Learned(states, self._priorities())

    def _priorities(self) -> Priorities | None:
        draws = self._drawing.draws
        return None if draws is None else _begin_priorities(draws, len(self.learners.keys))

    def resume(self, tree: Mapping[str, ArrayTree]) -> Learned:
        return Learned(tree["state"], tree.get("priorities"))

    def checkpoint(self, states: Learned) -> dict[str, ArrayTree]:
        seeds, arrays = self.args.seeds, gather_all(states)
        if len(jax.tree.leaves(arrays)[0]) > seeds:  # without the copies that a layout adds
            arrays = jax.tree.map(lambda leaf: leaf[:seeds], jax.device_get(arrays))
        return self._parts(arrays, self.policies(arrays))

    @staticmethod
    def _parts(states: Learned, policy: ArrayTree) -> dict[str, ArrayTree]:
        parts = {"state": states.state, "policy": policy}
        return parts | ({} if states.priorities is None else {"priorities": states.priorities})

    def learned(self, states: Learned) -> Iterator[tuple[slice, ArrayTree, int]]:
        yield slice(None), states.state, 1

    def policies(self, states: Learned) -> ArrayTree:
        params: ArrayTree = jax.vmap(self.program.policy_params)(states.state)
        return params

    def play_ahead(self, policies: ArrayTree) -> "list[Future[None]]":
        layout, keys = self.learners.layout, self._evaluation_keys
        return play_ahead(self.evaluator, self.program, layout, policies, keys)

    def evaluate(self, policies: ArrayTree, done: int) -> Evaluated:
        last = done == self.schedule.updates
        episodes = self.evaluator.final_episodes if last else self.evaluator.episodes
        keys = fold_in(self._evaluation_keys, done)
        layout = self.learners.layout
        return evaluate(self.evaluator, self.program, layout, policies, keys, episodes)

    @contextmanager
    def work(self, states: Learned, done: int) -> Iterator[Work]:
        with self.batches(done) as batches:
            yield updates(self.learners, states, batches, self.schedule, done)

    def batches(self, done: int) -> AbstractContextManager[BatchSource]:
        """Open the batches of the updates from a number on."""
        drawing, total = self._drawing, self.schedule.updates
        return open_batches(
            self.data,
            drawing.kind,
            drawing.windows,
            self.learners.keys,
            range(done, total, min(LOG_EVERY, total)),
            int(self.args.memory * 1e9),
            self.evaluator.learned_from,
            drawing.weights,
            drawing.draws,
        )


@jax.jit
def _keys(seeds: Int[Array, "seeds"]) -> tuple[Key[Array, "seeds"], ...]:
    keys = jax.vmap(lambda seed: jax.random.split(jax.random.key(seed), 3))(seeds)
    return keys[:, 0], keys[:, 1], keys[:, 2]


@partial(jax.jit, static_argnums=1)
def _begin_priorities(draws: Prioritised, seeds: int) -> Priorities:
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], seeds, 0), draws.begin())
