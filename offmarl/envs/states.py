"""Environment states as data: recorded with each step, so that episodes can be played again."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PRNGKeyArray, UInt8

from offmarl._arrays import is_key
from offmarl.envs.base import Environment, EnvState, Wrapper, extras_of
from offmarl.envs.sides import Side
from offmarl.errors import ShapeError
from offmarl.types import ArraySpec, ArrayTree, EnvSpec

STATE, KEY = "env_state", "env_key"
"""Names of the extras: the state before a step, and the random key of the step, as bytes."""


@dataclass(frozen=True)
class RecordsStates(Wrapper):
    """An environment whose recordings hold its states, as the extras `STATE` and `KEY`.

    Everything else is that of the wrapped environment.
    """

    @property
    def spec(self) -> EnvSpec:
        """The spec of the environment, with the extras."""
        return _spec(self.env)

    def extras(self, key: PRNGKeyArray, state: EnvState) -> dict[str, Array]:
        """Return the extras of the step that ``step(key, state, action)`` takes."""
        extras = extras_of(self.env, key, state)
        return extras | {STATE: to_bytes(state), KEY: to_bytes(key)}


def record_states(env: Environment) -> Environment:
    """Return an environment whose states are recorded with each step.

    `offmarl.replay_episode` plays episodes of such a recording again. Of one side, they are the
    states of the environment of all agents.
    """
    inner = env.env if isinstance(env, Side) else env
    recorder: Environment = RecordsStates(inner)
    return replace(env, env=recorder) if isinstance(env, Side) else recorder


@lru_cache(maxsize=16)
def _spec(env: Any) -> EnvSpec:
    key = jax.eval_shape(lambda: jax.random.key(0))
    parts = {STATE: _state_of(env), KEY: key}
    extras = {name: ArraySpec((_num_bytes(part),), "uint8") for name, part in parts.items()}
    return replace(env.spec, extras={**env.spec.extras, **extras})


def _state_of(env: Any) -> ArrayTree:
    """Return the shapes and types of an environment's state."""
    state, _ = jax.eval_shape(env.reset, jax.random.key(0))
    return state


def _plain(leaf: Array) -> Array:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def to_bytes(tree: ArrayTree) -> UInt8[Array, "n"]:
    """Return the bits of all leaves of a tree, end to end."""

    def flat(leaf: Array) -> Array:
        plain = _plain(leaf)
        plain = plain.astype(jnp.uint8) if plain.dtype == bool else plain
        return jax.lax.bitcast_convert_type(plain, jnp.uint8).ravel()

    leaves = [flat(jnp.asarray(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.concatenate([jnp.zeros(0, jnp.uint8), *leaves])


def _num_bytes(tree: ArrayTree) -> int:
    return jax.eval_shape(to_bytes, tree).size


def from_bytes(data: UInt8[np.ndarray, "T n"], like: ArrayTree) -> ArrayTree:
    """Undo `to_bytes` for T trees."""
    if data.shape[1:] != (_num_bytes(like),):
        raise ShapeError(
            f"the recorded states have {data.shape[-1]} bytes, and the environment's "
            f"{_num_bytes(like)}: give the environment that was recorded, with the same options."
        )
    leaves, begin = [], 0
    for leaf in jax.tree.leaves(like):
        plain = jax.eval_shape(_plain, leaf)
        end = begin + plain.size * plain.dtype.itemsize
        part = np.ascontiguousarray(data[:, begin:end])
        array = jnp.asarray(part.view(plain.dtype).reshape(len(data), *plain.shape))
        leaves.append(jax.random.wrap_key_data(array) if is_key(leaf) else array)
        begin = end
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def recorded_states(
    env: Environment, extras: dict[str, np.ndarray]
) -> tuple[ArrayTree, Key[Array, "T"]]:
    """Return the states before T steps, and the keys of the steps, from recorded extras."""
    keys = from_bytes(extras[KEY], jax.eval_shape(lambda: jax.random.key(0)))
    return from_bytes(extras[STATE], _state_of(env)), keys
