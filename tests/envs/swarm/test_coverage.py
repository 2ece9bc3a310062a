import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs

from .acting import DOWN, LEFT, RIGHT, STAY, UP, place, reset, take_step


def drone_at(env, x, y, stale=1.0):
    state, _ = reset(env)
    task = state.task._replace(staleness=jnp.full_like(state.task.staleness, stale))
    return place(state, [[x, y]])._replace(task=task)


@pytest.mark.parametrize(("before", "removed"), [(1.0, 1.0), (0.5, 0.54)])
def test_the_four_cells_nearest_to_a_drone_are_seen_and_pay(before, removed):
    """What grew in the step is removed, too."""
    env = envs.make("swarm/coverage-1", recovery_time=25)
    state, step = take_step(env, drone_at(env, 2.25, 3.75, before), jnp.array([STAY]))
    assert np.argwhere(state.task.staleness == 0).tolist() == [[1, 3], [1, 4], [2, 3], [2, 4]]
    assert step.reward.tolist() == pytest.approx([10 * 4 * removed / env.side**2])


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


@pytest.mark.parametrize(("place", "illegal"), [((0.5, 3.0), LEFT), ((1.0, 5.5), UP)])
def test_commands_that_lead_out_are_illegal(place, illegal):
    env = envs.make("swarm/coverage-1")
    _, step = take_step(env, drone_at(env, *place), jnp.array([STAY]))
    assert step.view.legal_actions.tolist() == [[action != illegal for action in range(5)]]


def test_the_arena_keeps_the_density():
    for num_agents in (3, 8, 100, 1000):
        env = envs.make(f"swarm/coverage-{num_agents}")
        assert env.side**2 / num_agents == pytest.approx(32, rel=0.06)


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
