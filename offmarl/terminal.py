"""Output for terminals: text with control characters escaped, formatted numbers, progress.

Text in vaults, cards, archives and answers of a hub is untrusted. Escape sequences in it could move
the cursor, overwrite the screen or set the window's title, and bidirectional overrides could make
one name look like another.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

_KEPT = "\n\t\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
"""Line breaks, tabs, and the joiners that some scripts need."""
_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Control and format characters, lone surrogates, and separators of lines and paragraphs."""
_PLAIN = re.compile(r"[\n\t -~]*")


def printable(text: str) -> str:
    r"""Return text with its control characters escaped as Python writes them.

    Parameters
    ----------
    text
        Any text. Line breaks and tabs stay.

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
            return f"{cell:,.0f}" if abs(cell) >= 999.95 else f"{cell:#.4g}"
        case Mapping():
            return ", ".join(f"{name} {number(entry)}" for name, entry in cell.items())
        case _:
            return str(cell)


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


def plot(
    x: Sequence[float],
    y: Sequence[float],
    reference: float | None = None,
    width: int = 60,
    height: int = 8,
) -> str:
    """Draw a curve as lines of text.

    Parameters
    ----------
    x, y
        The points, one or more, in ascending order of ``x``.
    reference
        A value of ``y`` that is drawn as a dashed line.
    width, height
        Numbers of characters and lines of the drawing, without its labels.
    """
    values = [*y, *([] if reference is None else [reference])]
    bottom, top = min(values), max(values)

    def line_of(value: float) -> int:
        return round((top - value) / ((top - bottom) or 1) * (height - 1))

    cells = [[" "] * width for _ in range(height)]
    if reference is not None:
        cells[line_of(reference)] = ["-" if column % 2 else " " for column in range(width)]
    for at, value in zip(x, y, strict=True):
        column = round((at - x[0]) / ((x[-1] - x[0]) or 1) * (width - 1))
        cells[line_of(value)][column] = "*"
    labels = [number(float(top)), *[""] * (height - 2), number(float(bottom))]
    margin = max(map(len, labels))
    lines = [f"{label:>{margin}} |{''.join(row)}" for label, row in zip(labels, cells, strict=True)]
    ends = number(x[0]), number(x[-1])
    axis = f"{ends[0]}{ends[1]:>{max(width - len(ends[0]), 1)}}"
    return "\n".join(line.rstrip() for line in [*lines, f"{'':{margin}}  {axis}"])


Advance = Callable[[int], object]
"""Called with the number of steps done since the last call."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Shows the progress of long work. A context manager that takes a description and the total number
of steps, and returns an `Advance`, such as `offmarl.tracking.progress`."""


def silent(steps: int) -> None:
    """No-op `Advance`."""


@contextmanager
def quiet(description: str, total: int) -> Iterator[Advance]:
    """Show nothing; a `Progress`."""
    del description, total
    yield silent
