"""Output of the command line: reports on standard output, all else on standard error."""

import errno
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from offmarl.paths import expanded
from offmarl.terminal import number, one_line, printable
from offmarl.tracking import to_json


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave a closed pipe to `offmarl.cli.exit_codes`."""
        raise BrokenPipeError


_out = _Console(highlight=False)
_err = _Console(stderr=True, highlight=False)
_GAP = 2
"""Width of the space between two columns."""
_credentials: list[str] = []
"""User names and passwords in URLs among the arguments, which are never printed."""


def complete_streams() -> None:
    """Replace streams that were closed, as cron may, and let no character fail that one lacks."""
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
        if "://" in url and "@" in url:
            from offmarl.vault.location import hide_credentials  # it imports TensorStore

            if hide_credentials(url) != url:
                _credentials.append(url.partition("://")[2].lstrip("/").rpartition("@")[0] + "@")


def hidden(text: str) -> str:
    """Return text with the credentials that the arguments contain replaced by ``***``."""
    for one in _credentials:
        text = text.replace(one, "***@")
    return text


class Report(NamedTuple):
    """The outcome of a verb."""

    data: Mapping[str, Any]
    """For programs: what ``--json`` prints."""
    text: RenderableType
    """For people."""
    sound: bool = True
    """Whether the command found no fault; the exit code is 1 otherwise."""


def show(report: Report, as_json: bool) -> None:
    """Print a report on standard output."""
    if as_json:
        _out.out(hidden(to_json(report.data, indent=2)))
    else:
        # A word that is longer than a line stays whole, as a path that users copy.
        _out.print(_Printable(report.text), crop=False, markup=False, overflow="ignore")


class _Printable:
    """A renderable with control characters escaped in all of its parts."""

    def __init__(self, content: RenderableType):
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self._content, options):
            yield Segment(text if control else printable(hidden(text)), style, control)


def show_error(error: BaseException, as_json: bool) -> None:
    """Print an error: in red on standard error, or as a JSON object on standard output."""
    text = f"{error}{_advice(error)}"
    if as_json:
        data = {"error": {"type": type(error).__name__, "message": text}}
        with suppress(OSError):  # of a full disk, which standard error tells
            return _out.out(hidden(to_json(data, indent=2)))
    message = printable(hidden(text))
    return _err.print(Text.assemble(("error: ", "bold red"), (message, "red")), soft_wrap=True)


def _advice(error: BaseException) -> str:
    """Return what to do about an error of the operating system, which says only what it is."""
    if not isinstance(error, OSError):
        return ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ": free some space, and repeat the command."
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) and error.filename:
        home = expanded(os.environ.get("HF_HOME") or "~/.cache/huggingface")
        place = Path(os.fsdecode(error.filename))
        if place in (home, *home.parents) or home in place.parents:
            return ": set HF_HOME to a directory that can be written."
        return ": choose a place that you may use, or change its permissions."
    return ""


def ask(question: str) -> bool:
    """Ask on standard error, and return whether the answer is yes; end of input means no."""
    _err.print(Text(f"{printable(hidden(question))} [y/N] "), end="", soft_wrap=True)
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning on standard error; replaces ``warnings.showwarning``."""
    text = printable(hidden(str(message)))
    _err.print(Text.assemble(("warning: ", "bold yellow"), (text, "yellow")), soft_wrap=True)


def show_interrupt(interrupt: KeyboardInterrupt, as_json: bool = False) -> None:
    """Print where a stopped command resumes, if it is known, and the error for ``--json``."""
    message = str(interrupt) or "stopped: repeat the command to finish it."
    if as_json:
        show_error(KeyboardInterrupt(message), as_json)
    _err.print(printable(hidden(message)), style="yellow", markup=False, soft_wrap=True)


def overview(summaries: Mapping[str, str]) -> Report:
    """Return the help of ``offmarl`` itself."""
    verbs = Table.grid(padding=(0, 2))
    for name, summary in summaries.items():
        verbs.add_row(Text(f"  {name}", "bold"), summary)
    return Report(
        {"commands": summaries},
        Group(
            Text.assemble(
                ("offmarl", "bold"),
                " COMMAND ...: offline multi-agent RL datasets and replay in JAX\n",
            ),
            verbs,
            "\n`offmarl COMMAND --help` describes a command. Every command accepts --json.",
        ),
    )


def table(columns: Sequence[str], rows: Iterable[Iterable[Any]], title: str = "") -> RenderableType:
    """Return a table; numbers are aligned on the right.

    Parameters
    ----------
    columns
        The headings.
    rows
        The cells: numbers or plain text.
    title
        Title above the table.
    """
    cells = [[*row] for row in rows]
    by_column = [*zip(columns, *cells, strict=True)]
    right = [any(isinstance(cell, int | float) for cell in below) for _, *below in by_column]
    most = [max(cell_len(_shown(cell)) for cell in one) for one in by_column]
    least = [most[0], *(max(map(_longest_word, one)) for one in by_column[1:])]
    room = _out.width - _GAP * (len(columns) - 1)
    least[0] = most[0] = min(most[0], max(cell_len(columns[0]), room - sum(least[1:])))
    widths = _shared(room, least, most)
    parts: list[RenderableType] = [_line(columns, widths, right, show_header=True)]
    for name, *rest in cells:
        fits = cell_len(_shown(name)) <= widths[0]
        # Users copy names from the first column: one that is too long has a line of its own.
        parts += [] if fits else [as_is(_shown(name))]
        parts.append(_line([name if fits else "", *rest], widths, right))
    return Group(*([Text(title, style="bold")] if title else []), "", *parts, "")


def _line(
    cells: Sequence[Any], widths: Sequence[int], right: Sequence[bool], show_header: bool = False
) -> Table:
    """Return the headings, or a row, of a table whose columns have these widths."""
    line = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    line.width = sum(widths) + _GAP * (len(widths) - 1)  # may exceed the width of the terminal
    line.show_header = show_header
    for cell, width, to_right in zip(cells, widths, right, strict=True):
        line.add_column(Text(_shown(cell)), width=width, justify="right" if to_right else "left")
    if not show_header:
        line.add_row(*(column.header for column in line.columns))
    return line


def _shown(cell: Any) -> str:
    return one_line(number(cell))


def _longest_word(cell: Any) -> int:
    """Return the width of the longest part of a cell that never goes on in the next line."""
    whole = isinstance(cell, int | float | PurePath)
    return max(map(cell_len, [_shown(cell)] if whole else _shown(cell).split()), default=0)


def _shared(room: int, least: Sequence[int], most: Sequence[int]) -> list[int]:
    """Return widths of columns; what room there is goes to the narrowest that want more."""
    widths = [*least]
    for _ in range(room - sum(least)):
        if growing := [i for i, width in enumerate(widths) if width < most[i]]:
            widths[min(growing, key=widths.__getitem__)] += 1
    return widths


def records(rows: Sequence[Mapping[str, Any]], title: str = "") -> RenderableType:
    """Return records with the same keys as a table; underscores in keys become spaces."""
    columns = [name.replace("_", " ") for name in rows[0]]
    return table(columns, [row.values() for row in rows], title)


def grid(facts: Mapping[str, Any]) -> Table:
    """Return facts with their names, one per line; paths are kept whole."""
    rows = Table.grid(Column(no_wrap=True), Column(), padding=(0, 2))
    for name, value in facts.items():
        text = value if isinstance(value, str | PurePath) else to_json(value)
        rows.columns[1].min_width = max(rows.columns[1].min_width or 0, _longest_word(text))
        rows.add_row(Text(one_line(name), style="bold"), Text(printable(str(text))))
    return rows


def as_is(text: Any) -> RenderableType:
    """Return text that is not wrapped, so that it can be copied from the terminal."""
    return Group(Text(printable(str(text)), no_wrap=True, overflow="ignore"))  # a bare Text wraps
