"""What every swarm task is made of: how drones move, and what they sense.

Pure functions of arrays; D is the number of dimensions, 2 or 3. Lengths are in cells, the unit of
the maps that tasks lay over the arena; times are in steps.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray


class Bodies(NamedTuple):
    """The drones, as points."""

    position: Float[Array, "N D"]
    """Each coordinate in [0, side]."""
    velocity: Float[Array, "N D"]


class Neighbours(NamedTuple):
    """The nearest others of each drone, nearest first."""

    agent: Int[Array, "N K"]
    """Their indices."""
    present: Bool[Array, "N K"]
    """False where fewer than K others are in range; ``agent`` then means nothing."""


def spawn(key: PRNGKeyArray, num_agents: int, side: int, dims: int = 2) -> Bodies:
    """Place drones at rest, uniformly in a square (cubic) arena."""
    position = jax.random.uniform(key, (num_agents, dims), maxval=side)
    return Bodies(position, jnp.zeros((num_agents, dims)))


def unit_commands(dims: int = 2) -> Float[np.ndarray, "A D"]:
    """Return the velocities a discrete drone may command: none, then - and + along each axis."""
    axes = np.eye(dims, dtype=np.float32)
    along = np.stack([-axes, axes], 1).reshape(2 * dims, dims)
    return np.concatenate([np.zeros((1, dims), np.float32), along])


def move(bodies: Bodies, command: Float[Array, "N D"], response: float, side: int) -> Bodies:
    """Advance one step towards the commanded velocities.

    Velocity follows with a first-order lag: a step makes up the fraction ``response`` of its
    difference from the command. A wall takes away the velocity into it.
    """
    velocity = bodies.velocity + response * (command - bodies.velocity)
    position = bodies.position + velocity
    inside = jnp.clip(position, 0.0, side)
    return Bodies(inside, jnp.where(inside == position, velocity, 0.0))


def stays_inside(
    position: Float[Array, "N D"], commands: Float[Array, "A D"], side: int
) -> Bool[Array, "N A"]:
    """Tell which commands, followed for a whole step, would keep each drone in the arena."""
    target = position[:, None] + commands[None]
    return ((target >= 0) & (target <= side)).all(-1)


def find_neighbours(position: Float[Array, "N D"], count: int, sensing_range: float) -> Neighbours:
    """Find the ``count`` nearest others of each drone within range, nearest first.

    Compares all pairs, so the cost grows with N squared. Of equally near ones the lower index
    comes first.
    """
    num_agents = position.shape[0]
    others = jnp.arange(num_agents)[:, None]
    squared = jnp.square(position[:, None] - position[None]).sum(-1)
    squared = jnp.where(np.eye(num_agents, dtype=bool), jnp.inf, squared)
    agent, distance = [], []
    # A few passes of elementwise minima down the columns vectorise; top_k and argmin do not.
    for _ in range(count):
        least = squared.min(0)
        nearest = jnp.where(squared == least[None], others, num_agents).min(0)
        squared = jnp.where(others == nearest[None], jnp.inf, squared)
        agent.append(nearest)
        distance.append(least)
    return Neighbours(jnp.stack(agent, -1), jnp.stack(distance, -1) <= sensing_range**2)


def sense_neighbours(bodies: Bodies, count: int, sensing_range: float) -> Float[Array, "N F"]:
    """Describe the nearest others: F = count * (2 D + 1), zeros where none is in range.

    For each: its position relative to the observer in units of the range, its velocity relative to
    the observer's, and 1 for being there.
    """
    near = find_neighbours(bodies.position, count, sensing_range)
    motion = jnp.concatenate([bodies.position / sensing_range, bodies.velocity], -1)
    relative = motion[near.agent] - motion[:, None]
    seen = jnp.concatenate([relative, jnp.ones((*near.agent.shape, 1))], -1)
    return jnp.where(near.present[..., None], seen, 0.0).reshape(len(seen), -1)


def sense_map(
    cells: Float[Array, "G G"], position: Float[Array, "N 2"], size: int
) -> Float[Array, "N F"]:
    """Look at a map around each drone, sharp nearby and blurred further out.

    F = size**2 + 9: the ``size`` x ``size`` cells around the drone's own (``size`` is odd), then
    the means of the 3 x 3 blocks of that size around it. Outside the map there are zeros.
    """
    padded = jnp.pad(cells, size + size // 2)
    own = jnp.minimum(position.astype(jnp.int32), cells.shape[0] - 1)
    sharp = _cut(padded, own + size, size)
    blurred = _cut(_blur(padded, size), own, 2 * size + 1)[:, ::size, ::size]
    return jnp.concatenate([sharp.reshape(len(own), -1), blurred.reshape(len(own), -1)], -1)


def _cut(
    cells: Float[Array, "P P"], corner: Int[Array, "N 2"], size: int
) -> Float[Array, "N size size"]:
    return jax.vmap(lambda at: jax.lax.dynamic_slice(cells, at, (size, size)))(corner)


def _blur(cells: Float[Array, "P P"], size: int) -> Float[Array, "Q Q"]:
    """Take the mean of every ``size`` x ``size`` window; Q = P - size + 1."""
    length = cells.shape[0] - size + 1
    rows = functools.reduce(jnp.add, [cells[i : i + length] for i in range(size)])
    both = functools.reduce(jnp.add, [rows[:, i : i + length] for i in range(size)])
    return both / size**2
