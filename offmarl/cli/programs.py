"""``offmarl record``, ``train`` and ``evaluate``: run programs, and play what they trained."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from jaxtyping import Float
from rich.console import Group
from rich.filesize import decimal
from tyro.conf import Positional, arg

from offmarl import programs
from offmarl.cli.output import Report, check_file, grid, records, table
from offmarl.cli.parse import (
    HELP,
    config_among,
    options_among,
    parse,
    parse_program,
    use_cores_for,
)
from offmarl.cli.tasks import CommandWork, Divided, TaskOptions
from offmarl.config import PositiveInt, RecordingArgs, Role, option
from offmarl.errors import OptionError
from offmarl.paths import local, path_text, safe_path
from offmarl.programs.registry import VERBS, Kind, find, load, summary
from offmarl.report import UNITS, final_evaluation, require_scores
from offmarl.statistics import ENOUGH_RUNS, MIN_RUNS, Estimate, estimate, iqm, spread
from offmarl.teams import only_or_all
from offmarl.terminal import interval
from offmarl.tracking import (
    AGREEMENT,
    GREEDY_RETURN,
    LOG_LIKELIHOOD,
    MARL_EVAL_FILE,
    RETURN,
    RUN_FILE,
    SAMPLED_RETURN,
    Acting,
    acting_of,
    labelled,
    read_run,
)

if TYPE_CHECKING:
    from offmarl.programs.recording.fixed import PolicyArgs
    from offmarl.programs.recording.record import Recording

_USAGE = """\
offmarl record NAME ...            train agents online and record them
offmarl record --from-run RUN ...  record further tiers of a finished run
offmarl record --policy RUN ...    record a trained policy (--policy --help)
offmarl record --policy random ...   policies by name (--policy random --help)
offmarl record ... --tasks 16 --launcher slurm    divide a recording into tasks
"""

_MORE = {
    GREEDY_RETURN: "greedy_mean",
    SAMPLED_RETURN: "sampled_mean",
    AGREEMENT: "agreement",
    LOG_LIKELIHOOD: "log_prob",
}
"""Metrics that are shown beside the main one, and their headings."""


_SEVERAL = tuple[str, ...]


def record(arguments: list[str]) -> Report:
    """Train agents online and record them at tiers, or record a policy."""
    if not arguments or arguments[0] in HELP:
        return overview("recorder", _USAGE)
    from offmarl.programs.recording.fixed import recorded_summary

    result: Any
    if _names_recorder(arguments):
        _, program, args = _program_of("recorder", arguments)
        result = program.main(args)
    elif (recording := _recording_of(arguments)) is not None:
        result = recorded_summary(recording.path, recording.record())
    else:
        about = "Record further tiers of a finished run."
        result = parse(programs.record_from_run, "record --from-run", about, arguments)
    _only_first_reports()
    return _recording_report(result)


def record_work(verb: str, arguments: list[str], block_steps: int | None) -> Divided:
    """Return the work of a recording: one block, or blocks of a fixed policy or a population."""
    from offmarl.programs.recording.blocks import RecordWork
    from offmarl.programs.recording.fixed import FixedArgs, fixed_recording, recorded_summary

    if _names_recorder(arguments):
        _, program, args = _program_of("recorder", arguments)
        recording = fixed_recording(args) if isinstance(args, FixedArgs) else None
        if recording is None and hasattr(program, "work") and block_steps is None:
            return Divided(program.work(args), lambda _: record(arguments))
    else:
        recording = _recording_of(arguments)
    if recording is not None:
        path, work = recording.path, RecordWork(recording, block_steps)
        if work.cuts_episodes():
            warnings.warn(
                f"blocks of {work.times} steps of each environment end before the time limit, and "
                "cut longer episodes: give a larger --block-steps.",
                stacklevel=2,
            )
        return Divided(
            work,
            lambda launched: _recording_report(recorded_summary(path, launched.fresh)),
        )
    if block_steps is not None:
        raise OptionError("--block-steps divides the recording of a fixed policy, not training.")
    return Divided(CommandWork(verb, arguments, record), lambda _: record(arguments))


def _recording_of(arguments: list[str]) -> "Recording | None":
    """Return the recording of policies that have learned or never do; None for ``--from-run``."""
    if (policies := _named_policies(arguments)) is not None:
        from offmarl.programs.recording.fixed import fixed_recording

        return fixed_recording(policies)
    from_run = "from_run" in options_among(arguments, from_run=_SEVERAL)
    return None if from_run else _trained_recording(arguments)


def _names_recorder(arguments: list[str]) -> bool:
    """Whether arguments, or the file that they give, name a recorder, or have to."""
    options = options_among(arguments, policy=_SEVERAL, from_run=_SEVERAL)
    return not arguments[0].startswith("-") or not options


def _named_policies(arguments: list[str]) -> "PolicyArgs | None":
    """Return the arguments that record policies by name, from code, or composed of several.

    None if ``--policy`` is a run.
    """
    options = options_among(arguments, policy=_SEVERAL, env=str)
    if not (policies := options.get("policy")) or (local(policies[0]) / RUN_FILE).exists():
        return None
    named = "/" not in policies[0] and "env" in options
    if not (named or policies[0] in ("random", "scripted") or {*policies[0]} & {*"@:=+"}):
        return None
    from offmarl.programs.recording.fixed import PolicyArgs

    about = "Record policies that do not learn, one for all agents or one for each side."
    return parse_program(PolicyArgs, "record --policy random", about, arguments, TaskOptions)


def _recording_report(recorded: Any) -> Report:
    return Report(recorded.data, recorded.view)


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Which policies of a run act, where, and how."""

    env: str | None = None
    """Environment to act in; by default the one of the run. It may have another number of agents if
    the policy was trained with --agent-id sinusoidal or none. For `offmarl evaluate`, code of your
    own (path/to/file.py:FACTORY or package.module:FACTORY) may also return an environment of
    PettingZoo's parallel API."""
    checkpoint: int | Literal["last", "best"] = "last"
    """The checkpoint whose policy acts: last, best, or the number of a step, if the run kept it
    (train --keep); recorders keep the policies of all their evaluations, by steps of the
    environment. best: for each seed the one with its best evaluation, which is online tuning: its
    return is not that of an offline method."""
    act: Literal["greedy", "sample"] = "greedy"
    """How the policy acts. greedy: it takes the best action. sample: it samples actions."""
    program: Path | None = None
    """Python file of the program that trained the run, if the program is not one of offmarl's. The
    file's code is run."""

    def load(self, run: Path, seed: int | None, env: Any = None) -> "programs.LoadedPolicy":
        """Return the policy of a training seed, by default the first, for ``env``, if given."""
        return programs.load_policy(
            run, seed, self.act == "greedy", self.program, env, self.checkpoint
        )


@dataclass(frozen=True, kw_only=True)
class _TrainedArgs(RecordingArgs, PolicyOptions):
    """Arguments of the recording of a trained policy."""

    policy: Path
    """Directory of the run that trained it, or the name of a pulled policy."""
    steps: int
    """Total number of environment steps to record, rounded up to a multiple of --num-envs."""
    training_seed: int | None = None
    """The training seed whose policy is recorded; by default the run's first."""
    opponents: tuple[str, ...] = option((), Role.RARE)
    """How the other teams act, if the run learned one side; by default as in its training. Needed
    if their code is your own."""


def _trained_recording(arguments: list[str]) -> "Recording":
    """Return the recording of a trained policy, which the same command resumes after a stop."""
    about = "Record a trained policy; `--policy random --help` lists the options of others."
    args = parse(_TrainedArgs, "record --policy", about, arguments, TaskOptions)
    from offmarl import envs
    from offmarl.cli.policies import load
    from offmarl.programs.cluster import join
    from offmarl.programs.recording.record import Recording
    from offmarl.programs.recording.sides import opponents_of

    use_cores_for(args)
    join(args)
    run = _run_directory(args.policy)
    seed = read_run(run)["seeds"][0] if args.training_seed is None else args.training_seed
    environment, policies = load(run, args, [seed], args.opponents)
    policy = policies[seed]
    origin = {"program": policy.name, "run": str(run), "training_seed": seed, "act": args.act}
    ending = "" if args.checkpoint == "last" else f"-{args.checkpoint}"
    origin |= {"checkpoint": args.checkpoint} if ending else {}
    ending += "" if args.act == "greedy" else "-sampled"
    name = args.name or safe_path(f"{policy.name}-{seed}{ending}", option="--name")
    return Recording(
        envs.record_states(environment) if args.env_states else environment,
        policy.policy,
        policy.params,
        args.out / safe_path(f"{environment.spec.name}.vlt", option="--env") / name,
        args.steps,
        args.num_envs,
        args.seed,
        lambda: {"policy": origin},
        devices=args.devices,
        identity={"seed": args.seed, "act": args.act, **opponents_of(environment)},
    )


def train(arguments: list[str]) -> Report:
    """Train an offline baseline on a vault."""
    if not arguments or arguments[0] in HELP:
        usage = "offmarl train NAME --vault PATH ...\noffmarl train --config FILE.toml ..."
        return overview("baseline", usage)
    name, program, args = _program_of("baseline", arguments)
    run = program.main(args)
    _only_first_reports()
    if not (run / MARL_EVAL_FILE).exists():
        view = f"{name} is trained but not evaluated (no environment, no held-out data): "
        return Report({"run": run}, view + path_text(run))
    final = final_evaluation(run)
    teams = sorted(name for name in final if name.startswith(f"{RETURN}_"))
    metric = RETURN if teams else next(key for key in UNITS if key in final)
    unit = UNITS[metric]
    if metric == RETURN:
        unit = labelled(unit, acting_of(read_run(run)))
    title = f"{name}, trained and evaluated in {path_text(run)}: {unit}"
    more = {head: final.get(other, {}) for other, head in _MORE.items() if other != metric}
    if more.get("sampled_mean"):  # side by side
        more = {"greedy_mean": final.get(RETURN, {})} | {x: y for x, y in more.items() if y}
    returns = {name.removeprefix(f"{RETURN}_"): final[name] for name in teams or [metric]}
    if not all(np.isfinite(x).all() for by_seed in returns.values() for x in by_seed.values()):
        require_scores(run)
    return _returns_report(title, {"run": run}, returns, more)


def train_work(verb: str, arguments: list[str], _block_steps: None) -> Divided:
    """Return the work of a training: a block for each seed, or one if there is one seed."""
    from offmarl.programs.offline import run_directory
    from offmarl.programs.runs.drawing import open_data
    from offmarl.programs.runs.gathering import SeedsWork

    _, program, args = _program_of("baseline", arguments)
    dataset = open_data(args)  # its errors come before a launch
    work = (
        CommandWork(verb, arguments, train)
        if args.seeds == 1
        else SeedsWork(program.main, args, run_directory(program.make, args, dataset))
    )
    return Divided(work, lambda _: train(arguments))


def evaluate(
    run: Annotated[Path, Positional, arg(metavar="RUN")],
    policy: PolicyOptions = PolicyOptions(),
    eval_episodes: PositiveInt | None = None,
    seed: int = 0,
    render: Path | None = None,
    opponents: tuple[str, ...] = (),
    jobs: PositiveInt = 1,
) -> Report:
    """Play episodes with each training seed of a trained policy.

    Parameters
    ----------
    run
        Directory of a run, or the name of a policy that `offmarl pull --policy` downloaded.
    policy
        What acts.
    eval_episodes
        Number of episodes for each training seed; by default 320, or 32 in a PettingZoo
        environment.
    seed
        Random seed of the episodes.
    render
        File for an episode of the first training seed: GIF, or PNG for its middle step.
    opponents
        How the other teams act, if the run learned one side; by default as in its training. Needed
        if their code is your own.
    jobs
        Number of processes that play in a PettingZoo environment.
    """
    from offmarl.cli import policies  # imports JAX, which --help does without

    if render:
        from offmarl.report.render import KINDS, play_run, save  # imports Matplotlib

        check_file(render, "--render", "episode.gif", KINDS)
    run = _run_directory(run)
    record = read_run(run)
    arguments = run, policy, record["seeds"], opponents
    environment, by_seed = policies.load(*arguments, jobs=jobs, drawn=render is not None)
    if render:
        save(play_run(by_seed[record["seeds"][0]], environment, seed), render)
    # Episodes of their own for each training seed, so that intervals over seeds hold their chance.
    seeds = [int(np.random.SeedSequence([seed, x]).generate_state(1)[0]) >> 1 for x in by_seed]
    returns = policies.play(environment, by_seed, eval_episodes, seeds)
    acting: Acting = "greedy" if policy.act == "greedy" else "sampled"
    who = _described(record, acting, policy.checkpoint, opponents)
    place, dependent = environment.spec.name, bool(record["args"].get("pbt"))
    about = {"run": run, "env": place, "acting": acting, "checkpoint": policy.checkpoint}
    about["render"] = render
    report = _returns_report(f"{who} of {run} in {place}: returns", about, returns, None, dependent)
    notes = [f"wrote {path_text(render)}"] if render else []
    if not record.get("complete"):
        notes.append("The run is not finished: its last checkpoint acts. Its command continues it.")
    return report._replace(text=Group(report.text, *notes))


def _described(
    record: Mapping[str, Any], acting: Acting, checkpoint: int | str, opponents: Sequence[str]
) -> str:
    """Return which policies of a run act, and how, in words."""
    who = labelled(record["program"], acting)
    if checkpoint != "last":
        who += ", best checkpoints" if checkpoint == "best" else f", step {checkpoint}"
    if side := record["args"].get("side"):
        who += f", {side} against {', '.join(opponents or record['args'].get('opponents', ()))},"
    return who


def export(
    run: Annotated[Path, Positional, arg(metavar="RUN")],
    out: Path,
    onnx: bool = False,
    training_seed: int | None = None,
    policy: PolicyOptions = PolicyOptions(),
) -> Report:
    """Write a trained policy as files that run without offmarl.

    Parameters
    ----------
    run
        Directory of a run, or the name of a policy that `offmarl pull --policy` downloaded.
    out
        Directory for the files, new or empty.
    onnx
        Also write ONNX, which has no policies that draw random numbers, take rewards as input, or
        whose agents choose after one another.
    training_seed
        Training seed whose policy is exported; by default the run's first.
    policy
        What is exported. Each call of a policy that samples its actions takes random keys.
    """
    run = _run_directory(run)
    loaded = policy.load(run, training_seed, policy.env)
    files = loaded.export(out, onnx)
    facts = {str(path): decimal(path.stat().st_size) for path in files}
    return Report({"run": run, "files": files, "stochastic": loaded.stochastic}, grid(facts))


def _run_directory(run: Path) -> Path:
    """Return the directory of a run, which may be the name of a pulled policy."""
    if run.exists():
        return run
    from offmarl.hub.policies import run_named  # imports the hub's libraries

    return run_named(run)


def overview(kind: Kind, usage: str, verb: str = "", without: Collection[str] = ()) -> Report:
    """Return the list of programs, as help of a verb, by default the one that runs them."""
    summaries = {name: summary(path) for name, path in find(kind).items() if name not in without}
    rows = table([kind, ""], summaries.items())
    more = (
        f"`offmarl {verb or VERBS[kind]} NAME --help` lists a {kind}'s options. In place of NAME, "
        f"give\nthe path of a Python file to run a {kind} of your own. With --json the result\n"
        "is printed as one JSON object."
    )
    return Report({f"{kind}s": summaries}, Group(usage, rows, more))


def _only_first_reports() -> None:
    """End all processes but the first, which reports; see `offmarl.programs.cluster`."""
    from offmarl.programs.cluster import is_first

    if not is_first():
        raise SystemExit(0)


def _program_of(kind: Kind, arguments: list[str]) -> tuple[str, ModuleType, Any]:
    """Return the name, the module and the arguments of a program from those of its command.

    The command begins with the program's name if ``--config`` does not say it.
    """
    name = None if arguments[0].startswith("-") else arguments[0]
    options = arguments if name is None else arguments[1:]
    if (config := config_among(options)) is not None:
        name = config.program_for(name)
    name = name or arguments[0]  # an option, which `load` refuses
    program = load(kind, name)
    about = f"{VERBS[kind]} {name}", program.__doc__
    return name, program, parse_program(program.Args, *about, options, TaskOptions)


def _returns_report(
    title: str,
    about: Mapping[str, Any],
    returns: Mapping[str, Mapping[int, Float[np.ndarray, "episodes"]]],
    more: Mapping[str, Mapping[int, Float[np.ndarray, "episodes"]]] | None = None,
    dependent: bool = False,
) -> Report:
    """Report the returns of the policies of a run's training seeds, by team.

    ``more`` holds other metrics, by the key of their mean. ``dependent`` seeds, those of a
    population, have no interval.
    """
    several = len(returns) > 1
    rows = [
        ({"team": team} if several else {})
        | {"seed": trained, "episodes": len(values), **spread(values)}
        | {
            name: float(values_of[trained].mean())
            for name, values_of in (more or {}).items()
            if values_of
        }
        for team, by_seed in returns.items()
        for trained, values in by_seed.items()
    ]
    parts, estimates = [records(rows, title)], {}
    for team, by_seed in returns.items():
        means = np.array([[values.mean()] for values in by_seed.values()])
        score = Estimate(float(iqm(means))) if dependent else estimate(iqm, means)
        estimates[team] = score._asdict()
        over = f"of {team} over seeds" if several else "over seeds"
        if score.low is not None:
            less = f" (below {ENOUGH_RUNS} seeds it covers less often than 95%)"
            less = less if len(by_seed) < ENOUGH_RUNS else ""
            parts.append(f"IQM {over} [95% interval]: {interval(*score)}{less}")
        elif len(by_seed) > 1:
            few = f"intervals need at least {MIN_RUNS} seeds"
            few = "its members replaced one another, so there is no interval" if dependent else few
            parts.append(f"IQM {over}: {interval(*score)} ({few})")
    return Report({**about, "seeds": rows, "iqm": only_or_all(estimates)}, Group(*parts))
