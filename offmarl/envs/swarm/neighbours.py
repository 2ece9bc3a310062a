"""Who is near whom: all pairs in small swarms, a cell list in large ones, with equal results.

The cell list (grid hash) sorts the drones by the cells of a grid as wide as the range of the
search. All candidates of a drone then lie in a few runs of neighbouring cells, contiguous in the
sorted order, so the cost is that of the neighbourhood and not of the swarm. Runs are read in blocks
of fixed size for as long as some drone's are not exhausted: exact however crowded a cell is.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

DENSE_LIMIT = 200
"""Up to so many drones all pairs are compared; beyond, the cell list is faster."""

_BLOCK = 8
"""Candidates of a run that are read at a time."""

_MARGIN = 1.001
"""Width of the grid's cells over the range, so that rounding never separates two in range."""

_NOBODY = np.iinfo(np.int32).max


class Neighbours(NamedTuple):
    """The nearest of each drone, nearest first."""

    which: Int[Array, "N K"]
    """Indices; 0, without meaning, where there are fewer than K."""
    distance: Float[Array, "N K"]
    """How far they are; infinite where there are fewer than K."""


class Nearest(NamedTuple):
    """The nearest so far, nearest first; of equally near ones the lower index comes first."""

    squared: Float[Array, "K N"]
    """Squared distances."""
    which: Int[Array, "K N"]
    """Their indices."""


def find_neighbours(
    position: Float[Array, "N D"],
    alive: Bool[Array, "N"],
    count: int,
    sensing_range: float,
    side: float,
) -> Neighbours:
    """Find the ``count`` nearest others of each drone within range.

    Parameters
    ----------
    position
        Each coordinate in [0, side].
    alive
        Who can be found.
    count, sensing_range
        K, and how far to look.
    side
        Of the arena.
    """
    if position.shape[0] <= DENSE_LIMIT or side <= 3 * sensing_range:
        nearest = search_all_pairs(position, alive, count)
    else:
        nearest = search_cells(position, alive, count, sensing_range, side)
    return _within(nearest, sensing_range)


def find_points(
    position: Float[Array, "N D"], points: Float[Array, "M D"], count: int, there: Bool[Array, "M"]
) -> Neighbours:
    """Find the ``count`` nearest of some other points, of those that are ``there``."""
    squared = jnp.where(there[:, None], _squared(points[:, None] - position[None]), jnp.inf)
    return _within(_take(squared, _rows(squared), count), math.inf)


def search_all_pairs(position: Float[Array, "N D"], alive: Bool[Array, "N"], count: int) -> Nearest:
    """Compare all pairs: the cost grows with N squared."""
    squared = _squared(position[:, None] - position[None])
    hidden = np.eye(position.shape[0], dtype=bool) | ~alive[:, None]
    return _take(jnp.where(hidden, jnp.inf, squared), _rows(squared), count)


def search_cells(
    position: Float[Array, "N D"],
    alive: Bool[Array, "N"],
    count: int,
    sensing_range: float,
    side: float,
) -> Nearest:
    """Compare each drone with those in its own and the adjacent cells; nobody beyond the range.

    Others further than the range may be found, or not.
    """
    num_agents = position.shape[0]
    order, start, stop = _runs(position, alive, _MARGIN * sensing_range, side)
    coordinates = [jnp.append(axis[order], jnp.inf) for axis in position.T]
    order = jnp.append(order, num_agents)

    def unread(carry: tuple[Int[Array, ""], Nearest]) -> Bool[Array, ""]:
        return (start + carry[0] < stop).any()

    def read_block(carry: tuple[Int[Array, ""], Nearest]) -> tuple[Int[Array, ""], Nearest]:
        offset, best = carry
        at = start[:, None] + offset + jnp.arange(_BLOCK)[:, None]
        at = jnp.where(at < stop[:, None], at, num_agents).reshape(-1, num_agents)
        index = order[at]
        offsets = [x[at] - own for x, own in zip(coordinates, position.T, strict=True)]
        squared = jnp.where(index == jnp.arange(num_agents), jnp.inf, _sum_of_squares(offsets))
        candidates = jnp.concatenate([best.squared, squared]), jnp.concatenate([best.which, index])
        return offset + _BLOCK, _take(*candidates, count)

    nobody = Nearest(
        jnp.full((count, num_agents), jnp.inf), jnp.full((count, num_agents), _NOBODY, jnp.int32)
    )
    return jax.lax.while_loop(unread, read_block, (jnp.zeros((), jnp.int32), nobody))[1]


def _runs(
    position: Float[Array, "N D"], alive: Bool[Array, "N"], width: float, side: float
) -> tuple[Int[Array, "N"], Int[Array, "R N"], Int[Array, "R N"]]:
    """Sort the drones by cell; return the order, and where the runs of each drone start and stop.

    A run is three cells adjacent along the last axis; there is one for each of the ``3**(D-1)``
    rows of cells around a drone.
    """
    dims = position.shape[1]
    cells = math.ceil(side / width) + 2  # with a rim of empty ones
    strides = (cells ** np.arange(dims)[::-1]).astype(np.int32)
    home = ((position / width).astype(jnp.int32) + 1) @ strides
    cell = jnp.where(alive, home, cells**dims)
    filled = jnp.zeros(cells**dims + 1, jnp.int32).at[cell + 1].add(1, mode="drop")
    first = jnp.cumsum(filled)
    around = np.array(list(itertools.product((-1, 0, 1), repeat=dims - 1)), np.int32)
    row = home + (around @ strides[:-1])[:, None]
    return jnp.argsort(cell).astype(jnp.int32), first[row - 1], first[row + 2]


def _take(squared: Float[Array, "C N"], index: Int[Array, "C N"], count: int) -> Nearest:
    """Take the ``count`` least of each column."""
    best = []
    # A few passes of elementwise minima down the columns vectorise; top_k and argmin do not.
    for _ in range(count):
        least = squared.min(0)
        nearest = jnp.where(squared == least, index, _NOBODY).min(0)
        squared = jnp.where(index == nearest, jnp.inf, squared)
        best.append((least, nearest))
    return Nearest(*(jnp.stack(parts) for parts in zip(*best, strict=True)))


def _within(nearest: Nearest, sensing_range: float) -> Neighbours:
    there = (nearest.squared <= sensing_range**2) & (nearest.squared < jnp.inf)
    distance = jnp.where(there, jnp.sqrt(nearest.squared), jnp.inf)
    return Neighbours(jnp.where(there, nearest.which, 0).T, distance.T)


def _rows(table: Array) -> Int[Array, "C N"]:
    return jnp.broadcast_to(jnp.arange(table.shape[0], dtype=jnp.int32)[:, None], table.shape)


def _squared(offset: Float[Array, "*b D"]) -> Float[Array, "*b"]:
    return _sum_of_squares([offset[..., axis] for axis in range(offset.shape[-1])])


def _sum_of_squares(offsets: Sequence[Float[Array, "*b"]]) -> Float[Array, "*b"]:
    """Add in the same order everywhere, so that all searches find the same bits."""
    total = jnp.square(offsets[0])
    for offset in offsets[1:]:
        total = total + jnp.square(offset)
    return total
