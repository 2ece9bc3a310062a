"""``convert`` in both directions."""

import importlib
from contextlib import contextmanager

import pytest

from offmarl import vault
from offmarl.cli import transform as commands
from offmarl.vault import convert

LIMIT = "--time-limit", 50


@pytest.mark.parametrize("layout", ["pymarl", "numpy", "zarr"])
def test_there_and_back(offmarl, xor_file, layout):
    first = offmarl("convert", xor_file, "a.vlt", *LIMIT, "--json").json
    out = "out.zarr" if layout == "zarr" else "out.npz"
    data = offmarl("convert", "a.vlt", out, "--to", layout, "--json").json
    assert (data["format"], data["episodes"], data["steps"]) == (layout, 3, 150)
    limit = LIMIT if layout == "pymarl" else ()
    back = offmarl("convert", out, "b.vlt", "--from", layout, *limit, "--json").json
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
    assert offmarl("convert", xor_file, "a.vlt", *LIMIT).code == 0
    offmarl.refuses(message, "convert", source, "out", *options)


@contextmanager
def read_columns(source):
    """Read columns by another name.

    A layout that a test adds: this function, and its line in `READERS`.
    """
    with convert.READERS["numpy"](source) as imported:
        yield imported


@pytest.fixture
def with_columns(monkeypatch):
    """Start the command line with another reader in `READERS`."""
    with monkeypatch.context() as patch:
        patch.setitem(convert.READERS, "columns", read_columns)
        importlib.reload(commands)
        yield
    importlib.reload(commands)


@pytest.mark.usefixtures("with_columns")
def test_an_import_format_is_a_reader_and_a_line(offmarl, xor_file):
    first = offmarl("convert", xor_file, "a.vlt", *LIMIT, "--json").json
    offmarl("convert", "a.vlt", "a.npz", "--to", "numpy")
    data = offmarl("convert", "a.npz", "b.vlt", "--from", "columns", "--json").json
    assert data["digest"] == first["digest"]
    assert vault.import_dataset("a.npz", "c.vlt", "columns").digest() == first["digest"]
    text = " ".join(offmarl("convert", "--help").out.replace("│", "").split())
    assert "columns for columns by another name" in text
    refused = offmarl("convert", "a.npz", "d.vlt", "--from", "columns", "--time-limit", 5)
    assert refused.code == 2 and "takes no --time-limit" in refused.err


def test_every_layout_is_in_the_help(offmarl):
    text = offmarl("convert", "--help").out
    assert all(f"{name}" in text for name in (*convert.READERS, *convert.WRITERS))
    assert all(reader.__doc__.startswith("Read ") for reader in convert.READERS.values())
