"""What drones sense: the nearest of things, relative to the drone, and maps of the arena."""

import functools
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def describe(
    known: Bool[Array, "N K"], offset: Float[Array, "N K D"], features: Float[Array, "N K F"]
) -> Float[Array, "N K D+F+1"]:
    """Describe things around each drone: offset, features, and 1; zeros for what is not known."""
    described = jnp.concatenate([offset, features, jnp.ones((*known.shape, 1))], -1)
    return jnp.where(known[..., None], described, 0.0)


def sense_map(
    cells: Float[Array, "*G"], position: Float[Array, "N D"], size: int
) -> Float[Array, "N F"]:
    """Look at a map around each drone, sharp nearby and blurred further out.

    F = size**D + 3**D: the block of ``size`` cells a side around the drone's own (``size`` is odd),
    then the means of the 3**D blocks of that size around it. Outside the map there are zeros.
    """
    dims = position.shape[1]
    padded = jnp.pad(cells, size + size // 2)
    own = jnp.minimum(position.astype(jnp.int32), cells.shape[0] - 1)
    sharp = _cut(padded, own + size, size)
    coarse = (slice(None), *(slice(None, None, size),) * dims)
    blurred = _cut(_blur(padded, size), own, 2 * size + 1)[coarse]
    return jnp.concatenate([sharp.reshape(len(own), -1), blurred.reshape(len(own), -1)], -1)


def _cut(cells: Float[Array, "*P"], corner: Int[Array, "N D"], size: int) -> Array:
    """Cut a block of ``size`` cells a side for each drone: ``(N, size, ...)``."""
    shape = (size,) * cells.ndim
    return jax.vmap(lambda at: jax.lax.dynamic_slice(cells, at, shape))(corner)


def _blur(cells: Float[Array, "*P"], size: int) -> Float[Array, "*Q"]:
    """Take the mean of every block of ``size`` cells a side; Q = P - size + 1."""
    length = cells.shape[0] - size + 1
    for axis in range(cells.ndim):
        shifted = [jax.lax.slice_in_dim(cells, i, i + length, axis=axis) for i in range(size)]
        cells = functools.reduce(jnp.add, shifted)
    return cells / size**cells.ndim


def watched(position: Float[Array, "N D"], side: int) -> Bool[Array, "*G"]:
    """Tell which cells are under a camera: those whose centres are the 2**D nearest to a drone."""
    dims = position.shape[1]
    corner = jnp.floor(position - 0.5).astype(jnp.int32)
    camera = jnp.asarray(list(itertools.product((0, 1), repeat=dims)))
    cell = corner[:, None] + camera[None] + 1  # within a rim of one cell around the arena
    with_rim = jnp.zeros((side + 2,) * dims, bool)
    at = tuple(cell[..., axis] for axis in range(dims))
    return with_rim.at[at].set(True)[(slice(1, -1),) * dims]
