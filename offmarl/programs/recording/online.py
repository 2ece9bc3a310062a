"""Online training with evaluation: what a recorder runs, and the files of its run."""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from offmarl import settings, tracking, vault
from offmarl._compiling import pinned, quickly
from offmarl.checkpoint import Checkpoints
from offmarl.config import Updates, changed, check_rules, from_json
from offmarl.envs import Environment
from offmarl.envs.sides import one_of, without_others
from offmarl.errors import NotLearnedError, OptionError, RunError
from offmarl.evaluation import require_room_for
from offmarl.networks import PolicyConfig, make_policy
from offmarl.paths import local, local_output
from offmarl.programs import registry
from offmarl.programs.cluster import ends_with_others, gather_all, is_first, join, on_first
from offmarl.programs.experience.buffer import ChunkWriter, init_capture, make_buffer
from offmarl.programs.program import (
    ArgsT,
    OnlineArgs,
    Program,
    state_shapes,
)
from offmarl.programs.recording.pbt import PopulationTraining
from offmarl.programs.recording.record import (
    Recording,
    is_complete,
    open_for_recording,
    recording_layout,
)
from offmarl.programs.recording.recorder import (
    EVALUATE,
    GREEDY,
    INIT,
    LEARNED,
    TRAIN,
    OnlineRecorder,
    Version,
    run_directory,
)
from offmarl.programs.recording.sides import (
    describe_policies,
    keep_opponents,
    learning_environment,
    opponents_of,
    players_of,
)
from offmarl.programs.recording.tiers import (
    REPLAY_TIERS,
    Tier,
    are_complete,
    check_vaults,
    parse_tiers,
    record_ladders,
)
from offmarl.programs.registry import origin_of
from offmarl.programs.runs.compiling import keep_compiled_programs
from offmarl.programs.runs.continuing import TrainingStart, learned_fields, start_of
from offmarl.programs.runs.identity import environment_source, made_from
from offmarl.programs.runs.loop import build, collect, copy_arrays, online_schedule
from offmarl.programs.runs.run import locked, settle
from offmarl.programs.runs.sharding import (
    ONE_DEVICE,
    SeedLayout,
    check_shards,
    place_state,
    recorder_layout,
    shards_record,
)
from offmarl.programs.runs.trained import stack_seeds
from offmarl.programs.runs.training import (
    Evaluated,
    Training,
    Work,
    carry_out,
    more_to_come,
    named_seeds,
)
from offmarl.replay.device import bytes_of, require_room, room_on
from offmarl.rollout import meet_others
from offmarl.teams import names_by_team, only_or_all, teams_of
from offmarl.terminal import table
from offmarl.trackers import check_trackers
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
    local_output(args.out)
    join(args)
    check_trackers(args.track)
    origin = origin_of(make)
    directory = run_directory(args, origin.name)
    with ends_with_others(directory), locked(directory, args.take_over) as lock:
        training = _prepared(make, settle(args, directory), origin, directory)
        with more_to_come():
            trained = carry_out(training, directory, lock, training.is_complete)
        if not trained:
            return _summary(training.runs, training.tiers, "complete already, nothing was changed")
        return _record_all(training.runs, training.versions(), training.tiers)


def _prepared(
    make: Callable[[EnvSpec, ArgsT, Environment], Program],
    args: ArgsT,
    origin: registry.ProgramOrigin,
    directory: Path,
) -> "_Training":
    """Return the training, or raise its errors before anything is written."""
    assert isinstance(args, OnlineArgs)
    tiers, env = parse_tiers(args.tiers), learning_environment(args, directory)
    start = start_of(args, env)
    args = changed(args, **start.scale)
    source = environment_source(env.spec.name) | opponents_of(env) | start.source
    if args.pbt:  # the data of a seed depend on all seeds
        source |= {"population": {"first": args.seed, "members": args.seeds}}
    layout = recorder_layout(args.seeds, args.num_envs, args.devices)
    runs = _recorders(make, args, env, origin, directory, source, layout)
    check_rules("total_steps / (num_envs x steps of an update)", Updates, runs[0].iterations)
    for run in runs:
        check_vaults(run, tiers)
    check_shards(directory, "environments", layout)
    require_room_for(env.spec, 4 * runs[0].args.eval_episodes)
    if start.source:
        start.check(runs[0].program, state_shapes(runs[0].program, runs[0].args))
    return _Training(runs, start, tiers)


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
        The opponents, if their code is your own; by default those of the training.

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
    directory, parsed = local(from_run), parse_tiers(tiers)
    record = tracking.read_run(directory)
    if record.get("kind") != "recorder":
        raise RunError(
            f"{directory} is the run of a baseline, which keeps no policies for tiers: give a "
            "directory that `offmarl record NAME` wrote, or record its last policy with "
            "`offmarl record --policy`."
        )
    if not record.get("complete"):
        raise RunError(f"{directory} is not finished: repeat its command until the training is.")
    origin = registry.ProgramOrigin(record["program"], record["file"], record["sha256"])
    module = registry.load_origin("recorder", origin, directory, program)
    if not issubclass(module.Args, OnlineArgs):
        raise RunError(
            f"{directory} has no versions to choose tiers from: record its policies with "
            f"`offmarl record --policy {directory}@SEED/STEP`."
        )
    args = from_json(module.Args, record["args"])
    steps = args.steps if steps is None else steps
    args = replace(args, env=env or args.env, tiers=tiers, steps=steps, devices=devices)
    place = _out_of(directory, args, origin.name) if out is None else local_output(out)
    args = replace(args, out=place)
    source = {name: record[name] for name in _SOURCES if name in record}
    game = learning_environment(
        replace(args, opponents=tuple(opponents)), None if opponents else directory
    )
    _require_same_environment(source, environment_source(game.spec.name) | opponents_of(game))
    if difference := EnvSpec.from_json(record["spec"]).difference(game.spec, extras=False):
        raise RunError(f"{directory} and {game.spec.name} differ in {difference}.")
    layout = recorder_layout(args.seeds, args.num_envs, devices)
    runs = _recorders(module.make, args, game, origin, directory, source, layout)
    for run in runs:
        check_vaults(run, parsed)
    return _record_all(runs, _saved_versions(runs, directory), parsed)


_WAYS = (
    (tracking.RETURN, tracking.WON, LEARNED),
    (tracking.GREEDY_RETURN, tracking.GREEDY_WON, GREEDY),
)
"""Metrics of an evaluation, and how the policy acts in it."""

_SOURCES = ("environment_source", "opponents", "init", "replay", "population")
"""Entries of a run's record that make `OnlineRecorder.source`."""


def _require_same_environment(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `RunError` if the environment's code or the opponents are not those of the training."""
    labels = {"environment_source": "code of the environment", "opponents": "opponents"}
    for name, label in labels.items():
        if name in recorded and name in now and recorded[name] != now[name]:
            raise RunError(
                f"the run was trained with {label} that changed since ({recorded[name]}, now "
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
    origin: registry.ProgramOrigin,
    directory: Path,
    source: Mapping[str, Any],
    layout: SeedLayout = ONE_DEVICE,
) -> list[OnlineRecorder]:
    """Return the recorders of all training seeds, which share a program."""
    assert isinstance(args, OnlineArgs)
    keep_compiled_programs()
    blank = without_others(env)
    program = build(make, env.spec, args, blank, lambda: cast(Hashable, blank))
    uniform = make_policy(PolicyConfig("random"), env.spec)
    policy = one_of((program.policy(False), uniform, program.policy(True)))
    first = OnlineRecorder(origin, args, env, program, policy, directory, args.seed, source, layout)
    return [first._replace(seed=seed) for seed in first.seeds]


def _record(run: OnlineRecorder) -> dict[str, Any]:
    return {
        "kind": "recorder",
        **made_from(run.origin, run.env, run.source, run.layout.devices),
        "args": run.settings | {"seed": run.args.seed, "seeds": run.args.seeds},
        **settings.origins_of(run.args).record(),
        "spec": replace(run.env.spec, extras=recording_layout(run.env, 1)[0].extras).to_json(),
        "greedy": run.program.greedy,
        "vault": None,
        "seeds": run.seeds,
        **shards_record(run.layout),
    }


def _record_all(
    runs: Sequence[OnlineRecorder], versions: Sequence[Sequence[Version]], tiers: Sequence[Tier]
) -> Recorded:
    """Record the tiers of all training seeds that learned; then raise the errors of others."""
    refused = list[str]()
    for run, evaluated in zip(runs, versions, strict=True):
        with more_to_come(run is not runs[-1]):
            refused += record_ladders(run, evaluated, tiers)
    if refused:
        raise NotLearnedError("\n\n".join(refused))
    return _summary(runs, tiers, "recorded" if tiers else "trained, without tiers to record")


# ---------------------------------------------------------------------------------- training


class _Training(Training):
    """The training seeds of a recorder; states are lists of the state of each."""

    args: OnlineArgs
    unit_name = "step"

    def __init__(self, runs: Sequence[OnlineRecorder], start: TrainingStart, tiers: Sequence[Tier]):
        first = runs[0]
        self.runs, self.tiers, self._start = runs, tiers, start
        self.args, self.record, self.seeds = first.args, _record(first), first.seeds
        self.schedule = online_schedule(first.program, first.args)
        self.unit, self.environment = first.iteration_steps, first.env.spec.name
        self.description = f"train {first.name}, {named_seeds(first.seeds)}"
        self.statistics, self.evaluations = {}, []
        self._population, self._saved_policies = PopulationTraining(first.args), first.policies()
        if self.args.pbt and len(_metrics(first)) > 1:
            raise OptionError("--pbt compares one return, and each team has its own: give --side.")
        self._chunks: list[ChunkWriter | None] = []
        """Writers of each seed's training data."""
        self._recording: list[Future[None]] | None = None
        """Done when the recording of tiers is compiled."""

    def is_complete(self) -> bool:
        """Whether all tiers are recorded."""
        return all(are_complete(run, self.tiers) for run in self.runs)

    def versions(self) -> list[list[Version]]:
        """Return the evaluated versions of the policy of each seed."""
        return _versions(self.runs, self.evaluations)

    def _actors(self) -> list[list[Version]]:
        """Return the versions that acted after the evaluations: copies in replaced members."""
        versions = self.versions()
        for number, (_, evaluation) in enumerate(self.evaluations):
            for place, parent in enumerate(evaluation.get(tracking.PARENT, ())):
                versions[place][number] = versions[int(parent) - self.args.seed][number]
        return versions

    def shapes(self) -> dict[str, ArrayTree]:
        program = self.runs[0].program
        shapes = state_shapes(program, self.args)
        if program.guided is not None:
            shapes = jax.eval_shape(lambda state: self._start.begin(program, state, 0), shapes)
        _check_room(self.runs, shapes)
        if self.args.pbt and not learned_fields(shapes):
            raise OptionError(
                "--pbt copies params and optimiser, which this program's state lacks."
            )
        return {"state": [shapes] * len(self.runs)}

    def begin(self) -> list[ArrayTree]:
        first, program = self.runs[0], self.runs[0].program
        if is_first():
            keep_opponents(first.env, first.directory)
        init = jax.jit(program.init, compiler_options=quickly())
        # The buffers are replaced one by one.
        hypers = self._population.members
        fresh = (init(run.key(INIT), hyper) for run, hyper in zip(self.runs, hypers, strict=True))
        states = map(partial(self._start.begin, program), fresh, self.seeds)
        return self._beside_prior([meet_others(first.env, state) for state in states])

    def resume(self, tree: Mapping[str, ArrayTree]) -> list[ArrayTree]:
        for _, evaluation in self.evaluations:
            self._population.resume(evaluation)
        return self._beside_prior(tree["state"])

    def _beside_prior(self, states: Sequence[ArrayTree]) -> list[ArrayTree]:
        """Return states with the data of ``--prefill``, which checkpoints do not hold."""
        if self._start.prior is None:
            return list(states)
        prior = self._start.prior()
        # Each seed has its own copy, since states are donated; the last one takes the original.
        more = len(states) - 1
        hint = "give fewer --seeds, or a smaller vault"
        require_room(more * prior.nbytes, f"{more} more copies of {self.args.prefill}", 1, hint)
        replays = [*(jax.tree.map(jnp.copy, prior) for _ in range(more)), prior]
        return [
            state._replace(capture=state.capture._replace(prior=replay))
            for state, replay in zip(states, replays, strict=True)
        ]

    def checkpoint(self, states: Sequence[ArrayTree]) -> dict[str, ArrayTree]:
        for chunks in self._chunks:
            if chunks is not None:
                chunks.flush()
        return {"policy": stack_seeds(self.policies(states)), "state": list(states)}

    def learned(self, states: Sequence[ArrayTree]) -> Iterator[tuple[slice, ArrayTree, int]]:
        for place, state in enumerate(states):
            policy = self.runs[0].program.policy_params(state)
            yield slice(place, place + 1), {"policy": policy, **learned_fields(state)}, 0

    def policies(self, states: Sequence[ArrayTree]) -> list[ArrayTree]:
        policies = [self.runs[0].program.policy_params(state) for state in states]
        if self.runs[0].layout.devices == 1:
            return policies
        return [jax.device_get(gather_all(policy)) for policy in policies]  # from several meshes

    def play_ahead(self, policies: Sequence[ArrayTree]) -> "list[Future[None]]":
        if jax.process_count() > 1:
            return []
        return [self.runs[0].by_team()[0].play_ahead((LEARNED, policies[0]))]

    def evaluate(self, policies: Sequence[ArrayTree], done: int) -> Evaluated:
        """Evaluate the policies, sampled and greedy, and keep them as a version."""
        metrics: Evaluated = {}
        teams = [run.by_team() for run in self.runs]
        for metric, won, way in _WAYS:
            results = [
                [run.play((way, params), run.key(EVALUATE, done)) for run in runs]
                for runs, params in zip(teams, policies, strict=True)
            ]
            returns = [
                [run.returns_in(x) for run, x in zip(*pair, strict=True)]
                for pair in zip(teams, results, strict=True)
            ]
            by_team = map(np.stack, zip(*returns, strict=True))
            metrics |= zip(_metrics(self.runs[0], metric), by_team, strict=True)
            wins = [of_teams[0].won for of_teams in results if len(of_teams) == 1]
            if values := [np.asarray(x, np.float32) for x in wins if x is not None]:
                metrics[won] = np.stack(values)
        shared = stack_seeds(gather_all(policies))
        if is_first() and done not in self._saved_policies.steps():
            self._saved_policies.save(done, {"policy": shared}, {})
        if self._recording is None:
            self._recording = _record_ahead(self.runs[0], self.tiers)
        return metrics

    def observe(self, done: int, states: list[ArrayTree], evaluation: Evaluated) -> Evaluated:
        """Replace members of a population, and add their lineage to the evaluation."""
        if not self.args.pbt:
            return evaluation
        last, returns = done == self.schedule.updates, evaluation[tracking.RETURN]
        copies, log = self._population.replace(done, returns, last)
        for loser, winner in copies.items():
            gained = copy_arrays(jax.device_get(gather_all(learned_fields(states[winner]))))
            states[loser] = place_state(states[loser]._replace(**gained), self.runs[loser].mesh)
        return evaluation | log

    @contextmanager
    def work(self, states: list[ArrayTree], done: int) -> Iterator[Work]:
        first, keys = self.runs[0], [run.key(TRAIN) for run in self.runs]
        keep = any(tier.name in REPLAY_TIERS for tier in self.tiers)
        with ExitStack() as stack:
            self._chunks = [stack.enter_context(_replay(run, done, keep)) for run in self.runs]
            yield collect(
                first.program,
                states,
                self._population.members,
                keys,
                self.schedule,
                done,
                self._chunks,
                first.layout,
            )
            wait(self._recording or [])
            for run, chunks, versions in zip(self.runs, self._chunks, self._actors(), strict=True):
                if chunks is not None:
                    opponents = describe_policies(players_of(run.env), run.iterations + 1)
                    chunks.complete(policies=[*map(run.about, versions), *opponents])

    def unfinished(self) -> list[Path]:
        paths = [(run.vault("replay"), run.recipe) for run in self.runs]
        return [path for path, recipe in paths if path.exists() and not is_complete(path, recipe)]


def _record_ahead(run: OnlineRecorder, tiers: Sequence[Tier]) -> "list[Future[None]]":
    """Compile the recording of tiers in a thread, while the policy is trained."""
    any_played = any(tier.name not in REPLAY_TIERS and not tier.shares for tier in tiers)
    if not any_played or len(run.by_team()) > 1 or run.args.devices or jax.process_count() > 1:
        return []
    arguments = run.env, run.policy, run.uniform()
    recording = Recording(*arguments, run.directory, run.args.steps, run.args.num_envs)
    return [recording.compile_ahead()]


def _check_room(runs: Sequence[OnlineRecorder], shapes: ArrayTree) -> None:
    """Raise `OptionError` if the states of all seeds do not fit into memory."""
    num_bytes, devices = len(runs) * bytes_of(shapes), runs[0].layout.local_devices
    room, hint = room_on(devices), "give smaller numbers"
    if num_bytes > room and shapes.capture.is_sampled and hasattr(runs[0].args, "capacity"):
        most = _fitting_capacity(runs, shapes, room)
        hint += f", such as --capacity {most}" if most >= runs[0].program.num_steps else ""
    require_room(num_bytes, "the environments, networks and buffers of all seeds", devices, hint)


def _fitting_capacity(runs: Sequence[OnlineRecorder], shapes: ArrayTree, room: int) -> int:
    """Return the largest capacity, up to that of the shapes, with which all seeds fit into room."""
    capture = shapes.capture
    num_steps = runs[0].program.num_steps if capture.num_finals < capture.capacity else None
    other_bytes, rows = bytes_of(shapes) - bytes_of(capture), len(capture.buffer.experience.ends)

    def num_bytes(capacity: int) -> int:
        make = partial(init_capture, make_buffer(rows, capacity), runs[0].env.spec, True, num_steps)
        return len(runs) * (other_bytes + bytes_of(jax.eval_shape(make)))

    return bisect_right(range(1, capture.capacity + 1), room, key=num_bytes)


def _metrics(run: OnlineRecorder, metric: str = tracking.RETURN) -> list[str]:
    """Return the names of the returns of each team."""
    return names_by_team(metric, teams_of(run.env.spec))


def _saved_versions(runs: Sequence[OnlineRecorder], directory: Path) -> list[list[Version]]:
    """Return the evaluated versions of the policies of a finished run."""
    shapes = {"policy": runs[0].policy_shapes()}
    _, info = Checkpoints(directory / tracking.CHECKPOINTS).restore(shapes)
    return _versions(runs, info["evaluations"])


def _versions(
    runs: Sequence[OnlineRecorder], evaluations: Iterable[Sequence[Any]]
) -> list[list[Version]]:
    """Return the evaluated versions of the policies of all seeds."""
    by_seed: list[list[Version]] = [[] for _ in runs]
    for done, returns in evaluations:
        for place, versions in enumerate(by_seed):
            teams = (np.asarray(returns[name][place], float) for name in _metrics(runs[0]))
            versions.append(Version(done, tuple(float(array.mean()) for array in teams)))
    return by_seed


def _replay(
    run: OnlineRecorder, start: int, keep: bool
) -> AbstractContextManager[ChunkWriter | None]:
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
    spec, join_agents = recording_layout(run.env, first_id=run.iterations + 1)
    size = run.args.num_envs, run.iterations * run.program.num_steps
    writer = open_for_recording(path, spec, size, run.recipe, provenance)
    return ChunkWriter(writer, "replay", start, start * run.program.num_steps, join_agents)


# ---------------------------------------------------------------------------------- summary


def _summary(runs: Sequence[OnlineRecorder], tiers: Sequence[Tier], title: str) -> Recorded:
    if not is_first():
        return summary_elsewhere(runs[0].directory)
    rows = [
        {"seed": run.seed, **describe_vault(run.vault(tier.name), tier.name)}
        for run in runs
        for tier in tiers
    ]
    return summarise(runs[0].directory, rows, title)


def summary_elsewhere(path: Path) -> Recorded:
    """Return the summary of a process that wrote nothing."""
    text = f"process {jax.process_index()} of {jax.process_count()}: process 0 wrote {path}"
    return Recorded({"run": str(path), "outcome": text, "vaults": []}, Text(text))


def summarise(directory: Path, rows: Sequence[dict[str, Any]], outcome: str) -> Recorded:
    """Return a summary of vaults from a row for each; see `describe_vault`."""
    # Users copy paths from here, so paths are never broken into lines.
    title, *paths = (
        Text(line, no_wrap=True, overflow="ignore")
        for line in (f"{directory}: {outcome}", *(row["path"] for row in rows))
    )
    title.stylize("bold")
    data = {"run": str(directory), "outcome": outcome, "vaults": rows}
    if not rows:
        return Recorded(data, title)
    columns = [column for column in rows[0] if column != "path"]
    headings = [column.replace("_", " ") for column in columns]
    view = table(headings, ([row[column] for column in columns] for row in rows))
    return Recorded(data, Group(title, view, *paths))


def describe_vault(path: Path, tier: str) -> dict[str, Any]:
    """Return what a vault holds, for a summary; warn if no episode is complete."""
    dataset = vault.open_vault(path)
    if dataset.episodes.incomplete == len(dataset.episodes.row):
        tracking.notice(
            f"warning: no episode of {path} is complete, so it has no returns: record more "
            "--steps, or in fewer environments (--num-envs)."
        )
    return {
        "tier": tier,
        "steps": dataset.num_steps,
        "episodes": len(dataset.episodes.row),
        "incomplete": dataset.episodes.incomplete,
        "mean_return": only_or_all(dataset.episodes.mean_returns),
        "path": str(path),
    }
