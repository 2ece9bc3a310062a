"""Quadrotors: rigid bodies with four motors and an attitude, in three dimensions.

A cell is 1 m and a step is 0.2 s, so the weight of a drone is its mass times `GRAVITY` cells per
squared step. With position x, velocity v, unit quaternion q (body to arena), angular velocity w in
the body's frame, wind u, and R the rotation matrix of q::

    x' = v
    v' = (f1 + f2 + f3 + f4) / m R e3 - g e3 - d (v - u),         d = g / top speed
    q' = q (0, w) / 2
    J w' = tau - w x J w - c J w

The motors are at the corners of a square (front left, front right, rear right, rear left); the
first axis of the body points ahead, the second left and the third up. They push along the third
axis with forces f from 0 to half the weight each, and turn the body by

    tau = (l (f1 - f2 - f3 + f4), l (-f1 - f2 + f3 + f4), b (f1 - f2 + f3 - f4)).

So a drone hovers with half of the force of each motor, falls at its top speed when the motors are
off, and holds a speed of that size when it is tilted by 45 degrees. The drag is linear, so that a
fall has a closed form. Two command modes, each of four numbers in [-1, 1]:

- ``rates``: collective thrust (-1 none, 0 the weight of the standard drone of its kind, 1 twice
  that), and body rates in units of `MOST_RATES`, which a controller on board follows.
- ``motors``: the forces of the motors (-1 none, 0 a quarter of the weight, 1 half).

A step is `SUBSTEPS` substeps with constant motor forces in each. Within a substep, velocity and
position are integrated exactly for a constant thrust and attitude, the gyroscopic torque of the
symmetric body exactly by a rotation, the damping of the spin exactly, and the attitude by the
rotation of a constant spin. So the integration is stable for any command, and quaternions keep
their length.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from offmarl.envs.swarm.dynamics import DroneParams, DroneState, length_of

COMMAND_SIZE = 4

GRAVITY = 9.81 * 0.2**2
"""Cells per squared step."""
SUBSTEPS = 10
MOST_RATES = np.array([1.2, 1.2, 0.6], np.float32)
"""Largest commanded angular velocity about each axis of the body, in radians per step."""

_STEP = 1 / SUBSTEPS
_INERTIA = np.array([0.01, 0.01, 0.018], np.float32)
"""Moments of inertia over the mass, in squared cells."""
_LEVER = 0.2 / math.sqrt(2)
"""Distance of the motors from the first two axes, l."""
_TWIST = 0.05
"""Torque about the third axis over the force of a motor, b."""
_SPIN_DRAG = 0.5
"""Fraction of the spin that is lost in a step, c."""
_RATE_GAIN = 5.0
"""Commanded change of the spin in a step over its error."""
_MIXER = np.array(
    [
        [_LEVER, -_LEVER, _TWIST],
        [-_LEVER, -_LEVER, -_TWIST],
        [-_LEVER, _LEVER, _TWIST],
        [_LEVER, _LEVER, -_TWIST],
    ],
    np.float32,
)
"""Torque of a unit force of each motor."""

# Gains of the scripted controller, which acts once in a step.
_VELOCITY_GAIN = 0.25
_RATES_GAIN = 0.8
"""Commanded angular velocity over the error of the attitude."""
_TURN_GAIN, _DAMPING = 0.9, 0.6
"""Commanded angular acceleration over the error of the attitude, and over the spin."""
_MOST_TILT = 1.2
"""Tangent of the largest tilt that the scripted controller asks for."""


def hover_at(drones: DroneState) -> DroneState:
    """Return drones with the attitude and the spin of quadrotors that hover."""
    level = jnp.zeros((len(drones.position), 4)).at[:, 0].set(1.0)
    return drones._replace(attitude=level, spin=jnp.zeros((len(drones.position), 3)))


def fly(
    drones: DroneState,
    command: Float[Array, "N 4"],
    params: DroneParams,
    wind: Float[Array, "3"],
    control: str,
) -> DroneState:
    """Advance one step in an arena without walls."""
    lift = (_require(params.thrust) / params.mass)[:, None]
    drag = (GRAVITY / params.top_speed * _require(params.drag) / params.mass)[:, None]
    command = jnp.clip(command, -1.0, 1.0)

    def advance(_: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        position, velocity, attitude, spin = state
        share = (1 + command) / 2 if control == "motors" else _follow(command, spin)
        force = GRAVITY / 2 * lift * share
        push = force.sum(-1, keepdims=True) * up_of(attitude)
        position, velocity = _glide(position, velocity, push, drag, wind)
        spin = _turn(spin, force @ _MIXER)
        attitude = _multiply(attitude, _rotation(spin * _STEP))
        return position, velocity, attitude / length_of(attitude, keepdims=True), spin

    start = (drones.position, drones.velocity, _require(drones.attitude), _require(drones.spin))
    position, velocity, attitude, spin = jax.lax.fori_loop(0, SUBSTEPS, advance, start)
    return DroneState(position, velocity, yaw_of(attitude), attitude, spin)


def _require(part: Array | None) -> Array:
    if part is None:
        raise ValueError("these drones are points: quadrotors have an attitude, thrust and drag.")
    return part


def _follow(command: Float[Array, "N 4"], spin: Float[Array, "N 3"]) -> Float[Array, "N 4"]:
    """Return the share of the force of each motor that follows commanded thrust and rates."""
    change = _RATE_GAIN * (command[:, 1:] * MOST_RATES - spin) + _SPIN_DRAG * spin
    return jnp.clip((1 + command[:, :1]) / 2 + _mix(change), 0.0, 1.0)


def _mix(change: Float[Array, "N 3"]) -> Float[Array, "N 4"]:
    """Return the shares of the forces of the motors that change the spin so much in a step."""
    coefficients = change * _INERTIA / (4 * np.square(_MIXER[0]))  # the columns are orthogonal
    return coefficients @ _MIXER.T / (GRAVITY / 2)


def _glide(
    position: Float[Array, "N 3"],
    velocity: Float[Array, "N 3"],
    push: Float[Array, "N 3"],
    drag: Float[Array, "N 1"],
    wind: Float[Array, "3"],
) -> tuple[Float[Array, "N 3"], Float[Array, "N 3"]]:
    """Integrate v' = push - g e3 - drag (v - wind) and x' = v over a substep."""
    final = (push - GRAVITY * jnp.asarray([0.0, 0.0, 1.0])) / drag + wind
    lost = -jnp.expm1(-drag * _STEP)
    difference = velocity - final
    return position + final * _STEP + difference * lost / drag, velocity - lost * difference


def _turn(spin: Float[Array, "N 3"], torque: Float[Array, "N 3"]) -> Float[Array, "N 3"]:
    """Integrate the angular velocity over a substep; the torque is over the mass."""
    angle = float(_INERTIA[2] / _INERTIA[0] - 1) * spin[:, 2] * _STEP
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    x, y, z = spin.T
    turned = jnp.stack([cosine * x - sine * y, sine * x + cosine * y, z], -1)
    lost = -math.expm1(-_SPIN_DRAG * _STEP)
    return turned + lost * (torque / _INERTIA / _SPIN_DRAG - turned)


# ---------------------------------------------------------------------------------- quaternions


def to_matrix(attitude: Float[Array, "N 4"]) -> Float[Array, "N 3 3"]:
    """Return the rotation matrices of unit quaternions; their columns are the body's axes."""
    w, x, y, z = attitude.T
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return jnp.stack([jnp.stack(row, -1) for row in rows], -2)


def up_of(attitude: Float[Array, "N 4"]) -> Float[Array, "N 3"]:
    """Return the direction of the thrust: the third column of the rotation matrix."""
    w, x, y, z = attitude.T
    return jnp.stack([2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)], -1)


def yaw_of(attitude: Float[Array, "N 4"]) -> Float[Array, "N"]:
    """Return the angle of the body's first axis, seen from above."""
    w, x, y, z = attitude.T
    return jnp.arctan2(2 * (x * y + w * z), 1 - 2 * (y * y + z * z))


def _rotation(vector: Float[Array, "N 3"]) -> Float[Array, "N 4"]:
    """Return the quaternions of rotations about vectors by their lengths."""
    half = 0.5 * length_of(vector, keepdims=True)
    # sinc is smooth at 0; its argument is in units of pi.
    return jnp.concatenate([jnp.cos(half), 0.5 * vector * jnp.sinc(half / jnp.pi)], -1)


def _multiply(left: Float[Array, "N 4"], right: Float[Array, "N 4"]) -> Float[Array, "N 4"]:
    a, b, c, d = left.T
    w, x, y, z = right.T
    product = [
        a * w - b * x - c * y - d * z,
        a * x + b * w + c * z - d * y,
        a * y - b * z + c * w + d * x,
        a * z + b * y - c * x + d * w,
    ]
    return jnp.stack(product, -1)


# ---------------------------------------------------------------------------------- controller


def command_towards(
    desired: Float[Array, "N 3"],
    velocity: Float[Array, "N 3"],
    rotation: Float[Array, "N 3 3"],
    spin: Float[Array, "N 3"],
    top_speed: Float[Array, "N 1"],
    control: str,
) -> Float[Array, "N 4"]:
    """Return the commands that bring quadrotors to the desired velocities, with yaw 0.

    A velocity controller asks for an acceleration, whose direction and size give the attitude and
    the thrust; a second controller turns the body to that attitude.
    """
    length = length_of(desired, keepdims=True)
    desired = desired * jnp.minimum(1.0, top_speed / jnp.maximum(length, 1e-6))
    push = _VELOCITY_GAIN * (desired - velocity) + GRAVITY / top_speed * desired
    rise = jnp.clip(push[:, 2:] + GRAVITY, 0.4 * GRAVITY, 1.8 * GRAVITY)
    size = length_of(push[:, :2], keepdims=True)
    flat = push[:, :2] * jnp.minimum(1.0, _MOST_TILT * rise / jnp.maximum(size, 1e-6))
    push = jnp.concatenate([flat, rise], -1)
    thrust = (push * rotation[:, :, 2]).sum(-1, keepdims=True) / GRAVITY - 1
    error = _tilt_error(rotation, push)
    if control == "rates":
        rates = _RATES_GAIN * error / MOST_RATES
        return jnp.clip(jnp.concatenate([thrust, rates], -1), -1.0, 1.0)
    share = (1 + jnp.clip(thrust, -0.8, 0.8)) / 2 + _mix(_TURN_GAIN * error - _DAMPING * spin)
    return jnp.clip(2 * share - 1, -1.0, 1.0)


def _tilt_error(rotation: Float[Array, "N 3 3"], push: Float[Array, "N 3"]) -> Float[Array, "N 3"]:
    """Return the rotation, in the body's frame, that aligns the thrust with a push; and yaw 0."""
    # Rows are the directions of the push in the body's frame, and of the thrust: the third axis.
    direction = jnp.einsum("nji,nj->ni", rotation, push)
    direction = direction / length_of(direction, keepdims=True)
    x, y, z = direction.T
    sine = jnp.sqrt(x * x + y * y)
    scale = jnp.arctan2(sine, z) / jnp.maximum(sine, 1e-6)
    upside_down = (sine < 1e-3) & (z < 0)  # any axis does
    roll = jnp.where(upside_down, math.pi, -y * scale)
    pitch = jnp.where(upside_down, 0.0, x * scale)
    yaw = jnp.arctan2(rotation[:, 1, 0], rotation[:, 0, 0])
    return jnp.stack([roll, pitch, -yaw], -1)
