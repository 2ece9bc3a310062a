"""Control characters are escaped before text from data is printed."""

import io

import pytest
from rich.table import Table

from offmarl.cli import output
from offmarl.errors import OffmarlError
from offmarl.terminal import number, one_line, printable

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


def _table_of(text):
    view = Table(text, title=text)
    view.add_row(text)
    return view


PRINTING = {
    "a warning": lambda text: output.show_warning(UserWarning(text)),
    "an interrupt": lambda text: output.show_interrupt(KeyboardInterrupt(text)),
    "an error": lambda text: output.show_error(OffmarlError(text), as_json=False),
    "a question": output.ask,
    "text": lambda text: output.show(output.Report({}, text), as_json=False),
    "a view": lambda text: output.show(output.Report({}, _table_of(text)), as_json=False),
    "facts": lambda text: output.show(output.Report({}, output.grid({text: text})), as_json=False),
    "lines": lambda text: output.show(output.Report({}, output.as_is(text)), as_json=False),
    "cells": lambda text: output.show(
        output.Report({}, output.table([text], [[text]], text)), as_json=False
    ),
    "JSON": lambda text: output.show(output.Report({text: text}, ""), as_json=True),
    "an error as JSON": lambda text: output.show_error(OffmarlError(text), as_json=True),
    "the overview": lambda text: output.show(output.overview({text: {text: text}}), as_json=False),
}


@pytest.mark.parametrize("printed", PRINTING.values(), ids=PRINTING)
def test_every_output_function_escapes_control_characters(printed, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    hostile = "[x]" + "".join(text for text in HOSTILE if text != "\udc80")
    printed(hostile)
    out, err = capsys.readouterr()
    text = out + err
    assert "[x]" in text
    assert printable(text) == text


def test_what_people_write_stays():
    for text in ("", "a b\n\tc", "Größe 日本 עברית ▁█ ✓ [x]", "क्‍ष", "👩‍🚀"):
        assert printable(text) == text


def test_numbers_round_to_four_digits():
    values = [999.94, 999.95, -999.96, 12.345678, 1234.5, 1e15, 9.9e14, 7]
    texts = "999.9 1,000 -1,000 12.35 1,234 1.000e+15 990,000,000,000,000 7"
    assert list(map(number, values)) == texts.split()
