"""What the command line prints: reports on standard output, the rest on standard error."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from offmarl.terminal import number, one_line, printable
from offmarl.tracking import to_json

_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)


class Report(NamedTuple):
    """The outcome of a verb, twice: for programs and for people."""

    data: Mapping[str, Any]
    view: RenderableType
    sound: bool = True
    """Whether what was looked at is as it should be; the exit code is 1 otherwise."""


def show(report: Report, as_json: bool) -> None:
    """Print a report on standard output."""
    if as_json:
        _out.out(to_json(report.data, indent=2))
    else:
        _out.print(_Printable(report.view), crop=False, markup=False)


class _Printable:
    """A view with the control characters in all of its parts escaped."""

    def __init__(self, view: RenderableType):
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self._view, options):
            yield Segment(text if control else printable(text), style, control)


def show_error(error: Exception, as_json: bool) -> None:
    """Print what went wrong: in red on standard error, or as a JSON object on standard output."""
    if as_json:
        data = {"error": {"type": type(error).__name__, "message": str(error)}}
        _out.out(to_json(data, indent=2))
    else:
        message = printable(str(error))
        _err.print(Text.assemble(("error: ", "bold red"), (message, "red")), soft_wrap=True)


def ask(question: str) -> bool:
    """Ask on standard error, and return whether the answer is yes; end of input counts as no."""
    _err.print(Text(f"{printable(question)} [y/N] "), end="", soft_wrap=True)
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning on standard error; replaces ``warnings.showwarning``."""
    text = printable(str(message))
    _err.print(Text.assemble(("warning: ", "bold yellow"), (text, "yellow")), soft_wrap=True)


def show_interrupt(interrupt: KeyboardInterrupt) -> None:
    """Say where a stopped command goes on, if it knows."""
    message = str(interrupt) or "stopped: give the same command again to finish it."
    _err.print(printable(message), style="yellow", markup=False, soft_wrap=True)


def overview(summaries: Mapping[str, str]) -> Report:
    """Return the help of the command line as a whole."""
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
            "\n`offmarl COMMAND --help` says more. Every command takes --json.",
        ),
    )


def table(columns: Sequence[str], rows: Iterable[Iterable[Any]], title: str = "") -> RenderableType:
    """Return a table; numbers are aligned on the right.

    Parameters
    ----------
    columns
        The headings.
    rows
        Their cells: numbers, or text, in which square brackets mean themselves.
    title
        Printed above.
    """
    grid = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    longest = 0
    for row in rows:
        cells = list(row)
        for column, cell in zip(grid.columns, cells, strict=True):
            if isinstance(cell, int | float):
                column.justify, column.no_wrap = "right", True  # a number broken in two is another
        texts = [Text(one_line(number(cell))) for cell in cells]
        longest = max(longest, texts[0].cell_len)
        grid.add_row(*texts)
    _fit(grid, longest)
    return Group(Text(title, style="bold"), grid) if title else grid


def _fit(grid: Table, longest: int) -> None:
    """Settle what gives way where a table is wider than the terminal: headings, then text.

    ``longest`` is the length of the longest cell in the first column.
    """
    unbounded = _out.options.update(max_width=sys.maxsize)
    narrow = Measurement.get(_out, unbounded, grid).maximum > _out.width
    for column in grid.columns:
        column.overflow = "fold"  # a path cut short is of no use
        if narrow and column.no_wrap:
            column.header = str(column.header).replace(" ", "\n")
    # Names are copied from here: they are not broken into lines while there is room for the rest.
    grid.columns[0].no_wrap = longest <= _out.width // 2


def grid(facts: Mapping[str, Any]) -> Table:
    """Return facts by name, one below the other."""
    rows = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        text = value if isinstance(value, str) else to_json(value)
        rows.add_row(Text(one_line(name), style="bold"), Text(printable(text), overflow="fold"))
    return rows


def as_is(text: Any) -> RenderableType:
    """Return text that is not broken into lines, so that it can be copied from the terminal."""
    text = printable(str(text))
    return Group(Text(text, no_wrap=True, overflow="ignore"))  # a bare Text would be wrapped
