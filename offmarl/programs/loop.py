"""The loop that all programs share: updates, compiled for all seeds and run in pieces.

All randomness is a pure function of (seed, update). So a resumed run has the same bits as an
uninterrupted one, and streamed batches equal those of a replay on the device.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from offmarl._arrays import largest_divisor
from offmarl.programs.buffer import ChunkWriter
from offmarl.programs.normalisation import make_program
from offmarl.programs.program import (
    ArgsT,
    Hyperparameters,
    Program,
    Stage,
    same_state,
    shaping_values,
)
from offmarl.programs.run import CheckpointTimer
from offmarl.replay import Batches, BatchSource, Replay, split_key
from offmarl.types import ArrayTree, EnvSpec

LOG_EVERY = 500
"""Largest number of updates between two lines of metrics."""

SECONDS_AT_ONCE = 1.0
"""Duration of a call of the compiled loop: signals are handled between calls."""

_MOST_PROGRAMS = 8
_programs: dict[Hashable, Program] = {}


def build(
    make: Callable[[EnvSpec, ArgsT, Any], Program],
    spec: EnvSpec,
    args: ArgsT,
    source: Any,
    identity: Callable[[], Hashable],
) -> Program:
    """Build a program, or return an equal one that was built and compiled before.

    Parameters
    ----------
    make, spec, source
        ``make(spec, args, source)`` builds it.
    args
        The program's arguments. Hyperparameters do not shape a program; see `structure`.
    identity
        Returns a key of what ``make`` has used of the source; called after ``make``.
    """
    program = make_program(make, spec, args, source)
    key = make, spec, type(args), shaping_values(args), identity()
    if key not in _programs and len(_programs) >= _MOST_PROGRAMS:
        del _programs[next(iter(_programs))]
    return _programs.setdefault(key, program)


# ---------------------------------------------------------------------------------- schedule


class Schedule(NamedTuple):
    """When a run logs, evaluates and changes from one stage to the next."""

    updates: int
    """Total number."""
    evaluate_every: int
    log_every: int
    starts: tuple[int, ...]
    """The first update of each stage."""

    def stage(self, update: int) -> int:
        """Return the number of the stage that an update belongs to."""
        return max(index for index, start in enumerate(self.starts) if start <= update)

    def next_log(self, done: int) -> int:
        """Return the update after which the next line of metrics is due.

        Lines divide the time between evaluations into blocks of ``log_every`` updates and a
        remainder; none spans two stages.
        """
        evaluated = done - done % self.evaluate_every
        block = (done - evaluated) // self.log_every + 1
        later = [start for start in self.starts if start > done]
        after = evaluated + min(block * self.log_every, self.evaluate_every)
        return min(after, self.updates, *later)

    def is_evaluation(self, done: int) -> bool:
        """Whether the policy is evaluated after this update: at intervals, and at the end."""
        return done % self.evaluate_every == 0 or done == self.updates


def stage_starts(stages: tuple[Stage, ...], updates: int) -> tuple[int, ...]:
    """Return the first update of each stage in a run of ``updates``.

    Raises
    ------
    ValueError
        The stages do not add up to the run.
    """
    given = sum(stage.updates or 0 for stage in stages)
    flexible = [stage for stage in stages if stage.updates is None]
    rest = updates - given
    if len(flexible) > 1 or rest < len(flexible) or (rest and not flexible):
        raise ValueError(f"{given} updates in stages of their own length")
    lengths = [rest if stage.updates is None else stage.updates for stage in stages]
    return tuple(sum(lengths[:index]) for index in range(len(lengths)))


# ---------------------------------------------------------------------------------- seeds


_spec: Any = PartitionSpec  # untyped
_PER_SEED, _SHARED = _spec("seed"), _spec()


class Layout(NamedTuple):
    """How the seeds of a run share the devices; static under jit."""

    at_once: int
    """Seeds computed side by side, by `jax.vmap`, on one device. The others follow one after the
    other, by `jax.lax.map`. The results' bits depend on this number, and not on the devices."""
    devices: int = 1
    """Devices that the seeds are spread over. With one seed at a time they need not divide the
    seeds: `place` adds copies of the last seed."""

    def mesh(self) -> Mesh:
        """Return the devices, along the axis "seed"."""
        return Mesh(np.array(jax.local_devices()[: self.devices]), ("seed",))

    def place(self, tree: ArrayTree, per_seed: bool) -> ArrayTree:
        """Put arrays on the devices: divided by seeds, or the same on each."""
        if self.devices == 1:
            return tree
        if per_seed:
            tree = jax.tree.map(self._pad, tree)
        axes = _PER_SEED if per_seed else _SHARED
        return jax.device_put(tree, NamedSharding(self.mesh(), axes))

    def _pad(self, leaf: Any) -> Any:
        missing = -len(leaf) % self.devices
        return jnp.concatenate([leaf, *[leaf[-1:]] * missing]) if missing else leaf


def layout_of(seeds: int, batching: str, at_once: int | None = None) -> Layout:
    """Choose how seeds are computed on this process's devices.

    Parameters
    ----------
    seeds
        Number of seeds.
    batching
        "map", "vmap", or "auto": whichever is faster on the backend.
    at_once
        The value of a resumed run, which is kept.
    """
    most = len(jax.local_devices())
    if at_once is None:
        if batching == "auto":
            batching = "map" if jax.default_backend() == "cpu" else "vmap"
        at_once = 1 if batching == "map" else seeds // largest_divisor(seeds, most)
    if at_once == 1:
        rounds = -(-seeds // most)
        return Layout(1, -(-seeds // rounds))
    groups = seeds // at_once if seeds % at_once == 0 else 1
    return Layout(at_once, largest_divisor(groups, most))


def map_seeds(
    layout: Layout, function: Callable[..., ArrayTree], per_seed: tuple[Any, ...], *shared: Any
) -> ArrayTree:
    """Apply a function of one seed to all seeds, under jit.

    Parameters
    ----------
    layout
        How the seeds are computed.
    function
        Function of an entry of each of ``per_seed``, and of ``shared``.
    per_seed
        Trees with a leading axis of seeds.
    shared
        Trees that are the same for all.
    """
    one_by_one = None if layout.at_once == 1 else layout.at_once

    def on_device(per_seed: tuple[Any, ...], shared: tuple[Any, ...]) -> ArrayTree:
        return jax.lax.map(lambda own: function(*own, *shared), per_seed, batch_size=one_by_one)

    if layout.devices == 1:
        return on_device(per_seed, shared)
    spread = jax.shard_map(
        on_device,
        mesh=layout.mesh(),
        in_specs=(_PER_SEED, _SHARED),
        out_specs=_PER_SEED,
        check_vma=False,
    )
    return spread(per_seed, shared)


# ---------------------------------------------------------------------------------- updates


@partial(jax.jit, static_argnums=0)
def start(program: Program, keys: Key[Array, "seeds"], hyper: Hyperparameters) -> ArrayTree:
    """Return the initial states of all seeds; ``hyper`` has a leading axis of seeds, too.

    The seeds follow one another. Under vmap, orthogonal initialisation is a batched QR
    factorisation, and several of these at once can deadlock on a CPU with few cores: jaxlib 0.10
    splits each over the threads that run them.
    """
    return jax.lax.map(lambda own: program.init(*own), (keys, hyper))


def start_stage(stage: Stage, states: ArrayTree, layout: Layout) -> ArrayTree:
    """Apply a stage's ``on_start`` to the state of each seed."""
    if stage.on_start is same_state:
        return layout.place(copied(states), per_seed=True)
    seeds = len(jax.tree.leaves(states)[0])
    started = [
        stage.on_start(jax.tree.map(lambda leaf, seed=seed: leaf[seed], states))
        for seed in range(seeds)
    ]
    return layout.place(jax.tree.map(lambda *leaves: jnp.stack(leaves), *started), per_seed=True)


@jax.jit
def copied(tree: ArrayTree) -> ArrayTree:
    """Copy every array, so that the result may be donated while the original is kept."""
    return jax.tree.map(jnp.copy, tree)


class Learners(NamedTuple):
    """A program, and the values that differ between its seeds."""

    program: Program
    hyper: Hyperparameters
    """With a leading axis of seeds."""
    keys: Key[Array, "seeds"]
    """Update i of a seed always draws from ``fold_in(key, i)``."""
    layout: Layout


def updates(
    learners: Learners,
    states: ArrayTree,
    batches: BatchSource,
    schedule: Schedule,
    done: int,
) -> Iterator[tuple[int, ArrayTree, dict[str, Float[Array, "seeds n"]]]]:
    """Update all seeds on batches, about `SECONDS_AT_ONCE` at a time.

    Parameters
    ----------
    learners
        The program and its seeds.
    states
        States of all seeds. They are donated, and so are the yielded states at the next step.
    batches
        The training data.
    schedule
        Where to stop in between.
    done
        Number of updates done before.

    Yields
    ------
    The number of updates done, the states after them (with the copies that `Layout.place` adds),
    and on the host the metrics of each update since the last yield.
    """
    seeds, size, data, stages = len(learners.keys), 1, None, learners.program.stages
    states = learners.layout.place(states, per_seed=True)
    hyper, keys = learners.layout.place((learners.hyper, learners.keys), per_seed=True)
    while done < schedule.updates:
        stage = schedule.stage(done)
        if done == schedule.starts[stage]:
            states = start_stage(stages[stage], states, learners.layout)
        offset = done % batches.updates
        if data is None or (offset == 0 and not isinstance(data, Replay)):
            data = next(batches.data)
            data = learners.layout.place(data, per_seed=not isinstance(data, Replay))
        count = min(size, batches.updates - offset, schedule.next_log(done) - done)
        begun = time.monotonic()
        place = done, offset, count
        states, metrics = _update(
            learners.program, stage, learners.layout, states, (keys, hyper), place, data
        )
        metrics = {name: value[:seeds, :count] for name, value in jax.device_get(metrics).items()}
        seconds = (time.monotonic() - begun) / count
        done += count
        size = max(1, min(2 * size, int(SECONDS_AT_ONCE / max(seconds, 1e-9)), LOG_EVERY))
        yield done, states, metrics


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _update(
    program: Program,
    stage: int,
    layout: Layout,
    states: ArrayTree,
    rest: tuple[Key[Array, "seeds"], Hyperparameters],
    place: tuple[Int[Array, ""] | int, ...],
    data: Replay | Batches,
) -> tuple[ArrayTree, dict[str, Float[Array, "seeds most"]]]:
    """Sample and update ``count`` times, at most `LOG_EVERY`, for all seeds.

    One compiled loop serves every ``count``, so that an update has the same bits wherever a run was
    interrupted. All seeds sample the same replay. Streamed batches are ``(seeds, most, ...)`` and
    used from ``offset`` on. Metrics beyond ``count`` are zero.
    """
    first, offset, count = place

    def seed_updates(
        state: ArrayTree,
        key: PRNGKeyArray,
        hyper: Hyperparameters,
        data: Replay | Batches,
    ) -> tuple[ArrayTree, dict[str, Array]]:
        def update(state: ArrayTree, index: Array) -> tuple[ArrayTree, dict[str, Array]]:
            sample_key, update_key = split_key(key, first + index)
            if isinstance(data, Batches):
                batch = data[offset + index].sequence()
            else:
                batch = data.sample(sample_key)
            return program.stages[stage].update(state, batch, update_key, hyper)

        def logged_update(
            index: Array, carry: tuple[ArrayTree, dict[str, Array]]
        ) -> tuple[ArrayTree, dict[str, Array]]:
            state, found = update(carry[0], index)
            return state, {name: log.at[index].set(found[name]) for name, log in carry[1].items()}

        _, metrics = jax.eval_shape(update, state, jnp.zeros((), jnp.int32))
        logs = {name: jnp.zeros(LOG_EVERY) for name in metrics}
        return jax.lax.fori_loop(0, count, logged_update, (state, logs))

    if isinstance(data, Replay):
        return map_seeds(layout, seed_updates, (states, *rest), data)
    return map_seeds(layout, seed_updates, (states, *rest, data))


def collect(
    program: Program,
    state: ArrayTree,
    hyper: Hyperparameters,
    key: PRNGKeyArray,
    schedule: Schedule,
    done: int,
    chunks: ChunkWriter | None,
) -> Iterator[tuple[int, ArrayTree, dict[str, Array]]]:
    """Update a program that collects its own steps, and write every step to a vault.

    Parameters
    ----------
    program
        The program, which acts and learns.
    state, hyper
        State and hyperparameters of one seed, without an axis of seeds. The state is donated, and
        so is each yielded state at the next step.
    key
        Update i always draws from ``fold_in(key, i)``.
    schedule
        The updates. Episodes are cut off after the last one.
    done
        Number of updates done before.
    chunks
        Writes the steps; None if they are not kept.

    Yields
    ------
    The number of updates done, the state after them, and the last update's metrics on the device.
    """
    for number in range(done, schedule.updates):
        stage = schedule.stage(number)
        if number == schedule.starts[stage]:
            # A copy, because donated leaves must not be aliases or kept elsewhere.
            state = copied(program.stages[stage].on_start(state))
        state, metrics = _collect(program, stage, state, jax.random.fold_in(key, number), hyper)
        if chunks is not None:
            cut = number == schedule.updates - 1
            state = state._replace(capture=chunks.put(state.capture, program.num_steps, cut))
        yield number + 1, state, metrics


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _collect(
    program: Program, stage: int, state: ArrayTree, key: PRNGKeyArray, hyper: Hyperparameters
) -> tuple[ArrayTree, dict[str, Array]]:
    return program.stages[stage].update(state, None, key, hyper)


# ---------------------------------------------------------------------------------- the loop


@runtime_checkable
class Journal(Protocol):
    """The files of a run; those of baselines and recorders differ."""

    @property
    def note(self) -> str:
        """The last evaluation in a few words, for the progress bar."""
        ...

    def add(self, done: int, metrics: Mapping[str, Any], count: int, /) -> None:
        """Take the metrics of the last ``count`` updates."""
        ...

    def log(self, done: int) -> None:
        """Write a line of metrics."""
        ...

    def evaluate(self, done: int, states: ArrayTree) -> None:
        """Evaluate the policy."""
        ...

    def save(self, done: int, states: ArrayTree) -> None:
        """Write a checkpoint."""
        ...


def learn(
    work: Iterator[tuple[int, ArrayTree, dict[str, Array]]],
    journal: Journal,
    schedule: Schedule,
    done: int,
    timer: CheckpointTimer,
    advance: Callable[[int, str], None],
    unit: int = 1,
) -> None:
    """Update, log, evaluate and checkpoint until the work is complete.

    Parameters
    ----------
    work
        From `updates` or `collect`.
    journal
        Takes the results.
    schedule
        When to log and evaluate.
    done
        Number of updates done before.
    timer
        Tells when a checkpoint is due.
    advance
        Shows progress: called with a number of steps and `Journal.note`.
    unit
        Number of steps of one update, for the progress.
    """
    for step, states, metrics in work:
        timer.work_done()
        journal.add(step, metrics, step - done)
        if step == schedule.next_log(step - 1):
            journal.log(step)
        if schedule.is_evaluation(step):
            journal.evaluate(step, states)
        advance((step - done) * unit, journal.note)
        done = step
        if timer.is_due() or step == schedule.updates:
            journal.save(step, states)
            timer.saved(step * unit)
