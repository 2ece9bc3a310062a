"""The one driver that every offline program shares."""

from collections.abc import Callable, Mapping
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

from offmarl import __version__, runs, tracking
from offmarl.replay import Batches, Dataset, Feed, Replay, feeding, open_dataset, split_key
from offmarl.training.evaluating import Judges, in_words, judge, judges_of
from offmarl.training.program import FREE, Args, Program, Schedule, schedule_of
from offmarl.types import ArrayTree, EnvSpec

_ArgsT = TypeVar("_ArgsT", bound=Args)


def train(name: str, make: Callable[[EnvSpec, _ArgsT], Program], args: _ArgsT) -> Path:
    """Train a program on a vault, evaluate it, and write the run.

    The same call again goes on where a stopped run's last checkpoint was, to the same bits; a
    finished run is left as it is.

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
    """
    dataset = open_dataset(args.vault, time_limit=args.time_limit)
    schedule = schedule_of(args, dataset.spec)
    judges = judges_of(args, dataset)
    args = replace(args, **schedule._asdict(), held_out=judges.fraction)
    program = make(dataset.spec, args)
    run = runs.open_run(_directory(name, args, dataset), _record(name, args, dataset, program))
    if not run.complete:
        _learn(_Job(run, program, judges, args, schedule), dataset)
        run.finish()
    return run.directory


def _directory(name: str, args: Args, dataset: Dataset) -> Path:
    return args.out or Path("runs") / (dataset.spec.name or dataset.name) / dataset.uid / name


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


def _learn(job: _Job, dataset: Dataset) -> None:
    """Update, log, evaluate and checkpoint until the run is complete."""
    run, program, schedule = job.run, job.program, job.schedule
    init_keys, update_keys, evaluate_keys = job.keys()
    checkpoints = run.checkpoints(keep=2)
    states = start(program, init_keys)
    done = checkpoints.latest() or 0
    if done:
        tree, _ = checkpoints.restore(_tree(program, states))
        states = tree["state"]
    tracking.cut(run.metrics, done)
    block, note = schedule.block, ""
    with (
        _feed(job, dataset, update_keys, range(done, schedule.updates, block)) as feed,
        tracking.progress(run.record["program"], schedule.updates, done) as advance,
    ):
        for step in range(done + block, schedule.updates + 1, block):
            parts = []
            for begin in range(step - block, step, feed.updates):
                data = next(feed.data)
                states, part = _update(program, feed.updates, states, update_keys, begin, data)
                parts.append(part)
            _log(job, step, _mean(parts))
            if step % schedule.evaluate_every == 0:
                note = _evaluate(job, program.policy_params(states), evaluate_keys, step)
                checkpoints.save(step, _tree(program, states), {})
            advance(block, note)
    checkpoints.close()
    run.write_marl_eval(job.judges.environment)


@partial(jax.jit, static_argnums=0)
def start(program: Program, keys: Key[Array, "seeds"]) -> ArrayTree:
    """Return the fresh states of all seeds.

    One after the other: orthogonal initialisation under vmap is a batched QR factorisation, and
    several of those at once can wait for one another for ever on a CPU of few cores (jaxlib 0.10
    splits each over the very threads that they hold).
    """
    return jax.lax.map(program.init, keys)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _update(
    program: Program,
    count: int,
    states: ArrayTree,
    keys: Key[Array, "seeds"],
    start: Int[Array, ""] | int,
    data: Replay | Batches,
) -> tuple[ArrayTree, dict[str, Float[Array, "seeds"]]]:
    """Sample and update ``count`` times, for all seeds at once; metrics are means.

    All seeds sample one replay; batches drawn beforehand are ``(seeds, count, ...)``.
    """

    def seed_updates(
        state: ArrayTree, key: PRNGKeyArray, data: Replay | Batches
    ) -> tuple[ArrayTree, dict[str, Array]]:
        def update(state: ArrayTree, index: Array) -> tuple[ArrayTree, dict[str, Array]]:
            sample_key, update_key = split_key(key, start + index)
            batch = data[index].sequence() if isinstance(data, Batches) else data.sample(sample_key)
            return program.update(state, batch, update_key)

        state, metrics = jax.lax.scan(update, state, jnp.arange(count))
        return state, jax.tree.map(jnp.mean, metrics)

    shared = None if isinstance(data, Replay) else 0
    return jax.vmap(seed_updates, in_axes=(0, 0, shared))(states, keys, data)


def _feed(
    job: _Job, dataset: Dataset, keys: Key[Array, "seeds"], steps: range
) -> AbstractContextManager[Feed]:
    args, memory = job.args, int(job.args.memory * 1e9)
    # Whatever a window holds beyond the longest episode would be masked out.
    length = min(args.length, int(dataset.episodes.length.max(initial=1)))
    return feeding(
        dataset,
        args.replay,
        args.batch_size,
        length,
        keys,
        steps,
        memory,
        job.judges.learnt_from,
    )


def _mean(parts: list[dict[str, Array]]) -> dict[str, NDArray[Any]]:
    """Return the means of metrics over parts of equal size."""
    return jax.tree.map(lambda *x: np.mean(x, axis=0), *jax.device_get(parts))


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
