"""Environment steps per second of mappo and ippo beside JaxMARL's scripts of the same algorithms.

    git clone https://github.com/FLAIROx/JaxMARL
    python benchmarks/online.py --jaxmarl JaxMARL

Both train in MPE simple_spread with the settings of JaxMARL's own configuration files, in turns and
in one process; compilation is not counted. The scripts are read from the checkout and run as they
are. What they import for settings, logs and distributions (hydra, omegaconf, wandb, distrax) is
replaced by the few lines below, so that they need only jaxmarl and flax.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import tyro
import yaml

from offmarl import envs
from offmarl._imports import import_file
from offmarl.programs import hyperparameters, registry
from offmarl.programs.loop import Schedule, collect

ENV = "jaxmarl/mpe/simple_spread_v3"

SHARED = {"num_envs": 16, "num_steps": 128, "anneal": True, "clip_value": True, "value_weight": 0.5}


class Pair(NamedTuple):
    """A program of offmarl with JaxMARL's settings, and the script that they are from."""

    program: str
    options: dict[str, Any]
    script: str
    config: str


PAIRS = {
    "ippo, feed-forward": Pair(
        "ippo",
        {"learning_rate": 2.5e-4, "activation": "tanh", "agent_id": "none"},
        "IPPO/ippo_ff_mpe.py",
        "IPPO/config/ippo_ff_mpe.yaml",
    ),
    "mappo, recurrent": Pair(
        "mappo",
        {
            "learning_rate": 2e-3,
            "network": "recurrent",
            "hidden": 128,
            "layers": 2,
            "clip_separately": True,
            "agent_id": "none",
        },
        "MAPPO/mappo_rnn_mpe.py",
        "MAPPO/config/mappo_homogenous_rnn_mpe.yaml",
    ),
}


@dataclass(frozen=True)
class Options:
    """Compare speeds."""

    jaxmarl: Path
    """A checkout of JaxMARL."""
    pairs: tuple[str, ...] = tuple(PAIRS)
    """What to compare."""
    updates: int = 10
    """Updates of 2,048 steps in a round."""
    rounds: int = 3
    """Rounds of each; the median counts."""


class Categorical:
    """The three methods of distrax's distribution that the scripts call."""

    def __init__(self, logits: jax.Array):
        self._log_probs = jax.nn.log_softmax(logits)

    def sample(self, seed: jax.Array) -> jax.Array:
        """Draw actions."""
        return jax.random.categorical(seed, self._log_probs)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Return the log-probabilities of actions."""
        return jnp.take_along_axis(self._log_probs, action[..., None], -1)[..., 0]

    def entropy(self) -> jax.Array:
        """Return the entropies."""
        return -(jnp.exp(self._log_probs) * self._log_probs).sum(-1)


def replace_imports() -> None:
    """Put small modules in the place of those that only settings, logs and distributions need."""
    contents: dict[str, dict[str, Any]] = {
        "hydra": {"main": lambda **_: lambda function: function},
        "omegaconf": {"OmegaConf": None},
        "wandb": {"log": lambda *_, **__: None},
        "distrax": {"Categorical": Categorical},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module


def theirs(pair: Pair, checkout: Path, updates: int) -> Callable[[], float]:
    """Return a function that trains with JaxMARL's script and returns its steps per second."""
    folder = checkout.resolve() / "baselines"
    config = yaml.safe_load((folder / pair.config).read_text())
    steps = updates * config["NUM_ENVS"] * config["NUM_STEPS"]
    config |= {"TOTAL_TIMESTEPS": steps}
    train = import_file(folder / pair.script).make_train(config)
    compiled = jax.jit(train).lower(jax.random.PRNGKey(0)).compile()

    def run() -> float:
        begun = time.perf_counter()
        jax.block_until_ready(compiled(jax.random.PRNGKey(1)))
        return steps / (time.perf_counter() - begun)

    return run


def ours(pair: Pair, updates: int) -> Callable[[], float]:
    """Return a function that trains with offmarl's program and returns its steps per second."""
    module, env = registry.load("recorder", pair.program), envs.make(ENV)
    args = module.Args(env=ENV, total_steps=10_000_000, **SHARED, **pair.options)
    program, hyper = module.make(env.spec, args, env), hyperparameters(args)
    init, schedule = jax.jit(program.init), Schedule(updates + 1, updates + 1, 1, (0,))

    def run() -> float:
        state = init(jax.random.key(0), hyper)
        work = collect(program, [state], hyper, [jax.random.key(1)], schedule, 0, [None])
        jax.block_until_ready(next(work)[1])
        begun = time.perf_counter()
        *_, (_, states, _) = work
        jax.block_until_ready(states)
        return updates * args.num_envs * args.num_steps / (time.perf_counter() - begun)

    return run


def main(options: Options) -> None:
    """Print the steps per second of both, and the ratio."""
    replace_imports()
    for name in options.pairs:
        pair = PAIRS[name]
        sides = ours(pair, options.updates), theirs(pair, options.jaxmarl, options.updates)
        rates = [[side() for side in sides] for _ in range(options.rounds)]
        mine, other = (statistics.median(rate) for rate in zip(*rates, strict=True))
        print(f"{name}: {mine:,.0f} steps/s, JaxMARL {other:,.0f}, ratio {mine / other:.2f}")


if __name__ == "__main__":
    main(tyro.cli(Options))
