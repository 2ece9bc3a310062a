"""What every environment must do: subclass, and give it an ``env``."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.envs import autoreset
from offmarl.types import Continuous

NUM_ENVS = 2
NUM_STEPS = 1000
KEYS = jax.random.split(jax.random.key(7), NUM_ENVS)
QUICKLY = {"xla_backend_optimization_level": 0}
"""How to compile what runs for a moment only."""


def sample_actions(spec, legal_actions, key):
    """Draw each agent's action, uniformly among the legal ones."""
    if isinstance(spec.action, Continuous):
        return jax.random.uniform(key, (spec.num_agents, spec.action_size), minval=-1, maxval=1)
    return jax.random.categorical(key, jnp.where(legal_actions, 0.0, -jnp.inf)).astype(jnp.int32)


def rollout(env, key, num_steps):
    """Act at random; return the actions, the keys and the timesteps, the first one apart."""

    def step(carry, key):
        state, view = carry
        action_key, step_key = jax.random.split(key)
        action = sample_actions(env.spec, view.legal_actions, action_key)
        after, timestep = env.step(step_key, state, action)
        return (after, timestep.view), (state, action, step_key, timestep)

    reset_key, scan_key = jax.random.split(key)
    state, first = env.reset(reset_key)
    _, steps = jax.lax.scan(step, (state, first.view), jax.random.split(scan_key, num_steps))
    return first, steps


class Programs(NamedTuple):
    """All that the tests run of an environment, compiled once."""

    reset: Callable
    step_many: Callable
    run: Callable
    """`rollout` with autoreset."""
    run_many: Callable
    traces: list
    """One entry each time ``run`` was compiled."""


@functools.cache
def compiled(env):
    traces = []

    def run(key):
        traces.append(key)
        return rollout(autoreset(env), key, NUM_STEPS)

    def run_many(keys):
        return jax.vmap(lambda key: rollout(autoreset(env), key, NUM_STEPS))(keys)

    programs = (env.reset, jax.vmap(env.step), run, run_many)
    return Programs(*(jax.jit(program, compiler_options=QUICKLY) for program in programs), traces)


@functools.cache
def record(env):
    """Return what ``run_many`` does: ``(E, ...)`` and ``(E, T, ...)``."""
    return jax.device_get(compiled(env).run_many(KEYS))


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def assert_close(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), left, right)


def random_step(env, key):
    """Take the first step of an episode."""
    state, timestep = env.reset(key)
    action = sample_actions(env.spec, timestep.view.legal_actions, key)
    return env.step(key, state, action)


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype.name), tree)


def types(tree):
    return [(x.shape, x.dtype.name, x.weak_type) for x in jax.tree.leaves(tree)]


class EnvironmentConformance:
    """Tests of the protocol `offmarl.envs.Environment`."""

    @pytest.fixture
    def env(self):
        raise NotImplementedError

    @pytest.fixture
    def recording(self, env):
        return record(env)

    def test_shapes_and_types_are_those_of_the_spec(self, env):
        spec = env.spec
        agents = (spec.num_agents,)
        view = {
            "observation": ((*agents, spec.observation_size), "float32"),
            "state": ((spec.state_size,), "float32"),
            "legal_actions": ((*agents, spec.action_size), "bool"),
            "alive": (agents, "bool"),
        }
        _, first = jax.eval_shape(env.reset, jax.random.key(0))
        _, step = jax.eval_shape(lambda key: random_step(env, key), jax.random.key(0))
        for timestep in (first, step):
            assert shapes(timestep.view._asdict()) == view
            assert shapes(timestep.next_view._asdict()) == view
            assert shapes(timestep.reward) == (agents, "float32")
            assert shapes(timestep.terminated) == shapes(timestep.truncated) == (agents, "bool")
            assert shapes(timestep.last) == ((), "bool")

    def test_a_step_changes_no_type(self, env):
        """Else a program would be compiled for fresh states, and again for all others."""
        state, first = jax.eval_shape(env.reset, jax.random.key(0))
        after, step = jax.eval_shape(lambda key: random_step(env, key), jax.random.key(0))
        fresh, later = (state, first.view), (after, step.view)
        assert jax.tree.structure(later) == jax.tree.structure(fresh)
        assert types(later) == types(fresh)

    def test_an_episode_begins_with_nothing_earned(self, env):
        _, first = compiled(env).reset(jax.random.key(3))
        assert_equal(first.view, first.next_view)
        assert not first.reward.any()
        assert not (first.terminated.any() or first.truncated.any() or first.last)

    def test_the_same_keys_give_the_same_bits(self, env):
        run = compiled(env).run
        assert_equal(run(jax.random.key(5))[1][3], run(jax.random.key(5))[1][3])

    def test_nothing_recompiles_when_only_data_changes(self, env):
        program = compiled(env)
        program.run(jax.random.key(0))
        program.run(jax.random.key(1))
        assert len(program.traces) == 1

    def test_a_batch_equals_its_members(self, env, recording):
        _, (_, action, _, timestep) = compiled(env).run(KEYS[1])
        member = jax.tree.map(lambda x: x[1], (recording[1][1], recording[1][3]))
        assert_close((action, timestep), member)

    def test_everything_is_finite(self, recording):
        finite = jax.tree.map(lambda x: bool(np.isfinite(x).all()), recording[1][3])
        assert all(jax.tree.leaves(finite))

    def test_living_agents_can_always_act(self, recording):
        for view in (recording[1][3].view, recording[1][3].next_view):
            assert (view.legal_actions.any(-1) | ~view.alive).all()

    def test_team_rewards_are_equal(self, env, recording):
        reward = recording[1][3].reward
        assert env.spec.reward == "individual" or (reward == reward[..., :1]).all()

    def test_ends_are_either_termination_or_truncation(self, env, recording):
        step = recording[1][3]
        assert not (step.terminated & step.truncated).any()
        assert_equal(step.last, (step.terminated | step.truncated).all(-1))
        for truncated, last in zip(step.truncated, step.last, strict=True):
            ends = np.flatnonzero(last)
            lengths = np.diff(ends, prepend=-1)
            limit = env.spec.time_limit
            assert limit is None or (lengths <= limit).all()
            assert (lengths[truncated[ends].any(-1)] == limit).all()

    def test_autoreset_keeps_what_the_action_led_to(self, env, recording):
        state, action, key, step = recording[1]
        key, state, action = jax.tree.map(lambda x: x[0], (key, state, action))
        step_key = jax.vmap(jax.random.split)(key)[:, 0]
        _, plain = compiled(env).step_many(step_key, state, action)
        autoreset_step = jax.tree.map(lambda x: x[0], step)
        assert_close(plain._replace(view=autoreset_step.view), autoreset_step)

    def test_autoreset_begins_an_episode_after_the_last_step(self, env, recording):
        _, _, keys, step = recording[1]
        ended = np.flatnonzero(step.last[0])
        for t in ended[:3]:
            _, fresh = compiled(env).reset(jax.random.split(keys[0, t])[1])
            assert_close(fresh.view, jax.tree.map(lambda x, t=t: x[0, t], step.view))
        going_on = ~step.last
        views = (step.view, step.next_view)
        assert_equal(*jax.tree.map(lambda x: x[going_on], views))
