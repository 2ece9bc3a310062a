"""How drones move as points, in two or three dimensions, with wind, walls and obstacles.

Pure functions of arrays; D is the number of dimensions. Lengths are in cells, the unit of the maps
that tasks lay over the arena, a square or cube with coordinates in [0, side]; times are in steps.

==============  ==================================================  =============================
dynamics        command, each entry in [-1, 1]                      discrete motions
==============  ==================================================  =============================
velocity        target velocity, in units of the top speed          rest, - and + along each axis
acceleration    thrust, against little drag: a double integrator    no thrust, - and + along each
unicycle        speed along the heading, turn, and climb in 3D      rest, ahead, ahead turning
                                                                    left or right, up, down
quadrotor       see `offmarl.envs.swarm.quadrotor`                  none
==============  ==================================================  =============================
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.envs.swarm.neighbours import find_points

WITH_DRAG = ("acceleration", "quadrotor")
"""Dynamics with a drag of the air that can be randomised."""

OBSTACLE_RADIUS = 1.0

_RESPONSE = 0.5
"""Fraction of the difference to the commanded velocity removed in a step, at mass 1."""
_THRUST = 0.3
"""Acceleration at full thrust in units of the top speed, at mass 1."""
_DRAG = 0.1
"""Fraction of the velocity through the air that drag removes in a step, at mass 1."""
_TURN = math.pi / 4
"""Largest turn in a step."""


@dataclass(frozen=True)
class Kind:
    """A type of drone, relative to the standard type."""

    name: str
    top_speed: float = 1.0
    mass: float = 1.0
    sight: float = 1.0
    """Sensing range, as a fraction of the task's."""
    strength: float = 2.0
    """Contribution where several drones must act together."""


STANDARD = Kind("standard")
SCOUT = Kind("scout", top_speed=1.2, mass=0.8, sight=1.2, strength=1.0)
LIFTER = Kind("lifter", top_speed=0.8, mass=1.25, sight=0.8, strength=2.0)
EVADER = Kind("evader", top_speed=1.2, mass=0.8, sight=1.0)
KINDS = (STANDARD, SCOUT, LIFTER, EVADER)


class DroneState(NamedTuple):
    """The drones as points; quadrotors have an attitude too."""

    position: Float[Array, "N D"]
    """Each coordinate in [0, side]."""
    velocity: Float[Array, "N D"]
    """Velocity over ground."""
    heading: Float[Array, "N"]
    """Angle from the first axis to the second; 0 except for unicycles and quadrotors (yaw)."""
    attitude: Float[Array, "N 4"] | None = None
    """Unit quaternions (w, x, y, z) that rotate from the body to the arena; None for points."""
    spin: Float[Array, "N 3"] | None = None
    """Angular velocity in the body's frame, in radians per step; None for points."""


class DroneParams(NamedTuple):
    """Parameters of the drones; constant during an episode. None for those that do not vary."""

    top_speed: Float[Array, "N"]
    mass: Float[Array, "N"]
    sight: Float[Array, "N"]
    """Sensing range."""
    strength: Float[Array, "N"]
    thrust: Float[Array, "N"] | None = None
    """Force of the motors, and of the controller behind them, over that of a standard drone."""
    drag: Float[Array, "N"] | None = None
    """Drag of the air over that of a standard drone."""
    delay: Int[Array, "N"] | None = None
    """Steps between a command and its effect."""
    dropout: Float[Array, "N"] | None = None
    """Probability that the sensors fail in a step."""


class Disturbance(NamedTuple):
    """Wind and sensor noise of an episode."""

    wind: Float[Array, "D"]
    """Wind velocity in cells per step."""
    noise: Float[Array, ""]
    """Standard deviation of the error in observed positions (cells) and velocities (cells/step)."""


def at_rest(position: Float[Array, "N D"]) -> DroneState:
    """Return drones that do not move, with heading 0."""
    return DroneState(position, jnp.zeros_like(position), jnp.zeros(position.shape[0]))


def take_drones(drones: DroneState, which: slice) -> DroneState:
    """Return some of the drones."""
    subset: DroneState = jax.tree.map(lambda part: part[which], drones)
    return subset


def params_of(kinds: Sequence[Kind], sensing_range: float) -> DroneParams:
    """Return the parameters of drones of the given kinds."""
    table = [
        (kind.top_speed, kind.mass, kind.sight * sensing_range, kind.strength) for kind in kinds
    ]
    return DroneParams(*jnp.asarray(np.array(table, np.float32).T))


def motions(dynamics: str, dims: int) -> Float[np.ndarray, "A D"]:
    """Return the commands of the discrete actions; the first does nothing."""
    if dynamics == "unicycle":
        flat = [[0, 0], [1, 0], [1, 1], [1, -1]]
        climbs = [[1, 0, 1], [1, 0, -1]] if dims == 3 else []
        return np.array([[*row, 0][:dims] for row in flat] + climbs, np.float32)
    axes = np.eye(dims, dtype=np.float32)
    along = np.stack([-axes, axes], 1).reshape(2 * dims, dims)
    return np.concatenate([np.zeros((1, dims), np.float32), along])


def fly(
    drones: DroneState,
    command: Float[Array, "N D"],
    params: DroneParams,
    wind: Float[Array, "D"],
    dynamics: str,
) -> DroneState:
    """Advance one step in an arena without walls."""
    heading = drones.heading
    if dynamics == "unicycle":
        heading = (heading + _TURN * command[:, 1]) % (2 * math.pi)
        ahead = jnp.stack([jnp.cos(heading), jnp.sin(heading)], -1) * command[:, :1]
        command = jnp.concatenate([ahead, command[:, 2:]], -1)
    if dynamics == "acceleration":
        velocity = _thrust(drones.velocity, _bounded(command), params, wind)
    else:
        target = params.top_speed[:, None] * _bounded(command) + wind
        force = _RESPONSE if params.thrust is None else _RESPONSE * params.thrust
        response = jnp.minimum(force / params.mass, 1.0)[:, None]
        velocity = drones.velocity + response * (target - drones.velocity)
    return DroneState(drones.position + velocity, velocity, heading)


def keep_inside(drones: DroneState, side: float) -> DroneState:
    """Move drones outside the arena to its walls, and remove their velocity out of it."""
    inside = jnp.clip(drones.position, 0.0, side)
    velocity = jnp.where(inside == drones.position, drones.velocity, 0.0)
    return drones._replace(position=inside, velocity=velocity)


def command_towards(
    desired: Float[Array, "N D"], velocity: Float[Array, "N D"], dynamics: str
) -> Float[Array, "N D"]:
    """Return the commands that bring drones closest to the desired velocities.

    Both velocities are in units of the top speed; for unicycles in their own frames.
    """
    if dynamics == "velocity":
        return _bounded(desired)
    if dynamics == "acceleration":
        return jnp.clip((desired - velocity) / _THRUST, -1.0, 1.0)
    turn = jnp.clip(jnp.arctan2(desired[:, 1], desired[:, 0]) / _TURN, -1.0, 1.0)
    flat = jnp.minimum(length_of(desired[:, :2], keepdims=True), 1.0)
    return jnp.concatenate([flat, turn[:, None], desired[:, 2:]], -1)


def _thrust(
    velocity: Float[Array, "N D"],
    command: Float[Array, "N D"],
    params: DroneParams,
    wind: Float[Array, "D"],
) -> Float[Array, "N D"]:
    top_speed, mass = params.top_speed[:, None], params.mass[:, None]
    thrust = _THRUST if params.thrust is None else _THRUST * params.thrust[:, None]
    drag = _DRAG if params.drag is None else _DRAG * params.drag[:, None]
    pushed = velocity + (thrust * top_speed * command - drag * (velocity - wind)) / mass
    speed = jnp.maximum(length_of(pushed, keepdims=True), 1e-6)
    return pushed * jnp.minimum(1.0, top_speed / speed)


def _bounded(command: Float[Array, "N D"]) -> Float[Array, "N D"]:
    """Shorten vectors longer than 1 to length 1."""
    return command / jnp.maximum(length_of(command, keepdims=True), 1.0)


def scatter(
    key: PRNGKeyArray, count: int, side: float, dims: int, gap: float
) -> Float[Array, "M D"]:
    """Draw ``count`` points at least ``gap`` apart, and half that from the walls.

    They lie in different cells of a grid, at most as far from the centres as the gap allows. If the
    cells are smaller than the gap, they lie at the centres.
    """
    per_axis = math.ceil(count ** (1 / dims) - 1e-9)
    pitch = side / per_axis
    slack = max((pitch - gap) / 2, 0.0)
    order_key, jitter_key = jax.random.split(key)
    cell = jax.random.permutation(order_key, per_axis**dims)[:count]
    grid = jnp.stack(jnp.unravel_index(cell, (per_axis,) * dims), -1)
    jitter = jax.random.uniform(jitter_key, (count, dims), minval=-slack, maxval=slack)
    return (grid + 0.5) * pitch + jitter


def keep_out(
    drones: DroneState,
    obstacles: Float[Array, "M D"],
    side: float,
    radius: float = OBSTACLE_RADIUS,
) -> DroneState:
    """Move drones inside an obstacle to its surface, and remove their velocity into it."""
    near = find_points(drones.position, obstacles, 1, radius, side)
    nearest = obstacles[near.which[:, 0]]
    offset = drones.position - nearest
    distance = jnp.maximum(length_of(offset, keepdims=True), 1e-6)
    normal = offset / distance
    hit = distance < radius
    surface = jnp.clip(nearest + radius * normal, 0.0, side)
    inward = jnp.minimum((drones.velocity * normal).sum(-1, keepdims=True), 0.0)
    return drones._replace(
        position=jnp.where(hit, surface, drones.position),
        velocity=jnp.where(hit, drones.velocity - inward * normal, drones.velocity),
    )


def stays_inside(
    position: Float[Array, "N D"], steps: Float[Array, "N A D"], side: float
) -> Bool[Array, "N A"]:
    """Return which displacements keep each drone in the arena."""
    target = position[:, None] + steps
    return ((target >= 0) & (target <= side)).all(-1)


def to_frame(heading: Float[Array, "N"], vectors: Float[Array, "N K D"]) -> Float[Array, "N K D"]:
    """Rotate vectors into the frames of drones, whose first axis points ahead."""
    cos, sin = jnp.cos(heading)[:, None], jnp.sin(heading)[:, None]
    x, y = vectors[..., 0], vectors[..., 1]
    turned = jnp.stack([cos * x + sin * y, cos * y - sin * x], -1)
    return jnp.concatenate([turned, vectors[..., 2:]], -1)


# --------------------------------------------------------------- parts of scripted controllers


def steer_around(
    offset: Float[Array, "N K D"], known: Float[Array, "N K 1"], desired: Float[Array, "N D"]
) -> Float[Array, "N D"]:
    """Return the velocity that leads around obstacles ahead."""
    distance = jnp.maximum(length_of(offset, keepdims=True), 0.1)
    gap = jnp.maximum(distance - OBSTACLE_RADIUS, 0.1)
    normal = -offset / distance
    into = jnp.maximum(-(normal * desired[:, None]).sum(-1, keepdims=True), 0.0)
    return jnp.where((known > 0) & (gap < 1.5), normal * (into + 0.1 / gap), 0.0).sum(1)


def length_of(vector: Float[Array, "*b D"], keepdims: bool = False) -> Float[Array, "*c"]:
    """Return the lengths of vectors, with ``keepdims`` along an axis of size 1."""
    return jnp.sqrt(jnp.square(vector).sum(-1, keepdims=keepdims))
