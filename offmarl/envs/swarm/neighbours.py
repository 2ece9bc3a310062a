"""Who is near whom: the nearest of others, of points, and how far the nearest is."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from offmarl.envs.swarm.cell_list import Points, reduce_within, sum_of_squares, use_dense

_NOBODY = np.iinfo(np.int32).max

_FAR_AT_ONCE = 32


class Neighbours(NamedTuple):
    """The nearest of each drone, nearest first; of equally near ones the lower index first."""

    which: Int[Array, "N K"]
    """Indices; 0, without meaning, where there are fewer than K."""
    distance: Float[Array, "N K"]
    """How far they are; infinite where there are fewer than K."""


class _Nearest(NamedTuple):
    """The nearest so far, nearest first."""

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
    """Find the ``count`` nearest others of each drone within reach.

    Parameters
    ----------
    position
        Each coordinate in [0, side].
    alive
        Who can be found.
    count, reach
        K, and how far to look.
    side
        Of the arena.
    """
    itself = jnp.arange(position.shape[0], dtype=jnp.int32)
    return _find(position, Points(position, alive), itself, count, reach, side)


def find_points(
    position: Float[Array, "N D"],
    points: Float[Array, "M D"],
    there: Bool[Array, "M"] | None,
    count: int,
    reach: float,
    side: float,
) -> Neighbours:
    """Find the ``count`` nearest of some other points within reach.

    Of those that are ``there``; None for all.
    """
    there = jnp.ones(points.shape[0], bool) if there is None else there
    return _find(position, Points(points, there), None, count, reach, side)


def find_distance(
    position: Float[Array, "N D"], points: Float[Array, "M D"], side: float
) -> Float[Array, "N"]:
    """Return the distance of each drone from the nearest of some points, however far that is."""
    num_points, dims = points.shape
    reach = 1.5 * side / num_points ** (1 / dims)  # within it, evenly spread, most have one
    reach = math.inf if use_dense(points.shape, reach, side) else reach
    things = Points(points, jnp.ones(num_points, bool))
    nowhere = jnp.full(position.shape[0], jnp.inf)

    def add(least: Float[Array, "N"], squared: Float[Array, "C N"]) -> Float[Array, "N"]:
        return jnp.minimum(least, jnp.where(squared <= reach**2, squared, jnp.inf).min(0))

    def compare_some(least: Float[Array, "N"]) -> Float[Array, "N"]:
        """Compare some of those that found none with all points."""
        far = jnp.nonzero(jnp.isinf(least), size=_FAR_AT_ONCE, fill_value=len(least))[0]
        theirs = position.at[far].get(mode="fill", fill_value=0.0)
        offsets = [its[:, None] - own for its, own in zip(points.T, theirs.T, strict=True)]
        return least.at[far].set(sum_of_squares(offsets).min(0), mode="drop")

    least = reduce_within(add, nowhere, position, things, reach, side)
    return jnp.sqrt(jax.lax.while_loop(lambda least: jnp.isinf(least).any(), compare_some, least))


def _find(
    position: Float[Array, "N D"],
    things: Points,
    hidden: Int[Array, "N"] | None,
    count: int,
    reach: float,
    side: float,
) -> Neighbours:
    """Find the nearest of things, but for one that is hidden from each drone."""

    def add(best: _Nearest, squared: Float[Array, "C N"], index: Int[Array, "C N"]) -> _Nearest:
        if hidden is not None:
            squared = jnp.where(index == hidden, jnp.inf, squared)
        return _take(
            jnp.concatenate([best.squared, squared]), jnp.concatenate([best.which, index]), count
        )

    shape = (count, position.shape[0])
    nobody = _Nearest(jnp.full(shape, jnp.inf), jnp.full(shape, _NOBODY, jnp.int32))
    index = jnp.arange(things.position.shape[0], dtype=jnp.int32)
    nearest = reduce_within(add, nobody, position, things._replace(values=(index,)), reach, side)
    there = (nearest.squared <= reach**2) & (nearest.squared < jnp.inf)
    distance = jnp.where(there, jnp.sqrt(nearest.squared), jnp.inf)
    return Neighbours(jnp.where(there, nearest.which, 0).T, distance.T)


def _take(squared: Float[Array, "C N"], index: Int[Array, "C N"], count: int) -> _Nearest:
    """Take the ``count`` least of each column; of equal ones that with the lower index."""
    # Computed again in another pass, rounded otherwise, a least one would equal none.
    squared = jax.lax.optimization_barrier(squared)  # type: ignore[no-untyped-call]
    best = []
    # A few passes of elementwise minima down the columns vectorise; top_k and argmin do not.
    for _ in range(count):
        least = squared.min(0)
        nearest = jnp.where(squared == least, index, _NOBODY).min(0)
        squared = jnp.where(index == nearest, jnp.inf, squared)
        best.append((least, nearest))
    return _Nearest(*(jnp.stack(parts) for parts in zip(*best, strict=True)))
