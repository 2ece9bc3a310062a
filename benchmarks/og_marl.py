"""Updates a second beside OG-MARL's TensorFlow programs of the same algorithms, on one core.

    python -m venv peer && peer/bin/pip install tensorflow-cpu tf-keras dm-sonnet
    git clone https://github.com/instadeepai/og-marl
    taskset -c 0 python benchmarks/og_marl.py --python peer/bin/python --checkout og-marl

The shape is that of SMAX 8m: 8 agents, observations of 205 numbers, a state of 192, 32 windows of
20 steps. Both have a linear layer and a GRU of 64 units. offmarl samples each batch in its loop;
OG-MARL's programs learn from one batch in memory, compiled by XLA as they ask for. What they import
for data and environments is replaced by stand-ins. Each program has a process of its own; the
processes take turns, and the times are those of their CPU.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tensorflow_programs import QUIET, SYSTEMS, load_module

AGENTS, ACTIONS, OBSERVATION, STATE, BATCH, STEPS = 8, 14, 205, 192, 32, 20


@dataclass(frozen=True)
class Args:
    python: Path
    """Python of an environment with tensorflow-cpu, tf-keras and dm-sonnet."""
    checkout: Path
    """OG-MARL's source."""
    programs: tuple[str, ...] = tuple(SYSTEMS)
    """Baselines."""
    rounds: int = 9
    """Measurements of each, in turn."""
    updates: int = 8
    """Updates of a measurement."""


def tensorflow_updates(program: str, updates: int, checkout: str) -> Callable[[], None]:
    """Return a function that makes some updates of a program of OG-MARL."""
    import numpy as np
    import tensorflow as tf

    module = load_module(program, checkout)
    names = [f"agent_{number}" for number in range(AGENTS)]
    environment = SimpleNamespace(agents=names, num_actions=ACTIONS)
    system: Any = getattr(module, SYSTEMS[program])(environment, None)
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
            "legals": np.ones((*agents, ACTIONS), "float32"),
        },
    }
    batch = tf.nest.map_structure(tf.constant, arrays)

    def run() -> None:
        for _ in range(updates):
            logs = system.train_step(batch)
            system.training_step_ctr += 1
        for value in logs.values():
            value.numpy()

    return run


def jax_updates(program: str, updates: int) -> Callable[[], None]:
    """Return a function that makes some updates of a program of offmarl."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks import updates as ways
    from benchmarks.windows import SMAX, random_replay
    from offmarl.programs.runs.compiling import keep_compiled_programs

    keep_compiled_programs()
    replay, _ = random_replay(SMAX, 20_000, BATCH)
    return ways.updates(program, ways.WAYS[-1], updates, replay)


def measure(run: Callable[[], None]) -> None:
    """Print the CPU seconds of a call for each line of the input."""
    run()
    for _ in sys.stdin:
        begun = time.process_time()
        run()
        print(time.process_time() - begun, flush=True)


def started(python: str, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [python, __file__, *words],
        env={**os.environ, **QUIET},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def main(args: Args) -> None:
    import numpy as np

    for program in args.programs:
        words = "worker", program, str(args.updates)
        workers = [
            started(sys.executable, *words),
            started(str(args.python), *words, str(args.checkout)),
        ]
        took: list[list[float]] = [[], []]
        for _ in range(args.rounds):
            for seconds, worker in zip(took, workers, strict=True):
                assert worker.stdin is not None and worker.stdout is not None
                worker.stdin.write("\n")
                worker.stdin.flush()
                seconds.append(float(worker.stdout.readline()) / args.updates)
        for worker in workers:
            worker.communicate()
        ours, peers = np.array(took)
        print(
            f"{program:10} offmarl {1e3 * np.median(ours):6.1f} ms an update, "
            f"OG-MARL {1e3 * np.median(peers):6.1f} ms: {np.median(peers / ours):.2f} x as fast"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        _, _, name, count, *source = sys.argv
        made = int(count)
        measure(tensorflow_updates(name, made, *source) if source else jax_updates(name, made))
    else:
        import tyro

        main(tyro.cli(Args, description=__doc__))
