"""The command line in this process, as tests/cli has it."""

import jax
import pytest

from offmarl.benchmark import tasks
from tests.cli.conftest import offmarl

__all__ = ["offmarl"]


@pytest.fixture(autouse=True)
def released(monkeypatch):
    """Count how often memory is released after a program, which takes a second, and do not.

    Other tests of this process need the programs that JAX has compiled.
    """
    times = []
    monkeypatch.setattr(jax, "clear_caches", lambda: times.append("compiled"))
    monkeypatch.setattr(tasks.gc, "collect", lambda: times.append("garbage"))
    return times
