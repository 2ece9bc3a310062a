"""What every swarm task is made of: how drones move, and what they sense.

Pure functions of arrays, in one, two or three dimensions (D). Lengths are in cells, the unit of the
maps that tasks lay over the arena; times are in steps.
"""

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

    index: Int[Array, "N K"]
    present: Bool[Array, "N K"]
    """False where fewer than K others are in range; the index means nothing there."""


def spawn(key: PRNGKeyArray, num_agents: int, side: int, dims: int = 2) -> Bodies:
    """Place drones at rest, uniformly in a square (cubic) arena."""
    position = jax.random.uniform(key, (num_agents, dims), maxval=side)
    return Bodies(position, jnp.zeros((num_agents, dims)))


def directions(dims: int = 2) -> Float[np.ndarray, "A D"]:
    """Unit commands of a discrete drone: stay, then back and forth along each axis."""
    axes = np.eye(dims, dtype=np.float32)
    along = np.stack([-axes, axes], 1).reshape(2 * dims, dims)
    return np.concatenate([np.zeros((1, dims), np.float32), along])


def move(bodies: Bodies, command: Float[Array, "N D"], response: float, side: int) -> Bodies:
    """Advance one step towards the commanded velocities; walls stop what runs into them.

    Velocity follows the command with a first-order lag: a fraction ``response`` of the difference
    is made up in a step.
    """
    velocity = bodies.velocity + response * (command - bodies.velocity)
    position = bodies.position + velocity
    inside = jnp.clip(position, 0.0, side)
    return Bodies(inside, jnp.where(inside == position, velocity, 0.0))


def stays_inside(
    position: Float[Array, "N D"], commands: Float[Array, "A D"], side: int
) -> Bool[Array, "N A"]:
    """Tell which commands, carried out in full, would keep each drone in the arena."""
    target = position[:, None] + commands[None]
    return ((target >= 0) & (target <= side)).all(-1)


def neighbours(position: Float[Array, "N D"], count: int, sensing_range: float) -> Neighbours:
    """Find the ``count`` nearest others of each drone within range, nearest first.

    All pairs are compared. Taking the minimum ``count`` times beats a sort by far at the sizes
    that all pairs allow.
    """
    num_agents = position.shape[0]
    squared = jnp.square(position[:, None] - position[None]).sum(-1)
    squared = jnp.where(np.eye(num_agents, dtype=bool), jnp.inf, squared)
    index, distance = [], []
    for _ in range(count):
        nearest = squared.argmin(-1)
        taken = nearest[:, None] == jnp.arange(num_agents)[None]
        index.append(nearest)
        distance.append(squared.min(-1))
        squared = jnp.where(taken, jnp.inf, squared)
    return Neighbours(jnp.stack(index, -1), jnp.stack(distance, -1) <= sensing_range**2)


def sense_neighbours(
    bodies: Bodies, count: int, sensing_range: float, top_speed: float
) -> Float[Array, "N F"]:
    """Describe the nearest others, F = count * (2 D + 1): zeros where there is none in range.

    For each: position and velocity relative to the observer, in units of the range and of the top
    speed, and 1 for its presence.
    """
    near = neighbours(bodies.position, count, sensing_range)
    offset = bodies.position[near.index] - bodies.position[:, None]
    drift = bodies.velocity[near.index] - bodies.velocity[:, None]
    presence = jnp.ones((*near.index.shape, 1))
    seen = jnp.concatenate([offset / sensing_range, drift / top_speed, presence], -1)
    return jnp.where(near.present[..., None], seen, 0.0).reshape(len(seen), -1)
