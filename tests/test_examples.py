"""The examples run as a user runs them: as a file, from another directory."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: object, where: Path) -> str:
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ, cwd=where
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_published_data(random_data, tmp_path):
    said = run("published_data.py", random_data("probe/observation"), where=tmp_path)
    assert said.startswith("cross-entropy: 0.693 at first, 0.6")
