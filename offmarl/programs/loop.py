"""The one driver that every offline program shares."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray
from numpy.typing import NDArray

from offmarl import __version__, tracking
from offmarl.checkpoint import Checkpoints
from offmarl.paths import below, local
from offmarl.programs import run as runs
from offmarl.programs.evaluate import Judges, in_words, judge, judges_of
from offmarl.programs.interruption import CheckpointTimer, checkpoint_timer
from offmarl.programs.program import FREE, Args, Program, Schedule, schedule_of
from offmarl.replay import Batches, BatchSource, Replay, open_batches, split_key
from offmarl.types import ArrayTree, EnvSpec
from offmarl.vault import Dataset, open_vault

_ArgsT = TypeVar("_ArgsT", bound=Args)

_SECONDS_AT_ONCE = 1.0
"""How long a call of the jitted loop may take: a signal is answered when it returns."""


def train(name: str, make: Callable[[EnvSpec, _ArgsT], Program], args: _ArgsT) -> Path:
    """Train a program on a vault, evaluate it, and write the run.

    The same call again goes on where a stopped run's last checkpoint was, to the same bits; a
    finished run is left as it is. SIGINT and SIGTERM save a checkpoint and then stop the run.

    Parameters
    ----------
    name
        The program's name.
    make
        Builds the program for data of a kind.
    args
        Its settings.

    Returns
    -------
    The run's directory.

    Raises
    ------
    VaultError, ShapeError, OptionError
        The vault cannot be read, or does not suit the program or the environment; a setting
        cannot be.
    RunError
        The directory holds a run with other settings.
    Stopped
        A signal stopped the run; the message says where it goes on.
    """
    with checkpoint_timer(args.checkpoint_seconds, "update") as timer:
        return _train(name, make, args, timer)


def _train(
    name: str, make: Callable[[EnvSpec, _ArgsT], Program], args: _ArgsT, timer: CheckpointTimer
) -> Path:
    dataset = open_vault(args.vault, time_limit=args.time_limit)
    schedule = schedule_of(args, dataset.spec)
    judges = judges_of(args, dataset)
    args = replace(args, **schedule._asdict(), held_out=judges.fraction)
    program = make(dataset.spec, args)
    run = runs.open_run(_directory(name, args, dataset), _record(name, args, dataset, program))
    if not run.complete or run.lacks_checkpoint(schedule.updates):
        _learn(_Job(run, program, judges, args, schedule), dataset, timer)
        run.finish()
    return run.directory


def _directory(name: str, args: Args, dataset: Dataset) -> Path:
    if args.out:
        return local(args.out)
    parts = dataset.spec.name or dataset.name, dataset.uid
    return Path("runs") / below(*parts, option="--out") / name


def _record(name: str, args: Args, dataset: Dataset, program: Program) -> dict[str, Any]:
    return {
        "offmarl": __version__,
        "kind": "baseline",
        "program": name,
        "args": {key: value for key, value in asdict(args).items() if key not in FREE},
        "spec": dataset.spec.to_json(),
        "policy": asdict(program.config),
        "greedy": program.greedy,
        "vault": f"{dataset.name}/{dataset.uid}",
        "vault_digest": dataset.digest(),
        "seeds": list(range(args.seed, args.seed + args.seeds)),
    }


class _Job(NamedTuple):
    """What stays the same from the first update to the last."""

    run: runs.Run
    program: Program
    judges: Judges
    args: Args
    schedule: Schedule

    @property
    def seeds(self) -> NDArray[np.int64]:
        """The training seeds."""
        return self.args.seed + np.arange(self.args.seeds)

    def keys(self) -> tuple[Key[Array, "seeds"], ...]:
        """Return the keys to start, to update and to evaluate with; steps are folded in later."""
        keys = jax.vmap(lambda seed: jax.random.split(jax.random.key(seed), 3))(self.seeds)
        return keys[:, 0], keys[:, 1], keys[:, 2]


def _learn(job: _Job, dataset: Dataset, timer: CheckpointTimer) -> None:
    """Update, log, evaluate and checkpoint until the run is complete."""
    run, program, schedule = job.run, job.program, job.schedule
    _, update_keys, evaluate_keys = job.keys()
    checkpoints = run.checkpoints(keep=2)
    done, begun, means = _begin(job, checkpoints)
    tracking.cut(run.metrics, done)
    timer.begin(done)
    note = ""
    with (
        _feed(job, dataset, update_keys, range(done, schedule.updates, schedule.block)) as feed,
        tracking.progress(run.record["program"], schedule.updates, done) as advance,
    ):
        left = range(done, schedule.updates)
        for step, states, metrics in _updates(program, feed, begun, update_keys, left):
            timer.work_done()
            means.add(metrics, step - done)
            if step % schedule.block == 0:
                _log(job, step, means.take())
            if step % schedule.evaluate_every == 0:
                note = _evaluate(job, program.policy_params(states), evaluate_keys, step)
            advance(step - done, note)
            done = step
            if timer.is_due() or step == schedule.updates:
                checkpoints.save(step, _tree(program, states), {"sums": means.sums})
                timer.saved(step)
    checkpoints.close()
    run.write_marl_eval(job.judges.environment)


def _begin(job: _Job, checkpoints: Checkpoints) -> tuple[int, ArrayTree, "_Means"]:
    """Return the updates done, the states after them, and the metrics since the last line."""
    states = start(job.program, job.keys()[0])
    found = checkpoints.resume(_tree(job.program, states))
    if found is None:
        return 0, states, _Means()
    pending = found.step % job.schedule.block
    return found.step, found.tree["state"], _Means(found.info.get("sums", {}), pending)


class _Means:
    """Means of metrics over the updates of a block, however the block is divided.

    Parameters
    ----------
    sums
        For each metric one sum for each seed; JSON.
    count
        Updates that they are over.
    """

    def __init__(self, sums: Mapping[str, list[float]] | None = None, count: int = 0):
        self.sums = dict(sums or {})
        self._count = count

    def add(self, metrics: Mapping[str, Float[np.ndarray, "seeds n"]], count: int) -> None:
        """Add the metrics of ``count`` updates, one after the other."""
        for name, values in metrics.items():
            before = np.array(self.sums.get(name, [0.0] * len(values)))[:, None]
            # Unlike a sum's, the order of a cumulative sum's additions does not depend on how many
            # there are, so that a run that was stopped within a block has the same bits.
            self.sums[name] = np.cumsum(np.hstack([before, values]), axis=1)[:, -1].tolist()
        self._count += count

    def take(self) -> dict[str, Float[np.ndarray, "seeds"]]:
        """Return the means, and begin anew."""
        sums = {name: np.array(values) for name, values in self.sums.items()}
        means = {name: (value / self._count).astype(np.float32) for name, value in sums.items()}
        self.sums, self._count = {}, 0
        return means


@partial(jax.jit, static_argnums=0)
def start(program: Program, keys: Key[Array, "seeds"]) -> ArrayTree:
    """Return the fresh states of all seeds.

    One after the other: orthogonal initialisation under vmap is a batched QR factorisation, and
    several of those at once can wait for one another for ever on a CPU of few cores (jaxlib 0.10
    splits each over the very threads that they hold).
    """
    return jax.lax.map(program.init, keys)


def _updates(
    program: Program,
    feed: BatchSource,
    states: ArrayTree,
    keys: Key[Array, "seeds"],
    updates: range,
) -> Iterator[tuple[int, ArrayTree, dict[str, Float[np.ndarray, "seeds n"]]]]:
    """Update, about `_SECONDS_AT_ONCE` at a time.

    Yields
    ------
    The updates done in all, the states after them (donated once the next are asked for), and the
    metrics of each update since the last time.
    """
    done, size, data = updates.start, 1, None
    while done < updates.stop:
        offset = done % feed.updates
        data = next(feed.data) if data is None or offset == 0 else data
        count = min(size, feed.updates - offset)
        begun = time.monotonic()
        states, metrics = _update(program, feed.updates, states, keys, done, offset, count, data)
        metrics = {name: value[:, :count] for name, value in jax.device_get(metrics).items()}
        seconds = (time.monotonic() - begun) / count
        done += count
        size = max(1, min(2 * size, int(_SECONDS_AT_ONCE / max(seconds, 1e-9)), feed.updates))
        yield done, states, metrics


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _update(
    program: Program,
    most: int,
    states: ArrayTree,
    keys: Key[Array, "seeds"],
    first: Int[Array, ""] | int,
    offset: Int[Array, ""] | int,
    count: Int[Array, ""] | int,
    data: Replay | Batches,
) -> tuple[ArrayTree, dict[str, Float[Array, "seeds most"]]]:
    """Sample and update ``count`` times, at most ``most``, for all seeds at once.

    One compiled loop serves every ``count``, so that an update gives the same bits wherever a run
    was stopped. All seeds sample one replay; batches drawn beforehand are ``(seeds, most, ...)``
    and used from ``offset`` on. Metrics beyond ``count`` are zero.
    """

    def seed_updates(
        state: ArrayTree, key: PRNGKeyArray, data: Replay | Batches
    ) -> tuple[ArrayTree, dict[str, Array]]:
        def update(state: ArrayTree, index: Array) -> tuple[ArrayTree, dict[str, Array]]:
            sample_key, update_key = split_key(key, first + index)
            if isinstance(data, Batches):
                batch = data[offset + index].sequence()
            else:
                batch = data.sample(sample_key)
            return program.update(state, batch, update_key)

        def logged_update(
            index: Array, carry: tuple[ArrayTree, dict[str, Array]]
        ) -> tuple[ArrayTree, dict[str, Array]]:
            state, found = update(carry[0], index)
            return state, {name: log.at[index].set(found[name]) for name, log in carry[1].items()}

        _, metrics = jax.eval_shape(update, state, jnp.zeros((), jnp.int32))
        logs = {name: jnp.zeros(most, value.dtype) for name, value in metrics.items()}
        return jax.lax.fori_loop(0, count, logged_update, (state, logs))

    shared = None if isinstance(data, Replay) else 0
    return jax.vmap(seed_updates, in_axes=(0, 0, shared))(states, keys, data)


def _feed(
    job: _Job, dataset: Dataset, keys: Key[Array, "seeds"], steps: range
) -> AbstractContextManager[BatchSource]:
    args, memory = job.args, int(job.args.memory * 1e9)
    # Whatever a window holds beyond the longest episode would be masked out.
    length = min(args.length, int(dataset.episodes.length.max(initial=1)))
    return open_batches(
        dataset,
        args.replay,
        args.batch_size,
        length,
        keys,
        steps,
        memory,
        job.judges.learnt_from,
    )


def _tree(program: Program, states: ArrayTree) -> dict[str, ArrayTree]:
    return {"state": states, "policy": program.policy_params(states)}


def _log(job: _Job, step: int, metrics: Mapping[str, NDArray[Any]]) -> None:
    """Write a line for each seed; metrics are ``(seeds, ...)``."""
    tracking.append(
        job.run.metrics,
        *(
            {"seed": seed, "step": step} | {name: value[i] for name, value in metrics.items()}
            for i, seed in enumerate(job.seeds)
        ),
    )


def _evaluate(job: _Job, params: ArrayTree, keys: Key[Array, "seeds"], step: int) -> str:
    """Judge the policies of all seeds, the last time by more episodes; log it, and say it."""
    last = step == job.schedule.updates
    episodes = job.args.final_episodes if last else job.args.evaluate_episodes
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, step)
    found = judge(job.judges, job.program, params, keys, episodes, last)
    if found:
        _log(job, step, found)
    return in_words(found)
