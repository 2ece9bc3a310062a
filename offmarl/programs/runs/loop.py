"""The loop that all programs share: updates, compiled for all seeds and run in pieces.

`updates` are those of programs that learn from batches. `collect` are those of programs that take
steps of their own, which are written to vaults.

All randomness is a pure function of (seed, update). So a resumed run has the same bits as an
uninterrupted one, and streamed batches equal those of a replay on the device.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, use_abstract_mesh
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray
from numpy.typing import NDArray

from offmarl._compiling import jit_in_order, quickly
from offmarl._mesh import DATA, divide
from offmarl.errors import OptionError
from offmarl.programs.cluster import from_first, gather_all
from offmarl.programs.experience.buffer import ChunkWriter, chunks_at_once
from offmarl.programs.program import (
    TD_ERRORS,
    Args,
    ArgsT,
    Hyperparameters,
    OnlineArgs,
    Program,
    Stage,
    shaping_values,
    structure,
)
from offmarl.programs.runs.compiling import compile_ahead
from offmarl.programs.runs.normalisation import normalise_as_asked
from offmarl.programs.runs.sharding import (
    ONE_DEVICE,
    SEEDS,
    SeedLayout,
    keep_divided,
    map_seeds,
    place_shared,
    place_state,
)
from offmarl.replay import BatchSource, Replay, split_key
from offmarl.replay.priorities import Priorities, Prioritised
from offmarl.types import ArrayTree, EnvSpec, Sequence

LOG_EVERY = 500
"""Largest number of updates between two lines of metrics."""

SECONDS_AT_ONCE = 1.0
"""Duration of a call of the compiled loop: signals are handled between calls."""

StateT = TypeVar("StateT")

_MOST_PROGRAMS = 8
_programs: dict[Hashable, Program] = {}


def build(
    make: Callable[[EnvSpec, ArgsT, Any], Program],
    spec: EnvSpec,
    args: ArgsT,
    source: Any,
    identity: Callable[[], Hashable],
) -> Program:
    """Return the program that ``make`` builds, with functions that were compiled before, if equal.

    Hyperparameters do not shape a program; see `structure`. ``identity`` returns a key of what
    ``make`` has used of the source; it is called after it.
    """
    program = make(spec, structure(args), source)
    key = make, spec, type(args), shaping_values(args), identity()
    if key not in _programs and len(_programs) >= _MOST_PROGRAMS:
        del _programs[next(iter(_programs))]
    return normalise_as_asked(args, _programs.setdefault(key, program), source)


# ---------------------------------------------------------------------------------- schedule


class Schedule(NamedTuple):
    """When a run logs, evaluates and changes from one stage to the next."""

    updates: int
    """Total number."""
    eval_every: int
    log_every: int
    starts: tuple[int, ...]
    """The first update of each stage."""

    def stage(self, update: int) -> int:
        """Return the number of the stage that an update belongs to."""
        return max(index for index, start in enumerate(self.starts) if start <= update)

    def next_log(self, done: int) -> int:
        """Return the update after which the next line of metrics is due.

        The first line is that of the first update. Then lines divide the time between evaluations
        into blocks of ``log_every`` updates and a remainder; none spans two stages.
        """
        if done == 0:
            return 1
        evaluated = done - done % self.eval_every
        block = (done - evaluated) // self.log_every + 1
        return min(evaluated + block * self.log_every, self.next_stop(done))

    def next_stop(self, done: int) -> int:
        """Return the update before which the work must pause: for an evaluation or a stage."""
        evaluated = done - done % self.eval_every
        later = [start for start in self.starts if start > done]
        return min(evaluated + self.eval_every, self.updates, *later)

    def is_evaluation(self, done: int) -> bool:
        """Whether the policy is evaluated after this update: at intervals, and at the end."""
        return done % self.eval_every == 0 or done == self.updates


def stage_starts(
    stages: tuple[Stage, ...], updates: int, option: str = "the run"
) -> tuple[int, ...]:
    """Return the first update of each stage in a run.

    `OptionError` if they do not add up to its updates, which ``option`` gives.
    """
    fixed = sum(stage.updates or 0 for stage in stages)
    flexible = [stage for stage in stages if stage.updates is None]
    remainder = updates - fixed
    if len(flexible) > 1 or remainder < len(flexible) or (remainder and not flexible):
        raise OptionError(
            f"{option} is {updates} updates, and the program has {fixed} updates in stages of "
            "their own length: give more, or other lengths of the stages."
        )
    lengths = [remainder if stage.updates is None else stage.updates for stage in stages]
    return tuple(sum(lengths[:index]) for index in range(len(lengths)))


def online_schedule(program: Program, args: OnlineArgs) -> Schedule:
    """Return when a recorder logs, evaluates and changes its stage, or raise `OptionError`."""
    iterations = -(-args.total_steps // (program.num_steps * args.num_envs))
    starts = stage_starts(program.stages, iterations, f"--total-steps {args.total_steps}")
    return Schedule(iterations, -(-iterations // args.evaluations), 1, starts)


def offline_schedule(program: Program, args: Args) -> Schedule:
    """Return when a baseline logs, evaluates and changes its stage, or raise `OptionError`."""
    assert args.updates is not None and args.eval_every is not None
    starts = stage_starts(program.stages, args.updates, f"--updates {args.updates}")
    return Schedule(args.updates, args.eval_every, LOG_EVERY, starts)


# ---------------------------------------------------------------------------------- updates


def start(program: Program, keys: Key[Array, "seeds"], hyper: Hyperparameters) -> ArrayTree:
    """Return the initial states of all seeds; ``hyper`` has a leading axis of seeds, too."""
    return _compiled_start()(program.init, keys, hyper)


def start_shapes(program: Program, keys: Key[Array, "seeds"], hyper: Hyperparameters) -> ArrayTree:
    """Return the shapes and types of what `start` returns."""
    return _compiled_start().eval_shape(program.init, keys, hyper)


@cache
def _compiled_start() -> Any:
    return jax.jit(_start, static_argnums=0, compiler_options=quickly())


def _start(
    init: Callable[..., ArrayTree], keys: Key[Array, "seeds"], hyper: Hyperparameters
) -> ArrayTree:
    """Start the seeds.

    The seeds follow one another: a program of the user's may have layers of Flax with orthogonal
    kernels, which can wait for one another under vmap; see `offmarl.networks.linear.orthogonal`.
    """
    return jax.lax.map(lambda seed: init(*seed), (keys, hyper))


class Learned(NamedTuple):
    """What the updates of a seed change; in a run, with a leading axis of seeds."""

    state: ArrayTree
    """The program's state."""
    priorities: Priorities | None = None
    """None where batches are not drawn by priorities."""


@jax.jit
def copy_arrays(tree: ArrayTree) -> ArrayTree:
    """Copy every array, so that the result may be donated while the original is kept."""
    return jax.tree.map(jnp.copy, tree)


class Learners(NamedTuple):
    """A program, and the values that differ between its seeds."""

    program: Program
    hyper: Hyperparameters
    """With a leading axis of seeds."""
    keys: Key[Array, "seeds"]
    """Update i of a seed always draws from ``fold_in(key, i)``."""
    layout: SeedLayout


def updates(
    learners: Learners,
    learned: Learned,
    batches: BatchSource,
    schedule: Schedule,
    done: int,
) -> Iterator[tuple[int, Learned, dict[str, Float[Array, "seeds n"]]]]:
    """Update all seeds on batches, about `SECONDS_AT_ONCE` at a time, after ``done`` updates.

    The states are donated, and so are the yielded ones at the next step. Yields the number of
    updates done, the states after them (with the copies that `SeedLayout.place` adds), and on the
    host the metrics of each update since the last yield.
    """
    seeds, size, data, stages = len(learners.keys), 1, None, learners.program.stages
    learned = learners.layout.place(copy_arrays(learned), SEEDS)
    per_seed, draws = _per_seed(learners), learners.layout.place(batches.draws)
    while done < schedule.updates:
        stage = schedule.stage(done)
        offset = done % batches.updates
        if data is None or (offset == 0 and not isinstance(data, Replay)):
            data = place_data(learners.layout, next(batches.data))
        count = min(size, batches.updates - offset, schedule.next_log(done) - done)
        start_time = time.monotonic()
        place = done, offset, count
        arguments = learned, per_seed, place, data, draws
        learned, metrics = _update(stages[stage], learners.layout, *arguments)
        logs = jax.device_get(gather_all(metrics))
        metrics = {name: value[:seeds, :count] for name, value in logs.items()}
        seconds = (time.monotonic() - start_time) / count
        done += count
        size = min(next_size(size, seconds, SECONDS_AT_ONCE), LOG_EVERY)
        yield done, learned, metrics


def updates_ahead(learners: Learners, learned: Learned, batches: BatchSource) -> "Future[None]":
    """Compile the first updates in a thread; the arguments are those of `updates`."""
    layout, stage = learners.layout, learners.program.stages[0]
    learned = layout.place(learned, SEEDS)
    data = place_data(layout, next(batches.data))
    draws = layout.place(batches.draws)
    args = stage, layout, learned, _per_seed(learners), (0, 0, 1), data, draws
    return compile_ahead(_update, *args)


def _per_seed(learners: Learners) -> tuple[Any, ...]:
    """Return arrays of seeds: keys, hyperparameters, and whether each is no added copy."""
    keys, hyper = learners.layout.place((learners.keys, learners.hyper), SEEDS)
    is_seed = np.arange(len(keys)) < len(learners.keys)
    return keys, hyper, learners.layout.place(is_seed, SEEDS)


def next_size(size: int, seconds: float, at_once: float) -> int:
    """Return how many updates the next call makes: at most twice as many as the last one.

    ``seconds`` is the duration of one update, and ``at_once`` that of a call to aim at. All
    processes get the number of the first, because an update has collective operations.
    """
    return from_first(max(1, min(2 * size, int(at_once / max(seconds, 1e-9)))))


def logged_loop(
    update: Callable[[StateT, Int[Array, ""]], tuple[StateT, dict[str, Array]]],
    state: StateT,
    count: Int[Array, ""] | int,
    most: int,
) -> tuple[StateT, dict[str, Array]]:
    """Make ``count`` updates, at most ``most``, in a compiled loop, and keep the metrics of each.

    One compiled loop serves every ``count``, so that an update has the same bits wherever a run was
    interrupted. ``update(state, index)`` is traced once; its metrics are always the same ones.
    Returns the last state, and the metrics, ``(most, ...)``; those from ``count`` on are zero.
    """
    update = partial(jax.jit, inline=True)(update)  # traced for the metrics' names and the loop

    def logged_update(
        index: Array, carry: tuple[StateT, dict[str, Array]]
    ) -> tuple[StateT, dict[str, Array]]:
        # The type is that below; a weak one would trace the update again.
        state, metrics = update(carry[0], jax.lax.convert_element_type(index, jnp.int32))
        return state, {name: log.at[index].set(metrics[name]) for name, log in carry[1].items()}

    _, metrics = jax.eval_shape(update, state, jnp.zeros((), jnp.int32))
    logs = {name: jnp.zeros((most, *x.shape), x.dtype) for name, x in metrics.items()}
    after: tuple[Any, dict[str, Array]] = jax.lax.fori_loop(0, count, logged_update, (state, logs))
    return after


def place_data(layout: SeedLayout, data: Replay | Sequence) -> Replay | Sequence:
    """Put training data on the devices: a replay as a whole on each, batches divided."""
    return layout.place(data, *(() if isinstance(data, Replay) else (SEEDS, None, DATA)))


@jit_in_order(static_argnums=(0, 1), donate_argnums=2)
def _update(
    stage: Stage,
    layout: SeedLayout,
    learned: Learned,
    per_seed: tuple[Key[Array, "seeds"], Hyperparameters, Bool[Array, "seeds"]],
    place: tuple[Int[Array, ""] | int, ...],
    data: Replay | Sequence,
    draws: Prioritised | None,
) -> tuple[Learned, dict[str, Float[Array, "seeds most"]]]:
    """Sample and update ``count`` times, at most `LOG_EVERY`, for all seeds.

    All seeds sample the same replay. Streamed batches are ``(seeds, most, ...)`` and
    used from ``offset`` on. Metrics beyond ``count`` are zero.
    """
    first, offset, count = place

    def seed_updates(
        learned: Learned,
        key: PRNGKeyArray,
        hyper: Hyperparameters,
        is_seed: Bool[Array, ""],
        data: Replay | Sequence,
        draws: Prioritised | None,
    ) -> tuple[Learned, dict[str, Array]]:
        def update(learned: Learned, index: Array) -> tuple[Learned, dict[str, Array]]:
            number = first + index
            sample_key, update_key = split_key(key, number)
            slots: Any = None
            if isinstance(data, Sequence):
                batch = jax.tree.map(lambda leaf: leaf[offset + index], data)
            else:
                batch, slots = _draw(data, draws, learned.priorities, sample_key, number)
            batch = divide(batch)
            state, outputs = stage.update(learned.state, batch, update_key, hyper)
            metrics = dict(outputs)
            errors = metrics.pop(TD_ERRORS, None)
            metrics = {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()}
            priorities = learned.priorities
            if draws is not None and priorities is not None and errors is not None:
                priorities = draws.reprioritise(
                    priorities, slots, errors, batch.mask & batch.next_known
                )
            return Learned(state, priorities), metrics

        # An added copy makes no updates, unless other devices would wait for its part of a batch.
        # Under vmap no seed is one, and loops of different lengths would be slow.
        alone = layout.at_once == layout.shards == 1
        num_updates = jnp.where(is_seed, count, 0) if alone else count
        return logged_loop(update, learned, num_updates, LOG_EVERY)

    if isinstance(data, Replay):
        return map_seeds(layout, seed_updates, (learned, *per_seed), data, draws)
    return map_seeds(layout, seed_updates, (learned, *per_seed, data), draws)


def _draw(
    replay: Replay,
    draws: Prioritised | None,
    priorities: Priorities | None,
    key: PRNGKeyArray,
    number: Int[Array, ""],
) -> tuple[Sequence, Any]:
    """Return the batch of an update, and the slots of its windows if priorities draw them."""
    if draws is None or priorities is None:
        return replay.sample(key), None
    slots, ratios = draws.draw(priorities, key)
    batch = replay.at(slots)
    weight = draws.weigh(ratios, batch.mask, number)
    if batch.weight is not None:
        weight = batch.weight * weight[:, None]
    return batch._replace(weight=weight), slots


# ---------------------------------------------------------------------------------- collecting

MOST_AT_ONCE = 64
"""Largest number of updates in one call of the compiled loop."""

COLLECTING_SECONDS = 0.25
"""Duration of a call of several updates: signals are handled between calls."""


def collect(
    program: Program,
    states: list[ArrayTree],
    hypers: list[Hyperparameters],
    keys: list[PRNGKeyArray],
    schedule: Schedule,
    done: int,
    chunks: Iterable[ChunkWriter | None],
    layout: SeedLayout = ONE_DEVICE,
    learns: bool = True,
) -> Iterator[tuple[int, list[ArrayTree], dict[str, NDArray[Any]]]]:
    """Update a program that collects its own steps, and write every step to vaults.

    Yields the number of updates done, the states of the seeds after them, and the metrics
    ``(seeds, n)`` of the n updates since the last yield. The caller may replace entries of the
    yielded list of states, and of ``hypers``, the hyperparameters of each seed.

    The updates run in a compiled loop, as many in a call as fit into `COLLECTING_SECONDS`, if the
    buffer holds the steps that are written. One compiled loop serves every number, and the vault
    has a chunk for each update, so that neither depends on where a call ended.

    The seeds share the compiled program, and their calls run at the same time. (With
    `jax.lax.map` or `jax.vmap` over seeds, each update would copy their buffers.) So a seed has the
    same bits alone and with others. Without ``learns``, the program only plays a policy.
    """
    run = learn_steps if learns else play_steps
    mesh_of, writers = [layout.mesh_of(seed) for seed in range(len(states))], list(chunks)
    # Copies, because donated leaves must have no other references. Buffers have none.
    copies = [_but_buffer(state) for state in states]
    states = [place_state(*pair) for pair in zip(copies, mesh_of, strict=True)]
    metrics: list[dict[str, Array]] = [{} for _ in states]
    captures = [state.capture for state, writer in zip(states, writers, strict=True) if writer]
    most = min([MOST_AT_ONCE, *(chunks_at_once(x, program.num_steps) for x in captures)])
    size = 1
    while done < schedule.updates:
        stage = schedule.stage(done)
        if done == schedule.starts[stage]:
            size = 1
        # Powers of two, so that few programs that copy steps out of the buffer are compiled.
        count = 1 << (min(size, most, schedule.next_stop(done) - done).bit_length() - 1)
        start_time = time.monotonic()
        for seed, (state, mesh) in enumerate(zip(states, mesh_of, strict=True)):
            place, shared = (done, count), place_shared((keys[seed], hypers[seed]), mesh)
            states[seed], metrics[seed] = run(program, stage, mesh, state, place, *shared)
        jax.block_until_ready(states)  # type: ignore[no-untyped-call]
        seconds = (time.monotonic() - start_time) / count
        if most > 1:
            size = next_size(size, seconds, COLLECTING_SECONDS)
        done += count
        for seed, writer in enumerate(writers):
            if writer is not None:
                last = done == schedule.updates
                writer.put(states[seed].capture, program.num_steps, last, count)
        logs = jax.device_get(metrics)
        yield done, states, {x: np.stack([log[x][:count] for log in logs]) for x in logs[0]}


def _but_buffer(state: ArrayTree) -> ArrayTree:
    """Return a copy of a state; of its buffer, if it has one, the original."""
    if not hasattr(state, "capture"):
        return copy_arrays(state)
    return copy_arrays(state._replace(capture=None))._replace(capture=state.capture)


def _collecting_updates(
    program: Program,
    stage: int,
    mesh: Mesh | None,
    state: ArrayTree,
    place: tuple[Int[Array, ""] | int, Int[Array, ""] | int],
    key: PRNGKeyArray,
    hyper: Hyperparameters,
) -> tuple[ArrayTree, dict[str, Array]]:
    """Make ``count`` updates from the number ``first`` on; ``place`` holds both."""
    first, count = place

    def update(state: ArrayTree, index: Array) -> tuple[ArrayTree, dict[str, Array]]:
        own_key = jax.random.fold_in(key, first + index)
        if mesh is None:
            return program.stages[stage].update(state, None, own_key, hyper)
        with use_abstract_mesh(mesh.abstract_mesh):
            state, metrics = program.stages[stage].update(state, None, own_key, hyper)
        return keep_divided(state, mesh), metrics

    return logged_loop(update, state, count, MOST_AT_ONCE)


learn_steps = partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)(_collecting_updates)
"""Make ``count`` updates from the number ``first`` on, of which ``place`` consists, and return the
state and the metrics."""

play_steps = jit_in_order(static_argnums=(0, 1, 2), donate_argnums=3)(_collecting_updates)
"""Do as `learn_steps` for a program that learns nothing."""
