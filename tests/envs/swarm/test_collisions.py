"""Collisions between drones, against closed forms and laws of conservation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs
from offmarl._compiling import QUICKLY
from offmarl.envs.swarm import neighbours
from offmarl.envs.swarm.collisions import RADIUS, collide
from offmarl.envs.swarm.dynamics import DroneState

from .acting import reset, take_step


def bump(position, velocity, mass, restitution, alive=None, side=20.0, fastest=2.0):
    """Move drones freely for a step, with collisions."""
    position, velocity = jnp.asarray(position), jnp.asarray(velocity)
    before = DroneState(position, velocity, jnp.zeros(len(position)))
    alive = jnp.ones(len(position), bool) if alive is None else jnp.asarray(alive)
    run = jax.jit(collide, static_argnums=(4, 5, 6), compiler_options=QUICKLY)
    after = before._replace(position=position + velocity)
    return run(before, after, jnp.asarray(mass), alive, restitution, fastest, side)


def momentum_and_energy(velocity, mass):
    velocity, mass = np.asarray(velocity, float), np.asarray(mass, float)
    return mass @ velocity, 0.5 * mass @ np.square(velocity).sum(-1)


@pytest.mark.parametrize(
    ("restitution", "mass", "apart", "left", "right"),
    [
        (1.0, [1.0, 1.0], 1.25, -0.5, 1.0),  # equal masses exchange their velocities
        (1.0, [1.0, 3.0], 1.25, -1.25, 0.25),
        (0.0, [1.0, 1.0], 1.25, 0.25, 0.25),
        (0.0, [1.0, 3.0], 1.25, -0.125, -0.125),
        (1.0, [1.0, 1.0], 0.875, -0.5, 1.0),
    ],
)
def test_two_drones_meet_in_the_course_of_a_step(restitution, mass, apart, left, right):
    """They close 1.5 in a step: they touch after half of it, or after a quarter."""
    start = np.array([4.0, 4.0 + apart])
    drones, collided = bump(
        np.stack([start, [5.0, 5.0]], 1), [[1.0, 0.0], [-0.5, 0.0]], mass, restitution
    )
    np.testing.assert_allclose(drones.velocity, [[left, 0], [right, 0]], atol=1e-6)
    time = (apart - 0.5) / 1.5
    ends = start + time * np.array([1.0, -0.5]) + (1 - time) * np.array([left, right])
    np.testing.assert_allclose(drones.position, np.stack([ends, [5.0, 5.0]], 1), atol=1e-6)
    assert collided.all()


def test_only_the_velocity_along_the_line_of_centres_changes():
    offset = 2 * RADIUS * np.array([0.6, 0.8])
    drones, _ = bump([[5.0, 5.0], 5 + offset], [[1.0, 0.0], [0.0, 0.0]], [1.0, 1.0], 1.0)
    along = 0.6 * np.array([0.6, 0.8])
    np.testing.assert_allclose(drones.velocity, [[1, 0] - along, along], atol=1e-5)


@pytest.mark.parametrize(
    ("offset", "velocity"),
    [
        ([1.0, 0.0], [[0.0, 0.0], [-0.2, 0.0]]),
        ([2.0, 0.6], [[2.0, 0.0], [0.0, 0.0]]),
        ([0.6, 0.0], [[-1.0, 0.0], [1.0, 0.0]]),
    ],
    ids=["too slow", "past each other", "apart"],
)
def test_drones_that_do_not_meet_fly_on(offset, velocity):
    start = np.array([[5.0, 5.0], np.add([5.0, 5.0], offset)])
    drones, collided = bump(start, velocity, [1.0, 1.0], 1.0)
    np.testing.assert_allclose(drones.velocity, velocity)
    np.testing.assert_allclose(drones.position, start + velocity, rtol=1e-6)
    assert not collided.any()


def test_nobody_bumps_into_the_dead():
    drones, collided = bump(
        [[4.0, 5.0], [5.0, 5.0]], [[1.0, 0.0], [0.0, 0.0]], [1.0, 1.0], 1.0, [True, False]
    )
    assert drones.velocity[0].tolist() == [1, 0]
    assert not collided[0]


def test_drones_that_overlap_are_moved_apart_about_their_centre_of_mass():
    drones, _ = bump([[5.0, 5.0], [5.2, 5.0]], [[0.0, 0.0]] * 2, [1.0, 3.0], 0.0)
    np.testing.assert_allclose(drones.position, [[4.775, 5], [5.275, 5]], atol=1e-6)
    assert not drones.velocity.any()


@pytest.mark.parametrize(
    ("dims", "restitution", "dense"),
    [
        (2, 1.0, False),
        (3, 0.0, True),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in ((2, 0.0, False), (2, 1.0, True), (3, 1.0, False))
        ),
    ],
)
def test_a_crowd_keeps_its_momentum_and_gains_no_energy(dims, restitution, dense, monkeypatch):
    """Crowded drones, most of which meet several others in the step."""
    monkeypatch.setattr(neighbours, "DENSE_LIMIT", 10**6 if dense else 0)
    side, num_drones = (6.0, 120) if dims == 2 else (3.0, 120)
    keys = jax.random.split(jax.random.key(dims), 3)
    position = jax.random.uniform(keys[0], (num_drones, dims), maxval=side)
    velocity = jax.random.normal(keys[1], (num_drones, dims))
    mass = jax.random.uniform(keys[2], (num_drones,), minval=0.5, maxval=2.0)
    drones, collided = bump(position, velocity, mass, restitution, side=side, fastest=0.4)
    momentum, energy = momentum_and_energy(velocity, mass)
    momentum_after, energy_after = momentum_and_energy(drones.velocity, mass)
    np.testing.assert_allclose(momentum_after, momentum, atol=2e-5 * num_drones)
    assert energy_after < 0.999 * energy
    assert collided.mean() > 0.9
    centre = mass @ (position + velocity)
    np.testing.assert_allclose(mass @ drones.position, centre, rtol=1e-5, atol=1e-3)


def test_a_pair_in_a_crowd_keeps_its_energy():
    """A thousand drones at rest on a grid, and one that hits another: the cell list finds it."""
    grid = np.stack(np.meshgrid(*[np.arange(32.0) * 2 + 1] * 2), -1).reshape(-1, 2)
    velocity = np.zeros_like(grid)
    velocity[100] = [2.0, 0.0]
    drones, collided = bump(grid, velocity, np.ones(1024), 1.0, side=64.0)
    assert np.flatnonzero(collided).tolist() == [100, 101]
    np.testing.assert_allclose(drones.velocity[100:102], [[0, 0], [2, 0]], atol=1e-5)


@pytest.mark.nightly
def test_drones_of_an_environment_bounce_off_each_other():
    """Each commands its top speed towards the other: they meet with 0.5 each, and bounce."""
    results = {}
    for kind in ("none", "elastic", "inelastic"):
        env = envs.make("swarm/coverage-2", action="continuous", collisions=kind)
        state, _ = reset(env)
        place = jnp.asarray([[3.0, 3.0], [4.0, 3.0]])
        state = state._replace(drones=state.drones._replace(position=place))
        command = jnp.asarray([[1.0, 0.0], [-1.0, 0.0]])
        after, _ = take_step(env, state, command)
        results[kind] = after.drones.velocity[:, 0].tolist()
        assert (after.collided is None) == (kind == "none")
    assert results == {"none": [0.5, -0.5], "elastic": [-0.5, 0.5], "inelastic": [0.0, 0.0]}
