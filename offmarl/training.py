"""The one driver that every offline program shares.

A program says how it starts, what one update does and how its policy acts (`Program`); the driver
samples, scans, vmaps seeds, evaluates, logs, checkpoints and resumes, the same for all. Sampling
and updating are fused in one scan over a replay that stays on the device, or, where that is too
small, over batches streamed to it. Everything random is a pure function of (seed, update), so that
a resumed run gives the bits of one that never stopped, and a stream the batches of the device.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray
from numpy.typing import NDArray

from offmarl import __version__, envs, runs, tracking
from offmarl.envs.base import Environment
from offmarl.errors import OptionError, ShapeError
from offmarl.evaluation import agreement, evaluate
from offmarl.networks import PolicyConfig, make_policy
from offmarl.replay import (
    Batches,
    Dataset,
    Feed,
    Replay,
    feeding,
    load,
    open_dataset,
    split_key,
)
from offmarl.types import ArrayTree, EnvSpec, Sequence

_LOG_EVERY = 500
"""Most updates between two lines of metrics, and between two signs of life."""


_FREE = ("out", "replay", "memory")
"""Settings that a run may be resumed with others of, because they do not change its result."""


@dataclass(frozen=True)
class Args:
    """Settings that all offline programs share."""

    vault: Path
    """Dataset to learn from, such as vaults/swarm/coverage-3.vlt/medium."""
    env: str | None = None
    """Environment to evaluate in; by default the one the dataset was recorded in. "none": train
    without one."""
    validation: Path | None = None
    """Held-out episodes, such as `offmarl split` makes: how far the policy agrees with their
    actions is evaluated too, which needs no environment."""
    out: Path | None = None
    """Directory of the run; by default runs/ENVIRONMENT/TIER/PROGRAM."""
    seeds: int = 1
    """Independent runs, trained side by side in one program."""
    seed: int = 0
    """The first of the seeds."""
    updates: int | None = None
    """Gradient updates; by default 100,000, and 3,000 on classic/* and probe/* data."""
    batch_size: int = 32
    """Windows a batch."""
    length: int = 20
    """Steps a window."""
    replay: Literal["auto", "device", "stream"] = "auto"
    """Where batches come from: the whole dataset on the device, or streamed from disk; the same
    batches either way. "auto": the device where the data fits into half of its free memory."""
    memory: float = 1.0
    """GB that streamed batches may take at a time."""
    evaluate_every: int | None = None
    """Updates between evaluations (and checkpoints); by default a twentieth of all."""
    evaluate_episodes: int = 32
    """Episodes an evaluation."""
    final_episodes: int = 320
    """Episodes of the last evaluation, whose returns are the run's result."""


class Program(NamedTuple):
    """An offline algorithm, as pure functions of one seed.

    Attributes
    ----------
    config
        The policy it trains.
    init
        ``init(key) -> state``.
    update
        ``update(state, batch, key) -> (state, metrics)``, metrics being scalars by name.
    policy_params
        ``policy_params(state)``: the parameters its policy acts with.
    greedy
        Whether the policy is evaluated by its best actions. One that is not (a clone of stochastic
        data acts as the data did) is evaluated that way too, once, at the end.
    """

    config: PolicyConfig
    init: Callable[[PRNGKeyArray], ArrayTree]
    update: Callable[[ArrayTree, Sequence, PRNGKeyArray], tuple[ArrayTree, dict[str, Array]]]
    policy_params: Callable[[ArrayTree], ArrayTree]
    greedy: bool = True


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
    dataset = open_dataset(args.vault)
    env, held_out = _environment(args, dataset), _held_out(args, dataset)
    schedule = _schedule(args, dataset.spec)
    args = replace(args, **schedule._asdict())
    program = make(dataset.spec, args)
    run = runs.open_run(_directory(name, args, dataset), _record(name, args, dataset, program))
    if not run.complete:
        _learn(_Job(run, program, dataset.spec, env, held_out, args, schedule), dataset)
        run.finish()
    return run.directory


# ---------------------------------------------------------------------------------- settings


class _Schedule(NamedTuple):
    updates: int
    evaluate_every: int

    @property
    def block(self) -> int:
        """Updates in one call of the jitted scan; they divide an evaluation's."""
        most = min(self.evaluate_every, _LOG_EVERY)
        return max(size for size in range(1, most + 1) if self.evaluate_every % size == 0)


def _schedule(args: Args, spec: EnvSpec) -> _Schedule:
    """Fill in what is left to us, and refuse what cannot be."""
    small = spec.name.startswith(("classic/", "probe/"))
    updates = (3_000 if small else 100_000) if args.updates is None else args.updates
    every = max(updates // 20, 1) if args.evaluate_every is None else args.evaluate_every
    schedule = _Schedule(updates, every)
    counts = ("seeds", "evaluate_episodes", "final_episodes")
    for name, count in (
        schedule._asdict() | {name: getattr(args, name) for name in counts}
    ).items():
        if count < 1:
            raise OptionError(f"{name} must be at least 1, not {count}.")
    if updates % every:
        raise OptionError(
            f"updates ({updates}) must be a multiple of evaluate_every ({every}): "
            f"give --updates {updates - updates % every + every}, or another --evaluate-every."
        )
    return schedule


def _environment(args: Args, dataset: Dataset) -> Environment | None:
    name = dataset.spec.name if args.env is None else args.env
    if name in ("", "none"):
        return None
    env = envs.make(name)
    if difference := dataset.spec.difference(env.spec):
        raise ShapeError(
            f"{dataset.path} and {name} differ in {difference}: name the environment it was "
            "recorded in with --env, or train with --env none."
        )
    return env


def _held_out(args: Args, dataset: Dataset) -> Sequence | None:
    """Return the first held-out episodes, as many as the last evaluation is to have."""
    if args.validation is None:
        return None
    data = open_dataset(args.validation)
    if difference := dataset.spec.difference(data.spec):
        raise ShapeError(
            f"{dataset.path} and {data.path} differ in {difference}: hold out episodes of the data "
            "that is learnt from, with `offmarl split`."
        )
    longest = max(data.episodes.length, default=0)
    replay = load(data, 1, int(longest))  # windows so long that there is one for each episode
    return replay.windows(replay.starts[: args.final_episodes])


def _directory(name: str, args: Args, dataset: Dataset) -> Path:
    return args.out or Path("runs") / (dataset.spec.name or dataset.name) / dataset.uid / name


def _record(name: str, args: Args, dataset: Dataset, program: Program) -> dict[str, Any]:
    return {
        "offmarl": __version__,
        "kind": "baseline",
        "program": name,
        "args": {key: value for key, value in asdict(args).items() if key not in _FREE},
        "spec": dataset.spec.to_json(),
        "policy": asdict(program.config),
        "greedy": program.greedy,
        "vault": f"{dataset.name}/{dataset.uid}",
        "vault_digest": dataset.digest(),
        "seeds": list(range(args.seed, args.seed + args.seeds)),
    }


# ---------------------------------------------------------------------------------- learning


class _Job(NamedTuple):
    """What stays the same from the first update to the last."""

    run: runs.Run
    program: Program
    spec: EnvSpec
    """Of the data."""
    env: Environment | None
    held_out: Sequence | None
    """Whole episodes."""
    args: Args
    schedule: _Schedule

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
    _write_marl_eval(run, job.env.spec.name if job.env else job.spec.name)


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
    return feeding(dataset, args.replay, args.batch_size, args.length, keys, steps, memory)


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


# ---------------------------------------------------------------------------------- evaluation


def _evaluate(job: _Job, params: ArrayTree, keys: Key[Array, "seeds"], step: int) -> str:
    """Evaluate every seed in what there is to evaluate in, and return a word on it."""
    notes = []
    if job.held_out is not None:
        agreed = jax.device_get(_agreements(job.program, job.spec, params, job.held_out))
        _log(job, step, {tracking.AGREEMENT: agreed})
        notes.append(f"agreement {agreed.mean():.3f}")
    if job.env is not None:
        own = _play(job, job.env, params, keys, step)
        notes.append(f"return {own.mean():.2f}")
    return ", ".join(notes)


def _play(
    job: _Job, env: Environment, params: ArrayTree, keys: Key[Array, "seeds"], step: int
) -> Float[np.ndarray, "seeds episodes"]:
    """Play, log and return episodes of every seed; the last time there are more of them."""
    last = step == job.schedule.updates
    episodes = job.args.final_episodes if last else job.args.evaluate_episodes
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, step)
    play = partial(_returns, job.program, env, episodes, params=params, keys=keys)
    own = jax.device_get(play(job.program.greedy))
    _log(job, step, {tracking.RETURN: own})
    if last and not job.program.greedy:
        _log(job, step, {tracking.GREEDY_RETURN: jax.device_get(play(True))})
    return own


@partial(jax.jit, static_argnums=(0, 1))
def _agreements(
    program: Program, spec: EnvSpec, params: ArrayTree, episodes: Sequence
) -> Float[Array, "seeds episodes"]:
    policy = make_policy(program.config, spec, greedy=True)
    return jax.vmap(lambda params: agreement(policy, params, episodes))(params)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _returns(
    program: Program,
    env: Environment,
    episodes: int,
    greedy: bool,
    params: ArrayTree,
    keys: Key[Array, "seeds"],
) -> Float[Array, "seeds episodes"]:
    policy = make_policy(program.config, env.spec, greedy)
    play = partial(evaluate, env, policy, num_episodes=episodes)
    return jax.vmap(lambda params, key: play(params, key).returns)(params, keys)


def _write_marl_eval(run: runs.Run, env: str) -> None:
    """Arrange the evaluations logged, those before a resume included, for comparison."""
    rows, seeds = tracking.read(run.metrics), run.record["seeds"]
    names = (tracking.RETURN, tracking.GREEDY_RETURN, tracking.AGREEMENT)
    found = {name: steps for name in names if (steps := _by_step(rows, name, seeds))}
    if not found:
        return
    main = next(iter(found))
    dataset, _, uid = run.record["vault"].rpartition("/")
    environment, _, task = (env or f"unknown/{dataset}").partition("/")
    data = tracking.marl_eval(
        environment,
        f"{task}/{uid}",
        run.record["program"],
        seeds,
        found[main],
        {name: steps[-1][1] for name, steps in found.items()},
        main,
    )
    tracking.write_json(run.directory / tracking.MARL_EVAL_FILE, data)


def _by_step(
    rows: list[dict[str, Any]], metric: str, seeds: list[int]
) -> list[tuple[int, Float[np.ndarray, "seeds episodes"]]]:
    """Collect a metric's rows, of one seed each, into one array for each step."""
    found: dict[int, dict[int, list[float]]] = {}
    for row in rows:
        if metric in row:
            found.setdefault(row["step"], {})[row["seed"]] = row[metric]
    return [(step, np.array([found[step][seed] for seed in seeds])) for step in sorted(found)]
