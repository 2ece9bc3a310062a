"""Resets and steps of swarm environments, each compiled once for all tests."""

from functools import partial

import jax
import jax.numpy as jnp

from offmarl._compiling import QUICKLY
from offmarl.envs.swarm.dynamics import at_rest

KEY = jax.random.key(0)
STAY, LEFT, RIGHT, DOWN, UP = range(5)

quickly = partial(jax.jit, static_argnums=0, compiler_options=QUICKLY)
"""Compile a function of an environment, and of arrays."""

_reset = quickly(lambda env, key: env.reset(key))
_step = quickly(lambda env, key, state, action: env.step(key, state, action))
reset_many = quickly(lambda env, keys: jax.vmap(env.reset)(keys))


def reset(env, key=KEY):
    return _reset(env, key)


def take_step(env, state, action, key=KEY):
    return _step(env, key, state, action)


# What the rules of a task consist of.
advance = quickly(lambda env, before, moved: env._advance(KEY, before, moved))
blocks = quickly(lambda env, state: env._blocks(KEY, state))
look = quickly(lambda env, state: env._view(KEY, state))
sense = quickly(lambda env, state: env._sense(state))
status = quickly(lambda env, state: env._status(state))


def place(state, positions, velocity=0.0, **params):
    """Return the state with its drones at some positions, and with other parameters of theirs."""
    drones = at_rest(jnp.asarray(positions, jnp.float32))
    drones = drones._replace(velocity=0 * drones.position + jnp.asarray(velocity))
    arrays = {name: jnp.asarray(values) for name, values in params.items()}
    return state._replace(drones=drones, params=state.params._replace(**arrays))
