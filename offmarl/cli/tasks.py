"""Options that divide the work of a verb into tasks, and launch or join them.

In the process of a task, `work_of` makes the work from the rest of the arguments.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from rich.console import Group

from offmarl.cli.output import Report, as_is, grid
from offmarl.cli.parse import (
    HELP,
    finite_number,
    options_among,
    parse,
    refuse_unused,
    split_options,
)
from offmarl.cli.verbs import VERBS, function_of
from offmarl.config import REPEATED, PositiveInt, Validated
from offmarl.errors import OptionError
from offmarl.launch import (
    Launched,
    Share,
    Work,
    join_work,
    launch,
    run_share,
)
from offmarl.paths import local, local_output
from offmarl.terminal import number
from offmarl.tracking import checksum, progress

_JOINING = dict.fromkeys(("coordinator", "processes", "process"), str)
"""Options that join the processes of one program, which transforms do not have."""


@dataclass(frozen=True, kw_only=True)
class TaskOptions(Validated):
    """Options that divide the work of a verb into tasks."""

    tasks: PositiveInt | None = None
    """Divide the work into this many tasks, which --launcher runs side by side; by default as many
    as the work suggests. What they make does not depend on their number. A benchmark has a task for
    each dataset and cell, whatever the number."""
    launcher: str | None = None
    """What runs the tasks: local (the default), processes of this machine; slurm, a job array; ray,
    a Ray cluster; MODULE:CLASS, one of your own."""
    jobs: PositiveInt | None = None
    """Tasks that run at the same time; by default one for each core, or as many as the cluster has
    room for."""
    launcher_option: Annotated[tuple[str, ...], REPEATED] = ()
    """KEY=VALUE for the launcher, such as partition=gpu or timeout_min=600 for slurm (as submitit
    names them), address=HOST:PORT or num_gpus=1 for ray."""
    task: str | None = None
    """I/N: run task I of N here and now, with I from 0, for other schedulers; --join follows."""
    join: bool = False
    """Join what all tasks of --task made."""
    block_steps: PositiveInt | None = None
    """Environment steps of a block, of which tasks run whole ones; by default it follows from the
    sizes of the data."""
    dry_run: bool = False
    """Print the plan, with its sizes, tasks and memory, and run nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum((self.tasks is not None, self.task is not None, self.join)) > 1:
            raise OptionError("give only one of --tasks, --task and --join.")
        if self.task is not None or self.join:
            names = ("launcher", "jobs", "launcher_option")
            values = {name: getattr(self, name) for name in names}
            refuse_unused("--task and --join launch no tasks", **values)

    @property
    def of_launcher(self) -> dict[str, Any]:
        """The launcher's own options."""
        return dict(map(_pair, self.launcher_option))


def split(arguments: list[str]) -> tuple[TaskOptions | None, list[str]]:
    """Return the options of tasks, None without any or for help, and the other arguments."""
    if {*HELP}.intersection(arguments):
        return None, arguments
    values, rest = split_options(TaskOptions, arguments)
    return (TaskOptions(**values) if values else None), rest


def _pair(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise OptionError(f"--launcher-option must be KEY=VALUE: got {text!r}.")
    if value in ("true", "false"):
        return name, value == "true"
    with suppress(ValueError):
        return name, int(value)
    number = finite_number(value)
    return name, value if number is None else number


class Divided(NamedTuple):
    """The work of a verb, which tasks can share."""

    work: Work
    report: Callable[[Launched], Report]
    """Describes the result."""
    before: Callable[[bool], Report | None] | None = None
    """Checks work that is always launched. Takes ``--dry-run``, and may return its report."""
    take_over: bool = True
    """Whether to go on after a launch of another machine that has not ended by itself."""


class CommandWork(Work):
    """A command as a whole: one block, which resumes where it was stopped.

    After a kill, the verb's function continues, and it does not change a finished result.
    """

    def __init__(self, verb: str, arguments: list[str], run: Callable[[list[str]], Report]):
        self._arguments, self._run = arguments, run
        out = options_among(arguments, out=str).get("out")
        beside = local_output(out).parent if out else local("runs")
        path = beside / f"{verb}-{checksum([verb, *arguments])}"
        super().__init__(f"{verb} {arguments[0]}", path, {"command": [verb, *arguments]})

    def run(self, block: int) -> None:
        """Run the command."""
        del block
        self._run(self._arguments)

    def is_complete(self) -> bool:
        """Unknown: the command finds out."""
        return False


def work_of(arguments: tuple[str, ...]) -> Work:
    """Make the work of a verb; `run` gives the arguments to the processes of its tasks."""
    verb, block_steps, *rest = arguments
    return _divided(verb, rest, int(block_steps) if block_steps else None).work


def _divided(verb: str, arguments: list[str], block_steps: int | None) -> Divided:
    about = VERBS[verb]
    if block_steps is not None and about.work not in ("record_work", "transform_work"):
        raise OptionError(f"--block-steps divides data, and `offmarl {verb}` makes none.")
    make, name = function_of(about.work, about), about.work.replace("_", "-")
    divided: Divided = (
        parse(make, verb, "", arguments) if name == verb else make(verb, arguments, block_steps)
    )
    return divided


def run(
    verb: str, arguments: list[str], options: TaskOptions, divided: Divided | None = None
) -> Report:
    """Plan, launch, run or join the work of a verb, as the options say.

    Without options all of it runs here, unless it is always launched.
    """
    if not arguments:
        raise OptionError(
            f"`offmarl {verb}` needs its own arguments, too: see `offmarl {verb} --help`."
        )
    share = None if options.task is None else Share.read(options.task)
    of_launcher = options.of_launcher
    for option in options_among(arguments, **_JOINING) if VERBS[verb].is_raw else ():
        raise OptionError(
            f"--{option} joins the processes of one program, and each task is a program of its "
            "own: divide the work by tasks or by processes."
        )
    work, report, before, take_over = divided or _divided(verb, arguments, options.block_steps)
    if before and share is None and not options.join and (early := before(options.dry_run)):
        return early
    if before is None and options == TaskOptions():
        run_task(work, Share(0, 1))
        return report(Launched(join_work(work)))
    if options.dry_run:
        return _plan(work, share.of if share else options.tasks)
    if share is not None:
        return run_task(work, share)
    if options.join:
        return report(Launched(join_work(work)))
    entry = (verb, str(options.block_steps or ""), *arguments)
    how = options.tasks, options.launcher or "local", options.jobs, of_launcher
    return report(launch(work, f"{__name__}:work_of", entry, *how, take_over=take_over))


def run_task(work: Work, share: Share) -> Report:
    """Run a share of the blocks in this process, with its progress."""
    if work.is_complete():
        ran, blocks = 0, 0
    else:
        blocks = len(share.blocks(work.num_blocks))
        name = f"task {share.number} of {share.of}" if share.of > 1 else work.name
        with progress(name, blocks) as advance:
            counter = [0]

            def show(done: int, _total: int) -> None:
                advance(done - counter[0])
                counter[0] = done

            ran = run_share(work, share, show)
    missing = 0 if work.is_complete() else len(work.missing())
    data = {"path": work.path, "blocks": blocks, "ran": ran, "missing": missing}
    status = f"{missing} blocks are missing." if missing else "All blocks are done: use --join."
    text = f"task {share.number} of {share.of}: {ran} of its {blocks} blocks were run now. {status}"
    return Report(data, text)


def _plan(work: Work, tasks: int | None) -> Report:
    facts, notes = work.plan(tasks), work.notes(tasks or 1)
    view = grid({name: _in_words(name, fact) for name, fact in facts.items()})
    return Report(facts | {"notes": notes}, Group(view, *map(as_is, notes)))


def _in_words(name: str, fact: Any) -> str:
    if isinstance(fact, int | float) and ("bytes" in name or "memory" in name):
        return f"{fact / 1e9:,.3g} GB" if fact >= 1e9 else f"{number(fact / 1e6)} MB"
    return number(fact) if isinstance(fact, int | float) else str(fact)
