"""Launches of a toy, by any of the launchers."""

import os

import pytest

from offmarl import launch as launching
from offmarl.launch import slurm as slurm_engine
from tests.launch import slurm
from tests.launch.toy import BLOCKS, ENTRY, Squares


@pytest.fixture
def engine(request, tmp_path, monkeypatch):
    """The name of a launcher, which can be used; by default local.

    With OFFMARL_REAL_SLURM=1 in the environment it is the SLURM that is installed.
    """
    name = getattr(request, "param", "local")
    pytest.importorskip({"slurm": "submitit", "ray": "ray", "local": "offmarl"}[name])
    monkeypatch.setattr(slurm_engine, "_LOST_SECONDS", 1.0)
    monkeypatch.setattr(slurm_engine, "_ASK_SECONDS", 0.2)
    if name == "slurm" and "OFFMARL_REAL_SLURM" not in os.environ:
        slurm.install(tmp_path / "bin")
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return name


@pytest.fixture
def launch(engine, tmp_path):
    """Launch the toy in tasks: ``launch("once:3", tasks=2)``."""

    def run(mishap="", tasks=4, workers=2, launcher=engine, options=None):
        path = tmp_path / "out"
        arguments, work = (str(path), str(BLOCKS), mishap), Squares(path, BLOCKS)
        return launching.launch(
            work, ENTRY, arguments, tasks, launcher, workers, options or {}
        ).fresh

    return run


@pytest.fixture
def directory(tmp_path):
    """The directory of the tasks."""
    return tmp_path / ".out.tasks"
