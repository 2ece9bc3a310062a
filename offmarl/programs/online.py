"""Online training with evaluation: what a recorder runs, and the files of its run."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
from rich import box
from rich.table import Table

import offmarl
from offmarl import envs, settings, tracking, vault
from offmarl.envs import Environment
from offmarl.errors import OptionError
from offmarl.programs.buffer import ChunkWriter
from offmarl.programs.loop import Schedule, build, collect, learn, stage_starts
from offmarl.programs.program import ArgsT, OnlineArgs, Program, hyperparameters
from offmarl.programs.record import is_complete, open_for_recording, resume
from offmarl.programs.recorder import (
    EVALUATE,
    INIT,
    TRAIN,
    Recorder,
    Version,
    run_directory,
)
from offmarl.programs.registry import origin_of
from offmarl.programs.run import (
    CheckpointTimer,
    Run,
    checkpoint_timer,
    environment_source,
    keep_compiled_programs,
    open_run,
    settled,
)
from offmarl.programs.tiers import REPLAY_TIERS, parse_tiers, record_tiers
from offmarl.teams import only_or_all
from offmarl.terminal import number
from offmarl.trackers import Trackers
from offmarl.trackers import check as check_trackers
from offmarl.types import ArrayTree, EnvSpec


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
    check_trackers(args.track)
    origin = origin_of(make)
    args = settled(args, run_directory(args, origin.name))
    tiers, env = parse_tiers(args.tiers), envs.make(args.env)
    env = envs.record_states(env) if args.env_states else env
    keep_compiled_programs()
    program = build(make, env.spec, args, env, lambda: cast(Hashable, env))
    source = environment_source(env.spec.name)
    run = Recorder(origin, args, env, program, program.policy(False), source)
    opened = open_run(run.directory, _record(run))
    if opened.complete and not opened.lacks_checkpoint(run.iterations):
        return _summary(run, tiers, "complete already, nothing was changed")
    with checkpoint_timer(args.checkpoint_seconds, "step") as timer:
        versions = _train(run, opened, timer, keep=not set(REPLAY_TIERS).isdisjoint(tiers))
    record_tiers(run, versions, [tier for tier in tiers if tier != "replay"])
    opened.write_marl_eval(env.spec.name)
    opened.finish()
    return _summary(run, tiers, "recorded")


def _record(run: Recorder) -> dict[str, Any]:
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


def _train(run: Recorder, opened: Run, timer: CheckpointTimer, keep: bool) -> list[Version]:
    """Train to the end, and return the evaluated versions."""
    journal, hyper = _Journal(run, opened), hyperparameters(run.args)
    done, begin, info = resume(run.program, journal.checkpoints, run.key(INIT), hyper)
    journal.go_on(done, info)
    timer.begin(done * run.iteration_steps)
    schedule = _schedule(run)
    replay = _open_replay(run, done) if keep else nullcontext()
    with journal.trackers, replay as chunks, _progress(run, done) as advance:
        journal.chunks = chunks
        key = run.key(TRAIN)
        work = collect(run.program, begin, hyper, key, schedule, done, chunks)
        elapsed = tracking.last(opened.metrics, tracking.WALL_TIME)
        learn(work, journal, schedule, done, timer, advance, run.iteration_steps, elapsed)
        if chunks is not None:
            chunks.complete(policies=[run.about(version) for version in journal.versions])
    journal.close()
    return journal.versions


def _schedule(run: Recorder) -> Schedule:
    every = -(-run.iterations // run.args.evaluations)
    try:
        starts = stage_starts(run.program.stages, run.iterations)
    except ValueError as error:
        raise OptionError(
            f"--total-steps {run.args.total_steps} is {run.iterations} updates, and the program "
            f"has {error}: give more --total-steps, or other lengths of the stages."
        ) from None
    return Schedule(run.iterations, every, 1, starts)


def _open_replay(run: Recorder, start: int) -> ChunkWriter:
    path = run.vault("replay")
    is_complete(path, run.recipe)
    provenance = {"program": run.name, "tier": "replay", "policy_id": "iterations of training"}
    writer = open_for_recording(path, run.env.spec, run.args.num_envs, run.recipe, provenance)
    return ChunkWriter(writer, "replay", start, start * run.program.num_steps)


def _progress(run: Recorder, start: int) -> AbstractContextManager[tracking.Advance]:
    steps = run.iteration_steps
    return tracking.progress(f"train {run.name}", run.iterations * steps, start * steps)


class _Journal:
    """The files of a training run: metrics, checkpoints to resume from, policies to record."""

    def __init__(self, run: Recorder, opened: Run):
        self._run = run
        self._opened, self._metrics = opened, opened.metrics
        self._unwritten: list[dict[str, Any]] = []
        self._policies = run.policies()
        self.checkpoints = opened.checkpoints(keep=2)
        self.versions: list[Version] = []
        self.chunks: ChunkWriter | None = None
        """Writes the training data."""

    def go_on(self, start: int, info: Mapping[str, Any]) -> None:
        """Drop what was written after the checkpoint that training resumes from."""
        tracking.cut(self._metrics, start * self._run.iteration_steps)
        self.trackers = Trackers(self._run.args.track, self._opened.directory, self._opened.record)
        self.versions = [Version(*version) for version in info.get("versions", [])]

    def add(self, done: int, metrics: Mapping[str, Any], _count: int) -> None:
        """Keep metrics, without waiting for the device."""
        step = done * self._run.iteration_steps
        self._unwritten.append({"seed": self._run.args.seed, "step": step, **metrics})

    def log(self, _done: int, times: Mapping[str, float]) -> None:
        """Add the times to the line; `save` writes it."""
        self._unwritten[-1] |= times

    def evaluate(self, done: int, state: ArrayTree) -> None:
        """Evaluate the policy, and keep it as a version."""
        key = jax.random.fold_in(self._run.key(EVALUATE), done)
        params = self._run.program.policy_params(state)
        returns = self._run.returns(self._run.policy, params, key)
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
        self.trackers.sync()

    @property
    def note(self) -> str:
        """Return of the last version."""
        return f"return {self.versions[-1].mean:.3g}" if self.versions else ""

    def close(self) -> None:
        """Close the files."""
        self.checkpoints.close()
        self._policies.close()


# ---------------------------------------------------------------------------------- summary


def _summary(run: Recorder, tiers: Sequence[str], title: str) -> Recorded:
    rows = [describe(run.vault(tier), tier) for tier in tiers]
    return summarise(run.directory, rows, title)


def summarise(directory: Path, rows: Sequence[dict[str, Any]], outcome: str) -> Recorded:
    """Return a summary of vaults from a row for each; see `describe`."""
    view = Table(title=f"{directory}: {outcome}", box=box.SIMPLE_HEAD)
    for column in rows[0]:
        view.add_column(column, overflow="fold", no_wrap=column != "path")
    for row in rows:
        view.add_row(*map(number, row.values()))
    return Recorded({"run": str(directory), "outcome": outcome, "vaults": rows}, view)


def describe(path: Path, tier: str) -> dict[str, Any]:
    """Return what a vault holds, for a summary."""
    found = vault.open_vault(path)
    return {
        "tier": tier,
        "steps": found.num_steps,
        "episodes": len(found.episodes.row),
        "incomplete": found.episodes.incomplete,
        "mean_return": only_or_all(found.episodes.mean_returns),
        "path": str(path),
    }
