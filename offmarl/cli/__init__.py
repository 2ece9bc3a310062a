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
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from inspect import cleandoc

from offmarl._ahead import call_briefly
from offmarl._memory import collect_rarely
from offmarl._version import __version__
from offmarl.cli import output
from offmarl.cli.following import next_commands
from offmarl.cli.output import Report
from offmarl.cli.parse import HELP, parse
from offmarl.cli.parse import parse_script as parse_script
from offmarl.cli.verbs import GROUPS, VERBS, function_of, summary_of
from offmarl.errors import (
    OffmarlError,
    OptionError,
    RunError,
    Stopped,
    UnknownNameError,
    raise_stopped,
    repeat_lost_interrupts,
    unknown_name,
)
from offmarl.paths import remember_paths


def main() -> None:
    """Run the command line and exit."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--json"]
    as_json = len(arguments) < len(sys.argv) - 1
    if as_json:
        os.environ["OFFMARL_QUIET"] = "1"
    output.hide_credentials_in(arguments)
    remember_paths(arguments)
    warnings.showwarning = output.show_warning
    with exit_codes(as_json):
        _leave_guards()
        report = _run(arguments)
        output.show(report, as_json, "" if as_json else next_commands(arguments, report.data))
        sys.exit(0 if report.sound else 1)


def _leave_guards() -> None:
    """Remove settings of JAX that offmarl does not support from the environment, with a warning."""
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
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, raise_stopped)
    collect_rarely()
    try:
        with _errors_shown(as_json):
            yield
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        _end_by_signal(signal.SIGPIPE)


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
        if isinstance(error, OffmarlError | OSError):
            output.show_error(error, as_json)
        elif _has_other_processes():
            traceback.print_exc()
        else:  # a bug
            raise
        code = 2 if isinstance(error, UnknownNameError | OptionError) else 1
        if _has_other_processes():  # JAX's shutdown would wait for them
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        sys.exit(code)
    finally:
        sys.stdout.flush()  # a closed pipe raises here, not when the interpreter exits


def _without_memory(error: Exception) -> RunError | None:
    """Return what to tell the user if memory, or the stack, ran out; None for other errors."""
    if isinstance(error, RecursionError):
        place = traceback.extract_tb(error.__traceback__)[-1]
        return RunError(
            "code calls itself without end, or a record is nested too deeply: the last call was at "
            f"{place.filename}:{place.lineno}."
        )
    full = type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)
    if not full and not isinstance(error, MemoryError):
        return None
    reason, *_ = (str(error) or "MemoryError").removeprefix("RESOURCE_EXHAUSTED: ").splitlines()
    return RunError(
        f"there is not enough memory ({reason.rstrip('.')}): take smaller batches or networks, "
        "fewer episodes, environments or seeds."
    )


def _without_device(error: Exception) -> OffmarlError | None:
    """Return what to tell the user if JAX finds no device; None otherwise."""
    if isinstance(error, OffmarlError | OSError) or "jax" not in sys.modules:
        return None
    missing = import_module("offmarl.cli.doctor").no_device()
    return OffmarlError(missing) if missing else None


_LEAVE_SECONDS = 5.0
"""How long a stopped process waits for the others of a run to stop."""


def _has_other_processes() -> bool:
    """Whether this process has joined others with `jax.distributed`."""
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()


def _end_by_signal(signum: int) -> None:
    """End the process by a signal, so that a shell's loop around the command ends, too.

    This also avoids the shutdown of JAX in the middle of a computation, which crashes. Other
    processes of the run end with this one; JAX would abort them if process 0 ended first.
    """
    if _has_other_processes():
        with suppress(Exception):
            call_briefly(sys.modules["jax"].distributed.shutdown, "offmarl-leave", _LEAVE_SECONDS)
    signal.signal(signum, signal.SIG_DFL)
    signal.raise_signal(signum)


def _run(arguments: list[str]) -> Report:
    if not arguments or arguments[0] in HELP:
        return output.overview(
            {
                title: {name: summary_of(name, verb) for name, verb in group.items()}
                for title, group in GROUPS.items()
            }
        )
    if arguments == ["--version"]:
        return Report({"version": __version__}, __version__)
    name, *arguments = arguments
    if name not in VERBS:
        raise unknown_name("command", name, VERBS, see="offmarl --help")
    verb = VERBS[name]
    function = function_of(name, verb)
    more: list[type] = []
    if verb.work:
        from offmarl.cli import tasks

        options, arguments = tasks.split(arguments)
        if options is not None:
            return tasks.run(name, arguments, options)
        more = [tasks.TaskOptions]
    if verb.is_raw:
        return function(arguments)
    about, *_ = (function.__doc__ or "").partition("Parameters\n")
    example = f"\n\nExample: offmarl {name} {verb.example}" if verb.example else ""
    outcome = parse(function, name, f"{cleandoc(about)}{example}", arguments, *more)
    if isinstance(outcome, Report):
        return outcome
    return tasks.run(name, arguments, tasks.TaskOptions(), outcome)
