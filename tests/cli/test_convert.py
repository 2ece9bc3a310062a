"""``convert`` in both directions."""

import importlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from offmarl import vault
from offmarl.cli import transform as commands
from offmarl.types import Continuous, EnvSpec
from offmarl.vault import convert
from offmarl.vault.convert.common import Imported, Record
from offmarl.vault.format import encoding


@pytest.fixture
def batch(tmp_path):
    """Two episodes of PyMARL's, of three and two steps."""
    filled = np.zeros((2, 4, 1), np.int64)
    filled[0], filled[1, :3] = 1, 1
    terminated = np.zeros((2, 4, 1), np.uint8)
    terminated[0, 2] = terminated[1, 1] = 1
    path = tmp_path / "data.npz"
    np.savez(
        path,
        obs=np.ones((2, 4, 2, 3), np.float32),
        actions=np.ones((2, 4, 2, 1), np.int64),
        avail_actions=np.ones((2, 4, 2, 5), np.int32),
        reward=np.ones((2, 4, 1), np.float32),
        terminated=terminated,
        filled=filled,
    )
    return path


@pytest.mark.parametrize("layout", ["pymarl", "numpy", "zarr"])
def test_there_and_back(offmarl, tmp_path, batch, layout):
    first = offmarl("convert", str(batch), str(tmp_path / "a.vlt"), "--json").json
    out = tmp_path / ("out.npz" if layout != "zarr" else "out.zarr")
    told = offmarl("convert", str(tmp_path / "a.vlt"), str(out), "--to", layout, "--json").json
    assert (told["format"], told["episodes"], told["steps"]) == (layout, 2, 5)
    command = ["convert", str(out), str(tmp_path / "b.vlt"), "--from", layout, "--json"]
    assert offmarl(*command).json["digest"] == first["digest"]


def test_options_that_do_not_belong(offmarl, tmp_path, batch):
    out = str(tmp_path / "a.vlt")
    for options in (
        ["--to", "numpy", "--from", "pymarl"],
        ["--from", "zarr", "--time-limit", "5"],
    ):
        result = offmarl("convert", str(batch), out, *options)
        assert result.code == 2
        assert "--to" in result.err or "--time-limit" in result.err
    offmarl("convert", str(batch), out)
    result = offmarl("convert", out, str(tmp_path / "out.npz"))
    assert result.code == 2
    assert "is a vault already: give --to" in result.err


@contextmanager
def read_counts(source):
    """Read a text file with the lengths of episodes.

    A layout that a test adds: this function, and its line in `READERS`.
    """
    lengths = [int(word) for word in Path(source).read_text().split()]
    spec = EnvSpec("", 1, 1, 1, Continuous(1), state="concatenated")
    records = (
        Record(encoding.from_disk({name: x[None] for name, x in one.items()}, spec))
        for one in map(episode, lengths)
    )
    yield Imported(spec, {"format": "counts"}, records, len(lengths))


def episode(length):
    ends = (np.arange(length) == length - 1)[:, None]
    numbers = np.arange(length, dtype=np.float32)[:, None, None]
    return {
        "observations": numbers,
        "actions": numbers * 0,
        "rewards": np.ones((length, 1), np.float32),
        "terminals": ends,
    }


@pytest.fixture
def with_counts(monkeypatch):
    """Start the command line with one more line in `READERS`."""
    with monkeypatch.context() as patch:
        patch.setitem(convert.READERS, "counts", read_counts)
        importlib.reload(commands)
        yield
    importlib.reload(commands)


@pytest.mark.usefixtures("with_counts")
def test_an_import_format_is_a_reader_and_a_line(offmarl, tmp_path):
    (tmp_path / "lengths.txt").write_text("3 1 4")
    made = offmarl("convert", "lengths.txt", "a.vlt", "--from", "counts", "--json").json
    assert (made["episodes"], made["steps"]) == (3, 8)
    found = vault.import_dataset("lengths.txt", "b.vlt", "counts")
    assert found.episodes.length.tolist() == [3, 1, 4]
    assert found.episodes.cause.tolist() == ["terminated"] * 3
    shown = " ".join(offmarl("convert", "--help").out.replace("│", "").split())
    assert "counts for a text file with the lengths of episodes" in shown
    refused = offmarl("convert", "lengths.txt", "c.vlt", "--from", "counts", "--time-limit", 5)
    assert refused.code == 2 and "takes no --time-limit" in refused.err


def test_every_layout_is_in_the_help(offmarl):
    shown = offmarl("convert", "--help").out
    assert all(f"{name}" in shown for name in (*convert.READERS, *convert.WRITERS))
    assert all(read.__doc__.startswith("Read ") for read in convert.READERS.values())


def test_a_layout_that_does_not_exist(offmarl, batch):
    for options in (["--from", "pymar"], ["--to", "zar"]):
        source = str(batch)
        if options[0] == "--to":
            offmarl("convert", source, "a.vlt")
            source = "a.vlt"
        refused = offmarl("convert", source, "out", *options)
        assert refused.code == 2 and "no layout named" in refused.err
