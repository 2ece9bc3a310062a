"""Resets and steps of swarm environments, each compiled once for all tests."""

from functools import partial

import jax

from offmarl._compiling import QUICKLY

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
