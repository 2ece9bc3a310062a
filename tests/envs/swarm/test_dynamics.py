import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs
from offmarl.envs.swarm import dynamics as motion

from .acting import reset

SIDE = 8


def swarm(position, velocity=None, heading=0.0):
    position = jnp.asarray(position, jnp.float32)
    velocity = jnp.zeros_like(position) if velocity is None else jnp.asarray(velocity, jnp.float32)
    return motion.DroneState(position, velocity, jnp.full(len(position), heading))


def move(drones, command, kind=motion.STANDARD, wind=(0.0, 0.0), dynamics="velocity"):
    params = motion.params_of([kind] * len(drones.position), 5.0)
    flown = motion.fly(drones, jnp.asarray(command), params, jnp.asarray(wind), dynamics)
    return motion.keep_inside(flown, SIDE)


@pytest.mark.parametrize("dims", [2, 3])
def test_drones_start_at_rest_all_over_the_arena(dims):
    env = envs.make(f"swarm/search-300:dims={dims}")
    drones = reset(env)[0].drones
    assert drones.position.shape == (300, dims)
    assert 0 <= drones.position.min() < 0.02 * env.side
    assert 0.98 * env.side < drones.position.max() <= env.side
    assert not drones.velocity.any()


def test_motions_are_rest_and_both_ways_along_each_axis():
    for dynamics in ("velocity", "acceleration"):
        motions = motion.motions(dynamics, 2)
        assert motions.tolist() == [[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]]
        assert motion.motions(dynamics, 3).shape == (7, 3)
    assert motion.motions("unicycle", 2).tolist() == [[0, 0], [1, 0], [1, 1], [1, -1]]
    assert motion.motions("unicycle", 3)[4:].tolist() == [[1, 0, 1], [1, 0, -1]]


def test_velocity_follows_the_command_with_a_lag():
    drones = move(swarm([[2.0, 2.0]]), [[1.0, 0.0]])
    assert drones.velocity.tolist() == [[0.5, 0.0]]
    assert drones.position.tolist() == [[2.5, 2.0]]
    drones = move(drones, [[1.0, 0.0]])
    assert drones.velocity.tolist() == [[0.75, 0.0]]
    assert drones.position.tolist() == [[3.25, 2.0]]


def test_heavy_drones_follow_slowly_and_fast_ones_further():
    kind = motion.Kind("", top_speed=2.0, mass=2.0)
    assert move(swarm([[2.0, 2.0]]), [[1.0, 0.0]], kind).velocity.tolist() == [[0.5, 0.0]]


def test_commands_longer_than_one_are_shortened():
    drones = move(swarm([[2.0, 2.0]]), [[3.0, 4.0]])
    assert drones.velocity[0].tolist() == pytest.approx([0.3, 0.4])


def test_wind_carries_away_who_rests():
    drones = swarm([[1.0, 4.0]])
    for _ in range(20):
        drones = move(drones, [[0.0, 0.0]], wind=(0.2, 0.0))
    assert drones.velocity[0].tolist() == pytest.approx([0.2, 0.0], abs=1e-4)


def test_thrust_adds_up_to_the_top_speed():
    drones, speeds = swarm([[0.0, 4.0]]), []
    for _ in range(5):
        drones = move(drones, [[1.0, 0.0]], motion.Kind("", top_speed=2.0), dynamics="acceleration")
        speeds.append(float(drones.velocity[0, 0]))
    assert speeds == pytest.approx([0.6, 1.14, 1.626, 2.0, 2.0])
    coasting = move(swarm([[4.0, 4.0]], [[0.5, 0.0]]), [[0.0, 0.0]], dynamics="acceleration")
    assert coasting.velocity[0].tolist() == pytest.approx([0.45, 0.0])


def test_a_unicycle_flies_where_it_heads_and_turns_on_command():
    drones = move(swarm([[4.0, 4.0]]), [[1.0, 1.0]], dynamics="unicycle")
    assert float(drones.heading[0]) == pytest.approx(math.pi / 4)
    half = 0.5 * math.sqrt(0.5)
    assert drones.velocity[0].tolist() == pytest.approx([half, half])
    left = swarm([[4.0, 4.0]], heading=math.pi / 2)
    assert move(left, [[1.0, 0.0]], dynamics="unicycle").velocity[0].tolist() == pytest.approx(
        [0.0, 0.5], abs=1e-6
    )


def test_a_unicycle_in_three_dimensions_climbs():
    params = motion.params_of([motion.STANDARD], 5.0)
    drones = motion.fly(
        swarm([[4.0, 4.0, 4.0]]), jnp.asarray([[0.0, 0, 1]]), params, jnp.zeros(3), "unicycle"
    )
    assert drones.velocity.tolist() == [[0.0, 0.0, 0.5]]


def test_a_wall_stops_only_the_motion_into_it():
    drones = move(swarm([[0.25, 4.0]], [[-1.0, 1.0]]), [[-0.6, 0.8]])
    assert drones.position[0, 0] == 0.0
    assert drones.velocity[0].tolist() == pytest.approx([0.0, 0.9])


def test_the_way_around_an_obstacle_by_hand():
    """Against the velocity into it, and by 0.1 over the gap, which counts as at least 0.1."""
    radius = motion.OBSTACLE_RADIUS
    offset = jnp.asarray([[radius + 0.5, 0.0], [0.0, radius], [radius + 1.5, 0.0], [1.0, 0.0]])
    mask = jnp.asarray([1.0, 1.0, 1.0, 0.0])[:, None, None]
    desired = jnp.asarray([[2.0, 1.0], [1.0, -3.0], [2.0, 0.0], [2.0, 0.0]])
    velocity = motion.steer_around(offset[:, None], mask, desired)
    np.testing.assert_allclose(velocity, [[-2.2, 0], [0, -1], [0, 0], [0, 0]], atol=1e-6)


@pytest.mark.slow
def test_an_obstacle_pushes_out_and_takes_the_velocity_into_it():
    obstacles = jnp.asarray([[4.0, 4.0], [7.0, 7.0]])
    drones = swarm([[3.5, 4.0], [2.0, 4.0]], [[1.0, 0.5], [1.0, 0.0]])
    outside = motion.keep_out(drones, obstacles, SIDE)
    assert outside.position.tolist() == [[3.0, 4.0], [2.0, 4.0]]
    assert outside.velocity.tolist() == [[0.0, 0.5], [1.0, 0.0]]


@pytest.mark.parametrize(
    ("count", "side", "dims"), [pytest.param(6, 12, 2, marks=pytest.mark.nightly), (12, 20, 3)]
)
def test_what_is_scattered_leaves_room_to_pass(count, side, dims):
    gap = 2 * motion.OBSTACLE_RADIUS + 1
    place = jax.jit(jax.vmap(lambda key: motion.scatter(key, count, side, dims, gap)))
    for obstacles in np.asarray(place(jax.random.split(jax.random.key(0), 20))):
        assert obstacles.shape == (count, dims)
        assert (obstacles >= motion.OBSTACLE_RADIUS).all()
        assert (obstacles <= side - motion.OBSTACLE_RADIUS).all()
        gaps = [np.linalg.norm(a - b) for a, b in itertools.combinations(obstacles, 2)]
        assert min(gaps) >= gap - 1e-4


def test_the_frame_of_a_drone_has_what_is_ahead_on_its_first_axis():
    ahead = motion.to_frame(jnp.asarray([math.pi / 2]), jnp.asarray([[[0.0, 2.0, 5.0]]]))
    assert ahead[0, 0].tolist() == pytest.approx([2.0, 0.0, 5.0], abs=1e-6)


@pytest.mark.parametrize("dynamics", ["velocity", "acceleration", "unicycle"])
def test_controllers_reach_the_velocity_they_wish_for(dynamics):
    drones, wish = swarm([[4.0, 4.0]]), jnp.asarray([[0.0, 0.2]])
    for _ in range(12):
        frame = drones.heading if dynamics == "unicycle" else jnp.zeros(1)
        local, own = (motion.to_frame(frame, v[:, None])[:, 0] for v in (wish, drones.velocity))
        command = motion.command_towards(local, own, dynamics)
        drones = move(drones, command, dynamics=dynamics)
    assert drones.velocity[0].tolist() == pytest.approx([0.0, 0.2], abs=0.03)
