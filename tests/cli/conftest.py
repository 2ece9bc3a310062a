"""Runs the command line in this process."""

import json
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest

from offmarl import cli
from offmarl.cli import output
from tests.vault.experience import recorded

EPISODES, STEPS = 3, 50


class Outcome(NamedTuple):
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class CommandLine:
    """The command line of this process; see `offmarl`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self._patch, self._capture = monkeypatch, capsys

    def __call__(self, *arguments: object) -> Outcome:
        self._patch.setattr(sys, "argv", ["offmarl", *map(str, arguments)])
        self._capture.readouterr()
        try:
            cli.main()
        except SystemExit as stop:
            return Outcome(int(stop.code or 0), *self._capture.readouterr())
        return Outcome(0, *self._capture.readouterr())

    def succeeds(self, *arguments: object) -> Outcome:
        outcome = self(*arguments)
        assert outcome.code == 0, outcome.err
        return outcome

    def refuses(self, message: str, *arguments: object, code: int = 2) -> None:
        """Check that a command ends with a code, and with one line that has a message."""
        outcome = self(*arguments)
        assert (outcome.code, outcome.err.count("\n")) == (code, 1), outcome.err
        assert outcome.err.startswith("error: ") and message in outcome.err


@pytest.fixture
def offmarl(monkeypatch, capsys, tmp_path):
    """Run a command in a directory of its own: ``offmarl("ls", "--json")``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFMARL_QUIET", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(output._out, "width", 200)  # whatever it was when this was imported
    return CommandLine(monkeypatch, capsys)


@pytest.fixture
def xor_file(tmp_path):
    """Three episodes of the XOR game in PyMARL's layout, with 50, 0 and 25 points."""
    choices = np.zeros((EPISODES, STEPS + 1, 2), int)
    choices[0, :, 1] = 1
    choices[2, ::2, 0] = 1
    differ = choices[..., 0] != choices[..., 1]
    slots = np.arange(STEPS + 1)
    view = np.broadcast_to(np.float32([0, 1, 0, 1]), (EPISODES, STEPS + 1, 2, 4))
    path = tmp_path / "xor.npz"
    np.savez(
        path,
        obs=view,
        state=view[:, :, 0],
        actions=choices[..., None],
        avail_actions=np.ones((EPISODES, STEPS + 1, 2, 2), np.int32),
        reward=np.where(slots < STEPS, differ, 0).astype(np.float32)[..., None],
        terminated=np.tile(np.uint8(slots == STEPS - 1)[None, :, None], (EPISODES, 1, 1)),
        filled=np.ones((EPISODES, STEPS + 1, 1), int),
    )
    return path


@pytest.fixture
def pair(tmp_path):
    """Two vaults of 80 steps, a.vlt/poor and b.vlt/good."""
    for seed, path in enumerate(("a.vlt/poor", "b.vlt/good")):
        recorded(tmp_path / path, seed=seed, provenance={"seed": seed})
    return tmp_path
