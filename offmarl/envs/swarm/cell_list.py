"""What is near what: all pairs compared where they are few, a cell list beyond.

The cell list (grid hash) sorts things by the cells of a grid at least as wide as the reach of the
search. All within reach of an observer then lies in a few runs of neighbouring cells, contiguous in
the sorted order, so the cost is that of the neighbourhood and not of the swarm. An observer's runs
are read one after the other, in blocks of fixed size for as long as anybody's are not exhausted:
exact however crowded a cell is.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

DENSE_LIMIT = 100
"""Up to so many things, and two more for each around an observer, all pairs are compared.

Beyond, the cell list is faster on a CPU.
"""

_MARGIN = 1.001
"""Width of the grid's cells over the reach, so that rounding never separates two in reach."""

_LARGEST_BLOCK = 32

Carry = TypeVar("Carry")

Add = Callable[..., Carry]
"""``add(carry, squared, *values)``: count in more pairs, ``(C, N)`` squared distances and values.

C is any number. Where there is no pair the squared distance is infinite, and values are anything.
"""


class Points(NamedTuple):
    """What is looked for."""

    position: Float[Array, "M D"]
    there: Bool[Array, "M"]
    """Which of them can be found."""
    values: tuple[Array, ...] = ()
    """``(M,)`` each: what `Add` is told of each."""


class _Grid(NamedTuple):
    """A square (cubic) grid over the arena, with a rim of empty cells."""

    cells: int
    """Along each axis."""
    width: float
    """Of a cell."""
    dims: int

    @property
    def strides(self) -> Int[np.ndarray, "D"]:
        return (self.cells ** np.arange(self.dims)[::-1]).astype(np.int32)

    def cell_of(self, position: Float[Array, "N D"]) -> Int[Array, "N"]:
        """Return the numbers of cells: the nearest ones for what is outside the arena."""
        inner = jnp.clip((position / self.width).astype(jnp.int32), 0, self.cells - 3)
        return (inner + 1) @ self.strides


class _Runs(NamedTuple):
    """What lies around each observer: the concatenation of R runs of things in sorted order."""

    order: Int[Array, "M"]
    """The things by cell."""
    stop: Int[Array, "R N"]
    """Where each run stops in the concatenation."""
    shift: Int[Array, "R N"]
    """From a place in the concatenation to that in the order, for each run."""


def reduce_within(
    add: Add[Carry],
    initial: Carry,
    observers: Float[Array, "N D"],
    things: Points,
    reach: float,
    side: float,
) -> Carry:
    """Fold over the pairs of observers and things, at least over all those within reach.

    Parameters
    ----------
    add
        Counts in more pairs, in any order; see `Add`. It must let pairs beyond the reach make no
        difference.
    initial
        What to start from: arrays ``(..., N)``.
    observers
        Where they are.
    things
        What they look for.
    reach
        How far; static.
    side
        Of the arena, which all should be in: coordinates in [0, side]. (What is not is found all
        the same.)
    """
    few = use_dense(things.position.shape, reach, side)
    fold = reduce_all_pairs if few else reduce_cells
    return fold(add, initial, observers, things, reach, side)


def use_dense(shape: tuple[int, ...], reach: float, side: float) -> bool:
    """Tell whether all pairs are compared, with things of shape ``(M, D)``."""
    return shape[0] <= DENSE_LIMIT + 2 * _around(shape, reach, side)


def _around(shape: tuple[int, ...], width: float, side: float) -> float:
    """Return how many things there are on average in a cell of a grid and those adjacent."""
    num_things, dims = shape
    return num_things * min(3 * width / side, 1.0) ** dims


def reduce_all_pairs(
    add: Add[Carry],
    initial: Carry,
    observers: Float[Array, "N D"],
    things: Points,
    reach: float,  # noqa: ARG001
    side: float,  # noqa: ARG001
) -> Carry:
    """Fold over all pairs at once: the cost grows with N times M."""
    offsets = [its[:, None] - own for its, own in _axes(things.position, observers)]
    squared = jnp.where(things.there[:, None], sum_of_squares(offsets), jnp.inf)
    return add(initial, squared, *(_spread(value, squared) for value in things.values))


def reduce_cells(
    add: Add[Carry],
    initial: Carry,
    observers: Float[Array, "N D"],
    things: Points,
    reach: float,
    side: float,
) -> Carry:
    """Fold over the pairs in the same cell or adjacent ones: the cost grows with N + M."""
    num_things, dims = things.position.shape
    grid = _lay_grid(num_things, dims, reach, side)
    runs = _find_runs(grid, observers, things)
    columns = [column[runs.order] for column in (*things.position.T, *things.values)]
    around = _around(things.position.shape, grid.width, side)
    block = min(_LARGEST_BLOCK, 4 * math.ceil(around / 4))

    def unread(state: tuple[Int[Array, ""], Carry]) -> Bool[Array, ""]:
        return (state[0] < runs.stop[-1]).any()

    def read_block(state: tuple[Int[Array, ""], Carry]) -> tuple[Int[Array, ""], Carry]:
        offset, carry = state
        place = offset + jnp.arange(block, dtype=jnp.int32)[:, None]
        at = jnp.zeros((block, observers.shape[0]), jnp.int32)
        for stop, shift in zip(runs.stop[::-1], runs.shift[::-1], strict=True):
            at = jnp.where(place < stop, place + shift, at)
        read = [column[at] for column in columns]
        squared = sum_of_squares([its - own for its, own in zip(read, observers.T, strict=False)])
        squared = jnp.where(place < runs.stop[-1], squared, jnp.inf)
        return offset + block, add(carry, squared, *read[dims:])

    return jax.lax.while_loop(unread, read_block, (jnp.zeros((), jnp.int32), initial))[1]


def _lay_grid(num_things: int, dims: int, reach: float, side: float) -> _Grid:
    """Choose cells as small as the reach allows, but no more than some two for each thing."""
    most = math.ceil((2 * num_things) ** (1 / dims))
    per_axis = max(1, min(math.floor(side / (_MARGIN * reach)), most))
    return _Grid(per_axis + 2, side / per_axis, dims)


def _find_runs(grid: _Grid, observers: Float[Array, "N D"], things: Points) -> _Runs:
    """Sort the things by cell, and find what lies around each observer.

    A run is three cells adjacent along the last axis; there is one for each of the ``3**(D-1)``
    rows of cells around an observer.
    """
    num_cells = grid.cells**grid.dims
    cell = jnp.where(things.there, grid.cell_of(things.position), num_cells)
    filled = jnp.zeros(num_cells + 1, jnp.int32).at[cell + 1].add(1, mode="drop")
    first = jnp.cumsum(filled)
    around = np.array(list(itertools.product((-1, 0, 1), repeat=grid.dims - 1)), np.int32)
    row = grid.cell_of(observers) + (around @ grid.strides[:-1])[:, None]
    start, end = first[row - 1], first[row + 2]
    stop = jnp.cumsum(end - start, 0)
    # Which of a cell comes first makes no difference, and a stable sort takes twice as long.
    order = jnp.argsort(cell, stable=False).astype(jnp.int32)
    return _Runs(order, stop, end - stop)


def sum_of_squares(offsets: Sequence[Float[Array, "*b"]]) -> Float[Array, "*b"]:
    """Add in the same order everywhere, so that all searches find the same bits."""
    return functools.reduce(jnp.add, [jnp.square(offset) for offset in offsets])


def _axes(one: Float[Array, "M D"], other: Float[Array, "N D"]) -> Any:
    return zip(one.T, other.T, strict=True)


def _spread(value: Array, table: Float[Array, "M N"]) -> Array:
    return jnp.broadcast_to(value[:, None], table.shape)
