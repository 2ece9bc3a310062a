"""Output of the command line: reports on standard output, all else on standard error."""

import errno
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.text import Text

from offmarl import terminal
from offmarl.errors import OptionError
from offmarl.paths import (
    hide_credentials,
    kind_of,
    local,
    local_output,
    no_empty_directories,
    path_text,
)
from offmarl.terminal import one_line, printable
from offmarl.tracking import to_json


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave a closed pipe to `offmarl.cli.exit_codes`."""
        raise BrokenPipeError


table = terminal.table
_out = _Console(highlight=False, emoji=False)  # ":car:" is in a name, and no picture
_err = _Console(stderr=True, highlight=False, emoji=False)
_credentials: list[str] = []
"""User names and passwords in URLs among the arguments, which are never printed."""


def complete_streams() -> None:
    """Replace closed standard streams by the null device, and characters that cannot be encoded."""
    for name in ("stdin", "stdout", "stderr"):  # in the order of the descriptors that they take
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(nothing, "r+", closefd=False))
    if isinstance(sys.stdout, TextIOWrapper):  # as standard error does by itself
        sys.stdout.reconfigure(errors="replace")


def hide_credentials_in(arguments: Iterable[str]) -> None:
    """Replace the credentials of URLs among the arguments by ``***`` in all further output."""
    _credentials.clear()
    for argument in arguments:
        url = argument.partition("=")[2] if argument.startswith("--") else argument
        if "://" in url and hide_credentials(url) != url:
            _credentials.append(url.partition("://")[2].lstrip("/").rpartition("@")[0] + "@")


def mask_credentials(text: str) -> str:
    """Return text with the credentials that the arguments contain replaced by ``***``."""
    for secret in _credentials:
        text = text.replace(secret, "***@")
    return text


class Report(NamedTuple):
    """The outcome of a verb."""

    data: Mapping[str, Any]
    """For programs: what ``--json`` prints."""
    text: RenderableType
    """For people."""
    sound: bool = True
    """Whether the command found no fault; the exit code is 1 otherwise."""


def show(report: Report, as_json: bool, following: str = "") -> None:
    """Print a report on standard output, and for people what follows it."""
    if as_json:
        _out.out(mask_credentials(to_json(report.data, indent=2)))
    else:
        # A word that is longer than a line stays whole, as a path that users copy.
        text = Group(report.text, as_is(f"\nNext: {following}")) if following else report.text
        _out.print(_Printable(text), crop=False, markup=False, overflow="ignore")


class _Printable:
    """A renderable with control characters escaped in all of its parts."""

    def __init__(self, content: RenderableType):
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self._content, options):
            yield Segment(text if control else printable(mask_credentials(text)), style, control)


def show_error(error: BaseException, as_json: bool) -> None:
    """Print an error: in red on standard error, or as a JSON object on standard output."""
    text = f"{error}{_advice(error)}"
    if as_json:
        data = {"error": {"type": type(error).__name__, "message": text}}
        with suppress(OSError):  # of a full disk, which standard error tells
            return _out.out(mask_credentials(to_json(data, indent=2)))
    message = printable(mask_credentials(text))
    return _err.print(Text.assemble(("error: ", "bold red"), (message, "red")), soft_wrap=True)


def _advice(error: BaseException) -> str:
    """Return what to do about an error of the operating system; empty without advice."""
    if not isinstance(error, OSError):
        return ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ": free some space, and repeat the command."
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) and error.filename:
        place = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
        pulled = "; what is pulled has its place in HF_HOME"
        inside = local(str(error.filename)).is_relative_to(local(place))
        return f": choose a place that you may use, or change its permissions{pulled * inside}."
    return ""


def ask(question: str) -> bool:
    """Ask on standard error, and return whether the answer is yes; end of input means no."""
    _err.print(Text(f"{printable(mask_credentials(question))} [y/N] "), end="", soft_wrap=True)
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning on standard error; replaces ``warnings.showwarning``."""
    text = printable(mask_credentials(str(message)))
    _err.print(Text.assemble(("warning: ", "bold yellow"), (text, "yellow")), soft_wrap=True)


def show_interrupt(interrupt: KeyboardInterrupt, as_json: bool = False) -> None:
    """Print where a stopped command resumes, if it is known, and the error for ``--json``."""
    message = str(interrupt) or "stopped: repeat the command to finish it."
    if as_json:
        show_error(KeyboardInterrupt(message), as_json)
    _err.print(printable(mask_credentials(message)), style="yellow", markup=False, soft_wrap=True)


def overview(groups: Mapping[str, Mapping[str, str]]) -> Report:
    """Return the help of ``offmarl`` itself, from the summaries of verbs in groups."""
    title = ("offmarl", "bold"), " COMMAND ...: offline multi-agent RL datasets and replay in JAX"
    width = max(len(name) for summaries in groups.values() for name in summaries)
    parts: list[RenderableType] = [Text.assemble(*title)]
    for group, summaries in groups.items():
        rows = {f"  {name:{width}}": summary for name, summary in summaries.items()}
        parts += [Text(f"\n{group}", "bold"), grid(rows)]
    parts.append("\n`offmarl COMMAND --help` describes a command. Every command accepts --json.")
    commands = {name: text for group in groups.values() for name, text in group.items()}
    return Report({"commands": commands}, Group(*parts))


def records(rows: Sequence[Mapping[str, Any]], title: str = "") -> RenderableType:
    """Return records with the same keys as a table; underscores in keys become spaces."""
    columns = [name.replace("_", " ") for name in rows[0]]
    return table(columns, [row.values() for row in rows], title)


def grid(facts: Mapping[str, Any]) -> RenderableType:
    """Return facts with their names, one per line; paths are kept whole."""
    texts = {
        one_line(name): x if isinstance(x, str | PurePath) else to_json(x)
        for name, x in facts.items()
    }
    return terminal.grid(texts)


def as_is(text: Any) -> RenderableType:
    """Return text that is not wrapped, so that it can be copied from the terminal."""
    text = path_text(text) if isinstance(text, PurePath) else str(text)
    return Group(Text(printable(text), no_wrap=True, overflow="ignore"))  # a bare Text wraps


def check_file(path: Path | None, option: str, example: str, kinds: Collection[str] = ()) -> None:
    """Check, before any work, that a file can be written; its directories need not exist."""
    if path is None:
        return
    full = local_output(path)
    if full.is_dir():
        raise OptionError(
            f"{path} is a directory: give a file name with {option}, such as {path / example}."
        )
    if kinds:
        kind_of(path, kinds, option)
    if full.exists() and not full.is_file():
        return  # a device or a pipe
    full = Path(os.path.realpath(full)) if full.is_symlink() else full
    partial = full.with_name(f".{full.name}.partial")
    try:
        with no_empty_directories(full.parent, always=True):
            full.parent.mkdir(parents=True, exist_ok=True)
            partial.touch()
            partial.unlink()
    except OSError as error:
        raise OptionError(
            f"{path} cannot be written ({error.strerror}: {error.filename}): give {option} another "
            "path."
        ) from None
