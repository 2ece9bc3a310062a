import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs
from offmarl._compiling import QUICKLY
from offmarl.envs.swarm.dynamics import at_rest
from offmarl.networks import PolicyConfig, make_policy

from .acting import DOWN, KEY, LEFT, RIGHT, STAY, UP, reset, take_step


def play(env, policy, num_episodes):
    """Return the first and last states and the timesteps of whole episodes."""

    def episode(key):
        reset_key, scan_key = jax.random.split(key)
        initial, first = env.reset(reset_key)

        def step(carry, key):
            state, view = carry
            action, _, _ = policy.act((), (), view.observation, view.legal_actions, key)
            state, timestep = env.step(key, state, action)
            return (state, timestep.view), timestep

        keys = jax.random.split(scan_key, env.time_limit)
        (final, _), steps = jax.lax.scan(step, (initial, first.view), keys)
        return initial, final, steps

    keys = jax.random.split(KEY, num_episodes)
    return jax.device_get(jax.jit(jax.vmap(episode), compiler_options=QUICKLY)(keys))


def drone_at(env, x, y):
    state, _ = reset(env)
    task = state.task._replace(staleness=jnp.ones_like(state.task.staleness))
    return state._replace(drones=at_rest(jnp.asarray([[x, y]], jnp.float32)), task=task)


@pytest.mark.slow
def test_the_return_is_the_staleness_removed():
    """What a cell has gained is what grew back less what was removed; growth is bounded."""
    env = envs.make("swarm/coverage-3", recovery_time=1000)
    uniform = make_policy(PolicyConfig("random"), env.spec)
    initial, final, steps = play(env, uniform, 4)
    gained = final.task.staleness.mean((1, 2)) - initial.task.staleness.mean((1, 2))
    grown = gained + steps.reward[..., 0].sum(1) / 10
    assert (grown > 0).all()
    assert (grown < env.time_limit / env.recovery_time).all()


def test_a_drone_sees_the_four_cells_nearest_to_it():
    env = envs.make("swarm/coverage-1")
    state, step = take_step(env, drone_at(env, 2.25, 3.75), jnp.array([STAY]))
    assert np.argwhere(state.task.staleness == 0).tolist() == [[1, 3], [1, 4], [2, 3], [2, 4]]
    assert step.reward.tolist() == pytest.approx([10 * 4 / env.side**2])


def test_staleness_comes_back_in_the_recovery_time():
    env = envs.make("swarm/coverage-1", recovery_time=4, time_limit=9)
    state = drone_at(env, 1.0, 1.0)
    state, _ = take_step(env, state, jnp.array([STAY]))
    away = state._replace(drones=drone_at(env, 5.0, 5.0).drones)
    staleness = []
    for _ in range(6):
        away, _ = take_step(env, away, jnp.array([STAY]))
        staleness.append(float(away.task.staleness[0, 0]))
    assert staleness == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_commands_that_lead_out_are_illegal():
    env = envs.make("swarm/coverage-1")
    _, step = take_step(env, drone_at(env, 0.5, 3.0), jnp.array([STAY]))
    assert step.view.legal_actions.tolist() == [[True, False, True, True, True]]


def test_the_arena_keeps_the_density():
    for num_agents in (3, 8, 100, 1000):
        env = envs.make(f"swarm/coverage-{num_agents}")
        assert env.side**2 / num_agents == pytest.approx(32, rel=0.06)


def test_starts_differ():
    env = envs.make("swarm/coverage-3")
    keys = jax.random.split(jax.random.key(0), 16)
    positions = jax.jit(jax.vmap(env.reset))(keys)[0].drones.position
    assert len(np.unique(positions, axis=0)) == 16


def test_agents_are_interchangeable():
    env = envs.make("swarm/coverage-8")
    state, _ = reset(env)
    action = jnp.asarray([STAY, LEFT, RIGHT, DOWN, UP, STAY, LEFT, RIGHT])
    order = jnp.asarray([3, 1, 7, 0, 2, 6, 5, 4])
    shuffled = state._replace(drones=jax.tree.map(lambda x: x[order], state.drones))
    _, step = take_step(env, state, action)
    _, other = take_step(env, shuffled, action[order])
    np.testing.assert_array_equal(step.view.observation[order], other.view.observation)
    np.testing.assert_array_equal(step.reward, other.reward)
