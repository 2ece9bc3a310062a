"""Nearest neighbours of drones, nearest points, distances, and lines of sight.

Small swarms compare all pairs. Large swarms use a cell list (grid hash): points are sorted by the
cells of a grid, and cells are at least as wide as the reach of the search. All points within reach
of an observer then lie in a few runs of adjacent cells, which are contiguous in the sorted order.
The cost is therefore proportional to the size of the neighbourhood, not of the swarm. The runs are
read in blocks of fixed size until those of every observer are exhausted, so the result is exact for
any number of points in a cell.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from offmarl.types import ArrayTree

_NONE = np.iinfo(np.int32).max
_NEARLY = np.int32(2**30)
"""Marks an index as that of an entry which is only nearly the minimum; see `_take`."""
_ROUNDING = 1 + 2e-6

_FAR_AT_ONCE = 32

DENSE_LIMIT = 100
"""Number of points up to which all pairs are compared; see `use_dense`.

For more points, the cell list is faster on a CPU.
"""

_MARGIN = 1.001
"""Width of a cell over the reach; above 1, so that rounding never separates points within reach."""

_LARGEST_BLOCK = 32

Carry = TypeVar("Carry")

Add = Callable[..., Carry]
"""``add(carry, squared, *values)``: add pairs, given as ``(C, N)`` squared distances and values.

C is any number. An entry that is not a pair has an infinite squared distance and arbitrary values.
"""


class Points(NamedTuple):
    """The points to search among."""

    position: Float[Array, "M D"]
    mask: Bool[Array, "M"]
    """Valid points; the others are never found."""
    values: tuple[ArrayTree, ...] = ()
    """Trees of ``(M,)`` arrays: values for `Add`."""


class _Grid(NamedTuple):
    """A square (cubic) grid over the arena, with a border of empty cells."""

    cells: int
    """Cells along each axis."""
    width: float
    """Width of a cell."""
    dims: int

    @property
    def strides(self) -> Int[np.ndarray, "D"]:
        return (self.cells ** np.arange(self.dims)[::-1]).astype(np.int32)

    def cell_of(self, position: Float[Array, "N D"]) -> Int[Array, "N"]:
        """Return the index of the cell of each position, the nearest cell outside the arena."""
        inner = jnp.clip((position / self.width).astype(jnp.int32), 0, self.cells - 3)
        return (inner + 1) @ self.strides


class _Runs(NamedTuple):
    """The points around each observer: the concatenation of R runs in sorted order."""

    order: Int[Array, "M"]
    """Indices of the points, sorted by cell."""
    stop: Int[Array, "R N"]
    """End of each run in the concatenation."""
    shift: Int[Array, "R N"]
    """Offset from a position in the concatenation to the position in the order, by run."""


def reduce_within(
    add: Add[Carry],
    initial: Carry,
    observers: Float[Array, "N D"],
    points: Points,
    reach: float,
    side: float,
) -> Carry:
    """Reduce over the pairs of observers and points, at least over all pairs within reach."""
    dense = use_dense(points.position.shape, reach, side)
    reduce = reduce_all_pairs if dense else reduce_cells
    return reduce(add, initial, observers, points, reach, side)


def use_dense(shape: tuple[int, ...], reach: float, side: float) -> bool:
    """Whether all pairs are compared for points of shape ``(M, D)``."""
    return shape[0] <= DENSE_LIMIT + 2 * _around(shape, reach, side)


def _around(shape: tuple[int, ...], width: float, side: float) -> float:
    """Return the average number of points in a cell and the cells adjacent to it."""
    num_points, dims = shape
    return num_points * min(3 * width / side, 1.0) ** dims


def reduce_all_pairs(
    add: Add[Carry],
    initial: Carry,
    observers: Float[Array, "N D"],
    points: Points,
    reach: float,  # noqa: ARG001
    side: float,  # noqa: ARG001
) -> Carry:
    """Reduce over all pairs at once: the cost grows with N times M."""
    axes = zip(points.position.T, observers.T, strict=True)
    offsets = [point[:, None] - observer for point, observer in axes]
    squared = jnp.where(points.mask[:, None], sum_of_squares(offsets), jnp.inf)
    values = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], squared.shape), points.values)
    return add(initial, squared, *values)


def reduce_cells(
    add: Add[Carry],
    initial: Carry,
    observers: Float[Array, "N D"],
    points: Points,
    reach: float,
    side: float,
) -> Carry:
    """Reduce over the pairs in the same or adjacent cells: the cost grows with N + M."""
    num_points, dims = points.position.shape
    # The smallest cells that the reach allows, up to about two per point.
    most = math.ceil((2 * num_points) ** (1 / dims))
    per_axis = max(1, min(math.floor(side / (_MARGIN * reach)), most))
    grid = _Grid(per_axis + 2, side / per_axis, dims)
    runs = _find_runs(grid, observers, points)
    columns = jax.tree.map(lambda x: x[runs.order], ([*points.position.T], points.values))
    around = _around(points.position.shape, grid.width, side)
    block = min(_LARGEST_BLOCK, 4 * math.ceil(around / 4))

    def unread(state: tuple[Int[Array, ""], Carry]) -> Bool[Array, ""]:
        return (state[0] < runs.stop[-1]).any()

    def read_block(state: tuple[Int[Array, ""], Carry]) -> tuple[Int[Array, ""], Carry]:
        offset, carry = state
        place = offset + jnp.arange(block, dtype=jnp.int32)[:, None]
        at = jnp.zeros((block, observers.shape[0]), jnp.int32)
        for stop, shift in zip(runs.stop[::-1], runs.shift[::-1], strict=True):
            at = jnp.where(place < stop, place + shift, at)
        position, values = jax.tree.map(lambda column: column[at], columns)
        squared = sum_of_squares([a - b for a, b in zip(position, observers.T, strict=True)])
        squared = jnp.where(place < runs.stop[-1], squared, jnp.inf)
        return offset + block, add(carry, squared, *values)

    return jax.lax.while_loop(unread, read_block, (jnp.zeros((), jnp.int32), initial))[1]


def _find_runs(grid: _Grid, observers: Float[Array, "N D"], points: Points) -> _Runs:
    """Sort the points by cell, and find the runs around each observer.

    A run is three adjacent cells along the last axis; each of the ``3**(D-1)`` rows of cells around
    an observer has one.
    """
    num_cells = grid.cells**grid.dims
    cell = jnp.where(points.mask, grid.cell_of(points.position), num_cells)
    counts = jnp.zeros(num_cells + 1, jnp.int32).at[cell + 1].add(1, mode="drop")
    first = jnp.cumsum(counts)
    around = np.array(list(itertools.product((-1, 0, 1), repeat=grid.dims - 1)), np.int32)
    row = grid.cell_of(observers) + (around @ grid.strides[:-1])[:, None]
    start, end = first[row - 1], first[row + 2]
    stop = jnp.cumsum(end - start, 0)
    # The order within a cell makes no difference, and a stable sort takes twice as long.
    order = jnp.argsort(cell, stable=False).astype(jnp.int32)
    return _Runs(order, stop, end - stop)


def sum_of_squares(offsets: Sequence[Float[Array, "*b"]]) -> Float[Array, "*b"]:
    """Add in a fixed order, so that all searches return the same bits."""
    return functools.reduce(jnp.add, [jnp.square(offset) for offset in offsets])


# ---------------------------------------------------------------------------------- neighbours


class Neighbours(NamedTuple):
    """The nearest neighbours of each drone, nearest first; ties go to the lower index."""

    which: Int[Array, "N K"]
    """Indices; 0 (meaningless) if there are fewer than K."""
    distance: Float[Array, "N K"]
    """Distances; infinite if there are fewer than K."""


_Nearest = tuple[Float[Array, "K N"], Int[Array, "K N"]]
"""Squared distances and indices of the nearest so far, nearest first."""


def find_neighbours(
    position: Float[Array, "N D"],
    alive: Bool[Array, "N"],
    count: int,
    reach: float,
    side: float,
) -> Neighbours:
    """Find the ``count`` nearest other drones of each drone within reach."""
    itself = jnp.arange(position.shape[0], dtype=jnp.int32)
    return find_points(position, position, count, reach, side, alive, itself)


def find_points(
    position: Float[Array, "N D"],
    points: Float[Array, "M D"],
    count: int,
    reach: float,
    side: float,
    mask: Bool[Array, "M"] | None = None,
    hidden: Int[Array, "N"] | None = None,
) -> Neighbours:
    """Find the ``count`` nearest points of each drone within reach, except the one hidden from it.

    Points outside of the mask are hidden from all.
    """

    def add(best: _Nearest, squared: Float[Array, "C N"], index: Int[Array, "C N"]) -> _Nearest:
        if hidden is not None:
            squared = jnp.where(index == hidden, jnp.inf, squared)
        return _take(jnp.concatenate([best[0], squared]), jnp.concatenate([best[1], index]), count)

    shape = (count, position.shape[0])
    none_yet = jnp.full(shape, jnp.inf), jnp.full(shape, _NONE, jnp.int32)
    mask = jnp.ones(points.shape[0], bool) if mask is None else mask
    candidates = Points(points, mask, (jnp.arange(points.shape[0], dtype=jnp.int32),))
    squared, which = reduce_within(add, none_yet, position, candidates, reach, side)
    within = (squared <= reach**2) & (squared < jnp.inf)
    distance = jnp.where(within, jnp.sqrt(squared), jnp.inf)
    return Neighbours(jnp.where(within, which, 0).T, distance.T)


def find_distance(
    position: Float[Array, "N D"], points: Float[Array, "M D"], side: float
) -> Float[Array, "N"]:
    """Return the distance of each drone to the nearest point, at any distance."""
    num_points, dims = points.shape
    reach = 1.5 * side / num_points ** (1 / dims)  # if spread evenly, most have one within it
    reach = math.inf if use_dense(points.shape, reach, side) else reach
    candidates = Points(points, jnp.ones(num_points, bool))
    nowhere = jnp.full(position.shape[0], jnp.inf)

    def add(least: Float[Array, "N"], squared: Float[Array, "C N"]) -> Float[Array, "N"]:
        return jnp.minimum(least, jnp.where(squared <= reach**2, squared, jnp.inf).min(0))

    def compare_some(least: Float[Array, "N"]) -> Float[Array, "N"]:
        """Compare drones that have no point within reach with all points, several at a time."""
        far = jnp.nonzero(jnp.isinf(least), size=_FAR_AT_ONCE, fill_value=len(least))[0]
        drones = position.at[far].get(mode="fill", fill_value=0.0)
        offsets = [point[:, None] - drone for point, drone in zip(points.T, drones.T, strict=True)]
        return least.at[far].set(sum_of_squares(offsets).min(0), mode="drop")

    least = reduce_within(add, nowhere, position, candidates, reach, side)
    return jnp.sqrt(jax.lax.while_loop(lambda least: jnp.isinf(least).any(), compare_some, least))


def keep_nearest(neighbours: Neighbours, keep: Bool[Array, "N J"], count: int) -> Neighbours:
    """Return the ``count`` nearest of those to keep; J is at least that."""
    distance = jnp.where(keep, neighbours.distance, jnp.inf)
    order = jnp.argsort(distance, -1, stable=True)[:, :count]
    distance = jnp.take_along_axis(distance, order, -1)
    which = jnp.take_along_axis(neighbours.which, order, -1)
    return Neighbours(jnp.where(jnp.isfinite(distance), which, 0), distance)


def can_see(
    position: Float[Array, "N D"],
    targets: Float[Array, "N K D"],
    obstacles: Float[Array, "M D"],
    radius: float,
    reach: float,
    side: float,
) -> Bool[Array, "N K"]:
    """Return whether the line from each drone to each of its targets passes no obstacle.

    Obstacles do not hide what is inside them. A drone inside an obstacle, which errors of measured
    positions cause, sees as if it were at the surface.
    """
    num_drones, num_targets, _ = targets.shape
    observers = position.T
    line = [
        (a - b[:, None]).T for a, b in zip(jnp.moveaxis(targets, -1, 0), observers, strict=True)
    ]
    length = jnp.maximum(sum_of_squares(line), 1e-12)

    def add(hidden: Bool[Array, "K N"], squared: Array, *centre: Array) -> Bool[Array, "K N"]:
        to = [(a - b)[:, None] for a, b in zip(centre, observers, strict=True)]
        along = sum(((a * b) for a, b in zip(to, line, strict=True)), jnp.zeros(())) / length
        along = jnp.clip(along, 0.0, 1.0)
        beside = sum_of_squares([a - along * b for a, b in zip(to, line, strict=True)])
        within = sum_of_squares([a - b for a, b in zip(to, line, strict=True)]) < radius**2
        # Below 1, so that drones at a surface see along it.
        size = 0.98 * jnp.minimum(radius**2, squared)[:, None]
        near = (squared <= (reach + radius) ** 2)[:, None]
        return hidden | ((beside < size) & ~within & near).any(0)

    solid = Points(obstacles, jnp.ones(len(obstacles), bool), tuple(obstacles.T))
    none = jnp.zeros((num_targets, num_drones), bool)
    return ~reduce_within(add, none, position, solid, reach + radius, side).T


def _take(squared: Float[Array, "C N"], index: Int[Array, "C N"], count: int) -> _Nearest:
    """Take the ``count`` smallest of each column; ties go to the lower index."""
    squared = jax.lax.optimization_barrier(squared)  # type: ignore[no-untyped-call]
    best = []
    # A few passes of elementwise minima along columns vectorise; top_k and argmin do not.
    for _ in range(count):
        least = squared.min(0)
        # XLA may compute the input twice, with other rounding, in spite of the barrier: then the
        # minimum equals no entry, and the nearest is one that is equal up to rounding.
        nearly = jnp.where(squared <= _ROUNDING * least, index | _NEARLY, _NONE)
        nearest = jnp.where(squared == least, index, nearly).min(0)
        nearest = jnp.where(nearest == _NONE, _NONE, nearest & ~_NEARLY)
        squared = jnp.where(index == nearest, jnp.inf, squared)
        best.append((least, nearest))
    distances, indices = zip(*best, strict=True)
    return jnp.stack(distances), jnp.stack(indices)
