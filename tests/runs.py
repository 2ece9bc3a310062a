"""Directories of runs, as training would leave them, with returns of one's choice."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from offmarl import tracking
from offmarl.networks import PolicyConfig
from offmarl.types import Discrete, EnvSpec


def write_run(directory: Path, program: str, vault: str | None, returns: Sequence) -> Path:
    """Write a finished run with the final returns given, ``(seeds, episodes)``."""
    directory.mkdir(parents=True)
    seeds = list(range(len(returns)))
    run = {
        "offmarl": "0.1.0",
        "kind": "baseline",
        "program": program,
        "args": {"learning_rate": 3e-4},
        "spec": EnvSpec("swarm/coverage-3", 3, 58, 112, Discrete(5)).to_json(),
        "policy": asdict(PolicyConfig("feedforward")),
        "vault": vault,
        "seeds": seeds,
        "complete": True,
    }
    final = np.asarray(returns, float)
    evaluations = tracking.marl_eval(
        "swarm", "coverage-3", program, seeds, [], {tracking.RETURN: final}
    )
    tracking.write_json(directory / tracking.RUN_FILE, run)
    tracking.write_json(directory / tracking.MARL_EVAL_FILE, evaluations)
    return directory
