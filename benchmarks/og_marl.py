"""Updates of a program of OG-MARL (TensorFlow 2) at the SMAX 8m shape; see `benchmarks/updates.py`.

    PYTHON benchmarks/og_marl.py CHECKOUT PROGRAM UPDATES

It prints the CPU seconds of some updates for each line of its input. PYTHON belongs to an
environment with ``tensorflow-cpu``, ``tf-keras`` and ``dm-sonnet``; CHECKOUT is OG-MARL's source.
What its programs import for data and environments is replaced by stand-ins, since every update
learns from the same batch in memory.
"""

import importlib
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

AGENTS, ACTIONS, OBSERVATION, STATE, BATCH, STEPS = 8, 14, 205, 192, 32, 20
SYSTEMS = {"maicq": "MAICQSystem", "qmix_cql": "QMIXCQLSystem", "iql_cql": "IQLCQLSystem"}
ABSENT = (
    "chex",
    "hydra",
    "jax",
    "omegaconf",
    "og_marl.environments",
    "og_marl.loggers",
    "og_marl.replay_buffers",
    "og_marl.vault_utils",
    "og_marl.vault_utils.download_vault",
    "og_marl.wrapped_environments",
    "og_marl.wrapped_environments.base",
)


def batch() -> dict[str, Any]:
    import numpy as np
    import tensorflow as tf

    rng, steps = np.random.default_rng(0), (BATCH, STEPS)
    agents = (*steps, AGENTS)
    arrays = {
        "observations": rng.normal(size=(*agents, OBSERVATION)).astype("float32"),
        "actions": rng.integers(0, ACTIONS, agents).astype("int32"),
        "rewards": rng.normal(size=agents).astype("float32"),
        "terminals": np.repeat(rng.random((*steps, 1)) < 0.03, AGENTS, -1),
        "truncations": np.zeros(agents, bool),
        "infos": {
            "state": rng.normal(size=(*steps, STATE)).astype("float32"),
            "legals": np.ones((*agents, ACTIONS), bool),
        },
    }
    return tf.nest.map_structure(tf.constant, arrays)


def main(checkout: str, program: str, updates: int) -> None:
    sys.path.insert(0, checkout)
    sys.modules.update({name: MagicMock() for name in ABSENT})
    module = importlib.import_module(f"og_marl.baselines.tf2_systems.offline.{program}")
    names = [f"agent_{number}" for number in range(AGENTS)]
    environment = SimpleNamespace(agents=names, num_actions=ACTIONS)
    system, experience = getattr(module, SYSTEMS[program])(environment, None), batch()
    for _ in sys.stdin:
        begun = time.process_time()
        for _ in range(updates):
            logs = system.train_step(experience)
            system.training_step_ctr += 1
        [value.numpy() for value in logs.values()]
        print(time.process_time() - begun, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
