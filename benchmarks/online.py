"""Recorders beside JaxMARL's scripts of the same algorithms: steps per second and returns.

    git clone https://github.com/FLAIROx/JaxMARL
    python benchmarks/online.py speed --jaxmarl JaxMARL
    python benchmarks/online.py returns --jaxmarl JaxMARL --pairs "vdn, simple_spread" --seeds 3

`speed` trains both with the settings of JaxMARL's own configuration files, in turns and in one
process; compilation is not counted. `returns` trains JaxMARL's scripts alone and prints what they
log; the recorders' returns are those of the vaults that `offmarl record` writes. The scripts are
read from the checkout and run as they are. What they import for settings, logs and distributions
(hydra, omegaconf, wandb, distrax) is replaced by the few lines below, so that they need only
jaxmarl, flax and flashbax.
"""

import dataclasses
import inspect
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
import yaml
from jaxtyping import Array, PRNGKeyArray

from offmarl import envs
from offmarl._imports import import_file
from offmarl.envs.base import Wrapper
from offmarl.programs import hyperparameters, registry
from offmarl.programs.runs.loop import Schedule, collect
from offmarl.types import ArraySpec, EnvSpec, Timestep

SPREAD = "jaxmarl/mpe/simple_spread_v3"
SPEAKER = "jaxmarl/mpe/simple_speaker_listener_v4"

PPO = {
    "num_envs": 16,
    "num_steps": 128,
    "schedule": "linear",
    "clip_value": True,
    "value_weight": 0.5,
}

MLP = PPO | {"learning_rate": 2.5e-4, "activation": "tanh", "agent_id": "none"}

RECURRENT = {"network": "recurrent", "hidden": 128, "layers": 2, "learning_rate": 2e-3} | {
    "clip_separately": True
}

MABRAX = {
    **{"num_envs": 64, "num_steps": 300, "learning_rate": 1e-3, "activation": "tanh"},
    **{"entropy": 2e-6, "value_weight": 4.5, "agent_id": "none"},
}

# Their sequences hold 26 or 128 observations; windows of length T hold T + 1.
Q_MPE = {
    **{"num_envs": 8, "num_steps": 26, "updates": 1, "batch_size": 32, "length": 25},
    **{"capacity": 650, "hidden": 64, "epsilon": 0.05, "exploration": 0.1, "max_grad_norm": 25.0},
    **{"target_every": 200, "learning_rate": 5e-3, "schedule": "linear", "gamma": 0.9},
    **{"reward_scale": 1.0},
}

Q_SMAX = {
    **{"num_envs": 16, "num_steps": 128, "updates": 8, "batch_size": 32, "length": 127},
    **{"capacity": 312, "hidden": 512, "epsilon": 0.05, "exploration": 0.1, "max_grad_norm": 10.0},
    **{"target_every": 80, "learning_rate": 5e-5, "gamma": 0.99, "reward_scale": 10.0},
}

SPEAKER_LISTENER = (("ENV_NAME", "MPE_simple_speaker_listener_v4"),)
THREE_MARINES = (("MAP_NAME", "3m"),)


class Pair(NamedTuple):
    """A program of offmarl with JaxMARL's settings, and the script that they are from."""

    program: str
    env: str
    options: dict[str, Any]
    script: str
    config: str
    changes: tuple[tuple[str, Any], ...] = ()
    """Entries of the configuration that are replaced."""


PAIRS = {
    "ippo feed-forward, simple_spread": Pair(
        "ippo",
        SPREAD,
        MLP,
        "IPPO/ippo_ff_mpe.py",
        "IPPO/config/ippo_ff_mpe.yaml",
    ),
    "ippo feed-forward, halfcheetah_6x1": Pair(
        "ippo",
        "jaxmarl/mabrax/halfcheetah_6x1",
        PPO | MABRAX,
        "IPPO/ippo_ff_mabrax.py",
        "IPPO/config/ippo_ff_mabrax.yaml",
        (("ENV_NAME", "halfcheetah_6x1"),),
    ),
    "ippo feed-forward, continuous simple_spread": Pair(
        "ippo",
        f"{SPREAD}:action_type=Continuous",
        PPO | MABRAX,
        "IPPO/ippo_ff_mabrax.py",
        "IPPO/config/ippo_ff_mabrax.yaml",
        (("ENV_NAME", "MPE_simple_spread_v3"), ("ENV_KWARGS", {"action_type": "Continuous"})),
    ),
    # The critic of that script sees an agent's own observation, as that of `ippo` does.
    "ippo feed-forward, hanabi": Pair(
        "ippo",
        "jaxmarl/hanabi",
        PPO | {"learning_rate": 5e-4, "hidden": 128, "agent_id": "none"},
        "MAPPO/mappo_ff_hanabi.py",
        "MAPPO/config/mappo_homogenous_ff_hanabi.yaml",
        (("NUM_ENVS", 16),),
    ),
    "ippo feed-forward, overcooked": Pair(
        "ippo",
        "jaxmarl/overcooked/coord_ring",
        MLP | {"shaped_rewards": 0.25},
        "IPPO/ippo_ff_overcooked.py",
        "IPPO/config/ippo_ff_overcooked.yaml",
    ),
    "ippo feed-forward, switch_riddle": Pair(
        "ippo",
        "jaxmarl/switch_riddle",
        MLP | {"num_envs": 64, "activation": "relu"},
        "IPPO/ippo_ff_switch_riddle.py",
        "IPPO/config/ippo_ff_switch_riddle.yaml",
    ),
    "mappo recurrent, simple_spread": Pair(
        "mappo",
        SPREAD,
        PPO | RECURRENT | {"agent_id": "none"},
        "MAPPO/mappo_rnn_mpe.py",
        "MAPPO/config/mappo_homogenous_rnn_mpe.yaml",
    ),
    "mappo recurrent, 3m": Pair(
        "mappo",
        "jaxmarl/smax/3m",
        PPO | RECURRENT | {"num_envs": 128, "entropy": 0.0, "max_grad_norm": 0.25},
        "MAPPO/mappo_rnn_smax.py",
        "MAPPO/config/mappo_homogenous_rnn_smax.yaml",
        THREE_MARINES,
    ),
    **{
        f"{name}, {task}": Pair(
            name,
            env,
            options,
            f"QLearning/{name}_rnn.py",
            f"QLearning/config/alg/ql_rnn_{config}.yaml",
            changes,
        )
        for name in ("iql", "vdn", "qmix")
        for task, env, options, config, changes in (
            ("simple_spread", SPREAD, Q_MPE, "mpe", ()),
            ("speaker_listener", SPEAKER, Q_MPE, "mpe", SPEAKER_LISTENER),
            ("3m", "jaxmarl/smax/3m", Q_SMAX, "smax", THREE_MARINES),
        )
    },
}


@dataclass(frozen=True)
class Speed:
    """Compare steps per second."""

    jaxmarl: Path
    """A checkout of JaxMARL."""
    pairs: tuple[str, ...] = tuple(PAIRS)
    """What to compare."""
    steps: int = 200_000
    """Environment steps in a round."""
    rounds: int = 3
    """Rounds of each; the median counts."""


@dataclass(frozen=True)
class Returns:
    """Train JaxMARL's scripts and print what they log."""

    jaxmarl: Path
    """A checkout of JaxMARL."""
    pairs: tuple[str, ...] = tuple(PAIRS)
    """What to train."""
    steps: int = 1_000_000
    """Environment steps."""
    seeds: int = 1
    """Seeds, one after the other."""
    seed: int = 0
    """The first of the seeds."""


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


class Gaussian:
    """The methods of distrax's distribution for continuous actions."""

    def __init__(self, mean: jax.Array, deviation: jax.Array):
        self._mean, self._deviation = mean, jnp.broadcast_to(deviation, mean.shape)

    def sample(self, seed: jax.Array) -> jax.Array:
        """Draw actions."""
        return self._mean + self._deviation * jax.random.normal(seed, self._mean.shape)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Return the log-densities of actions."""
        return jax.scipy.stats.norm.logpdf(action, self._mean, self._deviation).sum(-1)

    def entropy(self) -> jax.Array:
        """Return the entropies."""
        return (jnp.log(self._deviation) + 0.5 * jnp.log(2 * jnp.pi * jnp.e)).sum(-1)


LOGGED: list[dict[str, Any]] = []
"""What the script in training gave to wandb.log."""


def log(metrics: dict[str, Any], **_: Any) -> None:
    """Keep the scalars among metrics."""
    LOGGED.append({name: np.asarray(x) for name, x in metrics.items() if np.ndim(x) == 0})


def replace_imports() -> None:
    """Put small modules in the place of those that only settings, logs and distributions need."""
    contents: dict[str, dict[str, Any]] = {
        "hydra": {"main": lambda **_: lambda function: function},
        "omegaconf": {"OmegaConf": None},
        "wandb": {"log": log},
        "distrax": {"Categorical": Categorical, "MultivariateNormalDiag": Gaussian},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration as omegaconf does, for which 2e-3 is a number and for PyYAML a text."""

    def number(value: Any) -> Any:
        try:
            return float(value) if isinstance(value, str) else value
        except ValueError:
            return value

    return {name: number(value) for name, value in yaml.safe_load(path.read_text()).items()}


def their_training(
    pair: Pair, checkout: Path, steps: int, logs: bool
) -> tuple[Callable[[int], Any], int]:
    """Compile JaxMARL's training; return it as a function of the seed, with its steps."""
    folder = checkout.resolve() / "baselines"
    config = read_config(folder / pair.config) | dict(pair.changes)
    update = config["NUM_ENVS"] * config["NUM_STEPS"]
    steps = max(steps // update, 1) * update
    config |= {"TOTAL_TIMESTEPS": steps, "SEED": 0}
    module, kwargs = import_file(folder / pair.script), config["ENV_KWARGS"]
    if "layout" in kwargs:  # which the script's main replaces
        config["ENV_KWARGS"] = {"layout": module.overcooked_layouts[kwargs["layout"]]}
    if "switch_riddle" in pair.script:
        config["TOTAL_TIMESTEPS"] *= 3  # that script counts each agent's steps
    if "QLearning" in pair.script:
        config |= {"WANDB_MODE": "offline" if logs else "disabled", "TEST_DURING_TRAINING": logs}
        if not logs:
            config["LEARNING_STARTS"] = 0
        train = module.make_train(config, module.env_from_config(config)[0])
    elif "rng_init" in inspect.signature(module.make_train).parameters:
        train = module.make_train(config, jax.random.PRNGKey(0))  # seeds share their first weights
    else:
        train = module.make_train(config)
    compiled = jax.jit(train).lower(jax.random.PRNGKey(0)).compile()
    return lambda seed: jax.block_until_ready(compiled(jax.random.PRNGKey(seed))), steps


def their_speed(pair: Pair, checkout: Path, steps: int) -> Callable[[], float]:
    """Return a function that trains with JaxMARL's script and returns its steps per second.

    The speed is that of the last four fifths: the learners of values wait for their buffer before.
    """
    sides = [
        their_training(pair, checkout, num_steps, logs=False) for num_steps in (steps // 5, steps)
    ]

    def run() -> float:
        seconds = []
        for train, _ in sides:
            begun = time.perf_counter()
            train(1)
            seconds.append(time.perf_counter() - begun)
        (_, few), (_, many) = sides
        return (many - few) / (seconds[1] - seconds[0])

    return run


@dataclass(frozen=True)
class Flat(Wrapper):
    """An environment of grids as vectors, which are what JaxMARL's feed-forward networks see.

    JaxMARL's script stores the bytes of a grid. Networks here would see the logarithms of whole
    numbers, so the bytes become the smallest floats that hold them, which are twice as large.
    """

    @property
    def spec(self) -> EnvSpec:
        """The spec, whose observations are vectors."""
        _, timestep = jax.eval_shape(self.reset, jax.random.key(0))
        rows = timestep.view.observation
        observation = ArraySpec(rows.shape[1:], str(rows.dtype))
        return dataclasses.replace(self.env.spec, observation=observation, observation_size=0)

    def reset(self, key: PRNGKeyArray) -> tuple[Any, Timestep]:
        """Start an episode."""
        return flattened(*self.env.reset(key))

    def step(self, key: PRNGKeyArray, state: Any, action: Array) -> tuple[Any, Timestep]:
        """Take one step."""
        return flattened(*self.env.step(key, state, action))


def flattened(state: Any, timestep: Timestep) -> tuple[Any, Timestep]:
    """Return the timestep with observations of vectors."""
    view = timestep.next_view
    rows = view.observation.reshape(len(view.alive), -1)
    rows = rows.astype(jnp.float16 if rows.dtype == jnp.uint8 else jnp.float32)
    view = view._replace(observation=rows)
    return state, timestep._replace(view=view, next_view=view)


def our_speed(pair: Pair, steps: int) -> Callable[[], float]:
    """Return a function that trains with offmarl's program and returns its steps per second."""
    module, env = registry.load("recorder", pair.program), Flat(envs.make(pair.env))
    args = module.Args(env=pair.env, total_steps=10_000_000, **pair.options)
    updates = max(steps // (args.num_envs * args.num_steps), 1)
    program, hyper = module.make(env.spec, args, env), hyperparameters(args)
    init, schedule = jax.jit(program.init), Schedule(updates + 1, updates + 1, 1, (0,))

    def run() -> float:
        state = init(jax.random.key(0), hyper)
        work = collect(program, [state], [hyper], [jax.random.key(1)], schedule, 0, [None])
        jax.block_until_ready(next(work)[1])
        begun = time.perf_counter()
        *_, (_, states, _) = work
        jax.block_until_ready(states)
        return updates * args.num_envs * args.num_steps / (time.perf_counter() - begun)

    return run


def compare_speed(options: Speed) -> None:
    """Print the steps per second of both, and the ratio."""
    for name in options.pairs:
        pair = PAIRS[name]
        sides = (
            our_speed(pair, options.steps),
            their_speed(pair, options.jaxmarl, options.steps),
        )
        rates = [[side() for side in sides] for _ in range(options.rounds)]
        mine, other = (statistics.median(rate) for rate in zip(*rates, strict=True))
        ratio = f"ratio {mine / other:.2f}"
        print(f"{name}: {mine:,.0f} steps/s, JaxMARL {other:,.0f}, {ratio}", flush=True)


_RESULTS = ("returns", "returned_episode_returns", "test_returned_episode_returns", "win_rate")


def train_theirs(options: Returns) -> None:
    """Print means of what JaxMARL's scripts log, over tenths of the training."""
    for name in options.pairs:
        train, steps = their_training(PAIRS[name], options.jaxmarl, options.steps, logs=True)
        for seed in range(options.seed, options.seed + options.seeds):
            LOGGED.clear()
            begun = time.perf_counter()
            train(seed)
            jax.effects_barrier()
            print(f"{name}, seed {seed}: {steps} steps, {time.perf_counter() - begun:.0f} s")
            for metric in [key for key in LOGGED[0] if key.endswith(_RESULTS)]:
                values = np.array_split([line[metric] for line in LOGGED], 10)
                print(f"  {metric}:", *(f"{np.nanmean(part):.4g}" for part in values), flush=True)


def main(options: Speed | Returns) -> None:
    """Run a comparison."""
    replace_imports()
    if isinstance(options, Speed):
        compare_speed(options)
    else:
        train_theirs(options)


COMMANDS = (
    Annotated[Speed, tyro.conf.subcommand("speed")]
    | Annotated[Returns, tyro.conf.subcommand("returns")]
)

if __name__ == "__main__":
    main(tyro.cli(COMMANDS))  # type: ignore[arg-type]
