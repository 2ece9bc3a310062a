"""What others wrote is shown on a terminal, and never obeyed."""

import pytest

from offmarl.terminal import one_line, printable

HOSTILE = {
    "\x1b[2J": r"\x1b[2J",  # clears the screen
    "\x1b]0;title\x07": r"\x1b]0;title\x07",
    "\x9b31m": r"\x9b31m",  # an escape sequence in one character of C1
    "\r\x08\x7f\x00": r"\r\x08\x7f\x00",
    "a\u202egood\u2066": r"a\u202egood\u2066",  # overrides of direction
    "\u2028\ufeff\u200b": r"\u2028\ufeff\u200b",
    "\udc80": r"\udc80",  # a byte of a file's name that is not UTF-8
}


@pytest.mark.parametrize(("text", "shown"), HOSTILE.items())
def test_control_characters_are_escaped(text, shown):
    assert printable(f"<{text}>") == f"<{shown}>"
    assert one_line(f"{text}\n\t") == rf"{shown}\n\t"


def test_what_people_write_stays():
    for text in ("", "a b\n\tc", "Größe 日本 עברית ▁█ ✓ [x]", "क्‍ष", "👩‍🚀"):
        assert printable(text) == text
