"""The cell list against all pairs, and both against a search by sorting."""

import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from offmarl import envs
from offmarl._compiling import QUICKLY
from offmarl.envs.swarm import neighbours

SIDE = 24
REACH = 3.0
COUNT = 4
BOTH = (neighbours.reduce_all_pairs, neighbours.reduce_cells)


def searching_with(reduce, find, *args):
    with mock.patch.object(neighbours, "reduce_within", reduce):
        return find(*args)


@jax.jit
def neighbours_with_both(position, alive):
    find, options = neighbours.find_neighbours, (COUNT, REACH, SIDE)
    return [searching_with(reduce, find, position, alive, *options) for reduce in BOTH]


@jax.jit
def points_with_both(position, points, mask):
    find, options = neighbours.find_points, (COUNT, REACH, SIDE, mask)
    return [searching_with(reduce, find, position, points, *options) for reduce in BOTH]


def brute_force(position, points, mask, itself=False):
    """Sort all points by distance, lower index first where equal."""
    nearest = []
    for i, place in enumerate(position):
        squared = ((points - place) ** 2).sum(-1, dtype=np.float32)
        distances = sorted(
            (d, j) for j, d in enumerate(squared) if mask[j] and not (itself and i == j)
        )
        nearest.append([j for distance, j in distances if distance <= REACH**2][:COUNT])
    return nearest


def listed(near):
    mask = np.isfinite(near.distance)
    return [row[valid].tolist() for row, valid in zip(np.asarray(near.which), mask, strict=True)]


def drawn_places(data, shape, least=0, most=SIDE):
    """Whole numbers make ties and distances equal to the reach; few places make crowds."""
    most = data.draw(st.sampled_from([2, most]))
    return data.draw(hnp.arrays(np.float32, shape, elements=st.integers(least, most)))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [2, 3])
@given(st.data())
def test_both_searches_find_the_nearest_in_range(dims, data):
    position = drawn_places(data, (30, dims))
    alive = data.draw(hnp.arrays(bool, 30))
    dense, cells = neighbours_with_both(position, alive)
    assert listed(dense) == listed(cells) == brute_force(position, position, alive, itself=True)
    chex.assert_trees_all_equal(dense, cells)


@given(st.data())
@pytest.mark.slow
def test_both_searches_find_the_nearest_points_also_outside_the_arena(data):
    position, points = drawn_places(data, (20, 2)), drawn_places(data, (30, 2), -5, SIDE + 5)
    mask = data.draw(hnp.arrays(bool, 30))
    dense, cells = points_with_both(position, points, mask)
    assert listed(dense) == listed(cells) == brute_force(position, points, mask)
    chex.assert_trees_all_equal(dense, cells)


@pytest.mark.slow
@pytest.mark.bits
@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 5.0, SIDE]))
def test_both_searches_give_the_same_bits_anywhere(seed, spread):
    place = np.random.default_rng(seed)
    position = place.uniform(0, spread, (30, 2)).astype(np.float32)
    dense, cells = neighbours_with_both(position, np.ones(30, bool))
    chex.assert_trees_all_equal(dense, cells)


@pytest.mark.parametrize("num_points", [3, 300])
@pytest.mark.parametrize("spread", [4.0, 98.0])
def test_the_nearest_is_found_however_far_it_is(num_points, spread):
    """A crowd in a corner is far from most."""
    points = jax.random.uniform(jax.random.key(0), (num_points, 2), maxval=spread)
    position = jax.random.uniform(jax.random.key(1), (100, 2), maxval=98.0)
    distances = jax.jit(neighbours.find_distance, static_argnums=2)(position, points, 98.0)
    expected = np.linalg.norm(np.asarray(position)[:, None] - np.asarray(points), axis=-1).min(-1)
    np.testing.assert_allclose(distances, expected, rtol=1e-5)


def test_the_cell_list_serves_large_swarms_and_all_pairs_small_or_crowded_ones():
    def program(num_agents, side):
        position = jnp.zeros((num_agents, 2))
        find = functools.partial(neighbours.find_neighbours, count=4, reach=5.0, side=side)
        return str(jax.make_jaxpr(find)(position, jnp.ones(num_agents, bool)))

    assert "while" in program(300, 98.0)
    assert "while" not in program(100, 57.0)
    assert "while" not in program(300, 15.0)


def test_invalid_points_are_not_found():
    points, mask = jnp.asarray([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0]]), jnp.asarray([1, 0, 1], bool)
    near = neighbours.find_points(jnp.zeros((1, 2)), points, 4, 9.0, 10.0, mask)
    assert near.distance.tolist() == [[1.0, 2.0, np.inf, np.inf]]
    assert near.which[:, :2].tolist() == [[0, 2]]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        "swarm/search-30:comm=status,obstacles=0.1",
        "swarm/coverage-30:obstacles=0.2,randomise=all",
        "swarm/delivery-30",
        "swarm/delivery-40:dims=3",
        "swarm/pursuit-30-20",
        "swarm/pursuit-20-30:evaders=learned,comm=status",
        "swarm/flock-30:comm=status",
    ],
)
def test_no_task_can_tell_which_search_there_is(name, monkeypatch):
    """Sums over several drones may differ by rounding; what is seen, and who is near, does not."""
    env = envs.make(name)

    def play(key):
        def step(carry, key):
            state, view = carry
            legal = view.legal_actions
            last = legal.shape[-1] - 1 - legal[:, ::-1].argmax(-1)
            state, timestep = env.step(key, state, last)
            return (state, timestep.view), timestep.reward

        first_key, *keys = jax.random.split(key, 6)
        state, timestep = env.reset(first_key)
        (state, view), rewards = jax.lax.scan(step, (state, timestep.view), jnp.stack(keys))
        return state.task, state.alive, view, rewards

    results = []
    for limit in (10**9, -(10**9)):
        monkeypatch.setattr(neighbours, "DENSE_LIMIT", limit)
        with mock.patch.object(
            neighbours, "reduce_cells", wraps=neighbours.reduce_cells
        ) as reduce_cells:
            program = jax.jit(jax.vmap(play), compiler_options=QUICKLY)
            results.append(program(jax.random.split(jax.random.key(0), 4)))
        assert reduce_cells.called == (limit < 0)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *results)
