"""Runs the command line in this process."""

import json
import sys
from typing import Any, NamedTuple

import pytest

from offmarl import cli
from offmarl.cli import output


class Outcome(NamedTuple):
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def offmarl(monkeypatch, capsys, tmp_path):
    """Run a command in a directory of its own: ``offmarl("ls", "--json")``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFMARL_QUIET", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(output._out, "width", 200)  # whatever it was when this was imported

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["offmarl", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
        except SystemExit as stop:
            return Outcome(int(stop.code or 0), *capsys.readouterr())
        return Outcome(0, *capsys.readouterr())

    return run
