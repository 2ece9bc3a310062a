"""What every environment must do: subclass, and give it an ``env``.

To compile is nearly all that it costs, so there are two programs of an environment: two of it at
random under vmap and scan, each begun anew where it ends, beside what it wraps, if anything; and
one step and one reset alone. All checks are of what these return.
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
QUICKLY = {"xla_backend_optimization_level": 0}
"""How to compile what runs for a moment only."""


class Steps(NamedTuple):
    """Random steps of an environment that resets itself: ``(E, ...)`` and ``(E, T, ...)``."""

    first: Timestep
    first_seen: Seen | None
    """The first observations of the wrapped environment, where there is one."""
    state: Any
    """Before the step."""
    action: jax.Array
    key: jax.Array
    timestep: Timestep
    seen: Seen | None
    """What the same step is in the wrapped environment."""
    same_state: jax.Array
    """Whether it leads to the same state there."""


def sample_actions(spec, legal_actions, key):
    """Draw each agent's action, uniformly among the legal ones."""
    if isinstance(spec.action, Continuous):
        return jax.random.uniform(key, (spec.num_agents, spec.action_size), minval=-1, maxval=1)
    return jax.random.categorical(key, jnp.where(legal_actions, 0.0, -jnp.inf)).astype(jnp.int32)


def rollout(env, key, tolerance):
    """Act at random in one environment."""
    wrapped, resetting = wrapped_by(env), autoreset(env)

    def step(carry, key):
        state, view = carry
        action_key, step_key = jax.random.split(key)
        action = sample_actions(env.spec, view.legal_actions, action_key)
        after, timestep = resetting.step(step_key, state, action)
        seen, same = None, jnp.ones((), bool)
        if wrapped:
            seen, theirs = wrapped.step(jax.random.split(step_key)[0], state, action)
            same = timestep.last | close(wrapped.inner(after), theirs, tolerance)
        return (after, timestep.view), (state, action, step_key, timestep, seen, same)

    reset_key, scan_key = jax.random.split(key)
    state, first = env.reset(reset_key)
    first_seen = wrapped.reset(reset_key) if wrapped else None
    keys = jax.random.split(scan_key, NUM_STEPS)
    return Steps(first, first_seen, *jax.lax.scan(step, (state, first.view), keys)[1])


class Alone(NamedTuple):
    """One step and one reset, compiled without a batch."""

    program: Callable
    traces: list
    """One entry each time it was compiled."""

    def __call__(self, key, state, action):
        """Return ``env.step`` and ``env.reset``, under the keys that autoreset gives them."""
        return self.program(key, state, action)


@functools.lru_cache(maxsize=4)
def alone(env):
    traces = []

    def program(key, state, action):
        traces.append(key)
        step_key, reset_key = jax.random.split(key)
        return env.step(step_key, state, action), env.reset(reset_key)

    return Alone(jax.jit(program, compiler_options=QUICKLY), traces)


@functools.lru_cache(maxsize=4)
def at_random(env, tolerance=1e-5):
    """Return the program of `record`."""
    many = jax.vmap(lambda key: rollout(env, key, tolerance))
    return jax.jit(many, compiler_options=QUICKLY)


@functools.lru_cache(maxsize=2)
def record(env, tolerance=1e-5):
    """Take random steps."""
    keys = jax.random.split(jax.random.key(7), NUM_ENVS)
    return jax.device_get(at_random(env, tolerance)(keys))


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
    return jax.tree.map(lambda x: x[0, t], steps._replace(first=None, first_seen=None))


class EnvironmentConformance:
    """One test of the protocol `offmarl.envs.Environment`, and its parts."""

    tolerance = 1e-5
    """How far what is compiled in two ways may be apart, relatively."""

    @pytest.fixture
    def env(self):
        raise NotImplementedError

    def test_it_keeps_the_protocol(self, env, subtests):
        """Run all checks on one recording: in parallel, a worker has an environment to itself."""
        steps = record(env, self.tolerance)
        for name in dir(self):
            if name.startswith("check_"):
                with subtests.test(name.removeprefix("check_").replace("_", " ")):
                    getattr(self, name)(env, steps)

    def alone(self, env, steps, t=0):
        step = at(steps, t)
        return alone(env)(step.key, step.state, step.action)

    def check_shapes_and_types_are_those_of_the_spec(self, env, steps):
        spec = env.spec
        agents = (spec.num_agents,)
        view = {
            "observation": ((*agents, spec.observation_size), "float32"),
            "state": ((spec.state_size,), "float32"),
            "legal_actions": ((*agents, spec.action_size), "bool"),
            "alive": (agents, "bool"),
        }
        (_, step), (_, fresh) = self.alone(env, steps)
        for timestep, lead in ((step, 0), (fresh, 0), (steps.first, 1), (steps.timestep, 2)):
            assert shapes(timestep.view._asdict(), lead) == view
            assert shapes(timestep.next_view._asdict(), lead) == view
            assert shapes(timestep.reward, lead) == (agents, "float32")
            for ended in (timestep.terminated, timestep.truncated):
                assert shapes(ended, lead) == (agents, "bool")
            assert shapes(timestep.last, lead) == ((), "bool")

    def check_a_step_changes_no_type(self, env, steps):
        """Else a program would be compiled for fresh states, and again for all others."""
        (after, step), (state, first) = self.alone(env, steps)
        fresh, later = (state, first.view), (after, step.view)
        assert jax.tree.structure(later) == jax.tree.structure(fresh)
        assert types(later) == types(fresh)

    def check_nothing_recompiles_when_only_data_changes(self, env, steps):
        program, step = alone(env), at(steps, 0)
        (after, _), (fresh, _) = program(step.key, step.state, step.action)
        for state in (after, fresh):
            program(jax.random.key(1), state, step.action)
        assert len(program.traces) == 1

    def check_an_episode_begins_with_nothing_earned(self, env, steps):
        for first in (steps.first, self.alone(env, steps)[1][1]):
            assert_equal(first.view, first.next_view)
            assert not np.any(first.reward)
            assert not np.any(first.terminated | first.truncated)
            assert not np.any(first.last)

    def check_the_same_keys_give_the_same_bits(self, env, steps):
        keys = jax.random.split(jax.random.key(7), NUM_ENVS)
        again = jax.device_get(at_random(env, self.tolerance)(keys))
        assert_equal((again.first, again.timestep), (steps.first, steps.timestep))

    def check_a_batch_equals_its_members_and_keeps_what_the_action_led_to(self, env, steps):
        for t in [0, 1, *ends(steps)]:
            (_, plain), _ = self.alone(env, steps, t)
            kept = at(steps, t).timestep
            assert_close(plain._replace(view=kept.view), kept, self.tolerance)

    def check_another_episode_begins_where_one_ends(self, env, steps):
        for t in ends(steps):
            _, (_, fresh) = self.alone(env, steps, t)
            assert_close(fresh.view, at(steps, t).timestep.view, self.tolerance)
        going_on = ~steps.timestep.last
        views = (steps.timestep.view, steps.timestep.next_view)
        assert_equal(*jax.tree.map(lambda x: x[going_on], views))

    def check_one_alone_can_begin_anew_too(self, env, steps):
        """The two branches of the condition must be of the same types."""
        step = at(steps, 0)
        after, _ = jax.eval_shape(autoreset(env).step, step.key, step.state, step.action)
        assert jax.tree.structure(after) == jax.tree.structure(step.state)

    def check_everything_is_finite(self, env, steps):
        finite = jax.tree.map(lambda x: bool(np.isfinite(x).all()), (steps.first, steps.timestep))
        assert all(jax.tree.leaves(finite))

    def check_masks(self, env, steps):
        """Living agents can act; what an agent has not is never legal, nor seen."""
        num_agents, spec = env.spec.num_agents, env.spec
        sizes = spec.observation_sizes or (spec.observation_size,) * num_agents
        action_sizes = spec.action_sizes or (spec.action_size,) * num_agents
        for view in (steps.timestep.view, steps.timestep.next_view):
            assert (view.legal_actions.any(-1) | ~view.alive).all()
            for i in range(num_agents):
                assert not view.observation[:, :, i, sizes[i] :].any()
                assert not view.legal_actions[:, :, i, action_sizes[i] :].any()
        if isinstance(spec.action, Discrete):
            assert 0 <= steps.action.min() <= steps.action.max() < spec.num_actions

    def check_team_rewards_are_equal(self, env, steps):
        reward = steps.timestep.reward
        assert env.spec.reward == "individual" or (reward == reward[..., :1]).all()

    def check_ends_are_either_termination_or_truncation(self, env, steps):
        step, limit = steps.timestep, env.spec.time_limit
        assert not (step.terminated & step.truncated).any()
        assert_equal(step.last, (step.terminated | step.truncated).all(-1))
        for truncated, last in zip(step.truncated, step.last, strict=True):
            over = np.flatnonzero(last)
            lengths = np.diff(over, prepend=-1)
            assert len(over)
            assert limit is None or (lengths <= limit).all()
            assert (lengths[truncated[over].any(-1)] == limit).all()

    def check_every_step_is_that_of_what_is_wrapped(self, env, steps):
        if steps.seen is None:
            return
        assert steps.same_state.all()
        self.compare_seen(steps.first, steps.first_seen)
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
