"""Quadrotors, against closed forms of rigid bodies."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl._compiling import QUICKLY
from offmarl.envs.swarm import dynamics, quadrotor
from offmarl.envs.swarm.quadrotor import GRAVITY

STILL = jnp.zeros(3)

advance = jax.jit(quadrotor.fly, static_argnames="control", compiler_options=QUICKLY)


def body(position=(5.0, 5.0, 5.0), attitude=None, spin=None, kind=dynamics.STANDARD, **params):
    """Return a quadrotor at rest, and its parameters."""
    drones = quadrotor.hover_at(dynamics.at_rest(jnp.asarray([position])))
    if attitude is not None:
        drones = drones._replace(attitude=jnp.asarray([attitude]))
    if spin is not None:
        drones = drones._replace(spin=jnp.asarray([spin]))
    physics = dynamics.params_of([kind], 5.0)
    physics = physics._replace(thrust=physics.mass, drag=physics.mass)
    return drones, physics._replace(**{name: jnp.asarray([x]) for name, x in params.items()})


def fly(drones, params, command, steps=1, wind=STILL, control="rates"):
    for _ in range(steps):
        drones = advance(drones, jnp.asarray([command]), params, wind, control=control)
    return drones


@pytest.mark.parametrize("control", ["rates", "motors"])
@pytest.mark.parametrize("kind", [dynamics.STANDARD, dynamics.SCOUT, dynamics.EVADER])
def test_no_command_hovers(control, kind):
    drones, params = body(kind=kind)
    after = fly(drones, params, [0.0] * 4, 20, control=control)
    np.testing.assert_allclose(after.position, drones.position, atol=1e-5)
    np.testing.assert_allclose(after.velocity, 0, atol=1e-6)
    np.testing.assert_allclose(after.attitude, drones.attitude, atol=1e-6)
    np.testing.assert_allclose(after.spin, 0, atol=1e-6)


@pytest.mark.parametrize("top_speed", [1.0, 0.8])
@pytest.mark.parametrize("steps", [1, 3, 12])
def test_a_fall_is_that_of_linear_drag(top_speed, steps):
    """v = -V (1 - exp(-g t / V)), x = -V t + V**2 / g (1 - exp(-g t / V)), with V the top speed."""
    drones, params = body(top_speed=top_speed)
    after = fly(drones, params, [-1.0, 0.0, 0.0, 0.0], steps)
    lost = 1 - math.exp(-GRAVITY * steps / top_speed)
    assert float(after.velocity[0, 2]) == pytest.approx(-top_speed * lost, rel=1e-4)
    fallen = -top_speed * steps + top_speed**2 / GRAVITY * lost
    assert float(after.position[0, 2]) - 5 == pytest.approx(fallen, rel=1e-4)
    np.testing.assert_allclose(after.position[0, :2], 5, rtol=1e-6)


@pytest.mark.parametrize(
    ("params", "climbs"),
    [({"mass": 1.25}, -0.2), ({"thrust": 1.25}, 0.25), ({"drag": 2.0}, 0.0)],
)
def test_mass_thrust_and_drag_change_the_acceleration(params, climbs):
    """With no command: lift - 1 in units of gravity, over the drag that slows it."""
    drones, physics = body(**params)
    after = fly(drones, physics, [0.0] * 4)
    drag = GRAVITY * params.get("drag", 1.0) / params.get("mass", 1.0)
    expected = climbs * GRAVITY * -math.expm1(-drag) / drag
    assert float(after.velocity[0, 2]) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_drone_tilted_by_45_degrees_holds_its_top_speed():
    """The thrust is sqrt(2) of the weight; no rates keep the attitude."""
    tilt = math.pi / 4
    drones, params = body(attitude=[math.cos(tilt / 2), 0.0, math.sin(tilt / 2), 0.0])
    after = fly(drones, params, [math.sqrt(2) - 1, 0.0, 0.0, 0.0], 40)
    np.testing.assert_allclose(after.velocity, [[1, 0, 0]], atol=1e-4)


def test_the_wind_carries_a_hovering_drone():
    drones, params = body()
    wind = jnp.asarray([0.2, -0.1, 0.0])
    after = fly(drones, params, [0.0] * 4, 40, wind=wind)
    np.testing.assert_allclose(after.velocity[0], wind, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rates_are_followed(axis):
    """The commanded spin is reached, and the angle turned is its integral."""
    drones, params = body()
    command = np.zeros(4)
    command[1 + axis] = 0.5
    after = fly(drones, params, command, 2)
    expected = np.zeros(3)
    expected[axis] = 0.5 * quadrotor.MOST_RATES[axis]
    np.testing.assert_allclose(after.spin[0], expected, atol=0.01)
    later = fly(after, params, command, 3)
    turned = 2 * math.acos(abs(float(later.attitude[0] @ after.attitude[0])))
    assert turned == pytest.approx(3 * expected[axis], rel=0.02)


@pytest.mark.parametrize(
    ("motors", "sign"),
    [((1, -1, -1, 1), (1, 0, 0)), ((-1, -1, 1, 1), (0, 1, 0)), ((1, -1, 1, -1), (0, 0, 1))],
    ids=["right side down", "nose down", "to the left"],
)
def test_motors_turn_the_body(motors, sign):
    """A difference of forces: the spin after a step is torque / (J c) (1 - exp(-c))."""
    drones, params = body()
    after = fly(drones, params, 0.02 * np.array(motors), control="motors")
    lever = np.array([0.2 / math.sqrt(2), 0.2 / math.sqrt(2), 0.05])
    torque = lever * 4 * 0.02 * GRAVITY / 4
    expected = torque / np.array([0.01, 0.01, 0.018]) * -math.expm1(-0.5) / 0.5
    np.testing.assert_allclose(after.spin[0], sign * expected, atol=1e-5)


def test_a_free_body_precesses_and_slows_down():
    """Without torque, the spin across the axis turns by (J3 / J1 - 1) w3, and all of it decays."""
    drones, params = body(spin=[0.3, 0.0, 1.0])
    after = fly(drones, params, [-1.0] * 4, control="motors")
    decay = math.exp(-0.5)
    steps = np.arange(quadrotor.SUBSTEPS) / quadrotor.SUBSTEPS
    angle = 0.8 * np.exp(-0.5 * steps).sum() / quadrotor.SUBSTEPS
    expected = decay * np.array([0.3 * math.cos(angle), 0.3 * math.sin(angle), 1.0])
    np.testing.assert_allclose(after.spin[0], expected, rtol=1e-4)


@pytest.mark.nightly
def test_any_command_leaves_everything_bounded():
    """Random motor commands for 500 steps: unit quaternions, bounded spin and speed."""
    num_drones = 64
    drones = quadrotor.hover_at(dynamics.at_rest(jnp.full((num_drones, 3), 5.0)))
    params = dynamics.params_of([dynamics.STANDARD] * num_drones, 5.0)
    params = params._replace(thrust=params.mass, drag=params.mass)

    def step(drones, key):
        command = jnp.sign(jax.random.normal(key, (num_drones, 4)))
        return quadrotor.fly(drones, command, params, STILL, "motors"), None

    keys = jax.random.split(jax.random.key(0), 500)
    run = jax.jit(lambda drones: jax.lax.scan(step, drones, keys)[0], compiler_options=QUICKLY)
    after = run(drones)
    lengths = np.linalg.norm(after.attitude, axis=-1)
    np.testing.assert_allclose(lengths, 1.0, rtol=1e-5)
    assert np.abs(after.spin).max() < 0.2 / math.sqrt(2) * GRAVITY / 0.01 / 0.5
    assert np.linalg.norm(after.velocity, axis=-1).max() < 3


def test_matrices_are_those_of_the_quaternions():
    rng = np.random.default_rng(0)
    attitude = rng.normal(size=(5, 4))
    attitude /= np.linalg.norm(attitude, axis=-1, keepdims=True)
    rotation = np.asarray(quadrotor.to_matrix(jnp.asarray(attitude)))
    np.testing.assert_allclose(rotation @ rotation.mT, np.tile(np.eye(3), (5, 1, 1)), atol=1e-5)
    np.testing.assert_allclose(np.linalg.det(rotation), 1, rtol=1e-5)
    np.testing.assert_allclose(quadrotor.up_of(jnp.asarray(attitude)), rotation[..., 2], atol=1e-6)
    axis = attitude[:, 1:] / np.linalg.norm(attitude[:, 1:], axis=-1, keepdims=True)
    np.testing.assert_allclose(np.einsum("nij,nj->ni", rotation, axis), axis, atol=1e-5)
    cosine = (np.trace(rotation, axis1=1, axis2=2) - 1) / 2
    np.testing.assert_allclose(cosine, 2 * attitude[:, 0] ** 2 - 1, atol=1e-5)


def test_the_error_of_an_attitude_is_the_rotation_back_to_level():
    turned = jnp.asarray([[0.7, 0, 0], [0, -0.4, 0], [0.3, 0.4, 0], [2.5, 0, 0], [0, 0, 0.9]])
    rotation = quadrotor.to_matrix(quadrotor._rotation(turned))
    error = quadrotor._tilt_error(rotation, jnp.asarray([[0.0, 0.0, 2.0]] * 5))
    np.testing.assert_allclose(error[:, :2], -turned[:, :2], atol=1e-5)
    np.testing.assert_allclose(error[[0, 1, 4], 2], [0, 0, -0.9], atol=1e-5)


def test_commands_of_the_controller_by_hand():
    """Of level drones: for gravity, for drag, and for a quarter of the missing velocity."""
    desired = jnp.asarray([[0.5, 0, 0], [0, -9, 0], [0, 0, 1], [0, 0, -1], [0.5, 0, 0]])
    velocity = jnp.zeros((5, 3)).at[4, 0].set(0.5)
    level, ones = jnp.tile(jnp.eye(3), (5, 1, 1)), jnp.ones((5, 1))
    command = quadrotor.command_towards(desired, velocity, level, 0 * desired, ones, "rates")
    tilts = [math.atan(0.125 / GRAVITY + 0.5), math.atan(1.2), math.atan(0.5)]  # 1.2 at most
    pitch, roll, steady = 0.8 * np.array(tilts) / 1.2
    thrust = [[0.8, 0, 0, 0], [-0.6, 0, 0, 0]]
    expected = [[0, 0, pitch, 0], [0, roll, 0, 0], *thrust, [0, 0, steady, 0]]
    np.testing.assert_allclose(command, expected, atol=1e-5)
    spin = jnp.asarray([[0.05, -0.02, 0.03]] * 5)
    motors = quadrotor.command_towards(0 * desired, 0 * desired, level, spin, ones, "motors")
    np.testing.assert_allclose(motors.mean(1), 0, atol=1e-6)
    torque = GRAVITY / 4 * motors @ quadrotor._MIXER
    np.testing.assert_allclose(torque / np.array([0.01, 0.01, 0.018]), -0.6 * spin, atol=1e-5)


@functools.partial(jax.jit, static_argnames="control", compiler_options=QUICKLY)
def fly_towards(drones, params, goal, control):
    """Take one step with the scripted controller."""
    rotation, top_speed = quadrotor.to_matrix(drones.attitude), params.top_speed[:, None]
    command = quadrotor.command_towards(
        0.3 * (goal - drones.position), drones.velocity, rotation, drones.spin, top_speed, control
    )
    return quadrotor.fly(drones, command, params, STILL, control)


@pytest.mark.parametrize("control", ["rates", "motors"])
def test_the_controller_flies_to_a_goal_and_hovers_there(control):
    """Of four at once, two start level and two upside down; two are at their goals already."""
    level, upside_down = [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]
    goal = jnp.asarray([(8.0, 3.0, 6.0), (5.0, 5.0, 5.0)] * 2)
    bodies = [body(attitude=attitude) for attitude in (level, level, upside_down, upside_down)]
    drones, params = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *bodies)
    for _ in range(50):
        drones = fly_towards(drones, params, goal, control=control)
    np.testing.assert_allclose(drones.position, goal, atol=0.05)
    np.testing.assert_allclose(drones.velocity, 0, atol=0.02)
    np.testing.assert_allclose(quadrotor.up_of(drones.attitude), [[0, 0, 1]] * 4, atol=0.03)
