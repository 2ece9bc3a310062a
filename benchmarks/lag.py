"""Actors that lag behind the learner: what does V-trace correct?

    python benchmarks/lag.py [--env swarm/coverage-3] [--lag 8] [--seeds 5] [--rates 0.001 0.003]

Trains `impala` with V-trace and without (`--no-correct`, a plain actor-critic) for each step size,
with and without a lag, all seeds and step sizes side by side. It prints the mean return of sampled
actions, with its standard deviation over the seeds, and the difference that V-trace makes at the
lag, with a 95% interval over pairs of one seed.
"""

import json
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from offmarl import envs
from offmarl.evaluation import evaluate
from offmarl.programs import hyperparameters, registry
from offmarl.programs.program import Hyperparameters
from offmarl.statistics import mean_interval


@dataclass(frozen=True)
class Args:
    env: str = "swarm/coverage-3"
    """Environment."""
    lag: int = 8
    """Updates that the actors lag behind."""
    rates: tuple[float, ...] = (0.001, 0.003, 0.01)
    """Step sizes."""
    seeds: int = 5
    """Number of seeds."""
    total_steps: int = 60_000
    """Environment steps of each training."""
    num_envs: int = 16
    """Environments of each training."""
    episodes: int = 128
    """Episodes of the evaluation at the end of each training."""


def returns_of(args: Args, lag: int, correct: bool) -> np.ndarray:
    """Train at each step size with each seed; return the mean returns ``(rates, seeds)``."""
    module = registry.load("recorder", "impala")
    env = envs.make(args.env)
    sizes = {"num_envs": args.num_envs, "total_steps": args.total_steps}
    options = module.Args(env=args.env, lag=lag, correct=correct, **sizes)
    program = module.make(env.spec, options, env)
    values = hyperparameters(options)
    updates = args.total_steps // (options.num_envs * options.num_steps)

    def train(rate: jax.Array, seed: jax.Array) -> jax.Array:
        hyper = Hyperparameters(**vars(values) | {"learning_rate": rate})
        start, steps, play = jax.random.split(jax.random.key(seed), 3)

        def update(state, key):
            return program.stages[0].update(state, None, key, hyper)[0], None

        keys = jax.random.split(steps, updates)
        state, _ = jax.lax.scan(update, program.init(start, hyper), keys)
        params = program.policy_params(state)
        return evaluate(env, program.policy(False), params, play, args.episodes).returns.mean()

    each_seed = jax.vmap(train, in_axes=(None, 0))
    every = jax.jit(lambda rates, seeds: jax.lax.map(lambda rate: each_seed(rate, seeds), rates))
    return np.asarray(every(jnp.array(args.rates), jnp.arange(args.seeds)))


def main(args: Args) -> None:
    lags = {}
    for lag in (0, args.lag):
        for correct in (True, False):
            start, cpu = time.time(), time.process_time()
            lags[lag, correct] = returns_of(args, lag, correct)
            for rate, returns in zip(args.rates, lags[lag, correct], strict=True):
                row = {"lag": lag, "correct": correct, "rate": rate}
                spread = {"mean": float(returns.mean()), "std": float(returns.std(ddof=1))}
                print(json.dumps(row | spread | {"returns": np.round(returns, 3).tolist()}))
            print(f"{time.time() - start:.0f} s, {time.process_time() - cpu:.0f} CPU s", flush=True)
    changes = lags[args.lag, True] - lags[args.lag, False]
    for rate, change in zip(args.rates, changes, strict=True):
        print(f"step size {rate:g}: V-trace minus none at lag {args.lag}: {mean_interval(change)}")


if __name__ == "__main__":
    main(tyro.cli(Args))
