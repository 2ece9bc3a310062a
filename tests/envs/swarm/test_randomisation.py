"""What is drawn for each episode, its ranges, and what it does."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs
from offmarl.envs.states import from_bytes, to_bytes

from .acting import KEY, blocks, place, quickly, reset, reset_many, take_step

KEYS = jax.random.split(KEY, 64)
NIGHTLY = pytest.mark.nightly


FULL = "swarm/coverage-3:dynamics=acceleration,randomise=full,collisions=inelastic"


@functools.cache
def drawn():
    """Return 64 initial states with everything randomised."""
    return reset_many(envs.make(FULL), KEYS)[0]


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("top_speed", 0.75, 1.25),
        ("mass", 0.75, 1.25),
        ("thrust", 0.75, 1.25),
        ("drag", 0.5, 2.0),
        ("dropout", 0.0, 0.3),
        ("noise", 0.0, 0.1),
        ("wind", 0.0, 0.25),
    ],
)
def test_each_drone_has_its_own_draw_within_the_range(name, low, high):
    """The noise and the wind are those of an episode; the wind has any direction."""
    drawn_of = drawn().disturbance if name in ("noise", "wind") else drawn().params
    values = np.asarray(getattr(drawn_of, name))
    values = np.linalg.norm(values, axis=-1) if name == "wind" else values
    assert len(np.unique(values)) > 0.95 * values.size
    margin = 0.1 * (high - low)
    assert low <= values.min() < low + margin
    assert high - margin < values.max() <= high


def test_delays_are_none_one_or_two_steps():
    counts = np.bincount(np.asarray(drawn().params.delay).ravel())
    assert counts.tolist() == pytest.approx([64] * 3, abs=25)


def test_draws_are_independent():
    params = drawn().params
    parts = [params.top_speed, params.mass, params.thrust, params.drag, params.dropout]
    correlation = np.corrcoef([np.asarray(part).ravel() for part in parts])
    assert np.abs(correlation - np.eye(5)).max() < 0.25


def test_names_of_several_parts_are_joined_with_others():
    parts = {
        how: envs.make(f"swarm/coverage-3:randomise={how}")._randomised
        for how in ("none", "all", "full", "all+delay", "none+wind")
    }
    everything = {"wind", "noise", "speed", "mass", "thrust", "delay", "dropout"}
    assert parts == {
        "none": set(),
        "all": {"wind", "noise", "speed"},
        "full": everything,
        "all+delay": {"wind", "noise", "speed", "delay"},
        "none+wind": {"wind"},
    }
    assert envs.make(FULL)._randomised == everything | {"drag"}


def at_half_speed(part, value):
    """Return the velocity of a drone at (0.5, 0), with no command and with full thrust."""
    env = envs.make("swarm/coverage-1:dynamics=acceleration,action=continuous", randomise=part)
    state = place(reset(env)[0], [[2.0, 2.0]], [0.5, 0.0], **{part: [value]})
    steps = [take_step(env, state, jnp.asarray([[u, 0.0]]))[0] for u in (0.0, 1.0)]
    return [float(after.drones.velocity[0, 0]) for after in steps]


@pytest.mark.parametrize(
    ("part", "value", "coasts", "pushed"),
    [
        ("mass", 1.25, 0.5 - 0.05 / 1.25, 0.5 + (0.3 - 0.05) / 1.25),
        pytest.param("thrust", 0.8, 0.45, 0.45 + 0.24, marks=NIGHTLY),
        pytest.param("drag", 2.0, 0.4, 0.7, marks=NIGHTLY),
    ],
)
def test_parameters_change_the_motion(part, value, coasts, pushed):
    assert at_half_speed(part, value) == pytest.approx([coasts, pushed])


@NIGHTLY
def test_thrust_changes_the_response_to_a_velocity_command():
    env = envs.make("swarm/coverage-1:action=continuous", randomise="mass+thrust")
    state = place(reset(env)[0], [[2.0, 2.0]], mass=[1.25], thrust=[0.75])
    after, _ = take_step(env, state, jnp.asarray([[1.0, 0.0]]))
    assert after.drones.velocity[0].tolist() == pytest.approx([0.5 * 0.75 / 1.25, 0])


def test_a_command_takes_effect_after_its_delay():
    """Three drones with delays of 0, 1 and 2 steps, told once to go right."""
    env = envs.make("swarm/coverage-3:action=continuous", randomise="delay")
    state = place(reset(env)[0], [[2.0, 2.0], [2.0, 4.0], [2.0, 6.0]], delay=[0, 1, 2])
    speeds = []
    for command in (1.0, 0.0, 0.0):
        state, _ = take_step(env, state, jnp.asarray([[command, 0.0]] * 3))
        speeds.append(state.drones.velocity[:, 0].tolist())
    assert speeds == [[0.5, 0, 0], [0.25, 0.5, 0], [0.125, 0.25, 0.5]]


@NIGHTLY
def test_scripted_drones_wait_too():
    env = envs.make("swarm/pursuit-1-1", cells_per_agent=100, randomise="delay")
    state = place(reset(env)[0], [[3.0, 5.0], [5.0, 5.0]], delay=[0, 1])
    first, _ = take_step(env, state, jnp.zeros(1, int))
    second, _ = take_step(env, first, jnp.zeros(1, int))
    assert first.drones.position[1].tolist() == [5, 5]
    assert second.drones.position[1, 0] > 5.3


@pytest.mark.slow
def test_sensors_that_fail_leave_only_what_an_agent_knows_of_itself():
    env = envs.make("swarm/pursuit-3-2:randomise=dropout,evaders=learned")
    positions = [[3, 3], [4, 3], [3, 4], [6, 6], [4, 4]]
    see = blocks(env, place(reset(env)[0], positions, dropout=[1.0] * 4 + [0.0]))
    for name, part in see.items():
        fails = np.asarray(part[:4])
        assert fails.any() == (name == "own")
    assert see["neighbours"][4].any() and see["opponents"][4].any()


@NIGHTLY
def test_sensors_fail_at_the_rate_drawn():
    env = envs.make("swarm/coverage-2:randomise=dropout")
    state, _ = reset(env)
    params = state.params._replace(dropout=jnp.asarray([0.1, 0.3]))
    state = state._replace(params=params, task=jax.tree.map(jnp.ones_like, state.task))
    look = quickly(
        lambda env, keys: jax.vmap(lambda key: env._blocks(key, state)["map"].any(-1))(keys)
    )
    works = np.asarray(look(env, jax.random.split(KEY, 2000)))
    assert (1 - works.mean(0)).tolist() == pytest.approx([0.1, 0.3], abs=0.03)


@NIGHTLY
@pytest.mark.parametrize("name", [FULL, "swarm/hover-2:randomise=full,obstacles=0.05,opaque=true"])
def test_recorded_states_hold_everything_that_was_drawn(name):
    """An episode goes on from the bytes of its state to the same bits."""
    env = envs.make(name)
    state, first = reset(env)
    spec = env.spec
    action = jnp.full((3,), 2) if "coverage" in name else jnp.full((2, spec.action_size), 0.3)
    state, _ = take_step(env, state, action)
    data = np.asarray(jax.jit(to_bytes)(state))[None]
    again = jax.tree.map(lambda x: x[0], from_bytes(data, jax.eval_shape(lambda: state)))
    pair = [take_step(env, start, action, KEYS[5]) for start in (state, again)]
    chex.assert_trees_all_equal(*pair)
    assert first.view.state.shape == (spec.state_size,)
