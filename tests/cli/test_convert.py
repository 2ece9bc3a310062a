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
from offmarl.vault.convert.common import Imported, ImportedRow
from offmarl.vault.format import encoding


@pytest.mark.parametrize("layout", ["pymarl", "numpy", "zarr"])
def test_there_and_back(offmarl, xor_file, layout):
    first = offmarl("convert", xor_file, "a.vlt", "--json").json
    out = "out.zarr" if layout == "zarr" else "out.npz"
    data = offmarl("convert", "a.vlt", out, "--to", layout, "--json").json
    assert (data["format"], data["episodes"], data["steps"]) == (layout, 3, 150)
    back = offmarl("convert", out, "b.vlt", "--from", layout, "--json").json
    assert back["digest"] == first["digest"]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("xor.npz", ["--to", "numpy", "--from", "pymarl"], "--to writes a vault in another"),
        ("xor.npz", ["--from", "zarr", "--time-limit", "5"], "takes no --time-limit"),
        ("xor.npz", ["--from", "pymar"], "no layout named"),
        ("a.vlt", ["--to", "zar"], "no layout named"),
        ("a.vlt", [], "is a vault already: give --to"),
    ],
)
def test_options_that_do_not_belong(offmarl, xor_file, source, options, message):
    assert offmarl("convert", xor_file, "a.vlt").code == 0
    refused = offmarl("convert", source, "out", *options)
    assert refused.code == 2 and message in refused.err


@contextmanager
def read_counts(source):
    """Read a text file with the lengths of episodes.

    A layout that a test adds: this function, and its line in `READERS`.
    """
    lengths = [int(word) for word in Path(source).read_text().split()]
    spec = EnvSpec("", 1, 1, 1, Continuous(1), state="concatenated")
    records = (
        ImportedRow(encoding.from_disk({name: x[None] for name, x in arrays.items()}, spec))
        for arrays in map(episode, lengths)
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
    """Start the command line with another reader in `READERS`."""
    with monkeypatch.context() as patch:
        patch.setitem(convert.READERS, "counts", read_counts)
        importlib.reload(commands)
        yield
    importlib.reload(commands)


@pytest.mark.usefixtures("with_counts")
def test_an_import_format_is_a_reader_and_a_line(offmarl, tmp_path):
    (tmp_path / "lengths.txt").write_text("3 1 4")
    data = offmarl("convert", "lengths.txt", "a.vlt", "--from", "counts", "--json").json
    assert (data["episodes"], data["steps"]) == (3, 8)
    dataset = vault.import_dataset("lengths.txt", "b.vlt", "counts")
    assert dataset.episodes.length.tolist() == [3, 1, 4]
    assert dataset.episodes.cause.tolist() == ["terminated"] * 3
    text = " ".join(offmarl("convert", "--help").out.replace("│", "").split())
    assert "counts for a text file with the lengths of episodes" in text
    refused = offmarl("convert", "lengths.txt", "c.vlt", "--from", "counts", "--time-limit", 5)
    assert refused.code == 2 and "takes no --time-limit" in refused.err


def test_every_layout_is_in_the_help(offmarl):
    text = offmarl("convert", "--help").out
    assert all(f"{name}" in text for name in (*convert.READERS, *convert.WRITERS))
    assert all(reader.__doc__.startswith("Read ") for reader in convert.READERS.values())
