"""A killed transform leaves nothing at its path, and the same command then succeeds."""

import subprocess
import sys
import time

import numpy as np
import pytest

from offmarl import vault
from tests.children import run

from .experience import SPEC, make

CODE = """
import sys
from offmarl import vault
vault.{call}
print("done", flush=True)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "call",
    [
        "cat([sys.argv[1]] * 2, sys.argv[2])",
        "split(*sys.argv[1:3])",
        "map(*sys.argv[1:3], reward='reward / 10')",
    ],
)
def test_killed_at_any_instant(tmp_path, call):
    source = tmp_path / "a.vlt"
    with vault.create(source, SPEC, rows=4, chunk_steps=64) as writer:
        for seed in range(10):
            writer.append(*make(rows=4, steps=1000, seed=seed))
    expected = vault.open_vault(source).num_steps
    rng, unfinished = np.random.default_rng(0), 0
    # Importing takes long and its time varies, so the clock starts when the place is first touched.
    for attempt in range(10):
        out = tmp_path / f"{attempt}.vlt"
        command = [sys.executable, "-c", CODE.format(call=call), str(source), str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            while process.poll() is None and not list(tmp_path.glob(f"*{attempt}.vlt*")):
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.5))
            process.kill()
        before = sorted(path for path, _ in vault.list_vaults(tmp_path) if path.parent == out)
        assert before or not list(out.glob("[!.]*"))
        unfinished += not before
        if not before:
            run(command)
        made = [
            vault.open_vault(path)
            for path, _ in vault.list_vaults(out.parent)
            if path.parent == out
        ]
        assert sum(one.num_steps for one in made) == expected * (1 + call.startswith("cat"))
        assert not [path for path in out.iterdir() if path.name.startswith(".")]
    assert unfinished
