"""Collisions between drones: discs (balls) of radius `RADIUS` that push each other.

Drones move in straight lines during a step. Two of them collide at the first time t at which they
touch and approach each other. Along the line n between their centres each receives the impulse

    J = (1 + e) m1 m2 / (m1 + m2) s, with s the speed at which they approach along n,

with opposite signs, so momentum is conserved. The restitution e is 1 for elastic collisions, which
also conserve energy, and 0 for inelastic ones, after which both have the same speed along n. The
new velocity acts for the rest of the step. Drones that overlap at the beginning of a step are moved
apart, about their centre of mass.

If a drone meets several others in a step, the impulse of each pair is divided by the larger number
of drones that one of the two meets. The impulses remain opposite, and the energy cannot grow: with
c impulses on a drone, the square of their sum is at most c times the sum of their squares.

Pairs are found by the suite's neighbour search, so the cost is close to linear in the number of
drones.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from offmarl.envs.swarm.dynamics import DroneState
from offmarl.envs.swarm.neighbours import Points, reduce_within, sum_of_squares

RESTITUTION = {"elastic": 1.0, "inelastic": 0.0}
RADIUS = 0.25
"""Radius of a drone, in cells."""

_CONTACT = 2 * RADIUS


class _Motion(NamedTuple):
    """Position, displacement, velocity, mass and index of drones: D arrays for each vector."""

    position: tuple[Array, ...]
    step: tuple[Array, ...]
    velocity: tuple[Array, ...]
    mass: Array
    number: Array


class _Contact(NamedTuple):
    """Contacts of C other drones with N drones: ``(C, N)`` each."""

    touches: Bool[Array, "C N"]
    closing: Float[Array, "C N"]
    """Speed at which they approach, 0 if they do not."""
    overlap: Float[Array, "C N"]
    """Overlap at the beginning of the step."""
    remaining: Float[Array, "C N"]
    """Fraction of the step after the contact."""
    normal: tuple[Array, ...]
    """Direction from the drone to the other: D arrays."""


def collide(
    before: DroneState,
    after: DroneState,
    mass: Float[Array, "N"],
    alive: Bool[Array, "N"],
    restitution: float,
    fastest: float,
    side: float,
) -> tuple[DroneState, Bool[Array, "N"]]:
    """Return the drones after a step with the effects of collisions, and which collided."""
    num_drones, dims = before.position.shape
    index = jnp.arange(num_drones, dtype=jnp.int32)
    step = after.position - before.position
    motion = _Motion(tuple(before.position.T), tuple(step.T), tuple(after.velocity.T), mass, index)
    drones = Points(before.position, alive, (motion,))
    reach = _CONTACT + 2 * fastest

    def count(total: Int[Array, "N"], squared: Array, other: _Motion) -> Int[Array, "N"]:
        touches = _meet(motion, other, squared, reach).touches
        return total + touches.sum(0, dtype=jnp.int32)

    nothing = jnp.zeros(num_drones, jnp.int32)
    contacts = reduce_within(count, nothing, before.position, drones, reach, side)

    def push(
        total: Float[Array, "S N"], squared: Array, other: _Motion, theirs: Int[Array, "C N"]
    ) -> Float[Array, "S N"]:
        contact = _meet(motion, other, squared, reach)
        share = other.mass / (mass + other.mass) / jnp.maximum(jnp.maximum(contacts, theirs), 1)
        share = jnp.where(contact.touches, share, 0.0)
        change = -(1 + restitution) * share * contact.closing
        shift = change * contact.remaining - share * contact.overlap
        parts = [size * axis for size in (change, shift) for axis in contact.normal]
        return total + jnp.stack([part.sum(0) for part in parts])

    drones = drones._replace(values=(motion, contacts))
    none = jnp.zeros((2 * dims, num_drones))
    total = reduce_within(push, none, before.position, drones, reach, side)
    position, velocity = after.position + total[dims:].T, after.velocity + total[:dims].T
    return after._replace(position=position, velocity=velocity), contacts > 0


def _meet(drone: _Motion, other: _Motion, squared: Float[Array, "C N"], reach: float) -> _Contact:
    """Return the first contact of each pair in the step."""
    offset, course, relative = (
        [b - a for a, b in zip(*vectors, strict=True)]
        for vectors in zip(drone[:3], other[:3], strict=True)
    )
    pair = (other.number != drone.number) & (squared <= reach**2)
    inside = sum_of_squares(offset) - _CONTACT**2
    towards, pace = _dot(offset, course), sum_of_squares(course)
    root = jnp.square(towards) - pace * inside
    first = (-towards - jnp.sqrt(jnp.maximum(root, 0.0))) / jnp.maximum(pace, 1e-12)
    overlaps = inside < 0
    hits = overlaps | ((towards < 0) & (root >= 0) & (first <= 1))
    time = jnp.where(overlaps, 0.0, jnp.clip(first, 0.0, 1.0))
    contact = [at + time * moves for at, moves in zip(offset, course, strict=True)]
    length = jnp.maximum(jnp.sqrt(sum_of_squares(contact)), 1e-6)
    normal = tuple(axis / length for axis in contact)
    closing = jnp.maximum(-_dot(normal, relative), 0.0)
    overlap = jnp.where(overlaps, _CONTACT - jnp.sqrt(sum_of_squares(offset)), 0.0)
    touches = pair & hits & ((closing > 0) | overlaps)
    return _Contact(touches, closing, overlap, 1 - time, normal)


def _dot(left: "list[Array] | tuple[Array, ...]", right: list[Array]) -> Array:
    return sum((a * b for a, b in zip(left, right, strict=True)), jnp.zeros(()))
