"""Recorded episodes as scenes, by playing them again in their environment.

If the vault has the environment's states, they are drawn. Other vaults hold the actions and, if a
policy was recorded, the seed of all random numbers. An episode is then played again with the random
keys of its recording (any key serves a deterministic environment), and is shown only if all
observations and rewards equal the recorded ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from offmarl.errors import OptionError, ShapeError
from offmarl.report.render import Playback
from offmarl.types import ArrayTree, Episode, Transition
from offmarl.vault import Dataset

if TYPE_CHECKING:
    from jaxtyping import Array, Key, PRNGKeyArray

    from offmarl.envs.base import Environment

_TOLERANCE = 1e-3
"""Tolerance for other machines and versions of JAX, which round differently."""


class Keys(NamedTuple):
    """The random keys of an episode."""

    reset: PRNGKeyArray
    steps: Key[Array, "T"]


def replay(env: Environment, vault: Dataset, number: int) -> Playback:
    """Play a recorded episode again and return its scenes.

    Parameters
    ----------
    env
        The environment that was recorded.
    vault
        The recording.
    number
        The episode's index in `Dataset.episodes`.

    Raises
    ------
    ShapeError
        The environment has other sizes.
    OptionError
        The environment cannot be drawn, or the result differs from the recording: its random keys
        are not known, or the environment has changed.
    """
    import jax

    from offmarl.envs.states import STATE
    from offmarl.programs import replay_episode

    if not hasattr(env, "scene"):
        raise OptionError(f"episodes of {env.spec.name} cannot be drawn.")
    if difference := vault.spec.difference(env.spec, extras=False):
        raise ShapeError(
            f"{vault.path} and the environment {env.spec.name} differ in {difference}."
        )
    episode = vault.episode(number)
    steps = episode.transition
    if STATE in vault.spec.extras:
        states = replay_episode(vault, number, env).states
        return _playback(env, jax.device_get(jax.jit(jax.vmap(env.scene))(states)), steps)
    size = max(env.spec.time_limit or 0, len(steps.last))  # one program for all lengths
    keys = _keys(vault, number)
    pad = partial(_pad, size=size)
    scenes, seen, reward = jax.device_get(
        _program(env)(keys.reset, pad(keys.steps), pad(steps.action))  # type: ignore[arg-type]
    )
    _check(vault, number, seen, reward, episode)
    return _playback(env, scenes, steps)


def _playback(env: Environment, scenes: Any, steps: Transition) -> Playback:
    """Return the first T+1 scenes of an episode with the sums of its rewards."""
    import jax

    count = len(steps.last) + 1
    leaves, shape = jax.tree.flatten(scenes)
    drawn = [jax.tree.unflatten(shape, [leaf[t] for leaf in leaves]) for t in range(count)]
    score = np.concatenate([[0.0], np.cumsum(steps.reward.mean(1), dtype=float)])
    return Playback(env.spec.name, drawn, score)


def _pad(leaf: Any, size: int) -> Any:
    """Repeat the last entry up to ``size`` entries."""
    return leaf[np.minimum(np.arange(size), len(leaf) - 1)]


@lru_cache(maxsize=1)
def _program(env: Any) -> Any:
    """Return a function that plays actions: T+1 scenes and observations, and T rewards."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def run(reset: PRNGKeyArray, keys: Key[Array, "T"], actions: Array) -> ArrayTree:
        state, first = env.reset(reset)

        def step(state: Any, inputs: Any) -> tuple[Any, Any]:
            state, timestep = env.step(inputs[0], state, inputs[1])
            return state, (_scene(env, state), timestep.next_view.observation, timestep.reward)

        _, (scenes, seen, reward) = jax.lax.scan(step, state, (keys, actions))
        begin = (_scene(env, state), first.view.observation)
        joined = jax.tree.map(
            lambda one, more: jnp.concatenate([jnp.asarray(one)[None], more]), begin, (scenes, seen)
        )
        return (*joined, reward)

    return run


def _scene(env: Any, state: Any) -> Any:
    return env.scene(state)


def _check(vault: Dataset, number: int, seen: Any, reward: Any, episode: Episode) -> None:
    steps, final = episode.transition, episode.final
    recorded = np.asarray(steps.view.observation)
    if final is not None:
        recorded = np.concatenate([recorded, final.observation[None]])
    same = np.allclose(seen[: len(recorded)], recorded, atol=_TOLERANCE) and np.allclose(
        reward[: len(steps.reward)], steps.reward, atol=_TOLERANCE
    )
    if not same:
        raise OptionError(
            f"{vault.path}: episode {number}, played again, differs from the recording. Either its "
            "random keys are unknown, or the environment has changed: record a policy again to "
            "watch its episodes."
        )


def _keys(vault: Dataset, number: int) -> Keys:
    """Return the keys of an episode that a policy recording drew; arbitrary ones otherwise."""
    import jax

    table = vault.episodes
    row, start, length = (int(x[number]) for x in (table.row, table.start, table.length))
    recipe = _recipe(vault)
    if recipe is None or row >= recipe["num_envs"]:
        arbitrary = jax.random.key(0)
        return Keys(arbitrary, jax.random.split(arbitrary, length))
    first, key = jax.random.split(jax.random.key(recipe["seed"]))
    before = np.maximum(np.arange(start - 1, start + length), 0)
    step_keys, reset_keys = _draws(recipe["num_envs"], recipe["chunks"][1])(key, row, before)
    reset = reset_keys[0] if start else jax.random.split(first, recipe["num_envs"])[row]
    return Keys(reset, step_keys[1:])


@lru_cache(maxsize=1)
def _draws(num_envs: int, chunk: int) -> Any:
    """Return a function that draws the keys of steps and of the resets after them."""
    import jax

    @jax.jit
    def draw(key: PRNGKeyArray, row: Any, times: Any) -> tuple[Array, Array]:
        def of_step(time: Any) -> Any:
            of_chunk = jax.random.fold_in(key, time // chunk)
            keys = jax.random.split(of_chunk, (chunk, 2, num_envs))
            return jax.random.split(keys[time % chunk, 1, row])

        drawn = jax.lax.map(of_step, times)
        return drawn[:, 0], drawn[:, 1]

    return draw


def _recipe(vault: Dataset) -> Mapping[str, Any] | None:
    """Return the recipe of a policy recording; None for other vaults."""
    recipe = vault.provenance.get("recipe")
    names = {"env", "policy", "num_envs", "chunks", "seed"}
    found = recipe if isinstance(recipe, Mapping) else {}
    return found if found.keys() - {"extras"} == names else None
