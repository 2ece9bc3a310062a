"""Escape control characters before printing text from data.

Names and sentences in vaults, cards, archives and answers of a hub are written by others. Escape
sequences in them could move the cursor, rewrite what is on the screen or set the window's title,
and bidirectional overrides could show one name for another.
"""

import re
import unicodedata

_KEPT = "\n\t\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
"""Line breaks, and what spelling needs in some scripts."""
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
