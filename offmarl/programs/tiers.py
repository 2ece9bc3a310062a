"""Online training with evaluation, and recording of quality tiers: what a recorder runs."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from rich import box
from rich.table import Table

import offmarl
from offmarl import envs, settings, tracking, vault
from offmarl.checkpoint import Checkpoints
from offmarl.envs import Environment
from offmarl.errors import CheckpointError, OptionError, unknown_name
from offmarl.evaluation import Evaluation, evaluate
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs.buffer import ChunkWriter
from offmarl.programs.loop import Schedule, build, collect, learn, stage_starts
from offmarl.programs.program import ArgsT, OnlineArgs, Program, hyperparameters
from offmarl.programs.record import is_complete, open_for_recording, record_policy, resume
from offmarl.programs.registry import Origin, origin_of
from offmarl.programs.run import (
    CheckpointTimer,
    Run,
    checkpoint_timer,
    environment_source,
    keep_compiled_programs,
    more_to_come,
    open_run,
    settled,
)
from offmarl.types import ArrayTree, EnvSpec, Policy

FRACTIONS = {"poor": 0.25, "medium": 0.5, "good": 0.75}
"""Return of a tier's checkpoint, as a fraction of the way from random to expert."""

REPLAY_TIERS = ("replay", "medium-replay")
"""Training data: all of it, and its part up to the medium checkpoint."""

TIERS = ("random", *FRACTIONS, "expert", *REPLAY_TIERS)
"""``random`` is a uniform policy over legal actions, ``expert`` the best checkpoint. `REPLAY_TIERS`
are training data. `FRACTIONS` defines the others."""


def parse_tiers(text: str) -> list[str]:
    """Read names of tiers, separated by commas; `UnknownNameError` for one that is not a tier."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in TIERS:
            raise unknown_name("tier", name, TIERS)
    return list(dict.fromkeys(names))


def first_to_reach(fraction: float, returns: Sequence[float], random: float, expert: float) -> int:
    """Return the index of the first checkpoint that has come a fraction of the way to the expert.

    Parameters
    ----------
    fraction
        Fraction of the way from random to expert.
    returns
        Mean return of each checkpoint, in the order of training.
    random, expert
        Mean returns of the random policy and of the best checkpoint. The best checkpoint is
        evaluated again, because the best of many noisy estimates is too high. If no checkpoint
        reaches the threshold, the best one is taken.
    """
    threshold = random + fraction * (expert - random)
    reached = (index for index, value in enumerate(returns) if value >= threshold)
    return next(reached, best(returns))


def best(returns: Sequence[float]) -> int:
    """Return the index of the best checkpoint, the first one if several are equal."""
    return max(range(len(returns)), key=returns.__getitem__)


# ---------------------------------------------------------------------------------- recording


class _Run(NamedTuple):
    """The values that the functions below share."""

    origin: Origin
    args: OnlineArgs
    env: Environment
    program: Program
    policy: Policy
    """The program's policy with sampled actions."""
    source: dict[str, dict[str, str]]
    """From `environment_source`."""

    @property
    def name(self) -> str:
        return self.origin.name

    @property
    def directory(self) -> Path:
        return _directory(self.args, self.name)

    @property
    def iteration_steps(self) -> int:
        return self.program.num_steps * self.args.num_envs

    @property
    def iterations(self) -> int:
        return -(-self.args.total_steps // self.iteration_steps)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that determine the result."""
        args = asdict(self.args) | {"env": envs.short_name(self.args.env)}
        del args["out"], args["checkpoint_seconds"]
        if not self.args.env_states:  # as recordings before there were states
            del args["env_states"]
        return tracking.plain(args)  # as in the provenance on disk

    @property
    def recipe(self) -> dict[str, Any]:
        """Everything that determines the result, for the vaults."""
        return self.settings | self.source

    def vault(self, tier: str) -> Path:
        return self.args.out / f"{envs.short_name(self.args.env)}.vlt" / tier

    def key(self, purpose: int) -> PRNGKeyArray:
        return jax.random.fold_in(jax.random.key(self.args.seed), purpose)


def _directory(args: OnlineArgs, program: str) -> Path:
    return args.out / f"{envs.short_name(args.env)}.run-{program}"


_INIT, _TRAIN, _EVALUATE, _EVALUATE_EXPERT, _EVALUATE_RANDOM = range(5)


class Recorded(NamedTuple):
    """The result of a recorder, for programs and for people."""

    data: dict[str, Any]
    view: Table


def record_online(make: Callable[[EnvSpec, ArgsT, Environment], Program], args: ArgsT) -> Recorded:
    """Train a program online and record the requested tiers.

    The run's directory is ``<out>/<env>.run-<name>``, the vaults are ``<out>/<env>.vlt/<tier>``.
    After a kill at any instant, the same call resumes from the last checkpoint and ends with the
    parameters and data of an uninterrupted call. A finished run is not changed.

    Parameters
    ----------
    make
        ``make(spec, args, env)`` builds the program for an environment without autoreset. The run
        records the file that defines it.
    args
        The program's arguments.

    Raises
    ------
    RunError
        The directory holds a run with other arguments or other code of the environment.
    Stopped
        A signal stopped the run; the message says where it resumes.
    UnknownNameError
        There is no such tier or environment.
    VaultError
        A vault cannot be written.
    """
    assert isinstance(args, OnlineArgs)
    origin = origin_of(make)
    args = settled(args, _directory(args, origin.name))
    tiers, env = parse_tiers(args.tiers), envs.make(args.env)
    env = envs.record_states(env) if args.env_states else env
    keep_compiled_programs()
    program = build(make, env.spec, args, env, lambda: cast(Hashable, env))
    source = environment_source(env.spec.name)
    run = _Run(origin, args, env, program, program.policy(False), source)
    opened = open_run(run.directory, _record(run))
    if opened.complete and not opened.lacks_checkpoint(run.iterations):
        return _summary(run, tiers, "complete already, nothing was changed")
    with checkpoint_timer(args.checkpoint_seconds, "step") as timer:
        versions = _train(run, opened, timer, keep=not set(REPLAY_TIERS).isdisjoint(tiers))
    _record_tiers(run, versions, [tier for tier in tiers if tier != "replay"])
    opened.write_marl_eval(env.spec.name)
    opened.finish()
    return _summary(run, tiers, "recorded")


def _record(run: _Run) -> dict[str, Any]:
    return {
        "offmarl": offmarl.__version__,
        "kind": "recorder",
        "program": run.name,
        "file": run.origin.file,
        "sha256": run.origin.sha256,
        "args": run.settings,
        "settings": settings.used(run.args).sources(),
        "spec": run.env.spec.to_json(),
        "greedy": run.program.greedy,
        "vault": None,
        "seeds": [run.args.seed],
        **run.source,
    }


# ---------------------------------------------------------------------------------- training


class Version(NamedTuple):
    """An evaluated version of the policy."""

    iteration: int
    """Number of training iterations before it; its policy id in the replay data."""
    returns: list[float]

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))


def _train(run: _Run, opened: Run, timer: CheckpointTimer, keep: bool) -> list[Version]:
    """Train to the end, and return the evaluated versions."""
    journal, hyper = _Journal(run, opened), hyperparameters(run.args)
    done, begin, info = resume(run.program, journal.checkpoints, run.key(_INIT), hyper)
    journal.go_on(done, info)
    timer.begin(done * run.iteration_steps)
    schedule = _schedule(run)
    replay = _open_replay(run, done) if keep else nullcontext()
    with replay as chunks, _progress(run, done) as advance:
        journal.chunks = chunks
        key = run.key(_TRAIN)
        work = collect(run.program, begin, hyper, key, schedule, done, chunks)
        learn(work, journal, schedule, done, timer, advance, run.iteration_steps)
        if chunks is not None:
            chunks.complete(policies=[_about(run, version) for version in journal.versions])
    journal.close()
    return journal.versions


def _schedule(run: _Run) -> Schedule:
    every = -(-run.iterations // run.args.evaluations)
    try:
        starts = stage_starts(run.program.stages, run.iterations)
    except ValueError as error:
        raise OptionError(
            f"--total-steps {run.args.total_steps} is {run.iterations} updates, and the program "
            f"has {error}: give more --total-steps, or other lengths of the stages."
        ) from None
    return Schedule(run.iterations, every, 1, starts)


def _open_replay(run: _Run, start: int) -> ChunkWriter:
    path = run.vault("replay")
    is_complete(path, run.recipe)
    provenance = {"program": run.name, "tier": "replay", "policy_id": "iterations of training"}
    writer = open_for_recording(path, run.env.spec, run.args.num_envs, run.recipe, provenance)
    return ChunkWriter(writer, "replay", start, start * run.program.num_steps)


def _progress(run: _Run, start: int) -> AbstractContextManager[tracking.Advance]:
    steps = run.iteration_steps
    return tracking.progress(f"train {run.name}", run.iterations * steps, start * steps)


def _provenance(run: _Run, tier: str) -> dict[str, Any]:
    return {"program": run.name, "args": run.settings, "tier": tier}


def _about(run: _Run, version: Version) -> dict[str, Any]:
    return {
        "policy_id": version.iteration,
        "training_steps": version.iteration * run.iteration_steps,
        "return": version.mean,
    }


class _Journal:
    """The files of a training run: metrics, checkpoints to resume from, policies to record."""

    def __init__(self, run: _Run, opened: Run):
        self._run = run
        self._metrics = opened.metrics
        self._unwritten: list[dict[str, Any]] = []
        self._policies = _policies(run)
        self.checkpoints = opened.checkpoints(keep=2)
        self.versions: list[Version] = []
        self.chunks: ChunkWriter | None = None
        """Writes the training data."""

    def go_on(self, start: int, info: Mapping[str, Any]) -> None:
        """Drop what was written after the checkpoint that training resumes from."""
        tracking.cut(self._metrics, start * self._run.iteration_steps)
        self.versions = [Version(*version) for version in info.get("versions", [])]

    def add(self, done: int, metrics: Mapping[str, Any], _count: int) -> None:
        """Keep metrics, without waiting for the device."""
        step = done * self._run.iteration_steps
        self._unwritten.append({"seed": self._run.args.seed, "step": step, **metrics})

    def log(self, done: int) -> None:
        """Do nothing: `save` writes the lines."""

    def evaluate(self, done: int, state: ArrayTree) -> None:
        """Evaluate the policy, and keep it as a version."""
        key = jax.random.fold_in(self._run.key(_EVALUATE), done)
        params = self._run.program.policy_params(state)
        returns = _returns(self._run, self._run.policy, params, key)
        self.versions.append(Version(done, returns.tolist()))
        self.add(done, {tracking.RETURN: returns}, 0)
        if done not in self._policies.steps():
            self._policies.save(done, {"policy": params}, {})

    def save(self, done: int, state: ArrayTree) -> None:
        """Write the data and metrics so far, and a checkpoint to resume from."""
        if self.chunks is not None:
            self.chunks.flush()
        tracking.append(self._metrics, *self._unwritten)
        self._unwritten.clear()
        policy = jax.tree.map(lambda leaf: leaf[None], self._run.program.policy_params(state))
        versions = [list(version) for version in self.versions]
        self.checkpoints.save(done, {"policy": policy, "state": state}, {"versions": versions})

    @property
    def note(self) -> str:
        """Return of the last version."""
        return f"return {self.versions[-1].mean:.3g}" if self.versions else ""

    def close(self) -> None:
        """Close the files."""
        self.checkpoints.close()
        self._policies.close()


def _returns(run: _Run, policy: Policy, params: ArrayTree, key: PRNGKeyArray) -> np.ndarray:
    evaluation = _evaluate(run.env, policy, run.args.eval_episodes, params, key)
    return np.asarray(evaluation.returns)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _evaluate(
    env: Environment, policy: Policy, num_episodes: int, params: ArrayTree, key: PRNGKeyArray
) -> Evaluation:
    return evaluate(env, policy, params, key, num_episodes)


def _policies(run: _Run) -> Checkpoints:
    """Return the checkpoints of all evaluated versions of the policy."""
    return Checkpoints(run.directory / "policies")


# ---------------------------------------------------------------------------------- tiers


def _record_tiers(run: _Run, versions: Sequence[Version], tiers: Sequence[str]) -> None:
    """Record all tiers but replay, which the training has recorded."""
    play = partial(_returns, run)
    uniform = make_policy(PolicyConfig("random"), run.env.spec)
    random = float(play(uniform, (), run.key(_EVALUATE_RANDOM)).mean())
    means = [version.mean for version in versions]
    top = versions[best(means)]
    expert = float(play(run.policy, _load(run, top), run.key(_EVALUATE_EXPERT)).mean())

    def reached(tier: str) -> Version:
        return versions[first_to_reach(FRACTIONS[tier], means, random, expert)]

    def record(tier: str) -> None:
        if tier == "random":
            _record_tier(run, tier, uniform, (), {"return": random})
        elif tier == "expert":
            about = _about(run, top) | {"return": expert}
            _record_tier(run, tier, run.policy, _load(run, top), about)
        elif tier == "medium-replay":
            _cut_replay(run, tier, reached("medium"), versions)
        else:
            version = reached(tier)
            _record_tier(run, tier, run.policy, _load(run, version), _about(run, version))

    for tier in tiers:
        with more_to_come(tier != tiers[-1]):
            record(tier)


def _cut_replay(run: _Run, tier: str, until: Version, versions: Sequence[Version]) -> None:
    """Extract the training data up to a version of the policy."""
    recipe = {**run.recipe, "iterations": until.iteration}
    if is_complete(run.vault(tier), recipe):
        return
    trained = [_about(run, one) for one in versions if one.iteration <= until.iteration]
    about = {"recipe": recipe, "complete": True, "policies": trained, "origins": []}
    vault.slice(
        run.vault("replay"),
        run.vault(tier),
        stop=until.iteration * run.program.num_steps,
        by="steps",
        provenance=_provenance(run, tier) | about,
        progress=tracking.progress,
    )


def _record_tier(
    run: _Run, tier: str, policy: Policy, params: ArrayTree, about: Mapping[str, Any]
) -> None:
    record_policy(
        run.env,
        policy,
        params,
        run.vault(tier),
        run.args.steps,
        run.args.num_envs,
        seed=run.args.seed + TIERS.index(tier),
        provenance=_provenance(run, tier) | {"policies": [{**about, "policy_id": 0}]},
        checkpoint_seconds=run.args.checkpoint_seconds,
    )


def _load(run: _Run, version: Version) -> ArrayTree:
    policies, program = _policies(run), run.program

    def params(key: PRNGKeyArray) -> ArrayTree:
        return program.policy_params(program.init(key, hyperparameters(run.args)))

    like = jax.eval_shape(params, run.key(_INIT))
    try:
        tree, _ = policies.restore({"policy": like}, version.iteration)
    except CheckpointError as error:
        raise CheckpointError(
            run.directory / "policies" / str(version.iteration),
            error.reason,
            f"delete {run.directory} and repeat the command: it keeps the recorded data and "
            "repeats the training.",
        ) from error
    policies.close()
    return tree["policy"]


def _summary(run: _Run, tiers: Sequence[str], title: str) -> Recorded:
    rows = [_describe(run.vault(tier), tier) for tier in tiers]
    view = Table(title=f"{run.directory}: {title}", box=box.SIMPLE_HEAD)
    for column in rows[0]:
        view.add_column(column, overflow="fold", no_wrap=column != "path")
    for row in rows:
        view.add_row(*map(_cell, row.values()))
    return Recorded({"run": str(run.directory), "outcome": title, "vaults": rows}, view)


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return str(value)


def _describe(path: Path, tier: str) -> dict[str, Any]:
    found = vault.open_vault(path)
    return {
        "tier": tier,
        "steps": found.num_steps,
        "episodes": len(found.episodes.row),
        "incomplete": found.episodes.incomplete,
        "mean_return": found.episodes.mean_return,
        "path": str(path),
    }
