"""Obstacles that block sight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs
from offmarl._compiling import QUICKLY
from offmarl.envs.swarm import neighbours

from .acting import blocks, place, quickly, reset, status

NIGHTLY = pytest.mark.nightly


def slow_can_see(origin, target, obstacles, radius):
    """Return whether many points on the line are all outside of the obstacles."""
    line = origin + np.linspace(0, 1, 2001)[:, None] * (target - origin)
    for centre in obstacles:
        inside = np.linalg.norm(line - centre, axis=-1) < radius
        if inside.any() and np.linalg.norm(target - centre) >= radius:
            return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "dense"),
    [(2, False), *(pytest.param(*case, marks=NIGHTLY) for case in ((2, True), (3, False)))],
)
def test_lines_of_sight_are_those_of_geometry(dims, dense, monkeypatch):
    monkeypatch.setattr(neighbours, "DENSE_LIMIT", 10**6 if dense else -(10**6))
    rng = np.random.default_rng(dims)
    side, reach = 16.0, 6.0
    obstacles = rng.uniform(0, side, (24 * (dims - 1), dims))
    own = rng.uniform(0, side, (80, dims))
    own = own[np.linalg.norm(own[:, None] - obstacles, axis=-1).min(1) > 1.02][:30]
    course = rng.normal(size=(len(own), 5, dims))
    course *= rng.uniform(0.5, reach, (len(own), 5, 1)) / np.linalg.norm(course, axis=-1)[..., None]
    targets = own[:, None] + course
    see = functools.partial(neighbours.can_see, radius=1.0, reach=reach, side=side)
    visible = jax.jit(see, compiler_options=QUICKLY)(*map(jnp.asarray, (own, targets, obstacles)))
    sure = [  # not those at the edge of an obstacle
        [
            slow_can_see(a, b, obstacles, 0.97) == slow_can_see(a, b, obstacles, 1.01)
            for b in targets[i]
        ]
        for i, a in enumerate(own)
    ]
    expected = [
        [slow_can_see(a, b, obstacles, 0.99) for b in targets[i]] for i, a in enumerate(own)
    ]
    assert 0.2 < np.mean(expected) < 0.95
    assert np.mean(sure) > 0.8
    np.testing.assert_array_equal(np.asarray(visible)[sure], np.asarray(expected)[sure])


def test_a_drone_at_an_obstacle_sees_along_it_but_not_through_it():
    eyes = jnp.asarray([[4.0, 5.0], [4.05, 5.0]])  # at the surface, and measured to be inside
    targets = jnp.asarray([[[4.0, 8.0], [3.0, 5.0], [7.0, 5.0], [5.5, 5.0]]] * 2)
    see = functools.partial(neighbours.can_see, radius=1.0, reach=6.0, side=10.0)
    visible = jax.jit(see, compiler_options=QUICKLY)(eyes, targets, jnp.asarray([[5.0, 5.0]]))
    assert visible.tolist() == [[True, True, False, True]] * 2


def around_a_stone(name, positions, **options):
    """Place drones around an obstacle at (5, 5)."""
    env = envs.make(name, obstacles=0.05, **options)
    state, _ = reset(env)
    return env, place(state, positions)._replace(obstacles=jnp.asarray([[5.0, 5.0]]))


THREE = [[3.0, 5.0], [7.0, 5.0], [3.0, 8.0]]


@pytest.mark.parametrize(("opaque", "known"), [pytest.param(False, 2, marks=NIGHTLY), (True, 1)])
@pytest.mark.slow
def test_neighbours_behind_an_obstacle_are_not_observed(opaque, known):
    env, state = around_a_stone("swarm/coverage-3", THREE, opaque=opaque)
    block = np.asarray(blocks(env, state)["neighbours"][0])
    assert block[:, -1].tolist() == [1.0] * known + [0.0] * (4 - known)
    np.testing.assert_allclose(block[0, :2], [0, 0.6], atol=1e-6)  # visible ones come first
    if opaque:
        assert not block[1:].any()


@NIGHTLY
def test_messages_pass_obstacles():
    options = {"comm": "learned", "comm_range": 6.0}
    env, state = around_a_stone("swarm/coverage-3", THREE, opaque=True, **options)
    state = state._replace(message=jnp.eye(4)[jnp.asarray([0, 1, 2])])
    block = np.asarray(blocks(env, state)["neighbours"][0])
    assert block[:2, -1].tolist() == [1, 1]  # a message includes the sender's position
    np.testing.assert_array_equal(block[:2, -5:-1], np.eye(4)[[2, 1]])


@NIGHTLY
def test_targets_behind_an_obstacle_are_neither_observed_nor_found():
    places = [[3.0, 5.0], [1.0, 1.0]]
    for opaque in (False, True):
        env, state = around_a_stone("swarm/search-2", places, opaque=opaque, comm="status")
        task = state.task._replace(position=jnp.asarray([[7.5, 5.0]]), found=jnp.zeros(1, bool))
        state = state._replace(task=task)
        assert blocks(env, state)["targets"][0, 0, -1] == (not opaque)
        watched = quickly(lambda env, s: env._watch(s, s.task))(env, state)
        assert watched.found.tolist() == [not opaque]
        assert status(env, state)[0].any() == (not opaque)


@NIGHTLY
def test_opponents_behind_an_obstacle_are_not_observed_and_not_fled_from():
    places = [[3.0, 5.0], [7.0, 5.0]]
    for opaque in (False, True):
        env, state = around_a_stone("swarm/pursuit-1-1", places, opaque=opaque, cells_per_agent=100)
        assert blocks(env, state)["opponents"][0, 0, -1] == (not opaque)
        flees = quickly(lambda env, s: env._flee(s))(env, state)
        assert flees.any() == (not opaque)
