"""Output for terminals: text with control characters escaped, formatted numbers, progress.

Text in vaults, cards, archives and answers of a hub is untrusted. Escape sequences in it could move
the cursor, overwrite the screen or set the window's title, and bidirectional overrides could make
one name look like another.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from pathlib import PurePath
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from offmarl.paths import path_text

_KEPT = "\n\t\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
"""Line breaks, tabs, and the joiners that some scripts need."""
_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Control and format characters, lone surrogates, and separators of lines and paragraphs."""
_PLAIN = re.compile(r"[\n\t -~]*")


def printable(text: str) -> str:
    r"""Return text with its control characters, but line breaks and tabs, as Python writes them.

    Examples
    --------
    >>> printable("3m\x1b[2J")
    '3m\\x1b[2J'
    """
    if _PLAIN.fullmatch(text):
        return text
    return "".join(map(_escape, text))


def one_line(text: str) -> str:
    """Return `printable` text with line breaks and tabs escaped, too."""
    return printable(text).replace("\n", r"\n").replace("\t", r"\t")


def _escape(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _CATEGORIES:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode()


def number(cell: Any) -> str:
    """Format a cell: thousands separated, floats with four digits, None as empty text.

    Of a mapping, such as the returns of several teams, every entry is named.
    """
    match cell:
        case None:
            return ""
        case int():
            return f"{cell:,}"
        case float():
            return f"{cell:,.0f}" if 999.95 <= abs(cell) < 1e15 else f"{cell:#.4g}"
        case Mapping():
            return ", ".join(f"{name} {number(entry)}" for name, entry in cell.items())
        case _:
            return str(cell)


_GAP = 2
"""Width of the space between two columns."""


class _FittedLines:
    """Lines that a function makes for the width of a terminal."""

    def __init__(self, lines: Callable[[Console, int], Iterator[Text]]):
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        return self._lines(console, options.max_width)


def table(columns: Sequence[str], rows: Iterable[Iterable[Any]], title: str = "") -> RenderableType:
    """Return a table of numbers, paths and text that fits the terminal, and cuts none of them.

    If the columns do not fit beside each other, the cells of a row are listed below each other.
    """
    cells = [[*row] for row in rows]
    return _FittedLines(lambda console, width: _table(columns, cells, title, console, width))


def _table(
    columns: Sequence[str], rows: Sequence[list[Any]], title: str, console: Console, width: int
) -> Iterator[Text]:
    by_column = [*zip(columns, *rows, strict=True)]
    right = [any(isinstance(cell, int | float) for cell in below) for _, *below in by_column]
    most = [max(cell_len(_shown(cell)) for cell in column) for column in by_column]
    least = [most[0], *(max(map(_longest_word, map(_text, column))) for column in by_column[1:])]
    room = width - _GAP * (len(columns) - 1)
    lead = max(cell_len(columns[0]), room - sum(least[1:]))
    if lead < most[0]:  # long names have lines of their own, so the other columns take the room
        lead = max(cell_len(columns[0]), min(lead, room - sum(most[1:])))
    least[0] = most[0] = min(most[0], lead)
    if title:
        yield Text(printable(title), style="bold")
    yield Text()
    if sum(least) > room:
        for name, *rest in rows:
            texts = [_Whole(_shown(name)), *map(_text, rest)]
            yield from _facts([*zip(columns, texts, strict=True)], console, width)
            yield Text()
        return
    widths = _shared(room, least, most)
    yield from _folded(columns, widths, right, console, ["bold"] * len(widths))
    yield Text("─" * (sum(widths) + width - room))
    for name, *rest in rows:
        first = _shown(name)
        # Users copy names from the first column: one that is too long has a line of its own.
        if cell_len(first) > widths[0]:
            yield _whole(first)
            first = ""
        yield from _folded([first, *map(_shown, rest)], widths, right, console)
    yield Text()


def grid(values: Mapping[str, str | PurePath]) -> RenderableType:
    """Return facts with their names, one per line; paths are kept whole."""
    facts = [
        # Escaped here, because Rich drops some control characters.
        (name, _text(x) if isinstance(x, PurePath) else printable(x))
        for name, x in values.items()
    ]
    return _FittedLines(lambda console, width: _facts(facts, console, width))


def _facts(facts: Sequence[tuple[str, str]], console: Console, width: int) -> Iterator[Text]:
    lead = max((cell_len(name) for name, _ in facts), default=0)
    for name, value in facts:
        least, room = _longest_word(value), width - lead - _GAP
        if least <= room:  # otherwise the value has a line of its own
            yield from _folded([name, value], [lead, room], [False] * 2, console, ["bold", ""])
        else:
            yield _whole(name, "bold")
            yield from _folded([value], [max(width, least)], [False], console)


def _folded(
    cells: Sequence[str],
    widths: Sequence[int],
    right: Sequence[bool],
    console: Console,
    styles: Iterable[str] = (),
) -> Iterator[Text]:
    """Yield the lines of a row whose columns have these widths."""
    columns = [
        [part.plain.rstrip() for part in Text(cell).wrap(console, width)]
        for cell, width in zip(cells, widths, strict=True)
    ]
    for parts in zip_longest(*columns, fillvalue=""):
        line = _whole("")
        for part, width, to_right, style in zip_longest(parts, widths, right, styles):
            gap = " " * (width - cell_len(part))
            line.append(gap + part if to_right else part + gap, style or None)
            line.append(" " * _GAP)
        line.rstrip()
        yield line


def _whole(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ignore")


def _shown(cell: Any) -> str:
    return one_line(path_text(cell) if isinstance(cell, PurePath) else number(cell))


class _Whole(str):
    """A text that is not wrapped, such as a path."""


def _text(cell: Any) -> str:
    return _Whole(_shown(cell)) if isinstance(cell, PurePath) else _shown(cell)


def _longest_word(text: str) -> int:
    return max(map(cell_len, [text] if isinstance(text, _Whole) else text.split()), default=0)


def _shared(room: int, least: Sequence[int], most: Sequence[int]) -> list[int]:
    """Return the widths of columns: spare room goes to the narrowest that need more."""
    widths = [*least]
    for _ in range(room - sum(least)):
        if growing := [i for i, width in enumerate(widths) if width < most[i]]:
            widths[min(growing, key=widths.__getitem__)] += 1
    return widths


_BLOCKS = "▁▂▃▄▅▆▇█"


def bars(heights: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """Draw numbers as bars of one line, from ``low`` to ``high``: by default their extremes."""
    if not len(heights):
        return ""
    low = min(heights) if low is None else low
    span = ((max(heights) if high is None else high) - low) or 1.0
    levels = (round((height - low) / span * (len(_BLOCKS) - 1)) for height in heights)
    return "".join(_BLOCKS[level] for level in levels)


def interval(value: float, low: float | None, high: float | None) -> str:
    """Format an estimate with its confidence interval, if it has one."""
    return number(value) if low is None else f"{number(value)} [{number(low)}, {number(high)}]"


def spread_line(values: Mapping[str, float]) -> str:
    """Format what `offmarl.statistics.spread` returns."""
    text = "mean {mean:.4g}, std {std:.4g}, from {min:.4g} to {max:.4g}"
    return text.format(**values) if values else ""


Advance = Callable[[int], object]
"""Called with the number of steps done since the last call."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Shows the progress of long work. A context manager that takes a description and the total number
of steps, and returns an `Advance`, such as `offmarl.tracking.progress`."""


def silent(steps: int = 1, note: str = "") -> None:
    """No-op `Advance`."""


@contextmanager
def quiet(description: str, total: int) -> Iterator[Advance]:
    """Show nothing; a `Progress`."""
    del description, total
    yield silent
