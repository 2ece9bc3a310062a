"""Tables keep every digit and letter at any width of the terminal."""

import io
import time
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, Group

from offmarl import terminal, tracking
from offmarl.cli import output
from offmarl.launch.launching import Task, _summary, rows_of
from offmarl.launch.task import Call, Status
from offmarl.programs.recording.online import summarise

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
    texts = [terminal.number(cell) for cell in cells]
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


def test_no_part_of_a_name_becomes_a_picture(offmarl, capsys, monkeypatch):
    monkeypatch.setenv("OFFMARL_QUIET", "0")
    name = "car.py:car:smile=1"
    output.show(output.Report({}, Group(output.table([name], [[name]]), name)), as_json=False)
    output.show_interrupt(KeyboardInterrupt(name))
    with tracking.progress(name, 1) as advance:
        advance(1, name)
    out, err = capsys.readouterr()
    assert (out.count(name), err.count(name)) == (3, 3)


LONG = Path("a directory/with spaces", *["and-a-name-of-many-letters"] * 3, "x.vlt")


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
    gaps = printed(["a", "n"], [["x", 12], ["y", None], ["z", 3]], 40).splitlines()
    assert gaps[1:] == ["a   n", "\u2500" * 5, "x  12", "y", "z   3", ""]  # numbers end in line


def test_a_name_with_a_line_of_its_own_leaves_the_room_to_the_other_columns():
    interval = "0.125 [0.100, 0.150]"
    lines = printed(["data", "run", "last"], [["long-name/" * 6, "bc (greedy)", interval]], 50)
    name, *rest = lines.splitlines()[3:5]
    assert name == "long-name/" * 6 and [x.strip() for x in rest] == [f"bc (greedy)  {interval}"]


NUMBERS_OF_ALL_KINDS = [-343.125, 999.594, 1e-300, -1e300, 2**70, 0.5, float("nan"), 12_345_678]
WIDE = "\N{CJK UNIFIED IDEOGRAPH-570B}" * 12


def kinds_of_tables(cells):
    """Every output with columns, with the same cells."""
    columns = [f"argument_number_{number}" for number in range(len(cells))]
    rows = [dict(zip(columns, row, strict=True)) for row in (cells, cells[::-1])]
    yield output.table(columns, [row.values() for row in rows], "title")
    yield output.records(rows)
    yield output.grid({name: x if x is LONG else terminal.number(x) for name, x in rows[0].items()})
    path = {"path": "a-directory/" * 9 + "x.vlt"}
    yield summarise(Path("run"), [{"tier": WIDE, **row, **path} for row in rows], "recorded").view


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("count", [1, 3, 12])
def test_no_kind_of_table_cuts_a_number_at_any_width(width, count):
    numbers = [NUMBERS_OF_ALL_KINDS[at % 8] for at in range(count)]
    texts = [terminal.interval(x, x - 1, x + 1) if x == 0.5 else x for x in numbers]
    for view in kinds_of_tables([WIDE, *texts, LONG]):
        console = Console(file=io.StringIO(), width=width)
        console.print(view, crop=False, overflow="ignore")
        lines = console.file.getvalue().splitlines()
        words = [word for line in lines for word in line.split()]
        for text in texts:
            assert all(word in words for word in terminal.number(text).split())
        assert any(str(LONG) in line for line in lines)
        free = [line for line in lines if str(LONG) not in line and "a-directory" not in line]
        assert all(cell_len(line) <= max(width, 40) for line in free)


def test_tasks_tell_their_results_and_when_they_end(tmp_path, monkeypatch):
    """Two took 10 s; of three that are left one has run for 4 s, and one runs at a time."""
    monkeypatch.setattr(time, "time", lambda: 1_014.0)
    tasks = [
        Task(Call("e", (), n, 5, str(tmp_path), "."), f"cell {n}", [n], status=status)
        for n, status in enumerate([Status("done", since=990.0)] * 2 + [Status()] * 3)
    ]
    tasks[2].status = Status("running", since=1_010.0)
    assert "left" not in _summary(tasks)
    for task in tasks[:2]:
        task.result, task.end = "episode return 3.200", 1_000.0
    assert _summary(tasks).endswith("1 running; 0 blocks done; about 0:00:26 left")
    monkeypatch.setattr(time, "time", lambda: 1_050.0)  # it takes longer than the first ones
    assert _summary(tasks).endswith("about 0:00:57 left")  # 10 s, and twice (10 + 10 + 50) s / 3
    console = Console(file=io.StringIO(), width=120)
    console.print(rows_of(tasks))
    rows = [line.split() for line in console.file.getvalue().splitlines() if "cell" in line]
    assert [row[:3] for row in rows[:2]] == [["cell", "2", "running"], ["cell", "0", "done"]]
    assert rows[1][3:] == ["10", "s", "episode", "return", "3.200"]
    tasks[2].status = Status("running", since=50.0)
    tasks[3].status = tasks[4].status = Status("running", since=1_049.0)
    assert _summary(tasks).endswith("about 0:04:10 left")  # a task is not divided


def test_rows_that_are_listed_keep_empty_cells_addresses_and_equal_headings():
    rows = [["hf://org/name", 1.5, None], [None, 2.5, "x" * 9]]
    text = printed(["dataset", "same", "same"], rows, 22)
    assert [line.split() for line in text.splitlines() if line] == [
        ["dataset", "hf://org/name"],
        ["same", "1.500"],
        ["same"],
        ["dataset"],
        ["same", "2.500"],
        ["same", "x" * 9],
    ]
