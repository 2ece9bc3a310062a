"""Nearest neighbours: of drones among each other, of points around drones, and distances."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from offmarl.envs.swarm.cell_list import Points, reduce_within, sum_of_squares, use_dense

_NONE = np.iinfo(np.int32).max

_FAR_AT_ONCE = 32


class Neighbours(NamedTuple):
    """The nearest neighbours of each drone, nearest first; ties go to the lower index."""

    which: Int[Array, "N K"]
    """Indices; 0 (meaningless) if there are fewer than K."""
    distance: Float[Array, "N K"]
    """Distances; infinite if there are fewer than K."""


class _Nearest(NamedTuple):
    """The nearest found so far, nearest first."""

    squared: Float[Array, "K N"]
    """Squared distances."""
    which: Int[Array, "K N"]
    """Their indices."""


def find_neighbours(
    position: Float[Array, "N D"],
    alive: Bool[Array, "N"],
    count: int,
    reach: float,
    side: float,
) -> Neighbours:
    """Find the ``count`` nearest other drones of each drone within reach.

    Parameters
    ----------
    position
        Each coordinate in [0, side].
    alive
        Drones that can be found.
    count, reach
        K, and the largest distance.
    side
        Side of the arena.
    """
    itself = jnp.arange(position.shape[0], dtype=jnp.int32)
    return _find(position, Points(position, alive), itself, count, reach, side)


def find_points(
    position: Float[Array, "N D"],
    points: Float[Array, "M D"],
    count: int,
    reach: float,
    side: float,
    mask: Bool[Array, "M"] | None = None,
) -> Neighbours:
    """Find the ``count`` nearest points of each drone within reach.

    Parameters
    ----------
    position, points
        Each coordinate in [0, side].
    count, reach
        K, and the largest distance.
    side
        Side of the arena.
    mask
        Valid points; None if all are.
    """
    mask = jnp.ones(points.shape[0], bool) if mask is None else mask
    return _find(position, Points(points, mask), None, count, reach, side)


def find_distance(
    position: Float[Array, "N D"], points: Float[Array, "M D"], side: float
) -> Float[Array, "N"]:
    """Return the distance of each drone to the nearest point, at any distance."""
    num_points, dims = points.shape
    reach = 1.5 * side / num_points ** (1 / dims)  # if spread evenly, most have one within it
    reach = math.inf if use_dense(points.shape, reach, side) else reach
    every = Points(points, jnp.ones(num_points, bool))
    nowhere = jnp.full(position.shape[0], jnp.inf)

    def add(least: Float[Array, "N"], squared: Float[Array, "C N"]) -> Float[Array, "N"]:
        return jnp.minimum(least, jnp.where(squared <= reach**2, squared, jnp.inf).min(0))

    def compare_some(least: Float[Array, "N"]) -> Float[Array, "N"]:
        """Compare some of the drones without a point within reach with all points."""
        far = jnp.nonzero(jnp.isinf(least), size=_FAR_AT_ONCE, fill_value=len(least))[0]
        theirs = position.at[far].get(mode="fill", fill_value=0.0)
        offsets = [its[:, None] - own for its, own in zip(points.T, theirs.T, strict=True)]
        return least.at[far].set(sum_of_squares(offsets).min(0), mode="drop")

    least = reduce_within(add, nowhere, position, every, reach, side)
    return jnp.sqrt(jax.lax.while_loop(lambda least: jnp.isinf(least).any(), compare_some, least))


def _find(
    position: Float[Array, "N D"],
    points: Points,
    hidden: Int[Array, "N"] | None,
    count: int,
    reach: float,
    side: float,
) -> Neighbours:
    """Find the nearest points, except the one point hidden from each drone."""

    def add(best: _Nearest, squared: Float[Array, "C N"], index: Int[Array, "C N"]) -> _Nearest:
        if hidden is not None:
            squared = jnp.where(index == hidden, jnp.inf, squared)
        return _take(
            jnp.concatenate([best.squared, squared]), jnp.concatenate([best.which, index]), count
        )

    shape = (count, position.shape[0])
    none_yet = _Nearest(jnp.full(shape, jnp.inf), jnp.full(shape, _NONE, jnp.int32))
    index = jnp.arange(points.position.shape[0], dtype=jnp.int32)
    nearest = reduce_within(add, none_yet, position, points._replace(values=(index,)), reach, side)
    found = (nearest.squared <= reach**2) & (nearest.squared < jnp.inf)
    distance = jnp.where(found, jnp.sqrt(nearest.squared), jnp.inf)
    return Neighbours(jnp.where(found, nearest.which, 0).T, distance.T)


def _take(squared: Float[Array, "C N"], index: Int[Array, "C N"], count: int) -> _Nearest:
    """Take the ``count`` smallest of each column; ties go to the lower index."""
    # If XLA computed it again with other rounding, the minimum would equal no entry.
    squared = jax.lax.optimization_barrier(squared)  # type: ignore[no-untyped-call]
    best = []
    # A few passes of elementwise minima along columns vectorise; top_k and argmin do not.
    for _ in range(count):
        least = squared.min(0)
        nearest = jnp.where(squared == least, index, _NONE).min(0)
        squared = jnp.where(index == nearest, jnp.inf, squared)
        best.append((least, nearest))
    return _Nearest(*(jnp.stack(parts) for parts in zip(*best, strict=True)))
