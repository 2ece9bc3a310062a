"""Tables keep every digit and letter at any width of the terminal."""

import io
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from rich.console import Console, Group

from offmarl.cli import output

HEADINGS = ["agents", "steps", "episodes", "incomplete", "mean return"]
NUMBERS = st.lists(st.integers(0, 10**9) | st.floats(1, 1e4), min_size=1, max_size=5)
LETTERS = "abcdfgh/"


def printed(columns, rows, width):
    console = Console(file=io.StringIO(), width=width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "_out", console)
        output.show(output.Report({}, output.table(columns, rows)), as_json=False)
    return console.file.getvalue()


@given(
    name=st.text(LETTERS, min_size=1, max_size=90),
    cells=NUMBERS,
    width=st.integers(60, 100),
)
@example(name="abcdfgh/" * 4 + "abcdf", cells=[2, 60_416, 1_208, 32, 14.33], width=80)
def test_numbers_and_names_are_never_cut(name, cells, width):
    texts = [output.number(cell) for cell in cells]
    least = sum(2 + max(len(x), 10) for x in texts)
    assume(least + 2 + 16 <= width)  # otherwise the numbers do not fit beside any name
    headings = HEADINGS[: len(cells)]
    out = printed(["path", *headings], [[name, *cells]], width)
    head, below = out.split("\u2500", 1)
    for word in " ".join(headings).split():
        assert word in head.split()
    assert name in below.split()
    rows = [line.split() for line in below.splitlines()]
    assert any(row[-len(texts) :] == texts for row in rows)
    assert all(len(line) <= width for line in out.splitlines() if line != name)


LONG = Path("a directory/with spaces", *["and-a-name-of-many-letters"] * 3, "x.vlt")


@pytest.mark.parametrize("width", [20, 40, 80, 500])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_paths_are_whole_in_any_column_at_any_width(at, width):
    row = ["name", 12_345, "some words that may be wrapped"]
    row[at] = LONG
    lines = printed(["first", "second", "third"], [row, ["x", 1, "y"]], width).splitlines()
    assert any(str(LONG) in line for line in lines)
    assert at == 1 or any("12,345" in line for line in lines)


@pytest.mark.parametrize("width", [20, 80])
def test_paths_are_whole_in_facts_and_in_sentences(width, monkeypatch):
    console = Console(file=io.StringIO(), width=width)
    monkeypatch.setattr(output, "_out", console)
    path = "and-a-name-of-many-letters/" * 4
    text = Group(output.grid({"vault": LONG, "kept in": f"{path} (of words)"}), f"wrote {path}x")
    output.show(output.Report({}, text), as_json=False)
    printed = console.file.getvalue()
    assert str(LONG) in printed and printed.count(path) == 2 and f"{path}x" in printed


def test_room_goes_to_the_columns_that_need_it():
    row = ["name", "many words that are wrapped into a few lines", "more of them"]
    first = printed(["a", "b", "c"], [row], 40).splitlines()[3]
    assert first == "name  many words that are   more of them"
