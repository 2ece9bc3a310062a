import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from offmarl.envs.swarm import engine

SIDE = 8


def bodies(position, velocity=None):
    position = jnp.asarray(position, jnp.float32)
    velocity = jnp.zeros_like(position) if velocity is None else jnp.asarray(velocity, jnp.float32)
    return engine.Bodies(position, velocity)


@pytest.mark.parametrize("dims", [2, 3])
def test_spawn_covers_the_arena_at_rest(dims):
    swarm = engine.spawn(jax.random.key(0), 1000, SIDE, dims)
    assert swarm.position.shape == (1000, dims)
    assert 0 <= swarm.position.min() < 0.1
    assert SIDE - 0.1 < swarm.position.max() <= SIDE
    assert not swarm.velocity.any()


def test_unit_commands_are_rest_and_both_ways_along_each_axis():
    assert engine.unit_commands(2).tolist() == [[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]]
    assert engine.unit_commands(3).shape == (7, 3)


def test_velocity_follows_the_command_with_a_lag():
    swarm = bodies([[2.0, 2.0]])
    command = jnp.asarray([[1.0, 0.0]])
    swarm = engine.move(swarm, command, 0.5, SIDE)
    assert swarm.velocity.tolist() == [[0.5, 0.0]]
    assert swarm.position.tolist() == [[2.5, 2.0]]
    swarm = engine.move(swarm, command, 0.5, SIDE)
    assert swarm.velocity.tolist() == [[0.75, 0.0]]
    assert swarm.position.tolist() == [[3.25, 2.0]]


def test_a_wall_stops_only_the_motion_into_it():
    swarm = engine.move(bodies([[0.25, 4.0]], [[-1.0, 1.0]]), jnp.asarray([[-1.0, 1.0]]), 0.5, SIDE)
    assert swarm.position.tolist() == [[0.0, 5.0]]
    assert swarm.velocity.tolist() == [[0.0, 1.0]]


def test_commands_out_of_the_arena_are_told():
    inside = engine.stays_inside(
        jnp.asarray([[0.5, 4.0], [1.0, 7.5]]), jnp.asarray(engine.unit_commands()), SIDE
    )
    assert inside.tolist() == [[True, False, True, True, True], [True, True, True, True, False]]


def brute_force(position, count, sensing_range):
    """Sort all others by distance, lower index first where equal."""
    found = []
    for i, own in enumerate(position):
        squared = ((position - own) ** 2).sum(-1, dtype=np.float32)
        others = sorted((squared[j], j) for j in range(len(position)) if j != i)
        near = [j for distance, j in others if distance <= sensing_range**2]
        found.append(near[:count])
    return found


find_neighbours = jax.jit(engine.find_neighbours, static_argnums=(1, 2))
sense_map = jax.jit(engine.sense_map, static_argnums=2)


@pytest.mark.parametrize(("num_agents", "count"), [(1, 2), (3, 4), (9, 4)])
@given(st.data())
def test_neighbours_are_the_nearest_in_range(num_agents, count, data):
    places = hnp.arrays(np.float32, (num_agents, 2), elements=st.integers(0, SIDE))
    position, sensing_range = data.draw(places), data.draw(st.sampled_from([1.0, 3.0, 20.0]))
    near = find_neighbours(jnp.asarray(position), count, sensing_range)
    found = [
        row[there].tolist()
        for row, there in zip(np.asarray(near.agent), np.asarray(near.present), strict=True)
    ]
    assert found == brute_force(position, count, sensing_range)


def test_neighbours_are_described_relative_to_the_observer():
    swarm = bodies([[1, 1], [3, 1], [1, 7]], [[0, 0], [0.5, 0], [0, 1]])
    seen = engine.sense_neighbours(swarm, 2, 4.0)
    nothing = [0, 0, 0, 0, 0]
    assert seen.tolist() == [
        [0.5, 0, 0.5, 0, 1, *nothing],
        [-0.5, 0, -0.5, 0, 1, *nothing],
        [*nothing, *nothing],
    ]


def look(cells, position, size):
    """See `engine.sense_map`, a cell at a time."""
    side, half = len(cells), size // 2

    def at(x, y):
        return cells[x, y] if 0 <= x < side and 0 <= y < side else 0.0

    def block(x, y):
        return [
            [at(i, j) for j in range(y - half, y + half + 1)] for i in range(x - half, x + half + 1)
        ]

    x, y = np.minimum(position.astype(int), side - 1)
    far = [np.mean(block(x + i * size, y + j * size)) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    return np.concatenate([np.ravel(block(x, y)), far])


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("position", [(0.0, 0.0), (3.9, 4.0), (8.0, 8.0), (0.5, 7.99)])
def test_the_map_is_sharp_nearby_and_blurred_further_out(size, position):
    cells = np.random.default_rng(0).random((SIDE, SIDE), np.float32)
    position = np.asarray(position, np.float32)
    seen = sense_map(jnp.asarray(cells), jnp.asarray(position)[None], size)[0]
    np.testing.assert_allclose(seen, look(cells, position, size), rtol=1e-5, atol=1e-6)
