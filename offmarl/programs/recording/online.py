"""Online training with evaluation: what a recorder runs, and the files of its run."""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
from jaxtyping import PRNGKeyArray
from rich.console import Group, RenderableType
from rich.text import Text

from offmarl import settings, tracking, vault
from offmarl._compiling import pinned, quickly
from offmarl.checkpoint import Checkpoints
from offmarl.config import PositiveInt, changed, converted, from_json
from offmarl.envs import Environment
from offmarl.envs.sides import one_of, slot
from offmarl.errors import NotLearnedError, OptionError, RunError
from offmarl.evaluation import require_room_for
from offmarl.networks import PolicyConfig, make_policy
from offmarl.paths import local
from offmarl.programs import registry
from offmarl.programs.cluster import ends_with_others, gathered, is_first, join, on_first
from offmarl.programs.experience.buffer import ChunkWriter, init_capture, make_buffer
from offmarl.programs.program import (
    ArgsT,
    Hyperparameters,
    OnlineArgs,
    Program,
    hyperparameters,
    state_shapes,
)
from offmarl.programs.recording import collecting
from offmarl.programs.recording.collecting import collect
from offmarl.programs.recording.record import (
    Player,
    is_complete,
    open_for_recording,
    record_ahead,
    recorded,
)
from offmarl.programs.recording.recorder import (
    EVALUATE,
    INIT,
    LEARNED,
    RECORD,
    TRAIN,
    Recorder,
    Version,
    run_directory,
)
from offmarl.programs.recording.sides import (
    described,
    learning_environment,
    near,
    opponents_of,
    players_of,
)
from offmarl.programs.recording.tiers import (
    REPLAY_TIERS,
    Tier,
    are_complete,
    check_vaults,
    parse_tiers,
    record_tiers,
)
from offmarl.programs.registry import origin_of
from offmarl.programs.runs import finite
from offmarl.programs.runs.compiling import compile_ahead, keep_compiled_programs
from offmarl.programs.runs.continuing import Start, learned, start_of
from offmarl.programs.runs.identity import environment_source, made_from
from offmarl.programs.runs.loop import COMPILING, build, learn, online_schedule
from offmarl.programs.runs.run import (
    CheckpointTimer,
    Run,
    checkpoint_timer,
    locked,
    more_to_come,
    no_run_without_checkpoint,
    open_run,
    settled,
)
from offmarl.programs.runs.sharding import (
    ONE_DEVICE,
    Layout,
    check_divisible,
    check_shards,
    place_shared,
    place_state,
    recorder_layout,
    shards_record,
)
from offmarl.programs.runs.trained import stacked
from offmarl.replay.device import bytes_of, require_room, room_on
from offmarl.rollout import meet
from offmarl.teams import names_by_team, only_or_all, teams_of
from offmarl.terminal import table
from offmarl.trackers import Trackers
from offmarl.trackers import check as check_trackers
from offmarl.types import ArrayTree, EnvSpec


class Recorded(NamedTuple):
    """The result of a recorder, for programs and for people."""

    data: dict[str, Any]
    view: RenderableType


@pinned()
def record_online(make: Callable[[EnvSpec, ArgsT, Environment], Program], args: ArgsT) -> Recorded:
    """Train a program online and record the requested tiers, for each training seed.

    The run's directory is ``<out>/<env>.run/<program>-<seed>``, the vaults are
    ``<out>/<env>.vlt/<program>-<seed>-<tier>``. After a kill at any instant, the same call resumes
    from the last checkpoint and ends with the parameters and data of an uninterrupted call. A
    finished run is not changed; tiers that it lacks are added.

    Parameters
    ----------
    make
        ``make(spec, args, env)`` builds the program for an environment without autoreset. The run
        records the file that defines it.
    args
        The program's arguments.

    Raises
    ------
    NotLearnedError
        No version of the policy is good enough for a tier, or two tiers are alike. The run is
        kept, and all other tiers are recorded.
    RunError
        The directory holds a run, or a vault exists, with other arguments or other code of the
        environment. Nothing was changed.
    Stopped
        A signal stopped the run; the message says where it resumes.
    UnknownNameError
        There is no such tier or environment.
    VaultError
        A vault cannot be written.
    """
    assert isinstance(args, OnlineArgs)
    join(args)
    check_trackers(args.track)
    origin = origin_of(make)
    directory = run_directory(args, origin.name)
    with ends_with_others(directory), locked(directory, args.take_over) as lock:
        return _record_online(make, args, origin, directory, lock)


def _record_online(
    make: Callable[[EnvSpec, ArgsT, Environment], Program],
    args: ArgsT,
    origin: registry.Origin,
    directory: Path,
    lock: Callable[[], None],
) -> Recorded:
    assert isinstance(args, OnlineArgs)
    args = settled(args, directory)
    tiers, env = parse_tiers(args.tiers), learning_environment(args)
    start = start_of(args, env)
    source = environment_source(env.spec.name) | opponents_of(env) | start.source
    layout = recorder_layout(args.seeds, args.devices)
    check_divisible("--num-envs", args.num_envs, layout)
    runs = _recorders(make, args, env, origin, directory, source, layout)
    if getattr(args, "capacity", 0) is None:
        args = changed(args, capacity=on_first(lambda: _chosen_capacity(runs)))
        runs = _recorders(make, args, env, origin, directory, source, layout)
    for run in runs:
        check_vaults(run, tiers)
    check_shards(directory, "environments", layout)
    require_room_for(env.spec, 4 * args.eval_episodes)
    if args.init is not None or args.prefill is not None:
        start.check(runs[0].program, state_shapes(runs[0].program, args))
    opened = open_run(directory, _record(runs[0]))
    trained = opened.complete and not opened.lacks_checkpoint(runs[0].iterations)
    if trained and all(are_complete(run, tiers) for run in runs):
        return _summary(runs, tiers, "complete already, nothing was changed")
    lock()
    with (
        no_run_without_checkpoint(opened, lambda: _unfinished(runs)),
        checkpoint_timer(args.checkpoint_seconds, "step") as timer,
        more_to_come(),
    ):
        versions = _train(runs, start, opened, timer, tiers)
    opened.write_marl_eval(runs[0].env.spec.name)
    opened.finish()
    return _record_all(runs, versions, tiers)


@pinned()
def record_from_run(
    from_run: str | Path,
    tiers: str,
    steps: int | None = None,
    out: str | Path | None = None,
    env: str | None = None,
    program: str | Path | None = None,
    devices: int | None = None,
    opponents: Sequence[str] = (),
) -> Recorded:
    """Record further tiers from a recorder's finished run, without training.

    Parameters
    ----------
    from_run
        Directory of the run.
    tiers
        Tiers to record, as for `offmarl record NAME --tiers`, such as
        good,mixed=medium:0.5+expert:0.5.
    steps
        Environment steps to record in each tier; by default as many as in the run's other tiers.
    out
        Directory for the vaults ENV.vlt/PROGRAM-SEED-TIER; by default the one of the run's others.
    env
        The environment as the run's command named it, if its code is your own.
    program
        Python file of the program that trained the run, if the program is not one of offmarl's. The
        file's code is run.
    devices
        Number of devices that the environments are divided over; by default one.
    opponents
        The opponents as the run's command named them, if their code is your own.

    Raises
    ------
    RunError
        The directory is not that of a recorder's finished run, or a vault holds another recording,
        or the run kept no training data for a tier.
    NotLearnedError
        As `record_online`.
    OptionError
        ``out`` is missing for a run that was moved.
    """
    directory, chosen = local(from_run), parse_tiers(tiers)
    record = tracking.read_run(directory)
    if record.get("kind") != "recorder":
        raise RunError(
            f"{directory} is the run of a baseline, which keeps no policies for tiers: give a "
            "directory that `offmarl record NAME` wrote, or record its last policy with "
            "`offmarl record --policy`."
        )
    if not record.get("complete"):
        raise RunError(f"{directory} is not finished: repeat its command until the training is.")
    origin = registry.Origin(record["program"], record["file"], record["sha256"])
    module = registry.load_origin("recorder", origin, directory, program)
    args = from_json(module.Args, record["args"])
    opponents = tuple(opponents) or near(args.opponents, directory)
    args = replace(
        args, env=env or args.env, tiers=tiers, steps=args.steps if steps is None else steps
    )
    args = replace(args, out=_out_of(directory, args, origin.name) if out is None else local(out))
    source = {name: record[name] for name in _SOURCES if name in record}
    played = learning_environment(replace(args, opponents=opponents))
    _require_same_environment(source, environment_source(played.spec.name) | opponents_of(played))
    if difference := EnvSpec.from_json(record["spec"]).difference(played.spec, extras=False):
        raise RunError(f"{directory} and {played.spec.name} differ in {difference}.")
    args, layout = replace(args, devices=devices), recorder_layout(args.seeds, devices)
    check_divisible("--num-envs", args.num_envs, layout)
    runs = _recorders(module.make, args, played, origin, directory, source, layout)
    for run in runs:
        if any(tier.name == "replay" for tier in chosen) and not run.vault("replay").exists():
            raise RunError(
                f"{directory} kept no training data: they are kept while a run trains with replay "
                "or medium-replay among its --tiers, and cannot be recorded after it."
            )
        check_vaults(run, chosen)
    return _record_all(runs, _versions(runs, directory), chosen)


_SOURCES = ("environment_source", "opponents", "init", "replay")
"""Entries of a run's record that make `Recorder.source`."""


def _require_same_environment(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `RunError` if the environment's code or the opponents are not those of the training."""
    named = {"environment_source": "code of the environment", "opponents": "opponents"}
    for name, what in named.items():
        if name in recorded and name in now and recorded[name] != now[name]:
            raise RunError(
                f"the run was trained with {what} that changed since ({recorded[name]}, now "
                f"{now[name]}): its tiers would be recorded in another environment. Put back what "
                "it was trained with, or train again."
            )


def _out_of(directory: Path, args: OnlineArgs, name: str) -> Path:
    """Return the directory that a run's vaults were recorded in."""
    for out in directory.parents:
        if run_directory(replace(args, out=out), name) == directory:
            return out
    raise OptionError(f"{directory} was moved: give --out, the directory for the vaults.")


def _recorders(
    make: Callable[[EnvSpec, ArgsT, Environment], Program],
    args: ArgsT,
    env: Environment,
    origin: registry.Origin,
    directory: Path,
    source: Mapping[str, Any],
    layout: Layout = ONE_DEVICE,
) -> list[Recorder]:
    """Return the recorders of all training seeds, which share a program."""
    assert isinstance(args, OnlineArgs)
    keep_compiled_programs()
    blank = slot(env)
    program = build(make, env.spec, args, blank, lambda: cast(Hashable, blank))
    policy = one_of((program.policy(False), make_policy(PolicyConfig("random"), env.spec)))
    first = Recorder(origin, args, env, program, policy, directory, args.seed, source, layout)
    return [first._replace(seed=seed) for seed in first.seeds]


def _record(run: Recorder) -> dict[str, Any]:
    return {
        "kind": "recorder",
        **made_from(run.origin, run.env, run.source, run.layout.devices),
        "args": run.settings | {"seed": run.args.seed, "seeds": run.args.seeds},
        **settings.used(run.args).record(),
        "spec": replace(run.env.spec, extras=recorded(run.env, 1)[0].extras).to_json(),
        "greedy": run.program.greedy,
        "vault": None,
        "seeds": run.seeds,
        **shards_record(run.layout),
    }


def _record_all(
    runs: Sequence[Recorder], versions: Sequence[Sequence[Version]], tiers: Sequence[Tier]
) -> Recorded:
    """Record the tiers of all training seeds that learned; then raise the errors of others."""
    failed = []
    for run, own in zip(runs, versions, strict=True):
        try:
            with more_to_come(run is not runs[-1]):
                record_tiers(run, own, tiers)
        except NotLearnedError as error:
            failed.append(str(error))
    if failed:
        raise NotLearnedError("\n\n".join(failed))
    return _summary(runs, tiers, "recorded")


# ---------------------------------------------------------------------------------- training


def _train(
    runs: Sequence[Recorder],
    start: Start,
    opened: Run,
    timer: CheckpointTimer,
    tiers: Sequence[Tier],
) -> list[list[Version]]:
    """Train all seeds to the end, and return the evaluated versions of each."""
    first, journal, hyper = runs[0], _Journal(runs, opened), hyperparameters(runs[0].args)
    keep = any(tier.name in REPLAY_TIERS for tier in tiers)
    done, states, info = _resume(runs, start, journal.checkpoints, hyper)
    journal.go_on(done, info, states)
    timer.begin(done * first.iteration_steps)
    schedule = online_schedule(first.program, first.args)
    with ExitStack() as stack:
        stack.enter_context(journal.trackers)
        journal.chunks = [stack.enter_context(_replay(run, done, keep)) for run in runs]
        advance = stack.enter_context(_progress(runs, done))
        keys = [run.key(TRAIN) for run in runs]
        compiling = [_train_ahead(first, schedule.stage(done), states[0], keys[0], hyper)]
        if not done:  # the best version may be the untrained one
            journal.evaluate(0, states)
        wait(compiling)
        compiling = _record_ahead(first, tiers)
        work = collect(
            first.program, states, hyper, keys, schedule, done, journal.chunks, first.layout
        )
        del states  # they are donated
        elapsed = tracking.last(opened.metrics, tracking.WALL_TIME)
        learn(work, journal, schedule, done, timer, advance, first.iteration_steps, elapsed)
        wait(compiling)
        for run, chunks, versions in zip(runs, journal.chunks, journal.versions, strict=True):
            if chunks is not None:
                others = described(players_of(run.env), run.iterations + 1)
                chunks.complete(policies=[*map(run.about, versions), *others])
    journal.close()
    return journal.versions


def _train_ahead(
    run: Recorder, stage: int, state: ArrayTree, key: PRNGKeyArray, hyper: Hyperparameters
) -> "Future[None]":
    """Compile the updates in a thread, while the untrained policy is evaluated."""
    args = place_state(state, run.mesh), (0, 1), *place_shared((key, hyper), run.mesh)
    return compile_ahead(collecting.train, run.program, stage, run.mesh, *args)


def _record_ahead(run: Recorder, tiers: Sequence[Tier]) -> "list[Future[None]]":
    """Compile the recording of tiers in a thread, while the policy is trained."""
    played = any(tier.name not in REPLAY_TIERS and not tier.shares for tier in tiers)
    if not played or len(run.by_team()) > 1 or run.args.devices or jax.process_count() > 1:
        return []
    player = Player(run.policy, run.uniform(), run.args.num_envs)
    return [record_ahead(run.env, player, run.args.steps, run.key(RECORD))]


def _resume(
    runs: Sequence[Recorder], start: Start, checkpoints: Checkpoints, hyper: Hyperparameters
) -> tuple[int, list[ArrayTree], dict[str, Any]]:
    """Return the number of updates done, the states of all seeds, and the checkpoint's info."""
    init = jax.jit(runs[0].program.init, compiler_options=quickly())
    shapes = state_shapes(runs[0].program, runs[0].args)
    _check_room(runs, shapes)
    like = [shapes] * len(runs)
    found = checkpoints.resume({"state": like})
    if found is None:
        fresh = (init(run.key(INIT), hyper) for run in runs)  # the buffers are replaced one by one
        program = runs[0].program
        begun = (start.begin(program, state, number) for number, state in enumerate(fresh))
        return 0, [meet(runs[0].env, state) for state in begun], {}
    return found.step, list(found.tree["state"]), found.info


def _check_room(runs: Sequence[Recorder], shapes: ArrayTree) -> None:
    """Raise `OptionError` if the states of all seeds do not fit into memory."""
    needed, devices = len(runs) * bytes_of(shapes), runs[0].layout.local_devices
    room, hint = room_on(devices), "give smaller numbers"
    if needed > room and shapes.capture.is_sampled and hasattr(runs[0].args, "capacity"):
        most = _fitting_capacity(runs, shapes, room)
        hint += f", such as --capacity {most}" if most >= runs[0].program.num_steps else ""
    require_room(needed, "the environments, networks and buffers of all seeds", devices, hint)


def _chosen_capacity(runs: Sequence[Recorder]) -> int:
    """Return the capacity of the run's replays, or else the default one if they fit into memory."""
    args, record = cast(Any, runs[0].args), tracking.recorded(runs[0].directory)
    before = record.get("args", {}).get("capacity")
    if before is not None and "capacity" not in record.get("given", ["capacity"]):
        return cast(int, converted("capacity", PositiveInt, before))
    shapes, room = state_shapes(runs[0].program, args), room_on(runs[0].layout.local_devices) // 2
    least = max(runs[0].program.num_steps, getattr(args, "length", 1) + getattr(args, "burn_in", 0))
    chosen = min(max(_fitting_capacity(runs, shapes, room), least), args.default_capacity)
    if chosen < args.default_capacity:
        tracking.notice(
            f"--capacity {chosen}, so that the run takes at most half of the {2 * room / 1e9:,.1f} "
            f"GB of memory: with the default, {args.default_capacity}, it would take "
            f"{len(runs) * bytes_of(shapes) / 1e9:,.1f} GB."
        )
    return chosen


def _fitting_capacity(runs: Sequence[Recorder], shapes: ArrayTree, room: int) -> int:
    """Return the largest capacity, up to that of the shapes, with which all seeds fit into room."""
    capture = shapes.capture
    num_steps = runs[0].program.num_steps if capture.num_finals < capture.capacity else None
    others, rows = bytes_of(shapes) - bytes_of(capture), len(capture.buffer.experience.ends)

    def needed(capacity: int) -> int:
        make = partial(init_capture, make_buffer(rows, capacity), runs[0].env.spec, True, num_steps)
        return len(runs) * (others + bytes_of(jax.eval_shape(make)))

    return bisect_right(range(1, capture.capacity + 1), room, key=needed)


def _versions(runs: Sequence[Recorder], directory: Path) -> list[list[Version]]:
    """Return the evaluated versions of the policies of a finished run."""
    checkpoints = Checkpoints(directory / tracking.CHECKPOINTS)
    _, info = checkpoints.restore({"policy": runs[0].policy_shapes()})
    checkpoints.close()
    return _from_json(info)


def _from_json(info: Mapping[str, Any]) -> list[list[Version]]:
    return [
        [Version(iteration, returns, tuple(*others)) for iteration, returns, *others in own]
        for own in info["versions"]
    ]


def _replay(run: Recorder, start: int, keep: bool) -> AbstractContextManager[ChunkWriter | None]:
    """Open the vault of the training data; None if it is not kept, or complete."""
    path = run.vault("replay")
    if not keep or (is_complete(path, run.recipe) and start == run.iterations):
        return nullcontext()
    if start > 0 and not on_first(path.exists):
        raise RunError(
            f"{run.directory} kept no training data until update {start}: leave replay and "
            "medium-replay out of --tiers, or train again in another directory (--out)."
        )
    provenance = run.provenance("replay") | {"policy_id": "iterations of training"}
    # Versions of the learner's policy have the ids from 0 to the number of iterations.
    spec, whole = recorded(run.env, first_id=run.iterations + 1)
    size = run.args.num_envs, run.iterations * run.program.num_steps
    writer = open_for_recording(path, spec, size, run.recipe, provenance)
    return ChunkWriter(writer, "replay", start, start * run.program.num_steps, whole)


def _unfinished(runs: Sequence[Recorder]) -> list[Path]:
    """Return the vaults of training data that the runs have begun; `check_vaults` has seen them."""
    paths = [(run.vault("replay"), run.recipe) for run in runs]
    return [path for path, recipe in paths if path.exists() and not is_complete(path, recipe)]


def _progress(runs: Sequence[Recorder], start: int) -> AbstractContextManager[tracking.Advance]:
    steps, first, last = runs[0].iteration_steps, runs[0].seed, runs[-1].seed
    seeds = f"seeds {first}-{last}" if last > first else f"seed {first}"
    total, name = runs[0].iterations * steps, f"train {runs[0].name}, {seeds}"
    return tracking.progress(name, total, start * steps, note=COMPILING)


class _Lines(NamedTuple):
    """Lines of metrics, one for each update and seed."""

    done: int
    """The number of updates done after the last of them."""
    updates: int
    """The number of updates."""
    metrics: Sequence[Mapping[str, Any]]
    """Of each seed: an entry for each update, and perhaps more, which do not count."""
    times: dict[str, float]
    """`tracking.TIMES` after the last update."""

    def expand(self, unit: int, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Return the lines; ``unit`` is the number of steps of an update."""
        for index in range(self.updates):
            later = (self.updates - 1 - index) * unit
            times = dict(self.times)
            if times:
                times[tracking.WALL_TIME] -= later / times[tracking.SPEED]
            for seed, own in zip(seeds, self.metrics, strict=True):
                found = {name: values[index] for name, values in own.items()}
                yield {"seed": seed, "step": self.done * unit - later, **found, **times}


class _Journal:
    """The files of a training run: metrics, checkpoints to resume from, policies to record."""

    keeps = over = False

    def __init__(self, runs: Sequence[Recorder], opened: Run):
        self._runs = runs
        self._opened, self._metrics = opened, opened.metrics
        self._unwritten: list[_Lines] = []
        self._policies = runs[0].policies()
        self.checkpoints = opened.checkpoints(keep=2)
        self.versions: list[list[Version]] = [[] for _ in runs]
        """Of each seed."""
        self.chunks: list[ChunkWriter | None] = []
        """Writers of each seed's training data."""

    def go_on(self, start: int, info: Mapping[str, Any], states: Sequence[ArrayTree]) -> None:
        """Drop what was written after the checkpoint that training resumes from."""
        self._by_design = finite.infinities([self._learned(state) for state in states])
        tracking.cut(self._metrics, start * self._runs[0].iteration_steps if info else -1)
        track = self._runs[0].args.track if is_first() else ()
        self.trackers = Trackers(track, self._opened.directory, self._opened.record)
        if info:
            self.versions = _from_json(info)
        self._complete()

    def _complete(self) -> None:
        """Write evaluations again whose lines damage has cut: checkpoints hold their returns."""
        unit = self._runs[0].iteration_steps
        names = names_by_team(tracking.RETURN, teams_of(self._runs[0].env.spec))
        rows = (row for row in tracking.read(self._metrics) if names[0] in row)
        known = {(row["seed"], row["step"]) for row in rows}
        lost = [
            {"seed": run.seed, "step": one.iteration * unit}
            | dict(zip(names, (one.returns, *one.others), strict=True))
            for run, versions in zip(self._runs, self.versions, strict=True)
            for one in versions
            if (run.seed, one.iteration * unit) not in known
        ]
        if lost:
            tracking.append(self._metrics, *lost)

    def _learned(self, state: ArrayTree) -> ArrayTree:
        return {"policy": self._runs[0].program.policy_params(state), **learned(state)}

    def check(
        self,
        done: int,
        states: Sequence[ArrayTree],
        metrics: Sequence[Mapping[str, Any]],
        count: int,
    ) -> None:
        """Raise `NotFiniteError` if a seed is not finite."""
        found: dict[int, str] = {}
        for run, state, own in zip(self._runs, states, metrics, strict=True):
            last = {name: values[None, :count] for name, values in own.items()}
            tree = self._learned(state)
            found |= finite.faults(done, [run.seed], last, tree, 0, self._by_design)
        if found:
            where, step = self._opened.directory, self.checkpoints.latest()
            raise finite.error(found, finite.left_behind(where, step, None))

    def add(self, done: int, metrics: Sequence[Mapping[str, Any]], count: int) -> None:
        """Keep the metrics of ``count`` updates."""
        self._unwritten.append(_Lines(done, count, metrics, {}))

    def log(self, _done: int, times: Mapping[str, float]) -> None:
        """Add the times to the lines; `save` writes them."""
        self._unwritten[-1].times.update(times)

    def evaluate(self, done: int, states: Sequence[ArrayTree]) -> None:
        """Evaluate the policies, and keep them as a version."""
        policies = self._policies_of(states)
        returns = [
            [one.returns((LEARNED, params), run.key(EVALUATE, done)) for one in run.by_team()]
            for run, params in zip(self._runs, policies, strict=True)
        ]
        for versions, own in zip(self.versions, returns, strict=True):
            first, *others = (one.tolist() for one in own)
            versions.append(Version(done, first, tuple(others)))
        names = names_by_team(tracking.RETURN, teams_of(self._runs[0].env.spec))
        found = [{name: one[None] for name, one in zip(names, own, strict=True)} for own in returns]
        self.add(done, found, 1)
        shared = stacked(gathered(policies))
        if is_first() and done not in self._policies.steps():
            self._policies.save(done, {"policy": shared}, {})

    def save(self, done: int, states: Sequence[ArrayTree]) -> None:
        """Write the data and metrics so far, and a checkpoint to resume from."""
        for chunks in self.chunks:
            if chunks is not None:
                chunks.flush()
        unit, seeds = self._runs[0].iteration_steps, [run.seed for run in self._runs]
        lines = (line for some in self._unwritten for line in some.expand(unit, seeds))
        tracking.append(self._metrics, *lines)
        self._unwritten.clear()
        tree = {"policy": stacked(self._policies_of(states)), "state": list(states)}
        versions = [[list(version) for version in own] for own in self.versions]
        self.checkpoints.save(done, tree, {"versions": versions})
        self.trackers.sync()

    def _policies_of(self, states: Sequence[ArrayTree]) -> list[ArrayTree]:
        policies = [self._runs[0].program.policy_params(state) for state in states]
        if self._runs[0].layout.devices == 1:
            return policies
        return [jax.device_get(gathered(policy)) for policy in policies]  # from several meshes

    @property
    def note(self) -> str:
        """Mean return of the last versions, of each team."""
        last = [versions[-1].means for versions in self.versions if versions]
        means = [sum(own) / len(own) for own in zip(*last, strict=True)]
        return f"return {', '.join(f'{mean:.3g}' for mean in means)}" if last else ""

    def close(self) -> None:
        """Close the files."""
        self.checkpoints.close()
        self._policies.close()


# ---------------------------------------------------------------------------------- summary


def _summary(runs: Sequence[Recorder], tiers: Sequence[Tier], title: str) -> Recorded:
    if not is_first():
        return elsewhere(runs[0].directory)
    rows = [
        {"seed": run.seed, **describe(run.vault(tier.name), tier.name)}
        for run in runs
        for tier in tiers
    ]
    return summarise(runs[0].directory, rows, title)


def elsewhere(path: Path) -> Recorded:
    """Return the summary of a process that wrote nothing."""
    where = f"process {jax.process_index()} of {jax.process_count()}: process 0 wrote {path}"
    return Recorded({"run": str(path), "outcome": where, "vaults": []}, Text(where))


def summarise(directory: Path, rows: Sequence[dict[str, Any]], outcome: str) -> Recorded:
    """Return a summary of vaults from a row for each; see `describe`."""
    columns = [column for column in rows[0] if column != "path"]
    headings = [column.replace("_", " ") for column in columns]
    view = table(headings, ([row[column] for column in columns] for row in rows))
    # Users copy paths from here, so these are never broken into lines.
    title, *paths = (
        Text(line, no_wrap=True, overflow="ignore")
        for line in (f"{directory}: {outcome}", *(row["path"] for row in rows))
    )
    title.stylize("bold")
    data = {"run": str(directory), "outcome": outcome, "vaults": rows}
    return Recorded(data, Group(title, view, *paths))


def warn_of(recorded: vault.Dataset) -> None:
    """Warn if a recording has no complete episode, and if other programs appended to it."""
    episodes, own = recorded.episodes, recorded.manifest
    if episodes.incomplete == len(episodes.row):
        tracking.notice(
            f"warning: no episode of {recorded.path} is complete, so it has no returns: record "
            "more --steps, or in fewer environments (--num-envs)."
        )
    if own is not None and (len(own.head.runs) > 1 or own.unverified):
        tracking.notice(
            f"warning: {recorded.path} also holds steps that were appended to the recording."
        )


def describe(path: Path, tier: str) -> dict[str, Any]:
    """Return what a vault holds, for a summary."""
    found = vault.open_vault(path)
    warn_of(found)
    return {
        "tier": tier,
        "steps": found.num_steps,
        "episodes": len(found.episodes.row),
        "incomplete": found.episodes.incomplete,
        "mean_return": only_or_all(found.episodes.mean_returns),
        "path": str(path),
    }
