"""Train online, evaluate, and record the tiers: the driver that all recorders share."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from rich import box
from rich.table import Table

import offmarl
from offmarl import envs, tracking, vault
from offmarl.checkpoint import Checkpoints
from offmarl.config import NonNegative, PositiveInt, Seed, Validated
from offmarl.envs import Environment
from offmarl.errors import CheckpointError
from offmarl.evaluation import Evaluation, evaluate
from offmarl.networks import PolicyConfig, init_policy, make_policy
from offmarl.programs import run as runs
from offmarl.programs.collect import OnlineProgram, State, collect, resume
from offmarl.programs.interruption import CheckpointTimer, checkpoint_timer, more_to_come
from offmarl.programs.provenance import is_complete, open_for_recording
from offmarl.programs.record import record_policy
from offmarl.programs.tiers import (
    FRACTIONS,
    REPLAY_TIERS,
    TIERS,
    best,
    first_to_reach,
    parse_tiers,
)
from offmarl.programs.writer import ChunkWriter
from offmarl.types import ArrayTree, Policy


@dataclass(frozen=True)
class OnlineArgs(Validated):
    """What every recorder is told."""

    env: str = "swarm/coverage-3"
    """Environment to learn in; `offmarl envs` lists them."""
    tiers: str = "random,medium,expert,replay"
    """Data to record, of random, poor, medium, good, expert, replay (all training data) and
    medium-replay (that up to the medium policy, cut from replay, which is recorded too)."""
    out: Path = Path("vaults")
    """Directory for the vaults, and for the run beside them."""
    steps: PositiveInt = 100_000
    """Environment steps to record in each tier; replay has all steps of the training."""
    total_steps: PositiveInt = 300_000
    """Environment steps to train for."""
    num_envs: PositiveInt = 32
    """Environments side by side."""
    evaluations: PositiveInt = 40
    """Versions of the policy to evaluate and keep during training; tiers are chosen from them."""
    eval_episodes: PositiveInt = 64
    """Episodes in an evaluation."""
    seed: Seed = 0
    """Decides everything random."""
    checkpoint_seconds: NonNegative = 30.0
    """Seconds of work that a kill may cost; Ctrl-C and SIGTERM save before they stop."""


class _Run(NamedTuple):
    """What the parts below share."""

    name: str
    args: OnlineArgs
    env: Environment
    config: PolicyConfig
    policy: Policy
    program: OnlineProgram

    @property
    def directory(self) -> Path:
        return self.args.out / f"{envs.short_name(self.args.env)}.run-{self.name}"

    @property
    def iteration_steps(self) -> int:
        return self.program.num_steps * self.args.num_envs

    @property
    def iterations(self) -> int:
        return -(-self.args.total_steps // self.iteration_steps)

    @property
    def recipe(self) -> dict[str, Any]:
        """All that decides the result."""
        args = asdict(self.args) | {"env": envs.short_name(self.args.env)}
        del args["out"], args["checkpoint_seconds"]
        return tracking.plain(args)  # as provenance on disk will have it

    def vault(self, tier: str) -> Path:
        return self.args.out / f"{envs.short_name(self.args.env)}.vlt" / tier

    def key(self, purpose: int) -> PRNGKeyArray:
        return jax.random.fold_in(jax.random.key(self.args.seed), purpose)


_INIT, _TRAIN, _EVALUATE, _EVALUATE_EXPERT, _EVALUATE_RANDOM = range(5)


class Recorded(NamedTuple):
    """What a recorder made, for programs and for people."""

    data: dict[str, Any]
    view: Table


def record_online(
    name: str, args: OnlineArgs, env: Environment, config: PolicyConfig, program: OnlineProgram
) -> Recorded:
    """Train a program online and record the tiers asked for.

    The run's directory is ``<out>/<env>.run-<name>``, the vaults ``<out>/<env>.vlt/<tier>``. Killed
    at any instant, the same call again goes on from the last checkpoint, and ends with the
    parameters and the data of a call that was never stopped. Once ended, it changes nothing.

    Parameters
    ----------
    name
        The program's.
    args
        What the user asked for; the program's own arguments may be among them.
    env
        The environment to evaluate and record in, without autoreset.
    config
        Describes the policy that ``program.acting`` gives the parameters of.
    program
        What learns, in ``args.num_envs`` environments.

    Raises
    ------
    RunError
        The directory holds a run of other arguments.
    Stopped
        A signal stopped the run; the message says where it goes on.
    UnknownNameError
        There is no such tier.
    VaultError
        A vault cannot be written.
    """
    tiers = parse_tiers(args.tiers)
    run = _Run(name, args, env, config, make_policy(config, env.spec), program)
    opened = runs.open_run(run.directory, _record(run))
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
        "args": run.recipe,
        "spec": run.env.spec.to_json(),
        "policy": asdict(run.config),
        "greedy": False,
        "vault": None,
        "seeds": [run.args.seed],
    }


# ---------------------------------------------------------------------------------- training


class Version(NamedTuple):
    """An evaluated version of the policy."""

    iteration: int
    """Iterations of training behind it; its id in the replay data."""
    returns: list[float]

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))


def _train(run: _Run, opened: runs.Run, timer: CheckpointTimer, keep: bool) -> list[Version]:
    """Train to the end and return the versions evaluated on the way."""
    journal = _Journal(run, opened)
    start, begin, info = resume(run.program, journal.checkpoints, run.key(_INIT))
    journal.go_on(start, info)
    timer.begin(start * run.iteration_steps)
    every = -(-run.iterations // run.args.evaluations)
    todo = range(start, run.iterations)
    replay = _open_replay(run, start) if keep else nullcontext()
    with replay as chunks, _progress(run, start) as advance:
        for done, state, metrics in collect(run.program, begin, run.key(_TRAIN), todo, chunks):
            timer.work_done()
            journal.log(done, metrics)
            if done % every == 0 or done == run.iterations:
                journal.evaluate(done, run.program.acting(state))
            advance(run.iteration_steps, journal.note)
            if timer.is_due() or done == run.iterations:
                if chunks is not None:
                    chunks.flush()
                journal.save(done, state)
                timer.saved(done * run.iteration_steps)
        if chunks is not None:
            chunks.complete(policies=[_about(run, version) for version in journal.versions])
    journal.close()
    return journal.versions


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
    return {"program": run.name, "args": run.recipe, "tier": tier}


def _about(run: _Run, version: Version) -> dict[str, Any]:
    return {
        "policy_id": version.iteration,
        "training_steps": version.iteration * run.iteration_steps,
        "return": version.mean,
    }


class _Journal:
    """The files of a run in training: metrics, checkpoints to go on from, policies to record."""

    def __init__(self, run: _Run, opened: runs.Run):
        self._run = run
        self._metrics = opened.metrics
        self._unwritten: list[dict[str, Any]] = []
        self._policies = _policies(run)
        self.checkpoints = opened.checkpoints(keep=2)
        self.versions: list[Version] = []

    def go_on(self, start: int, info: Mapping[str, Any]) -> None:
        """Forget what was written after the checkpoint that training goes on from."""
        tracking.cut(self._metrics, start * self._run.iteration_steps)
        self.versions = [Version(*version) for version in info.get("versions", [])]

    def log(self, done: int, metrics: Mapping[str, Any]) -> None:
        """Take metrics down, without waiting for the device."""
        step = done * self._run.iteration_steps
        self._unwritten.append({"seed": self._run.args.seed, "step": step, **metrics})

    def evaluate(self, done: int, params: ArrayTree) -> None:
        """Evaluate a version, and keep it."""
        key = jax.random.fold_in(self._run.key(_EVALUATE), done)
        returns = _returns(self._run, self._run.policy, params, key)
        self.versions.append(Version(done, returns.tolist()))
        self.log(done, {tracking.RETURN: returns})
        if done not in self._policies.steps():
            self._policies.save(done, {"policy": params}, {})

    def save(self, done: int, state: State) -> None:
        """Write metrics, and a checkpoint to go on from."""
        tracking.append(self._metrics, *self._unwritten)
        self._unwritten.clear()
        policy = jax.tree.map(lambda leaf: leaf[None], self._run.program.acting(state))
        versions = [list(version) for version in self.versions]
        self.checkpoints.save(done, {"policy": policy, "state": state}, {"versions": versions})

    @property
    def note(self) -> str:
        """How well it goes."""
        return f"return {self.versions[-1].mean:.3g}" if self.versions else ""

    def close(self) -> None:
        """Let go of the files."""
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
    """Return the place of all evaluated versions of the policy."""
    return Checkpoints(run.directory / "policies")


# ---------------------------------------------------------------------------------- tiers


def _record_tiers(run: _Run, versions: Sequence[Version], tiers: Sequence[str]) -> None:
    """Record the tiers other than replay, which training has recorded."""
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
    """Take the training data up to a version of the policy."""
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
    policies = _policies(run)
    like = jax.eval_shape(lambda key: init_policy(run.config, run.env.spec, key), run.key(_INIT))
    try:
        tree, _ = policies.restore({"policy": like}, version.iteration)
    except CheckpointError as error:
        raise CheckpointError(
            run.directory / "policies" / str(version.iteration),
            error.reason,
            f"delete {run.directory} and repeat the command: what was recorded is kept, and the "
            "training is repeated.",
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
