"""Environments, seeds and batches on several devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(work: str, *arguments: object, devices: int = 8, optimised: bool = False) -> object:
    """Run a function of `several_devices` in a process with some devices; return its result."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": str(devices)}
    if optimised:  # as users compile
        for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"):
            environment.pop(name, None)
    command = [sys.executable, "-m", "tests.programs.several_devices", work, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "names",
    ["swarm/pursuit-3-1,classic/xor", "swarm/flock-4", "jaxmarl/smax/3m", "jumanji/lbf"],
)
def test_random_recordings_have_the_same_bits_on_any_number_of_devices(names, tmp_path):
    for name, digests in run("record", tmp_path, names, "1,2,4,8", optimised=True).items():
        assert len(set(digests)) == 1, name
