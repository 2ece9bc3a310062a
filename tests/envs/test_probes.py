"""The returns that the probes state, computed by playing all action sequences."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs

PROBES = [name for name in envs.names() if name.startswith("probe/")]
UNIFORM = {"two-step": 0.75, "match": 0.375}
"""Mean returns of independent uniform play; 0.5 in the others."""
CUES = jnp.asarray(list(itertools.product((0, 1), repeat=2)))


reset = jax.jit(lambda env, key: env.reset(key), static_argnums=0)
take_step = jax.jit(lambda env, *args: env.step(jax.random.key(0), *args), static_argnums=0)


@functools.cache
def all_returns(env):
    """Return the returns of all joint action sequences under all cues: ``(cues, sequences)``."""
    joint = list(itertools.product((0, 1), repeat=2))
    sequences = jnp.asarray(list(itertools.product(joint, repeat=env.length)))
    return returns_of(env, sequences), sequences


@functools.partial(jax.jit, static_argnums=0)
def play_all(env, sequences):
    def play(cue, actions):
        state, _ = env.reset(jax.random.key(0))
        state = state._replace(cue=cue)
        _, steps = jax.lax.scan(lambda s, a: env.step(jax.random.key(0), s, a), state, actions)
        return steps.reward[:, 0].sum()

    return jax.vmap(jax.vmap(play, (None, 0)), (0, None))(CUES, sequences)


def returns_of(env, sequences):
    """Return the returns of sequences of joint actions ``(sequences, T, 2, ...)`` as above."""
    return np.asarray(play_all(env, sequences))


@pytest.mark.parametrize("name", PROBES)
def test_the_returns_of_the_best_and_of_uniform_play(name):
    env = envs.make(name)
    returns, _ = all_returns(env)
    assert returns.max(1).tolist() == [env.optimal_return] * len(CUES)
    assert returns.mean() == pytest.approx(UNIFORM.get(name.removeprefix("probe/"), 0.5))


@pytest.mark.parametrize(
    ("name", "first_action", "last_action", "wanted"),
    [
        ("probe/one-step", 0, 0, 0.0),
        ("probe/two-step", 0, 0, 0.5),
        ("probe/observation", 1, 1, 0.5),
        ("probe/match", 0, 0, 0.5),
        ("probe/memory", 1, 0, 0.5),
    ],
)
def test_a_learner_without_the_ability_gets_what_is_stated(name, first_action, last_action, wanted):
    env = envs.make(name)
    returns, sequences = all_returns(env)
    constant = (sequences[:, 0] == first_action).all(-1) & (sequences[:, -1] == last_action).all(-1)
    assert returns[:, constant].mean() == pytest.approx(wanted)


@pytest.mark.parametrize("name", PROBES)
def test_continuous_actions_are_shares_of_the_discrete_ones(name):
    returns, sequences = all_returns(envs.make(name))
    env = envs.make(name, action="continuous")
    ends = 2.0 * sequences[..., None] - 1
    np.testing.assert_allclose(returns_of(env, ends), returns, atol=1e-6)
    halves = returns_of(env, 0 * ends[:1])
    np.testing.assert_allclose(halves.mean(), returns.mean(), atol=1e-6)
    # Linear in one agent's action, so 0.5 lies three quarters of the way.
    low, high, between = (ends[:1].at[:, :, 0].set(x) for x in (-1.0, 1.0, 0.5))
    expected = returns_of(env, low) / 4 + 3 * returns_of(env, high) / 4
    np.testing.assert_allclose(returns_of(env, between), expected, atol=1e-6)


@pytest.mark.parametrize("name", PROBES)
def test_episodes_terminate_at_their_length(name):
    env = envs.make(name)
    state, _ = reset(env, jax.random.key(0))
    for time in range(1, env.length + 1):
        state, step = take_step(env, state, jnp.zeros(2, jnp.int32))
        assert bool(step.last) == (time == env.length)
        assert not step.truncated.any()


def observations(name, actions):
    """Return what is seen at the start and after each of the ``(T, N)`` actions."""
    env = envs.make(name)
    state, first = reset(env, jax.random.key(0))
    views = [first.view.observation.tolist()]
    for action in actions:
        state, step = take_step(env, state, jnp.asarray(action, jnp.int32))
        views.append(step.view.observation.tolist())
    return state, views


def test_memory_shows_the_cue_once_and_asks_at_the_end():
    state, views = observations("probe/memory", [(0, 0), (1, 1)])
    assert views[0] == [[1 - cue, cue, 0] for cue in state.cue.tolist()]
    assert views[1:] == [[[0, 0, 0]] * 2, [[0, 0, 1]] * 2]


def test_two_step_shows_what_was_chosen():
    _, views = observations("probe/two-step", [(0, 1)])
    assert views == [[[1, 0, 0]] * 2, [[0, 1, 0], [0, 0, 1]]]


def test_observation_gives_each_agent_its_own_cue():
    env = envs.make("probe/observation")
    state, first = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 64))
    np.testing.assert_array_equal(first.view.observation.argmax(-1), state.cue)
    assert len(np.unique(state.cue, axis=0)) == 4
