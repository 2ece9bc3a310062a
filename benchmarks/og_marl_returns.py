"""Returns of OG-MARL's TensorFlow programs on a vault of offmarl's, after a number of updates.

    python -m venv peer && peer/bin/pip install tensorflow-cpu tf-keras dm-sonnet pyyaml
    git clone https://github.com/instadeepai/og-marl
    python benchmarks/og_marl_returns.py --python peer/bin/python --checkout og-marl \
        --vault vaults/jaxmarl/smax/3m.vlt/mappo-0-medium

They run with the settings of their own configuration files. As from their replay buffer, batches
are 32 windows of 20 consecutive steps of the stream of episodes, all equally likely. The policies
act greedily, which is how OG-MARL evaluates them, in the environment of the vault. offmarl's
returns are those of `offmarl train` with as many updates.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tensorflow_programs import QUIET, SYSTEMS, load_module

BATCH, STEPS = 32, 20
NOT_ALLOWED = -1e8


@dataclass(frozen=True)
class Args:
    python: Path
    """Python of an environment with tensorflow-cpu, tf-keras, dm-sonnet and pyyaml."""
    checkout: Path
    """OG-MARL's source."""
    vault: Path
    """The dataset."""
    programs: tuple[str, ...] = tuple(SYSTEMS)
    """Baselines."""
    seeds: int = 5
    """Training seeds, one after the other."""
    updates: int = 10_000
    """Updates of each seed."""
    episodes: int = 320
    """Episodes of each evaluation."""


# ---------------------------------------------------------------------------------- the peer


class Peer:
    """A program of OG-MARL, in a process with TensorFlow."""

    def __init__(self, program: str, checkout: str, data: str, seed: int):
        import numpy as np
        import tensorflow as tf
        import yaml

        self._np, self._tf = np, tf
        module = load_module(program, checkout)
        self._data = dict(np.load(data))
        configs = Path(checkout) / "og_marl/baselines/tf2_systems/offline/configs"
        config = yaml.safe_load((configs / f"{program}.yaml").read_text())["system"]
        config["learning_rate"] = float(config["learning_rate"])  # omegaconf reads 3e-4 as a number
        self._agents, num_actions = self._data["legals"].shape[2:]
        names = [f"agent_{number}" for number in range(self._agents)]
        environment = SimpleNamespace(agents=names, num_actions=num_actions)
        tf.random.set_seed(seed)
        self._rng = np.random.default_rng(seed)
        self._system: Any = getattr(module, SYSTEMS[program])(environment, None, **config)
        acting = "policy_network" if hasattr(self._system, "policy_network") else "q_network"
        self._network: Any = getattr(self._system, acting)
        self._act = tf.function(self._greedy())

    def _greedy(self) -> Any:
        tf, network = self._tf, self._network

        def act(observation: Any, legal: Any, carry: Any) -> Any:
            envs = tf.shape(observation)[0]
            ids = tf.tile(tf.eye(self._agents)[None], (envs, 1, 1))
            inputs = tf.concat([ids, observation], -1)
            values, carry = network(tf.reshape(inputs, (-1, inputs.shape[-1])), carry)
            values = tf.reshape(values, (envs, self._agents, -1))
            return tf.argmax(tf.where(legal, values, NOT_ALLOWED), -1), carry

        return act

    def batch(self) -> Any:
        """Draw windows."""
        np, rows = self._np, self._data["actions"]
        row = self._rng.integers(0, len(rows), BATCH)[:, None]
        time = self._rng.integers(0, rows.shape[1] - STEPS + 1, BATCH)[:, None] + np.arange(STEPS)
        names = "observations", "actions", "rewards", "terminals", "truncations"
        fields: dict[str, Any] = {name: self._data[name][row, time] for name in names}
        fields["infos"] = {name: self._data[name][row, time] for name in ("state", "legals")}
        return self._tf.nest.map_structure(self._tf.constant, fields)

    def train(self, updates: int) -> float:
        """Make updates, and return the seconds that they took."""
        begun = time.monotonic()
        for _ in range(updates):
            self._system.train_step(self.batch())
            self._system.training_step_ctr += 1
        return time.monotonic() - begun

    def act(self, observation: Any, legal: Any, reset: bool) -> Any:
        """Choose actions greedily in all environments."""
        if reset:
            self._carry = self._network.initial_state(len(observation) * self._agents)
        actions, self._carry = self._act(observation, legal, self._carry)
        return actions.numpy()


def serve(program: str, checkout: str, data: str, seed: str) -> None:
    """Answer the calls that come from the standard input."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what TensorFlow prints
    peer = Peer(program, checkout, data, int(seed))
    while True:
        name, args = pickle.load(sys.stdin.buffer)
        pickle.dump(getattr(peer, name)(*args), answers)
        answers.flush()


# ---------------------------------------------------------------------------------- the comparison


def export(vault: Path, file: Path) -> None:
    """Write a vault as the arrays of OG-MARL's datasets, ``(rows, steps, ...)``."""
    import numpy as np

    from offmarl.vault import open_vault

    steps = open_vault(vault).transitions()
    np.savez(
        file,
        observations=steps.view.observation,
        state=steps.view.state,
        legals=steps.view.legal_actions.astype(np.float32),
        actions=steps.action.astype(np.int32),
        rewards=steps.reward,
        terminals=steps.terminated,
        truncations=steps.truncated,
    )


def evaluate(call: Any, env: Any, episodes: int) -> float:
    """Return the mean return of one episode in each of ``episodes`` environments."""
    import jax
    import numpy as np

    reset, step = jax.jit(jax.vmap(env.reset)), jax.jit(jax.vmap(env.step))
    key, begin = jax.random.split(jax.random.key(0))
    state, timestep = reset(jax.random.split(begin, episodes))
    returns, running, first = np.zeros(episodes), np.ones(episodes, bool), True
    while running.any():
        view = timestep.view
        actions = call("act", np.asarray(view.observation), np.asarray(view.legal_actions), first)
        key, subkey = jax.random.split(key)
        state, timestep = step(jax.random.split(subkey, episodes), state, actions.astype(np.int32))
        first = False
        returns += running * np.asarray(timestep.reward).mean(-1)
        running &= ~np.asarray(timestep.last)
    return float(returns.mean())


def started(python: Path, *words: str) -> "subprocess.Popen[bytes]":
    """Start a peer."""
    rest = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [str(python), __file__, "worker", *words],
        env=rest | QUIET,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def main(args: Args) -> None:
    """Train and evaluate each seed of each program."""
    import statistics

    from offmarl import envs
    from offmarl.vault import open_vault

    env = envs.make(open_vault(args.vault).spec.name)
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data.npz"
        export(args.vault, data)
        for program in args.programs:
            rows = []
            for seed in range(args.seeds):
                words = program, str(args.checkout), str(data), str(seed)
                with started(args.python, *words) as process:

                    def call(name: str, *words: Any, process: Any = process) -> Any:
                        pickle.dump((name, words), process.stdin)
                        process.stdin.flush()
                        return pickle.load(process.stdout)

                    seconds = call("train", args.updates)
                    rows.append(evaluate(call, env, args.episodes))
                    process.kill()
                print(f"  {program}, seed {seed}: {rows[-1]:.3f}, {seconds:.0f} s", flush=True)
            print(f"{program}: mean {statistics.mean(rows):.3f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        serve(*sys.argv[2:])
    else:
        import tyro

        main(tyro.cli(Args, description=__doc__))
