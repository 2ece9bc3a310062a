"""What every environment must do: subclass, and give it an ``env``.

To compile is nearly all that it costs, so there are three programs of an environment: one reset and
one step alone, and a scan of steps of two under vmap, each begun anew where it ends. What is
wrapped, if anything, takes the same steps in the same programs; XLA does twice only what differs.
All checks are of what these return.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.envs import autoreset
from offmarl.types import Continuous, Discrete, Timestep

from .wrapped import Seen, close, wrapped_by

NUM_ENVS = 2
NUM_STEPS = 500
CHUNK = 125
"""Steps in one call of a program; the first call is made twice, to see that nothing differs."""
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""How to compile what runs for a moment only."""


class Steps(NamedTuple):
    """Random steps of an environment that resets itself: ``(E, T, ...)``."""

    state: Any
    """Before the step."""
    action: jax.Array
    key: jax.Array
    timestep: Timestep
    seen: Seen | None
    """What the same step is in the wrapped environment, where there is one."""
    same_state: jax.Array
    """Whether it leads to the same state there."""


class Recording(NamedTuple):
    """All that is checked of an environment."""

    first: Timestep
    """``(E, ...)``"""
    first_seen: Seen | None
    steps: Steps
    again: Steps
    """The first `CHUNK` of the steps, from another call with the same arguments."""


def sample_actions(spec, legal_actions, key):
    """Draw each agent's action, uniformly among the legal ones."""
    if isinstance(spec.action, Continuous):
        return jax.random.uniform(key, (spec.num_agents, spec.action_size), minval=-1, maxval=1)
    return jax.random.categorical(key, jnp.where(legal_actions, 0.0, -jnp.inf)).astype(jnp.int32)


def rollout(env, tolerance, carry, key):
    """Act at random in one environment, from a state and its view on."""
    wrapped, resetting = wrapped_by(env), autoreset(env)

    def step(carry, key):
        state, view = carry
        action_key, step_key = jax.random.split(key)
        action = sample_actions(env.spec, view.legal_actions, action_key)
        after, timestep = resetting.step(step_key, state, action)
        seen, same = None, jnp.ones((), bool)
        if wrapped:
            own_key, _ = jax.random.split(step_key)
            seen, theirs = wrapped.step(own_key, state, action)
            same = timestep.last | close(wrapped.inner(after), theirs, tolerance)
        return (after, timestep.view), Steps(state, action, step_key, timestep, seen, same)

    return jax.lax.scan(step, carry, jax.random.split(key, CHUNK))


class Programs(NamedTuple):
    """All that is compiled of an environment."""

    reset: Callable
    """``env.reset``, and that of the wrapped environment."""
    step: Callable
    """``env.step``"""
    run: Callable
    """`rollout` under vmap."""
    traces: list
    """One entry each time ``step`` was compiled."""


@functools.lru_cache(maxsize=4)
def compiled(env, tolerance=1e-5):
    wrapped, traces = wrapped_by(env), []

    def reset(key):
        return env.reset(key), wrapped.reset(key) if wrapped else None

    def step(key, state, action):
        traces.append(key)
        return env.step(key, state, action)

    run = jax.vmap(functools.partial(rollout, env, tolerance))
    programs = (jax.jit(program, compiler_options=QUICKLY) for program in (reset, step, run))
    return Programs(*programs, traces)


@functools.lru_cache(maxsize=2)
def record(env, tolerance=1e-5):
    """Take `NUM_STEPS` random steps in each of `NUM_ENVS` environments."""
    program = compiled(env, tolerance)
    reset_key, *keys = jax.random.split(jax.random.key(7), 1 + NUM_STEPS // CHUNK)
    keys = [jax.random.split(key, NUM_ENVS) for key in keys]
    begun = [program.reset(key) for key in jax.random.split(reset_key, NUM_ENVS)]
    (state, first), seen = jax.tree.map(lambda *each: join("stack", each, 0), *begun)
    carry = start = state, first.view
    chunks = []
    for key in keys:
        carry, steps = program.run(carry, key)
        chunks.append(jax.device_get(steps))
    steps = jax.tree.map(lambda *each: join("concatenate", each, 1), *chunks)
    again = program.run(start, keys[0])[1]
    return jax.device_get(Recording(first, seen, steps, again))


def join(how, arrays, axis):
    """Stack or concatenate; in NumPy, where nothing compiles, unless they are keys."""
    is_key = jnp.issubdtype(arrays[0].dtype, jax.dtypes.prng_key)
    return getattr(jnp if is_key else np, how)(arrays, axis=axis)


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def assert_close(left, right, tolerance=1e-5):
    def check(a, b):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance / 10)

    jax.tree.map(check, left, right)


def shapes(tree, lead=0):
    return jax.tree.map(lambda x: (x.shape[lead:], x.dtype.name), tree)


def types(tree):
    return [(x.shape, x.dtype.name, jax.typeof(x).weak_type) for x in jax.tree.leaves(tree)]


def ends(steps):
    """Return the first three steps of the first environment that end an episode."""
    return np.flatnonzero(steps.timestep.last[0])[:3].tolist()


def at(steps, t):
    """Return step ``t`` of the first environment."""
    return jax.tree.map(lambda x: x[0, t], steps)


class EnvironmentConformance:
    """One test of the protocol `offmarl.envs.Environment`, and its parts."""

    tolerance = 1e-5
    """How far what is compiled in two ways may be apart, relatively."""

    @pytest.fixture
    def env(self):
        raise NotImplementedError

    def test_it_keeps_the_protocol(self, env, subtests):
        """Run all checks on one recording: in parallel, a worker has an environment to itself."""
        recording = record(env, self.tolerance)
        for name in dir(self):
            if name.startswith("check_"):
                with subtests.test(name.removeprefix("check_").replace("_", " ")):
                    getattr(self, name)(env, recording)

    def step_alone(self, env, steps, t):
        """Take a recorded step again, by itself; return also the key of the reset after it."""
        state, action, key = jax.tree.map(lambda x: x[0, t], steps[:3])
        step_key, reset_key = jax.random.split(key)
        return *compiled(env, self.tolerance).step(step_key, state, action), reset_key

    def check_shapes_and_types_are_those_of_the_spec(self, env, recording):
        spec = env.spec
        agents = (spec.num_agents,)
        view = {
            "observation": ((*agents, spec.observation_size), "float32"),
            "state": ((spec.state_size,), "float32"),
            "legal_actions": ((*agents, spec.action_size), "bool"),
            "alive": (agents, "bool"),
        }
        _, alone, _ = self.step_alone(env, recording.steps, 0)
        for timestep, lead in ((alone, 0), (recording.first, 1), (recording.steps.timestep, 2)):
            assert shapes(timestep.view._asdict(), lead) == view
            assert shapes(timestep.next_view._asdict(), lead) == view
            assert shapes(timestep.reward, lead) == (agents, "float32")
            for ended in (timestep.terminated, timestep.truncated):
                assert shapes(ended, lead) == (agents, "bool")
            assert shapes(timestep.last, lead) == ((), "bool")

    def check_a_step_changes_no_type(self, env, recording):
        """Else a program would be compiled for fresh states, and again for all others."""
        program, action = compiled(env, self.tolerance), recording.steps.action[0, 0]
        (state, first), _ = program.reset(jax.random.key(1))
        after, step = program.step(jax.random.key(2), state, action)
        fresh, later = (state, first.view), (after, step.view)
        assert jax.tree.structure(later) == jax.tree.structure(fresh)
        assert types(later) == types(fresh)
        program.step(jax.random.key(3), after, action)
        assert len(program.traces) == 1

    def check_an_episode_begins_with_nothing_earned(self, env, recording):
        first = recording.first
        assert_equal(first.view, first.next_view)
        assert not first.reward.any()
        assert not (first.terminated.any() or first.truncated.any() or first.last.any())

    def check_the_same_keys_give_the_same_bits(self, env, recording):
        once = jax.tree.map(lambda x: x[:, :CHUNK], recording.steps.timestep)
        assert_equal(recording.again.timestep, once)

    def check_a_batch_equals_its_members_and_keeps_what_the_action_led_to(self, env, recording):
        steps = recording.steps
        for t in [0, 1, *ends(steps)]:
            _, alone, _ = self.step_alone(env, steps, t)
            kept = at(steps.timestep, t)
            assert_close(alone._replace(view=kept.view), kept, self.tolerance)

    def check_another_episode_begins_where_one_ends(self, env, recording):
        steps, reset = recording.steps, compiled(env, self.tolerance).reset
        for t in ends(steps):
            *_, key = self.step_alone(env, steps, t)
            (_, fresh), _ = reset(key)
            assert_close(fresh.view, at(steps.timestep, t).view, self.tolerance)
        going_on = ~steps.timestep.last
        views = (steps.timestep.view, steps.timestep.next_view)
        assert_equal(*jax.tree.map(lambda x: x[going_on], views))

    def check_everything_is_finite(self, env, recording):
        seen = recording.first, recording.steps.timestep
        finite = jax.tree.map(lambda x: bool(np.isfinite(x).all()), seen)
        assert all(jax.tree.leaves(finite))

    def check_masks(self, env, recording):
        """Living agents can act; what an agent has not is never legal, nor seen."""
        num_agents, spec, steps = env.spec.num_agents, env.spec, recording.steps
        sizes = spec.observation_sizes or (spec.observation_size,) * num_agents
        action_sizes = spec.action_sizes or (spec.action_size,) * num_agents
        for view in (steps.timestep.view, steps.timestep.next_view):
            assert (view.legal_actions.any(-1) | ~view.alive).all()
            for i in range(num_agents):
                assert not view.observation[:, :, i, sizes[i] :].any()
                assert not view.legal_actions[:, :, i, action_sizes[i] :].any()
        if isinstance(spec.action, Discrete):
            assert 0 <= steps.action.min() <= steps.action.max() < spec.num_actions

    def check_team_rewards_are_equal(self, env, recording):
        reward = recording.steps.timestep.reward
        assert env.spec.reward == "individual" or (reward == reward[..., :1]).all()

    def check_ends_are_either_termination_or_truncation(self, env, recording):
        step, limit = recording.steps.timestep, env.spec.time_limit
        assert not (step.terminated & step.truncated).any()
        assert_equal(step.last, (step.terminated | step.truncated).all(-1))
        for truncated, last in zip(step.truncated, step.last, strict=True):
            over = np.flatnonzero(last)
            lengths = np.diff(over, prepend=-1)
            assert len(over)
            assert limit is None or (lengths <= limit).all()
            assert (lengths[truncated[over].any(-1)] == limit).all()

    def check_every_step_is_that_of_what_is_wrapped(self, env, recording):
        steps = recording.steps
        if steps.seen is None:
            return
        assert steps.same_state.all()
        self.compare_seen(recording.first, recording.first_seen)
        self.compare_seen(steps.timestep, steps.seen)
        ours, theirs = steps.timestep, steps.seen
        assert_close(ours.reward, theirs.reward, self.tolerance)
        if theirs.last is None:  # made for a step more, so that its own end never comes
            late = np.arange(NUM_STEPS) % env.spec.time_limit == env.spec.time_limit - 1
            assert_equal(ours.last, np.broadcast_to(late, ours.last.shape))
        else:
            assert_equal(ours.last, theirs.last)
        if theirs.truncated is not None:
            assert_equal(ours.truncated.all(-1), theirs.truncated)

    def compare_seen(self, ours, theirs):
        for i, expected in enumerate(theirs.observations):
            own = ours.next_view.observation[..., i, : expected.shape[-1]]
            assert_close(own, expected, self.tolerance)
        if theirs.legal_actions is not None:
            assert_equal(ours.next_view.legal_actions, theirs.legal_actions)
        if theirs.state is not None:
            assert_close(ours.next_view.state, theirs.state, self.tolerance)
