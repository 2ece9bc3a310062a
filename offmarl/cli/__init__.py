"""The command line: ``offmarl VERB ...``.

The verb is looked up before anything heavy is imported, so that help is instant. A verb is a
function of that name in one of this package's modules: tyro turns its parameters into options, and
it returns a `Report`, shown as text, or as JSON with ``--json``.

Exit codes: 0, 1 (it failed), 2 (wrong arguments: no such command, name or option); 130 in
a shell after Ctrl-C, 143 after SIGTERM.
"""

import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

from offmarl._ahead import briefly
from offmarl._garbage import collect_rarely
from offmarl._version import __version__
from offmarl.cli import output
from offmarl.cli.output import Report
from offmarl.cli.parse import HELP, parse
from offmarl.cli.parse import parse_script as parse_script
from offmarl.errors import (
    OffmarlError,
    OptionError,
    RunError,
    Stopped,
    UnknownNameError,
    unknown_name,
)


class Verb(NamedTuple):
    """The module of a verb's function, and its help."""

    module: str
    summary: str
    example: str = ""
    """Arguments of the example in ``--help``."""
    is_raw: bool = False
    """Whether the function takes the arguments unparsed."""
    work: str = ""
    """The function of the module that makes the work which tasks can share, if any."""


_GROUPS: dict[str, dict[str, Verb]] = {
    "Begin": {
        "demo": Verb("demo", "Record, train offline and compare on a small swarm, in minutes"),
        "envs": Verb(
            "environments",
            "List the environments, or describe, measure and draw one",
            "swarm/flock-8 --picture flock.gif",
        ),
        "new": Verb(
            "new",
            "Create a working baseline or environment file to start from",
            "env my_env --out ~/research",
        ),
        "doctor": Verb("doctor", "Check the installation and the connection to the hub"),
        "completion": Verb("doctor", "Print a shell completion script"),
    },
    "Record and train": {
        "record": Verb(
            "programs",
            "Train agents online and record them at several tiers",
            is_raw=True,
            work="record_work",
        ),
        "train": Verb(
            "programs", "Train an offline baseline on a vault", is_raw=True, work="train_work"
        ),
        "tune": Verb(
            "tune", "Search settings with which a program learns", is_raw=True, work="tune_work"
        ),
        "benchmark": Verb(
            "benchmark",
            "Train baselines on datasets, and make tables, curves and a page",
            is_raw=True,
            work="benchmark_work",
        ),
    },
    "Evaluate": {
        "evaluate": Verb(
            "programs",
            "Play episodes with a trained policy",
            "runs/swarm/coverage-3/mappo-0-medium/bc --render episode.gif",
        ),
        "compare": Verb(
            "compare",
            "Compare runs: IQM with intervals, profiles, a figure, a page",
            "runs/swarm/coverage-3/*-medium/* --html report.html",
        ),
        "ope": Verb(
            "ope",
            "Estimate the returns of trained policies from a dataset, without the environment",
            "runs/swarm/coverage-3/*/* --vault vaults/swarm/coverage-3.vlt/mappo-0-replay",
        ),
    },
    "Look at data": {
        "ls": Verb(
            "data",
            "List local vaults or available datasets",
            "--remote --env smac_v1 --agents 3",
        ),
        "show": Verb(
            "data",
            "Show the contents and the origin of a vault",
            "vaults/swarm/coverage-3.vlt/mappo-0-medium",
        ),
        "report": Verb(
            "report",
            "Describe the contents of datasets: figures, coverage, episodes",
            "vaults/swarm/coverage-3.vlt --html page.html",
        ),
        "verify": Verb("data", "Check a vault for damage", "A.vlt --deep"),
    },
    "Share data": {
        "pull": Verb("hub", "Download a published dataset", "og_marl/smac_v1/3m/Good --dry-run"),
        "push": Verb(
            "hub",
            "Publish vaults as a dataset on the hub",
            "vaults/swarm/coverage-3.vlt --to org/name --licence CC-BY-4.0",
        ),
        "cache": Verb("hub", "List, remove or verify pulled datasets", "rm og_marl/smac_v1/3m"),
        "convert": Verb(
            "transform",
            "Convert a dataset of another project into a vault, or back",
            "bridge.npz bridge.vlt --from pymarl --env classic/bridge",
        ),
    },
    "Change data": {
        "cat": Verb(
            "transform", "Join vaults into one", "A.vlt B.vlt -o C.vlt", work="transform_work"
        ),
        "filter": Verb(
            "transform",
            "Select the episodes or steps of a vault that meet a condition",
            'A.vlt "return > 10 and length < 50" -o B.vlt',
            work="transform_work",
        ),
        "sample": Verb(
            "transform",
            "Sample the episodes of a vault, or select the best",
            "A.vlt --steps 1e5 --match-returns --seed 0 -o B.vlt",
            work="transform_work",
        ),
        "split": Verb(
            "transform",
            "Split episodes into training, validation and test sets",
            "A.vlt --fractions .8 .1 .1 --seed 0 -o B.vlt",
        ),
        "slice": Verb(
            "transform",
            "Extract a range of episodes or time steps",
            "A.vlt --start 100 --stop 200 -o B.vlt",
        ),
        "dedup": Verb("transform", "Remove duplicate episodes", "A.vlt -o B.vlt"),
        "map": Verb(
            "transform",
            "Change or add columns of a vault: relabel rewards, normalise observations",
            'A.vlt --reward "reward / 10" -o B.vlt',
            work="transform_work",
        ),
        "recode": Verb(
            "transform",
            "Store a vault with another codec, chunk size or layout",
            "A.vlt --codec zstd --chunk-steps 2048 -o B.vlt",
            work="transform_work",
        ),
        "compact": Verb("data", "Reclaim unused space", "A.vlt"),
        "salvage": Verb("data", "Copy the intact episodes of a damaged vault", "A.vlt -o B.vlt"),
    },
}

VERBS = {name: verb for group in _GROUPS.values() for name, verb in group.items()}


def main() -> None:
    """Run the command line and exit."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--json"]
    as_json = len(arguments) < len(sys.argv) - 1
    if as_json:
        os.environ["OFFMARL_QUIET"] = "1"
    output.hide_credentials_in(arguments)
    warnings.showwarning = output.show_warning
    with exit_codes(as_json):
        _leave_guards()
        report = _run(arguments)
        output.show(report, as_json)
        sys.exit(0 if report.sound else 1)


def _leave_guards() -> None:
    """Leave out settings of JAX that offmarl and the libraries below it do not keep, and say so."""
    defaults = {
        **dict.fromkeys(("TRANSFER_GUARD", "NUMPY_RANK_PROMOTION"), ("allow",)),
        **dict.fromkeys(
            ("NUMPY_DTYPE_PROMOTION", "DEFAULT_PRNG_IMPL"), ("standard", "threefry2x32")
        ),
        "ENABLE_X64": ("0", "false"),
        "THREEFRY_PARTITIONABLE": ("1", "true"),
    }
    for name, default in ((f"JAX_{guard}", x) for guard, x in defaults.items()):
        if os.environ.pop(name, "").lower() not in ("", *default):
            warnings.warn(
                f"{name} has no effect: offmarl computes with JAX's default.", stacklevel=2
            )


@contextmanager
def exit_codes(as_json: bool = False) -> Iterator[None]:
    """Print errors that a user can fix as one line, and set the command line's exit code.

    The programs in ``baselines/`` and ``recorders/`` use it when they run as scripts. Python
    collects garbage rarely from here to the first update of a run.
    """
    output.complete_streams()
    repeat_lost_interrupts()
    collect_rarely()
    try:
        with _errors_shown(as_json):
            yield
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        _end_by_signal(signal.SIGPIPE)


_REPEAT_SECONDS = 0.05


def repeat_lost_interrupts() -> None:
    """Repeat a Ctrl-C whose exception Python discards.

    An exception in a callback of the garbage collector, such as JAX's, or in a finaliser is printed
    and discarded, and a program that has not yet installed its own handler would run on.
    """
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) == "Event loop is closed":
            return  # another write of a checkpoint that failed and was reported
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            before(unraisable)
            return
        # Later, because a signal in this function would be discarded, too.
        repeat = threading.Timer(_REPEAT_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
        repeat.daemon = True
        repeat.start()

    sys.unraisablehook = hook


@contextmanager
def _errors_shown(as_json: bool) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except KeyboardInterrupt as interrupt:
        output.show_interrupt(interrupt, as_json)
        _end_by_signal(interrupt.signum if isinstance(interrupt, Stopped) else signal.SIGINT)
    except Exception as caught:
        error = _without_memory(caught) or _without_device(caught) or caught
        if not isinstance(error, OffmarlError | OSError):  # a bug
            if _has_other_processes():
                traceback.print_exc()
                _end_at_once(1)
            raise
        output.show_error(error, as_json)
        code = 2 if isinstance(error, UnknownNameError | OptionError) else 1
        if _has_other_processes():
            _end_at_once(code)
        sys.exit(code)
    finally:
        sys.stdout.flush()  # a closed pipe raises here, not when the interpreter exits


def _without_memory(error: Exception) -> RunError | None:
    """Return the error of a user whose command needs more memory than there is; None for others."""
    full = type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)
    if not full and not isinstance(error, MemoryError):
        return None
    reason, *_ = (str(error) or "MemoryError").removeprefix("RESOURCE_EXHAUSTED: ").splitlines()
    return RunError(
        f"there is not enough memory ({reason.rstrip('.')}): take smaller batches or networks, "
        "fewer episodes, environments or seeds."
    )


def _without_device(error: Exception) -> OffmarlError | None:
    """Return the error of a user whose `JAX_PLATFORMS` name no device; None for others."""
    if isinstance(error, OffmarlError | OSError) or "jax" not in sys.modules:
        return None
    missing = import_module("offmarl.cli.doctor").no_device()
    return OffmarlError(missing) if missing else None


_LEAVE_SECONDS = 5.0
"""How long a stopped process waits for the others of a run to stop."""


def _has_other_processes() -> bool:
    """Whether this process has joined others with `jax.distributed`."""
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()


def _end_at_once(code: int) -> None:
    """End the process without the end of JAX, which would wait for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_by_signal(signum: int) -> None:
    """End the process by a signal, so that a shell's loop around the command ends, too.

    This also avoids the shutdown of JAX in the middle of a computation, which crashes. Other
    processes of the run end with this one; JAX would abort them if process 0 ended first.
    """
    if _has_other_processes():
        briefly(sys.modules["jax"].distributed.shutdown, "leave", _LEAVE_SECONDS)
    signal.signal(signum, signal.SIG_DFL)
    signal.raise_signal(signum)


def _run(arguments: list[str]) -> Report:
    if not arguments or arguments[0] in HELP:
        groups = _GROUPS.items()
        return output.overview(
            {title: {name: verb.summary for name, verb in one.items()} for title, one in groups}
        )
    if arguments == ["--version"]:
        return Report({"version": __version__}, __version__)
    name, *rest = arguments
    if name not in VERBS:
        raise unknown_name("command", name, VERBS, see="offmarl --help")
    return _call(name, VERBS[name], rest)


def function_of(name: str, verb: Verb) -> Callable[..., Any]:
    """Import a function of a verb's module."""
    function: Callable[..., Any] = getattr(import_module(f"offmarl.cli.{verb.module}"), name)
    return function


def _call(name: str, verb: Verb, arguments: list[str]) -> Report:
    function = function_of(name, verb)
    if verb.is_raw:
        return function(arguments)
    more: list[type] = []
    if verb.work:
        from offmarl.cli import tasks

        options, arguments = tasks.split(arguments)
        if options is not None:
            return tasks.run(name, arguments, options, tasks.report_vault)
        more = [tasks.TaskOptions]
    example = f"\n\nExample: offmarl {name} {verb.example}" if verb.example else ""
    return parse(function, name, f"{verb.summary}.{example}", arguments, *more)
