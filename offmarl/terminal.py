"""Output for terminals: text with control characters escaped, formatted numbers, progress.

Text in vaults, cards, archives and answers of a hub is untrusted. Escape sequences in it could move
the cursor, overwrite the screen or set the window's title, and bidirectional overrides could make
one name look like another.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
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
            return f"{cell:,.0f}" if abs(cell) >= 1e3 else f"{cell:#.4g}"
        case Mapping():
            return ", ".join(f"{name} {number(entry)}" for name, entry in cell.items())
        case _:
            return str(cell)


def interval(value: float, low: float | None, high: float | None) -> str:
    """Format an estimate with its confidence interval, if it has one."""
    return number(value) if low is None else f"{number(value)} [{number(low)}, {number(high)}]"


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
