"""Rules of hover, with numbers computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs

from .acting import KEY, advance, look, quickly, reset, sense


@pytest.fixture(scope="module")
def hover():
    """Two drones; the goals are at (2, 2, 2) and (4, 4, 4), and the arena's side is 6."""
    env = envs.make("swarm/hover-2", time_limit=10)
    state, _ = reset(env)
    goal = jnp.asarray([[2.0, 2, 2], [4, 4, 4]])
    assert env.side == 6
    return env, state._replace(task=state.task._replace(goal=goal))


def place(state, positions, velocity=0.0, collided=(False, False)):
    drones = state.drones._replace(position=jnp.asarray(positions, jnp.float32))
    drones = drones._replace(velocity=jnp.full((2, 3), velocity))
    return state._replace(drones=drones, collided=jnp.asarray(collided))


@pytest.mark.parametrize(
    ("after", "velocity", "collided", "reward"),
    [
        ([[2, 2, 2.4], [4, 4, 4]], 0.0, (False, False), 2.0 + 5 * 0.3 / 6),
        ([[2, 2, 2.6], [4, 4, 4]], 0.0, (False, False), 1.0 + 5 * 0.2 / 6),
        ([[2, 2, 3], [4, 4, 4]], 0.2, (False, False), 0.0),  # too fast, and no nearer
        ([[2, 2, 3], [4, 4, 4]], 0.0, (True, False), 1.0 - 0.5),
    ],
)
def test_the_team_is_paid_for_hovering_and_progress(hover, after, velocity, collided, reward):
    env, state = hover
    before = place(state, [[2, 2, 3], [4, 4, 4]])
    later = place(state, after, velocity, collided)
    after, rewards, done = advance(env, before, later)
    assert rewards.tolist() == pytest.approx([reward] * 2, abs=1e-5)
    assert not done
    metrics = env.metrics(after)
    assert float(metrics["collided"]) == np.mean(collided)


@pytest.mark.slow
def test_agents_and_state_show_the_attitude(hover):
    env, state = hover
    view = look(env, state)
    own = env.read(view.observation)["own"]
    np.testing.assert_array_equal(own[:, 6:15], np.tile(np.eye(3).ravel(), (2, 1)))
    np.testing.assert_array_equal(own[:, 15:], np.zeros((2, 3)))
    assert env.spec.action.size == 4
    assert env.spec.state_size == 2 * (3 + 3 + 4 + 3) + 2 * 4
    np.testing.assert_array_equal(env.scene(state).attitude, [[1, 0, 0, 0]] * 2)


def test_agents_observe_the_way_to_their_goals(hover):
    env, state = hover
    state = place(state, [[2, 2, 5], [4, 3.5, 4]])
    goal = sense(env, state)["goal"]
    np.testing.assert_allclose(goal, [[0, 0, -1, 0.5], [0, 0.5, 0, 0.5 / 6]], atol=1e-6)


@pytest.mark.nightly
def test_goals_are_outside_of_obstacles_and_away_from_most():
    env = envs.make("swarm/hover-8", obstacles=0.05)
    keys = jax.random.split(KEY, 16)
    state = quickly(lambda env: jax.vmap(env.reset)(keys)[0])(env)
    goal, obstacles = np.asarray(state.task.goal), np.asarray(state.obstacles)
    nearest = np.linalg.norm(goal[:, :, None] - obstacles[:, None], axis=-1).min(-1)
    assert (nearest > 1.2).all()  # an obstacle has the radius 1
    assert (nearest > 1.7).mean() > 0.9
    assert ((goal >= 0) & (goal <= env.side)).all()


def test_the_other_dynamics_can_be_chosen():
    env = envs.make("swarm/hover-2:dims=2,dynamics=velocity,action=discrete,collisions=none")
    assert env.spec.num_actions == 5
    state, _ = reset(env)
    assert env.metrics(state)["collided"] == 0
