"""Metrics, marl-eval JSON, and progress."""

import errno
import io
import json
import math
import os
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import tracking


def test_records_come_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracking.append(path, {"seed": 0, "step": np.int64(1), "loss": jnp.float32(0.5)})
    losses = {"seed": 0, "step": 2, "loss": [1.5, math.nan]}
    tracking.append(path, losses, {"seed": 0, "step": 3})
    assert tracking.read(path) == [
        {"seed": 0, "step": 1, "loss": 0.5},
        {"seed": 0, "step": 2, "loss": [1.5, None]},
        {"seed": 0, "step": 3},
    ]


def test_reading_what_is_not_there_gives_nothing(tmp_path):
    assert tracking.read(tmp_path / "metrics.jsonl") == []
    tracking.cut(tmp_path / "metrics.jsonl", 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("step", wrong) for wrong in (10**30, -1)),
        ("seed", 2**31),
        ("wall_time", None),
        *(("loss", wrong) for wrong in (10**30, 1e308, [10**400], "x")),
    ],
)
def test_numbers_that_no_run_logs_are_damage(tmp_path, field, value):
    path = tmp_path / "metrics.jsonl"
    row = {"seed": 0, "step": 1, "loss": [-1e38, 2**62, None]}
    path.write_text(f"{json.dumps(row)}\n{json.dumps(row | {field: value})}\n")
    with pytest.warns(UserWarning, match="is damaged from line 2 on"):
        assert tracking.read(path) == [row]


@pytest.mark.parametrize("torn", ["", '{"step": 5, "lo', '{"step": 5}'])
def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path, torn):
    full, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    records = [{"seed": 0, "step": step, "loss": 1 / step} for step in range(1, 7)]
    tracking.append(full, *records)
    tracking.append(resumed, *records[:4])
    with resumed.open("a") as file:
        file.write(torn)
    tracking.cut(resumed, step=3)
    tracking.append(resumed, *records[3:])
    assert resumed.read_bytes() == full.read_bytes()
    assert (tracking.last(full, "loss"), tracking.last(full, "speed")) == (1 / 6, 0)


@pytest.mark.parametrize(
    ("given", "published"),
    [
        ("random", "random"),
        ("red=/home/me/runs/a@*/*/greedy+scripted:2", "red=runs/a@*/*/greedy+scripted:2"),
        ("/home/me=1/my@place/runs/a@0/3:0.5", "runs/a@0/3:0.5"),
        ("blue=/home/me/code/mine.py:f", "blue=code/mine.py:f"),
        ("red=/home/me+you/my/runs/a@0+/home/me+/runs/b:2+random", "red=runs/a@0+runs/b:2+random"),
        ("/home/me+you/runs/a+b", "runs/a+b"),
        ("/home/me@1/my/runs/a@0/best/greedy", "runs/a@0/best/greedy"),
    ],
)
def test_what_is_published_does_not_say_where_opponents_are(given, published):
    of_code = {"policy": "/home/me/code/mine.py:f"}
    record = {
        "args": {"opponents": [given], "weight": of_code["policy"]},
        "opponents": {"red": of_code, "blue": {"members": [of_code, {"run": "a"}]}},
    }
    public, short = tracking.publishable(record), {"policy": "code/mine.py:f"}
    assert public["args"] == {"opponents": [published], "weight": short["policy"]}
    assert public["opponents"] == {"red": short, "blue": {"members": [short, {"run": "a"}]}}


def test_json_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "run.json"
    tracking.write_json(path, {"seeds": (0, 1), "vault": tmp_path, "loss": math.inf})
    before = path.read_text()
    assert json.loads(before) == {"seeds": [0, 1], "vault": str(tmp_path), "loss": None}
    with pytest.raises(AttributeError):
        tracking.write_json(path, {"seeds": object()})
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_a_file_that_cannot_be_written_stays_and_is_named(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "page.html"
    tracking.replace_file(path, "before")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*page\.html"):
        tracking.replace_file(path, b"after")
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_outputs_go_through_links_and_to_pipes(tmp_path):
    pipe, link, real = (tmp_path / name for name in ("pipe", "link", "real"))
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    tracking.write_output(pipe, "text")
    assert os.read(reader, 9) == b"text" and pipe.is_fifo()
    os.close(reader)
    real.write_text("before")
    link.symlink_to(real)
    tracking.write_output(link, b"after")
    assert link.is_symlink() and real.read_text() == "after"


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.ENOSPC, "full")])
def test_progress_that_cannot_be_written_ends_nothing(error, monkeypatch):
    def fail(_text):
        raise error

    file = SimpleNamespace(write=fail, flush=lambda: None, isatty=lambda: False)
    monkeypatch.setattr(tracking, "_console", tracking._Console(file=file))
    monkeypatch.setenv("OFFMARL_QUIET", "0")
    tracking.notice("nobody reads this")
    with tracking.progress("train", 2) as advance:
        advance(2)


@pytest.fixture
def screen(monkeypatch):
    """Return the output of progress on a terminal, or elsewhere."""

    def watch(terminal: bool) -> io.StringIO:
        text = io.StringIO()
        console = tracking._Console(file=text, force_terminal=terminal, width=120)
        monkeypatch.setattr(tracking, "_console", console)
        monkeypatch.setenv("OFFMARL_QUIET", "0")
        return text

    return watch


def test_progress_on_a_terminal_is_a_bar(screen):
    text = screen(terminal=True)
    with tracking.progress("train bc", 2000) as advance:
        advance(1000, "return 1.50")
        advance(1000, "wrote runs/[x]/[/red]")
    assert "train bc" in text.getvalue() and "wrote runs/[x]/[/red]" in text.getvalue()
    assert "2,000/2,000" in text.getvalue()


def test_progress_elsewhere_is_a_line_now_and_then(screen):
    text = screen(terminal=False)
    with tracking.progress("train bc", 2000, completed=1000) as advance:
        advance(500)
        advance(500, "return 1.50")
    (line,) = text.getvalue().splitlines()
    assert line.startswith("train bc: 2,000/2,000, ")
    assert line.endswith("return 1.50")


def test_slow_progress_shows_the_time_of_one_piece(screen, monkeypatch):
    text = screen(terminal=False)
    clock = iter([0.0, 95.0, 190.0])
    monkeypatch.setattr(tracking.time, "monotonic", lambda: next(clock))
    with tracking.progress("benchmark", 2) as advance:
        advance(1, "bc")
        advance(1, "maicq")
    assert text.getvalue().splitlines() == [
        "benchmark: 1/2, 95 s each, 0:01:35 left, bc",
        "benchmark: 2/2, 95 s each, maicq",
    ]


def test_rates_and_times_are_those_of_the_last_seconds_without_compilation(screen, monkeypatch):
    text = screen(terminal=False)
    clock = iter([0.0, 100.0, 110.0, 119.9])
    monkeypatch.setattr(tracking.time, "monotonic", lambda: next(clock))
    with tracking.progress("train bc", 1000, note="compiling") as advance:
        advance(1)
        advance(200)
        advance(200)
    assert text.getvalue().splitlines() == [
        "train bc: compiling",
        "train bc: 1/1,000",
        "train bc: 201/1,000, 20.0/s, 0:00:40 left",
    ]


@pytest.mark.parametrize(
    ("total", "seconds", "unit", "shown"),
    [
        (2_000_000, 2.0, "steps", "2,000,000/2,000,000, 1.0M/s"),
        (1_999_000, 2.0, "steps", "1,999,000/1,999,000, 999.5k/s"),
        (2_000, 2.0, "bytes", "2,000/2,000 B, 1.0kB/s"),
        (200, 2.0, "steps", "200/200, 100/s"),
        (199, 2.0, "steps", "199/199, 99.5/s"),
        (1, 2.0, "steps", "1/1, 0.5/s"),
        (1, 4.0, "steps", "1/1, 4 s each"),
        (1, 4.0, "bytes", "1/1 B, 0.2B/s"),
    ],
)
def test_a_rate_has_few_digits(screen, monkeypatch, total, seconds, unit, shown):
    text, clock = screen(terminal=False), iter([0.0, seconds])
    monkeypatch.setattr(tracking.time, "monotonic", lambda: next(clock))
    with tracking.progress("pull", total, unit=unit, note="compiling") as advance:
        advance(total)
    assert text.getvalue().splitlines() == ["pull: compiling", f"pull: {shown}"]


def test_progress_can_be_silenced(screen, monkeypatch):
    text = screen(terminal=True)
    monkeypatch.setenv("OFFMARL_QUIET", "1")
    with tracking.progress("train bc", 1) as advance:
        advance()
    assert text.getvalue() == ""
