"""The examples run, as a user would run them."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_own_learner(random_data):
    command = [sys.executable, EXAMPLES / "own_learner.py", random_data("probe/observation")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    assert result.stdout.startswith("cross-entropy: 0.693 at first, 0.6")
    asked = subprocess.run(command[:2], capture_output=True, text=True, check=False, env=os.environ)
    assert asked.returncode == 1 and "own_learner.py vaults/" in asked.stderr
