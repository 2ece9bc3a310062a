"""Autoreset, on an environment made for the tests."""

import itertools
from dataclasses import dataclass, field
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.envs import autoreset, restart, transition
from offmarl.types import Discrete, EnvSpec
from tests.rollouts import view_of


@dataclass(frozen=True, eq=False)
class Countdown:
    """Counts down from a random number, which is its state, and tells how often it was reset."""

    resets: list = field(default_factory=list)
    spec: ClassVar[EnvSpec] = EnvSpec("", 1, 1, 1, Discrete(1))

    def reset(self, key):
        jax.debug.callback(lambda: self.resets.append(1))
        count = jax.random.randint(key, (), 1, 10)
        return count, restart(self.view(count))

    def step(self, key, state, action):
        count = state - 1
        ended = count[None] == 0
        return count, transition(self.view(count), -ended.astype(float), ended, ~ended & ended)

    def view(self, count):
        return view_of(self.spec, count)


def walk(env, states, keys):
    """Step a batch (or a batch of batches) through ``(T, ...)`` keys."""

    def step(states, keys):
        return jax.vmap(env.step, in_axes=(0, 0, None))(keys, states, jnp.zeros(1, jnp.int32))

    return jax.lax.scan(step, states, keys)


@pytest.fixture
def env():
    return autoreset(Countdown())


def test_episodes_follow_one_another(env):
    state, take_step = jnp.asarray(2), jax.jit(env.step)
    steps = []
    for i in range(30):
        state, step = take_step(jax.random.key(i), state, jnp.zeros(1, jnp.int32))
        steps.append((int(step.next_view.state[0]), int(step.view.state[0]), bool(step.last)))
    assert steps[:2] == [(1, 1, False), (0, steps[1][1], True)]
    for (_, now, _), (then, _, last) in itertools.pairwise(steps):
        assert then == now - 1
        assert last == (then == 0)


@pytest.mark.slow
def test_batches_equal_their_members(env):
    shape = (2, 5)
    states = jnp.arange(1, 1 + np.prod(shape)).reshape(shape)
    keys = jax.random.split(jax.random.key(0), (20, *shape))
    batch = jax.vmap(walk, in_axes=(None, 0, 1), out_axes=(0, 1))
    _, together = jax.jit(batch, static_argnums=0)(env, states, keys)
    take_step = jax.jit(env.step)
    for index in np.ndindex(shape):
        state, steps = states[index], []
        for key in keys[(slice(None), *index)]:
            state, step = take_step(key, state, jnp.zeros(1, jnp.int32))
            steps.append(step)
        alone = jax.tree.map(lambda *x: jnp.stack(x), *steps)
        member = jax.tree.map(lambda x, i=index: x[(slice(None), *i)], together)
        chex.assert_trees_all_equal(alone, member)


def test_a_batch_resets_only_where_an_episode_ends(env):
    states = jnp.asarray([8, 9])
    keys = jax.random.split(jax.random.key(0), (10, 2))
    jax.block_until_ready(jax.jit(walk, static_argnums=0)(env, states, keys[:7]))
    jax.effects_barrier()
    assert env.env.resets == []
    jax.block_until_ready(jax.jit(walk, static_argnums=0)(env, states, keys[:8]))
    jax.effects_barrier()
    assert env.env.resets


def test_what_is_shared_by_a_batch_may_stay_shared(env):
    key = jax.random.key(0)
    step = jax.vmap(env.step, in_axes=(None, 0, None))
    states, timestep = step(key, jnp.asarray([1, 2, 1]), jnp.zeros(1, jnp.int32))
    assert states[0] == states[2]
    assert timestep.last.tolist() == [True, False, True]
