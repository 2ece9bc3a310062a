"""Tests of the environment protocol for pytest: see `EnvironmentConformance`.

Compilation is nearly the whole cost, so each environment has three programs: one reset, one step,
and a scan of steps of two environments under vmap with autoreset. All checks read the recording
that these make.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from offmarl._compiling import quickly
from offmarl.envs.base import autoreset
from offmarl.envs.outside import faults, outcome
from offmarl.types import Continuous, EnvSpec, Timestep, View

NUM_ENVS = 2
NUM_STEPS = 500


class RandomSteps(NamedTuple):
    """Random steps with autoreset: ``(E, T, ...)``."""

    state: Any
    """Before the step."""
    action: Any
    key: Any
    timestep: Timestep


class RecordedSteps(NamedTuple):
    """The data that the checks read."""

    first: Timestep
    """``(E, ...)``"""
    steps: RandomSteps
    again: RandomSteps
    """The same steps from a second call with the same arguments."""


class Programs(NamedTuple):
    """The compiled programs of an environment."""

    reset: Callable[..., Any]
    """``env.reset``"""
    step: Callable[..., Any]
    """``env.step``"""
    run: Callable[..., Any]
    """`_run`"""
    traces: list[Any]
    """One entry for each time ``step`` was compiled."""


def sample_actions(spec: EnvSpec, legal_actions: Any, key: Any) -> Any:
    """Draw each agent's action, uniformly among the legal ones."""
    if isinstance(spec.action, Continuous):
        return jax.random.uniform(key, (spec.num_agents, spec.action_size), minval=-1, maxval=1)
    return jax.random.categorical(key, jnp.where(legal_actions, 0.0, -jnp.inf)).astype(jnp.int32)


def _run(env: Any, resets: list[Any], keys: Any) -> tuple[Timestep, RandomSteps]:
    """Return the first timesteps after resets, and random steps from there on."""
    resetting = autoreset(env)

    def step(carry: Any, key: Any) -> tuple[Any, RandomSteps]:
        state, view = carry
        action_key, step_key = jax.random.split(key)
        action = sample_actions(env.spec, view.legal_actions, action_key)
        after, timestep = resetting.step(step_key, state, action)
        return (after, timestep.view), RandomSteps(state, action, step_key, timestep)

    def rollout(state: Any, view: View, key: Any) -> RandomSteps:
        return jax.lax.scan(step, (state, view), jax.random.split(key, NUM_STEPS))[1]

    states, first = jax.tree.map(lambda *leaves: jnp.stack(leaves), *resets)
    return first, jax.vmap(rollout)(states, first.view, keys)


@functools.lru_cache(maxsize=4)
def compile_programs(env: Any) -> Programs:
    """Return the programs of an environment; equal environments share them."""
    traces: list[Any] = []

    def step(key: Any, state: Any, action: Any) -> Any:
        traces.append(key)
        return env.step(key, state, action)

    compile_quickly = functools.partial(jax.jit, compiler_options=quickly())
    run = compile_quickly(functools.partial(_run, env))
    return Programs(compile_quickly(env.reset), compile_quickly(step), run, traces)


@functools.lru_cache(maxsize=2)
def record(env: Any) -> RecordedSteps:
    """Take `NUM_STEPS` random steps in each of `NUM_ENVS` environments."""
    program = compile_programs(env)
    reset_keys, keys = jax.random.split(jax.random.key(7), (2, NUM_ENVS))
    resets = [program.reset(key) for key in reset_keys]
    first, steps = program.run(resets, keys)
    return jax.device_get(RecordedSteps(first, steps, again=program.run(resets, keys)[1]))


def _assert_close(left: Any, right: Any, tolerance: float) -> None:
    chex.assert_trees_all_close(left, right, rtol=tolerance, atol=tolerance / 10)


def _types(tree: Any) -> list[Any]:
    return [(x.shape, x.dtype.name, jax.typeof(x).weak_type) for x in jax.tree.leaves(tree)]


def _ends(steps: RandomSteps) -> list[int]:
    """Return the first three steps of the first environment that end an episode."""
    return np.flatnonzero(steps.timestep.last[0])[:3].tolist()


def _at(steps: Any, t: int) -> Any:
    """Return step ``t`` of the first environment."""
    return jax.tree.map(lambda x: x[0, t], steps)


class EnvironmentConformance:
    """Tests that an environment keeps the protocol `offmarl.envs.Environment`.

    Subclass it with a pytest fixture ``env``. It needs pytest 9 or later::

        class TestMine(EnvironmentConformance):
            @pytest.fixture
            def env(self):
                return offmarl.envs.make("path/to/mine.py:Mine")

    Episodes must end within 500 random steps.
    """

    tolerance = 1e-5
    """Largest relative difference between programs that compile differently."""

    def test_it_keeps_the_protocol(self, env: Any, subtests: Any) -> None:
        """Run all checks on one recording: one test, so that one worker compiles it."""
        recording = record(env)
        for name in dir(self):
            if name.startswith("_check_"):
                with subtests.test(name.removeprefix("_check_").replace("_", " ")):
                    getattr(self, name)(env, recording)

    def _step_alone(self, env: Any, steps: RandomSteps, t: int) -> Any:
        """Repeat a recorded step unbatched; return also the key of the reset after it."""
        state, action, key = _at(steps[:3], t)
        step_key, reset_key = jax.random.split(key)
        return *compile_programs(env).step(step_key, state, action), reset_key

    def _check_shapes_and_types_are_those_of_the_spec(
        self, env: Any, recording: RecordedSteps
    ) -> None:
        _, alone, _ = self._step_alone(env, recording.steps, 0)
        first = jax.tree.map(lambda x: x[0], recording.first)
        for timestep in (alone, first, _at(recording.steps.timestep, 0)):
            _, typed = outcome(env.spec, "step", ((), timestep))
            chex.assert_trees_all_equal_shapes_and_dtypes(typed, timestep)

    def _check_a_step_changes_no_type(self, env: Any, recording: RecordedSteps) -> None:
        """Otherwise a program would compile for fresh states and again for all others."""
        program, action = compile_programs(env), recording.steps.action[0, 0]
        state, first = program.reset(jax.random.key(1))
        after, step = program.step(jax.random.key(2), state, action)
        fresh, later = (state, first.view), (after, step.view)
        chex.assert_trees_all_equal_structs(later, fresh)
        assert _types(later) == _types(fresh)
        program.step(jax.random.key(3), after, action)
        assert len(program.traces) == 1

    def _check_an_episode_begins_with_nothing_earned(
        self, env: Any, recording: RecordedSteps
    ) -> None:
        first = recording.first
        chex.assert_trees_all_equal(first.view, first.next_view)
        assert not first.reward.any()
        assert not (first.terminated.any() or first.truncated.any() or first.last.any())

    def _check_the_same_keys_give_the_same_bits(self, env: Any, recording: RecordedSteps) -> None:
        chex.assert_trees_all_equal(recording.again.timestep, recording.steps.timestep)

    def _check_a_batch_equals_its_members_and_keeps_what_the_action_led_to(
        self, env: Any, recording: RecordedSteps
    ) -> None:
        steps = recording.steps
        for t in [0, 1, *_ends(steps)]:
            _, alone, _ = self._step_alone(env, steps, t)
            batched = _at(steps.timestep, t)
            _assert_close(alone._replace(view=batched.view), batched, self.tolerance)

    def _check_another_episode_begins_where_one_ends(
        self, env: Any, recording: RecordedSteps
    ) -> None:
        steps, reset = recording.steps, compile_programs(env).reset
        for t in _ends(steps):
            *_, key = self._step_alone(env, steps, t)
            _, fresh = reset(key)
            _assert_close(fresh.view, _at(steps.timestep, t).view, self.tolerance)
        going_on = ~steps.timestep.last
        views = (steps.timestep.view, steps.timestep.next_view)
        chex.assert_trees_all_equal(*jax.tree.map(lambda x: x[going_on], views))

    def _check_everything_is_finite(self, env: Any, recording: RecordedSteps) -> None:
        timesteps = recording.first, recording.steps.timestep
        finite = jax.tree.map(lambda x: bool(np.isfinite(x).all()), timesteps)
        assert all(jax.tree.leaves(finite))

    def _check_values_that_shapes_do_not_show(self, env: Any, recording: RecordedSteps) -> None:
        steps = recording.steps.timestep
        assert not [*faults(env.spec, steps, steps.next_view)]

    def _check_only_the_time_limit_truncates(self, env: Any, recording: RecordedSteps) -> None:
        step, limit = recording.steps.timestep, env.spec.time_limit
        chex.assert_trees_all_equal(step.last, (step.terminated | step.truncated).all(-1))
        assert not step.truncated[~step.last].any()  # an agent's alone
        for truncated, last in zip(step.truncated, step.last, strict=True):
            over = np.flatnonzero(last)
            lengths = np.diff(over, prepend=-1)
            assert len(over)
            assert (lengths[truncated[over].any(-1)] == limit).all()
