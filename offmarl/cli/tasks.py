"""Options that divide the work of a verb into tasks, and launch or join them.

A verb that knows them calls `taken`. In the process of a task, `work_of` makes the work from the
same arguments.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from rich.console import Group

from offmarl import vault
from offmarl.cli.output import Report, as_is, grid
from offmarl.cli.parse import TASK_OPTIONS, given_among
from offmarl.errors import OptionError
from offmarl.launch import (
    LAUNCHERS,
    Launched,
    Options,
    Share,
    Work,
    join_work,
    launch,
    run_share,
)
from offmarl.launch.launching import LauncherName
from offmarl.paths import local
from offmarl.terminal import number
from offmarl.tracking import progress

_TRANSFORMS = ("cat", "filter", "sample", "map", "recode")

_MAKERS = {
    "record": "offmarl.cli.programs:record_work",
    "train": "offmarl.cli.programs:train_work",
    "benchmark": "offmarl.cli.benchmark:benchmark_work",
    "tune": "offmarl.cli.tune:tune_work",
    **dict.fromkeys(_TRANSFORMS, "offmarl.cli.transform:transform_work"),
}
"""The function of each verb that makes its work from its name, arguments and a block's size."""

_FLAGS = ("join", "dry_run")


class TaskOptions(NamedTuple):
    """The options, as they were given."""

    tasks: int | None = None
    """By default as many as the work suggests."""
    launcher: LauncherName = "local"
    jobs: int | None = None
    launcher_option: Mapping[str, Any] = {}
    task: Share | None = None
    join: bool = False
    block_steps: int | None = None
    dry_run: bool = False
    take_over: bool = True


def taken(
    arguments: Sequence[str], ignored: Sequence[str] = ()
) -> tuple[TaskOptions | None, list[str]]:
    """Return the options among arguments, None for none or a call for help, and the rest.

    ``ignored`` are options that the verb has itself; `OptionError` if a value is invalid.
    """
    if {"-h", "--help"} & {*arguments}:
        return None, [*arguments]
    found: dict[str, list[str]] = {}
    rest, waiting = [], [*arguments]
    while waiting:
        option, sign, value = (one := waiting.pop(0)).partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or name not in TASK_OPTIONS or name in ignored:
            rest.append(one)
        elif name in _FLAGS:
            found[name] = ["yes"]
        elif not sign and not waiting:
            raise OptionError(f"{option} needs a value.")
        else:
            found.setdefault(name, []).append(value if sign else waiting.pop(0))
    return (_options(found) if found else None), rest


def _options(found: Mapping[str, Sequence[str]]) -> TaskOptions:
    values: dict[str, Any] = {name: texts[-1] for name, texts in found.items()}
    for name in ("tasks", "jobs", "block_steps"):
        if name in values:
            values[name] = _count(name, values[name])
    if values.get("launcher", "local") not in LAUNCHERS:
        raise OptionError(
            f"--launcher must be one of {', '.join(LAUNCHERS)}: got {values['launcher']!r}."
        )
    if "launcher_option" in values:
        values["launcher_option"] = dict(map(_pair, found["launcher_option"]))
    if "task" in values:
        values["task"] = Share.read(values["task"])
    values |= dict.fromkeys(values.keys() & {*_FLAGS}, True)
    options = TaskOptions(**values)
    if sum((options.task is not None, options.join, "tasks" in values)) > 1:
        raise OptionError("give only one of --tasks, --task and --join.")
    launching = [name for name in ("launcher", "jobs", "launcher_option") if name in values]
    if launching and (options.task is not None or options.join):
        other, name = "--join" if options.join else "--task", launching[0].replace("_", "-")
        raise OptionError(
            f"{other} launches no tasks: give --{name} with --tasks, or leave it out."
        )
    return options


def _count(name: str, text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value.is_integer() or value < 1:
        option = name.replace("_", "-")
        raise OptionError(f"--{option} must be a whole number of at least 1: got {text}.")
    return int(value)


def _pair(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise OptionError(f"--launcher-option must be KEY=VALUE: got {text!r}.")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


class CommandWork(Work):
    """A command as a whole: one block, which resumes where it was stopped.

    After a kill, the verb's function continues, and it does not change a finished result.
    """

    def __init__(self, verb: str, arguments: list[str], run: Callable[[list[str]], Report]):
        self._arguments, self._run = arguments, run
        checksum = hashlib.sha256(json.dumps([verb, *arguments]).encode()).hexdigest()[:8]
        path = local("runs") / f"{verb}-{checksum}"
        super().__init__(f"{verb} {arguments[0]}", path, {"command": [verb, *arguments]})

    @property
    def num_blocks(self) -> int:
        """One."""
        return 1

    def run(self, block: int) -> None:
        """Run the command."""
        del block
        self._run(self._arguments)

    def is_complete(self) -> bool:
        """Unknown: the command finds out."""
        return False

    def join(self) -> None:
        """Do nothing: the command itself has written the result."""


def work_of(arguments: tuple[str, ...]) -> Work:
    """Make the work of a verb; `run` gives the arguments to the processes of its tasks."""
    verb, block_steps, *rest = arguments
    module, _, name = _MAKERS[verb].partition(":")
    make: Callable[[str, list[str], int | None], Work] = getattr(import_module(module), name)
    return make(verb, rest, int(block_steps) if block_steps else None)


def run(
    verb: str,
    arguments: list[str],
    options: TaskOptions,
    report: Callable[[Work, Launched], Report],
) -> Report:
    """Do what the options ask for with the work of a verb; ``report`` describes the result."""
    if not arguments:
        raise OptionError(f"give the command that tasks divide: see `offmarl {verb} --help`.")
    joining = () if verb in _TRANSFORMS else ("coordinator", "processes", "process")
    if given := given_among(joining, arguments):
        raise OptionError(
            f"--{given[0]} joins the processes of one program, and each task is a program of its "
            "own: divide the work by tasks or by processes."
        )
    entry = (verb, str(options.block_steps or ""), *arguments)
    work = work_of(entry)
    if options.dry_run:
        return _plan(work, options)
    if options.task is not None:
        return _run_share(work, options.task)
    if options.join:
        return report(work, Launched(join_work(work)))
    count = options.tasks or work.default_tasks
    how = options.launcher, options.jobs, options.launcher_option, options.take_over
    chosen = Options(count, *how)
    return report(work, launch(work, chosen, f"{__name__}:work_of", entry))


def own_options(verb: str, arguments: Sequence[str]) -> list[str]:
    """Return options of `TASK_OPTIONS` that a verb has itself, with these arguments.

    ``offmarl benchmark --dry-run`` makes tables, unless it is divided into tasks.
    """
    dividing = ("tasks", "task", "join", "launcher")
    return ["dry_run"] if verb == "benchmark" and not given_among(dividing, [*arguments]) else []


def added_options(verb: str) -> list[str]:
    """Return the options of `TASK_OPTIONS` that the help of a verb adds."""
    return [one for one in TASK_OPTIONS if one not in own_options(verb, [])]


def report_of(verb: str) -> Callable[[Work, Launched], Report]:
    """Return what describes the result of a verb that takes parsed arguments."""
    if verb == "benchmark":
        from offmarl.cli.benchmark import report_benchmark

        return report_benchmark
    return _report_vault


def _report_vault(work: Work, launched: Launched) -> Report:
    """Describe the vault that a transform made."""
    from offmarl.cli import transform

    del launched
    return transform.report([vault.open_vault(work.path)])


def _run_share(work: Work, share: Share) -> Report:
    if work.is_complete():
        ran, blocks = 0, 0
    else:
        blocks = len(share.blocks(work.num_blocks))
        with progress(f"task {share.number} of {share.of}", blocks) as advance:
            shown = [0]

            def show(done: int, _total: int, _block: int | None) -> None:
                advance(done - shown[0])
                shown[0] = done

            ran = run_share(work, share, show)
    missing = 0 if work.is_complete() else len(work.missing())
    data = {"path": work.path, "blocks": blocks, "ran": ran, "missing": missing}
    left = f"{missing} blocks are missing." if missing else "All blocks are done: use --join."
    text = f"task {share.number} of {share.of}: {ran} of its {blocks} blocks were run now. {left}"
    return Report(data, text)


def _plan(work: Work, options: TaskOptions) -> Report:
    tasks = options.task.of if options.task else options.tasks or work.default_tasks
    facts, notes = work.plan(tasks), work.notes(tasks)
    shown = grid({name: _in_words(name, fact) for name, fact in facts.items()})
    return Report(facts | {"notes": notes}, Group(shown, *map(as_is, notes)))


def _in_words(name: str, fact: Any) -> str:
    if isinstance(fact, int | float) and ("bytes" in name or "memory" in name):
        return f"{fact / 1e9:,.3g} GB"
    return number(fact) if isinstance(fact, int | float) else str(fact)
