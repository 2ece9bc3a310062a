import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.envs.swarm import observations

SIDE = 8

sense_map = jax.jit(observations.sense_map, static_argnums=2)


def look(cells, position, size):
    """Compute `observations.sense_map` a cell at a time."""
    side, half, dims = len(cells), size // 2, cells.ndim

    def at(cell):
        return cells[cell] if all(0 <= x < side for x in cell) else 0.0

    def block(middle):
        ranges = [range(x - half, x + half + 1) for x in middle]
        return [at(cell) for cell in itertools.product(*ranges)]

    centre = np.minimum(position.astype(int), side - 1)
    around = itertools.product((-1, 0, 1), repeat=dims)
    far = [np.mean(block(centre + size * np.array(offset))) for offset in around]
    return np.concatenate([block(centre), far])


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize(
    "position", [(0.0, 0.0), (3.9, 4.0), (8.0, 8.0), (0.5, 7.99), (1.0, 2.0, 8.0)]
)
def test_the_map_is_sharp_nearby_and_blurred_further_out(size, position):
    cells = np.random.default_rng(0).random((SIDE,) * len(position), np.float32)
    position = np.asarray(position, np.float32)
    result = sense_map(jnp.asarray(cells), jnp.asarray(position)[None], size)[0]
    np.testing.assert_allclose(result, look(cells, position, size), rtol=1e-5, atol=1e-6)


def test_a_camera_watches_the_nearest_cells_in_any_dimension():
    watched = jax.jit(observations.watched_cells, static_argnums=1)
    flat = watched(jnp.asarray([[2.25, 3.75]]), SIDE)
    assert np.argwhere(flat).tolist() == [[1, 3], [1, 4], [2, 3], [2, 4]]
    assert watched(jnp.full((1, 3), 4.0), SIDE).sum() == 8
    assert watched(jnp.zeros((1, 3)), SIDE).sum() == 1


def test_what_is_not_known_is_zero():
    result = observations.describe(
        jnp.asarray([[True, False]]), jnp.ones((1, 2, 2)), jnp.full((1, 2, 1), 3.0)
    )
    assert result.tolist() == [[[1, 1, 3, 1], [0, 0, 0, 0]]]
