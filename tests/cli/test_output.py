"""Tables keep every digit and letter at any width of the terminal."""

import io

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from rich.console import Console

from offmarl.cli import output

HEADINGS = ["agents", "steps", "episodes", "incomplete", "mean return"]
NUMBERS = st.lists(st.integers(0, 10**9) | st.floats(1, 1e4), min_size=1, max_size=5)
LETTERS = "abcdfgh/"


def printed(columns, rows, width):
    console = Console(file=io.StringIO(), width=width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output._out, "width", width)
        console.print(output.table(columns, rows))
    return console.file.getvalue()


@given(
    name=st.text(LETTERS, min_size=1, max_size=60),
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
    head, below = out.replace("\n", " ").split("\u2500", 1)
    for word in " ".join(headings).split():
        assert word in head.split()
    for text in texts:
        assert text in below.split()
    assert "".join(c for c in below if c in LETTERS) == name
