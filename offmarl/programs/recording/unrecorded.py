"""Training of a recorder's program that is evaluated and not recorded."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from offmarl._compiling import pinned
from offmarl.envs import Environment
from offmarl.errors import OptionError
from offmarl.evaluation import returns_by_team
from offmarl.programs.program import Hyperparameters, OnlineArgs, Program, hyperparameters
from offmarl.programs.recording.sides import learning_environment
from offmarl.programs.runs import finite
from offmarl.programs.runs.compiling import keep_compiled_programs
from offmarl.programs.runs.evaluate import play
from offmarl.programs.runs.loop import (
    Learned,
    build,
    online_schedule,
    start,
    start_shapes,
    start_stage,
)
from offmarl.programs.runs.run import Watcher
from offmarl.programs.runs.sharding import Layout, layout_of, map_seeds
from offmarl.replay.device import bytes_of, require_room
from offmarl.teams import teams_of
from offmarl.types import ArrayTree


def scored_environment(args: OnlineArgs) -> Environment:
    """Return the environment that a recorder learns in, whose returns are one number."""
    env = learning_environment(args)
    if len(teams := teams_of(env.spec)) > 1:
        raise OptionError(
            f"{env.spec.name} has {len(teams)} teams, whose returns are not one number: give "
            f"--side with one of {', '.join(team.name for team in teams)}."
        )
    return env


@pinned()
def learning_curve(
    make: Callable[..., Program],
    args: OnlineArgs,
    seeds: int,
    report: Watcher,
) -> None:
    """Train seeds side by side, the first that of the arguments, and report each evaluation.

    ``report`` is called with the environment steps taken and the returns. Raises `OptionError` for
    arguments that cannot be, and `NotFiniteError`.
    """
    keep_compiled_programs()
    env = scored_environment(args)
    program = build(make, env.spec, args, env, lambda: cast(Hashable, env))
    layout = layout_of(seeds, "auto")
    keys = jax.vmap(lambda seed: jax.random.split(jax.random.key(seed), 3))(
        args.seed + jnp.arange(seeds)
    )
    one = hyperparameters(args)
    hyper = jax.tree.map(lambda leaf: jnp.full(seeds, leaf, leaf.dtype), one)
    shapes = start_shapes(program, keys[:, 0], hyper)
    require_room(bytes_of(shapes), "the environments, networks and buffers of all seeds")
    states = layout.place(start(program, keys[:, 0], hyper), per_seed=True)
    hyper, update_keys = layout.place((hyper, keys[:, 1]), per_seed=True)
    evaluate_keys = keys[:, 2]
    unit, schedule = program.num_steps * args.num_envs, online_schedule(program, args)
    for number in range(schedule.updates):
        stage = schedule.stage(number)
        if number == schedule.starts[stage]:
            states = start_stage(program.stages[stage], Learned(states), layout).state
        states = _advance(program, stage, layout, states, (update_keys, hyper), number)
        done = number + 1
        if schedule.is_evaluation(done):
            own = program.policy_params(states)
            if found := finite.faults(done, range(args.seed, args.seed + seeds), {}, own):
                raise finite.error(found)
            at = jax.vmap(jax.random.fold_in, in_axes=(0, None))(evaluate_keys, done)
            params, at = layout.place((own, at), per_seed=True)
            played = play(program, env, layout, args.eval_episodes, (False,), params, at)
            report(done * unit, returns_by_team(env.spec, played)[:seeds, 0, :, 0])


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _advance(
    program: Program,
    stage: int,
    layout: Layout,
    states: ArrayTree,
    rest: tuple[Key[Array, "seeds"], Hyperparameters],
    number: Int[Array, ""] | int,
) -> ArrayTree:
    """Update every seed once."""

    def of_seed(state: ArrayTree, key: Any, hyper: Hyperparameters) -> ArrayTree:
        key = jax.random.fold_in(key, number)
        return program.stages[stage].update(state, None, key, hyper)[0]

    return map_seeds(layout, of_seed, (states, *rest))
