import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from offmarl.envs.swarm import neighbours

SIDE = 24
RANGE = 3.0
COUNT = 4


@jax.jit
def both(position, alive):
    dense = neighbours.search_all_pairs(position, alive, COUNT)
    cells = neighbours.search_cells(position, alive, COUNT, RANGE, SIDE)
    return [neighbours._within(nearest, RANGE) for nearest in (dense, cells)]


def brute_force(position, alive, count, sensing_range):
    """Sort all others by distance, lower index first where equal."""
    found = []
    for i, own in enumerate(position):
        squared = ((position - own) ** 2).sum(-1, dtype=np.float32)
        others = sorted((squared[j], j) for j in range(len(position)) if j != i and alive[j])
        near = [j for distance, j in others if distance <= sensing_range**2]
        found.append(near[:count])
    return found


def listed(near):
    there = np.isfinite(near.distance)
    return [row[known].tolist() for row, known in zip(np.asarray(near.which), there, strict=True)]


@pytest.mark.parametrize("dims", [2, 3])
@given(st.data())
def test_both_searches_find_the_nearest_in_range(dims, data):
    """Whole numbers make ties and distances equal to the range; few places make crowds."""
    most = data.draw(st.sampled_from([2, SIDE]))
    position = data.draw(hnp.arrays(np.float32, (30, dims), elements=st.integers(0, most)))
    alive = data.draw(hnp.arrays(bool, 30))
    dense, cells = both(position, alive)
    assert listed(dense) == listed(cells) == brute_force(position, alive, COUNT, RANGE)
    np.testing.assert_array_equal(dense.distance, cells.distance)
    np.testing.assert_array_equal(dense.which, cells.which)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 5.0, SIDE]))
def test_both_searches_give_the_same_bits_anywhere(seed, spread):
    place = np.random.default_rng(seed)
    position = place.uniform(0, spread, (30, 2)).astype(np.float32)
    dense, cells = both(position, np.ones(30, bool))
    jax.tree.map(np.testing.assert_array_equal, dense, cells)


def test_the_cell_list_serves_large_swarms_and_nobody_notices(monkeypatch):
    def find(position):
        return neighbours.find_neighbours(position, jnp.ones(300, bool), 4, 5.0, 98.0)

    position = jax.random.uniform(jax.random.key(0), (300, 2), maxval=98.0)
    cells, program = jax.jit(find)(position), str(jax.make_jaxpr(find)(position))
    monkeypatch.setattr(neighbours, "DENSE_LIMIT", 300)
    jax.clear_caches()
    dense = jax.jit(find)(position)
    assert "while" in program
    assert "while" not in str(jax.make_jaxpr(find)(position))
    jax.tree.map(np.testing.assert_array_equal, cells, dense)


def test_points_that_are_not_there_are_not_found():
    points = jnp.asarray([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0]])
    near = neighbours.find_points(jnp.zeros((1, 2)), points, 4, jnp.asarray([True, False, True]))
    assert near.distance.tolist() == [[1.0, 2.0, np.inf, np.inf]]
    assert near.which[:, :2].tolist() == [[0, 2]]
