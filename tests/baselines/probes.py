"""Training on a vault without a run, to test what is learned."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

import offmarl
from offmarl import envs
from offmarl.evaluation import evaluate
from offmarl.programs import DatasetStatistics, Program, hyperparameters, registry
from offmarl.programs.loop import stage_starts
from offmarl.programs.program import structure
from offmarl.types import ArrayTree, Sequence


class Learnt(NamedTuple):
    """A trained program, and its data."""

    args: Any
    program: Program
    state: ArrayTree
    batch: Sequence
    """Further windows of the data."""


def learn(name: str, data: Path, updates: int, **options: Any) -> Learnt:
    """Train a baseline for a few updates, in one compiled loop for each of its stages."""
    baseline = registry.load("baseline", name)
    args = baseline.Args(vault=data, updates=updates, **options)
    dataset = offmarl.open(data)
    program = baseline.make(dataset.spec, structure(args), DatasetStatistics(dataset))
    hyper, replay = hyperparameters(args), dataset.replay(args.batch_size, args.length)
    state = jax.jit(program.init)(jax.random.key(0), hyper)
    starts = [*stage_starts(program.stages, updates), updates]
    for number, stage in enumerate(program.stages):
        keys = jax.random.split(jax.random.key(number), starts[number + 1] - starts[number])
        state = _updated(stage.update, state, replay, keys, hyper)
    return Learnt(args, program, state, replay.sample(jax.random.key(9)))


@partial(jax.jit, static_argnums=0)
def _updated(update: Any, state: Any, replay: Any, keys: Any, hyper: Any) -> Any:
    def step(state: Any, key: Any) -> Any:
        batch_key, update_key = jax.random.split(key)
        return update(state, replay.sample(batch_key), update_key, hyper)[0], None

    return jax.lax.scan(step, state, keys)[0]


def mean_return(learnt: Learnt, env: str, greedy: bool = True) -> float:
    """Return the mean return of a trained program."""
    play = jax.jit(
        partial(evaluate, envs.make(env), learnt.program.policy(greedy)), static_argnums=2
    )
    params = learnt.program.policy_params(learnt.state)
    return float(play(params, jax.random.key(2), 64).returns.mean())
