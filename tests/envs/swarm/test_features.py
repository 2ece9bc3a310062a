"""Features of the suite, a test for each.

Gavin et al., "Accelerating Swarms".
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs
from offmarl.types import Continuous, Discrete

from .acting import KEY, look, place, reset, reset_many, status, take_step

KEYS = jax.random.split(KEY, 8)
TASKS = ("coverage-4", "search-4", "delivery-4", "pursuit-4-2", "flock-4")


@functools.cache
def rich():
    """Return an environment with most options on, a state, and the view of it."""
    env = envs.make("swarm/coverage-4", comm="learned", randomise="all", heterogeneous=True)
    return env, *reset_many(env, KEYS)


@pytest.mark.parametrize(("task", "dims"), [*((task, 2) for task in TASKS), ("coverage-4", 3)])
def test_continuous_and_discrete_actions_in_two_and_three_dimensions(task, dims):
    discrete = envs.make(f"swarm/{task}", dims=dims)
    continuous = envs.make(f"swarm/{task}", dims=dims, action="continuous")
    assert (discrete.spec.action, discrete.spec.reward) == (Discrete(1 + 2 * dims), "team")
    assert continuous.spec.action == Continuous(dims)
    state, _ = jax.eval_shape(discrete.reset, KEY)
    assert state.drones.position.shape[1] == dims


@pytest.mark.slow
def test_a_continuous_action_is_the_command():
    discrete, continuous = (
        envs.make("swarm/coverage-2", action=kind) for kind in ("discrete", "continuous")
    )
    state, _ = reset(discrete)
    expected, _ = take_step(discrete, state, jnp.asarray([2, 3]))
    result, _ = take_step(continuous, state, jnp.asarray([[1.0, 0.0], [0.0, -1.0]]))
    chex.assert_trees_all_equal(expected.drones, result.drones)


@pytest.mark.parametrize(
    "task", [TASKS[0], *(pytest.param(task, marks=pytest.mark.nightly) for task in TASKS[1:])]
)
def test_partial_observability(task):
    """Changes far away are not seen."""
    env = envs.make(f"swarm/{task}", comm="none", randomise="none", obstacles=0.0)
    state, _ = reset(env)
    high = env.side - 1.0
    near = jnp.asarray([[1.0, 1.0], [high, high], [high, 1.0], [1.0, high]])
    near = jnp.concatenate([near, state.drones.position[4:]])
    view, changed = (look(env, place(state, x)) for x in (near, near.at[1].add(-0.5)))
    np.testing.assert_array_equal(view.observation[0], changed.observation[0])
    assert (view.state != changed.state).any()


def test_noise_is_of_the_size_drawn():
    env, states, first = rich()
    own = env.read(first.view.observation)["own"]
    error = (own[..., :2] + 1) * env.side / 2 - states.drones.position
    assert error.any()
    assert (jnp.abs(error) < 5 * states.disturbance.noise[:, None, None]).all()
    slower = own[..., 2:4] - states.drones.velocity
    assert (jnp.abs(slower) < 5 * states.disturbance.noise[:, None, None]).all()
    assert (jnp.abs(slower - error) > 1e-4).any()  # it has noise of its own


def quarter(env, points):
    """Turn points by a quarter around the middle of the arena."""
    x, y = jnp.moveaxis(points, -1, 0)
    return jnp.stack([env.side - y, x], -1)


def turned(vectors):
    """Turn vectors by a quarter."""
    x, y = jnp.moveaxis(vectors, -1, 0)
    return jnp.stack([-y, x], -1)


def among_things(env):
    """Return a state in which drones move, and are next to the things of their task."""
    state, _ = reset(env)
    velocity, heading = state.drones.velocity, state.drones.heading
    drones = state.drones._replace(
        velocity=jax.random.normal(KEY, velocity.shape) / 2,
        heading=jax.random.uniform(KEY, heading.shape, maxval=6.0),
    )
    state = state._replace(drones=drones)
    if "position" in state.task._fields:
        near = drones.position[: len(state.task.position)] + 0.5
        state = state._replace(task=state.task._replace(position=near))
    return state


@pytest.mark.slow
@pytest.mark.parametrize("name", ["search-4", "delivery-4", "pursuit-4-2", "flock-4"])
def test_unicycles_observe_the_same_in_a_world_that_is_turned(name):
    """Whatever is along the axes of the arena is seen in each drone's own frame."""
    env = envs.make(f"swarm/{name}:dynamics=unicycle,comm=none,randomise=none,sensing_range=3")
    state = among_things(env)
    points = {"position", "sites", "beacon"} & {*state.task._fields}
    fields = {field: quarter(env, getattr(state.task, field)) for field in points}
    if "velocity" in state.task._fields:
        fields["velocity"] = turned(state.task.velocity)
    around = state._replace(
        drones=state.drones._replace(
            position=quarter(env, state.drones.position),
            velocity=turned(state.drones.velocity),
            heading=state.drones.heading + jnp.pi / 2,
        ),
        task=state.task._replace(**fields),
        obstacles=None if state.obstacles is None else quarter(env, state.obstacles),
    )
    straight, rotated = (env.read(look(env, s).observation) for s in (state, around))
    own, theirs = straight.pop("own"), rotated.pop("own")
    np.testing.assert_allclose(own[:, 2:4], theirs[:, 2:4], atol=1e-5)  # its velocity
    for part in straight:
        assert straight[part].any() or part == "time", part
        np.testing.assert_allclose(straight[part], rotated[part], atol=1e-5, err_msg=part)


@pytest.mark.parametrize("name", ["search-4", "pursuit-4-2"])
def test_what_unicycles_tell_does_not_depend_on_their_heading(name):
    """The other drones do not know the heading."""
    env = envs.make(f"swarm/{name}:dynamics=unicycle,comm=status,sensing_range=3")
    state = among_things(env)
    drones = state.drones._replace(heading=state.drones.heading + jnp.pi / 2)
    messages, later = (status(env, state._replace(drones=x)) for x in (state.drones, drones))
    assert messages.any()
    np.testing.assert_allclose(messages, later, atol=1e-5)


@pytest.mark.slow
def test_more_than_a_thousand_agents():
    env = envs.make("swarm/coverage-1001")
    state, _ = reset(env)
    _, step = take_step(env, state, jnp.zeros(env.spec.num_agents, jnp.int32))
    assert np.isfinite(step.view.observation).all()
    assert step.view.observation.shape == (env.spec.num_agents, env.spec.observation_size)


def test_heterogeneous():
    env, states, first = rich()
    assert env.spec.kinds == ("scout", "lifter", "scout", "lifter")
    assert states.params.mass[0].tolist() == pytest.approx([0.8, 1.25, 0.8, 1.25])
    assert states.params.sight[0].tolist() == pytest.approx([6, 4, 6, 4])
    own = env.read(first.view.observation)["own"]
    assert own[0, :, -1].tolist() == [0, 1, 0, 1]


def say(dropout, distance):
    """Let the second of two drones say 3, and return what the first hears, and whom it knows of."""
    env = envs.make("swarm/coverage-2", comm="learned", comm_range=7.0, comm_dropout=dropout)
    state = place(reset(env)[0], [[0.0, 0.0], [distance, 0.0]])
    _, step = take_step(env, state, jnp.asarray([0, 3]))
    neighbour = env.read(step.view.observation)["neighbours"][0, 0]
    return neighbour[-5:-1].tolist(), float(neighbour[-1])


def test_communication_has_a_range():
    three, silence = [0, 0, 0, 1], [0, 0, 0, 0]
    assert say(0.0, 3.0) == (three, 1)
    assert say(0.0, 6.5) == (three, 1)  # heard, and not seen
    assert say(0.0, 7.5) == (silence, 0)


@pytest.mark.nightly
def test_communication_has_losses():
    assert say(1.0, 3.0) == ([0, 0, 0, 0], 1)  # seen, and not heard


def test_messages_are_part_of_the_action():
    assert rich()[0].spec.action == Discrete(5 * 4)
    continuous = envs.make("swarm/coverage-2", comm="learned", action="continuous", comm_size=3)
    assert continuous.spec.action == Continuous(2 + 3)


@pytest.mark.parametrize("task", TASKS)
def test_observations_do_not_grow_with_the_swarm(task):
    family, *rest = task.split("-")
    sizes = {
        envs.make(f"swarm/{family}-{n}" + "-2" * (len(rest) - 1)).spec.observation_size
        for n in (4, 20)
    }
    assert len(sizes) == 1


@pytest.mark.slow
def test_a_scene_has_all_there_is_to_draw():
    env = envs.make("swarm/delivery-4", obstacles=0.05, dynamics="unicycle")
    scene = env.scene(reset(env)[0])
    assert scene.drones.shape == (4, 2)
    assert scene.kind.tolist() == [1, 2, 1, 2]
    assert len(scene.marks) == len(scene.mark) == 4 + 3
    assert scene.links.shape == (4, env.num_neighbours)
    assert len(scene.obstacles) == env._num_obstacles > 0
