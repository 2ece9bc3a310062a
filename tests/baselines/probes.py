"""Training on a vault without a run, to test what is learned."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import offmarl
from offmarl import envs
from offmarl.evaluation import evaluate
from offmarl.programs import DatasetStatistics, Program, hyperparameters, registry
from offmarl.programs.program import structure
from offmarl.programs.runs.loop import stage_starts
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
    hyper, sizes = hyperparameters(args), (args.batch_size, args.length)
    replay = dataset.replay(*sizes, return_to_go=program.return_to_go)
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


def uniform_play(env: Any, count: int = 128) -> Sequence:
    """Episodes of uniform play, each in a window of its own; actions are spread evenly."""
    rng = np.random.default_rng(0)
    even = np.arange(count) % 2
    if env.action == "continuous":
        even = 2 * (np.arange(count) + 0.5) / count - 1
    orders = [rng.permutation(even) for _ in range(2 * env.length)]
    actions = jnp.asarray(np.stack(orders, -1).reshape(count, env.length, 2))
    actions = actions[..., None] if env.action == "continuous" else actions.astype(jnp.int32)

    def play(key: jax.Array, actions: jax.Array) -> Sequence:
        state, start = env.reset(key)

        def step(carry: Any, action: jax.Array) -> Any:
            state, view = carry
            state, after = env.step(key, state, action)
            return (state, after.view), (view, after)

        (_, last), (views, after) = jax.lax.scan(step, (state, start.view), actions)
        view = jax.tree.map(lambda x, end: jnp.concatenate([x, end[None]]), views, last)
        yes = jnp.ones(env.length, bool)
        first = jnp.arange(env.length + 1) == 0
        ends = after.terminated, after.truncated
        return Sequence(view, actions, after.reward, *ends, 0 * after.reward, yes, yes, first)

    return jax.jit(jax.vmap(play))(jax.random.split(jax.random.key(7), count), actions)
