"""The rules of the tasks other than coverage, with known numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs
from offmarl.envs.swarm.dynamics import at_rest
from offmarl.errors import OptionError

from .acting import DOWN, KEY, RIGHT, STAY, quickly, reset, reset_many, take_step

see = quickly(lambda env, state: env.read(env._view(KEY, state).observation))


def place(state, *positions):
    return state._replace(drones=at_rest(jnp.asarray(positions, jnp.float32)))


# ------------------------------------------------------------------ search


@pytest.fixture(scope="module")
def search():
    env = envs.make("swarm/search-3", time_limit=20)
    state, _ = reset(env)
    task = state.task._replace(
        position=jnp.asarray([[4.0, 4.0], [10.0, 10.0]]),
        velocity=jnp.zeros((2, 2)),
        found=jnp.asarray([True, False]),
    )
    return env, state._replace(task=task)


@pytest.mark.parametrize(
    ("positions", "held"),
    [
        ([[4, 3], [0, 0], [0, 0]], 0.0),  # a scout alone
        ([[4, 3], [0, 0], [3, 4]], 0.5),  # two scouts
        ([[0, 0], [4, 3], [0, 0]], 0.5),  # a lifter
        ([[0, 0], [6.5, 4], [0, 0]], 0.0),  # too far
    ],
)
def test_a_target_is_held_by_a_lifter_or_two_scouts(search, positions, held):
    env, state = search
    after, step = take_step(env, place(state, *positions), jnp.zeros(3, int))
    assert env.metrics(after)["held"] == held
    assert step.reward.tolist() == pytest.approx([20 / 20 * held] * 3)


def test_finding_a_target_is_paid_once(search):
    env, state = search
    state = place(state, [10, 6], [0, 0], [0, 0])
    rewards = []
    for _ in range(2):
        state, step = take_step(env, state, jnp.zeros(3, int))
        rewards.append(float(step.reward[0]))
    assert rewards == [2.5, 0.0]


@pytest.mark.slow
def test_targets_wander_at_their_speed_inside():
    env = envs.make("swarm/search-3")
    state, _ = reset(env)
    for _ in range(10):
        before = state.task.position
        state, _ = take_step(env, state, jnp.zeros(3, int))
        moved = jnp.linalg.norm(state.task.position - before, axis=-1)
        assert (moved <= 0.4 + 1e-5).all()
        assert ((state.task.position >= 0) & (state.task.position <= env.side)).all()


def test_a_scout_sees_further_than_a_lifter(search):
    env, state = search
    targets = see(env, place(state, [4, 9.5], [4, 9.5], [9.5, 4]))["targets"]
    assert targets[:, 0, -1].tolist() == [1, 0, 1]
    np.testing.assert_allclose(targets[0, 0, :2], [0, -5.5 / 6], atol=1e-6)


# ------------------------------------------------------------------ delivery


@pytest.fixture(scope="module")
def delivery():
    env = envs.make("swarm/delivery-3")
    state, _ = reset(env)
    sites = jnp.asarray([[1.0, 1.0], [9.0, 1.0], [9.0, 9.0]])
    task = state.task._replace(
        sites=sites,
        position=jnp.asarray([[2.0, 1.0], [2.0, 8.0], [9.0, 5.0]]),
        goal=jnp.asarray([1, 0, 2]),
        heavy=jnp.asarray([False, True, False]),
    )
    return env, state._replace(task=task)


def put(env, state, *positions):
    """Place drones, and let them grip what is there."""
    state = place(state, *positions)
    return state._replace(task=env._grip(state, state.task))


def test_a_light_load_goes_with_one_drone(delivery):
    env, state = delivery
    state = put(env, state, [2, 2], [5, 5], [5, 5])
    after, step = take_step(env, state, jnp.asarray([RIGHT, STAY, STAY]))
    moved = 0.5 / 0.8 * 1.2  # the lag of a scout, its mass and its speed
    np.testing.assert_allclose(after.task.position[0], [2 + moved, 1], rtol=1e-6)
    assert step.reward.tolist() == pytest.approx([0.5 * moved / 3] * 3)


@pytest.mark.parametrize(("helper", "moves"), [([5.0, 5.0], False), ([2.0, 9.0], True)])
def test_a_heavy_load_goes_with_two(delivery, helper, moves):
    env, state = delivery
    state = put(env, state, helper, [2, 8], [5, 5])
    after, _ = take_step(env, state, jnp.asarray([DOWN, DOWN, STAY]))
    assert (after.task.position[1, 1] < 8) == moves


def test_who_waits_at_a_heavy_load_calls(delivery):
    env, state = delivery
    after, step = take_step(env, put(env, state, [2, 4], [2, 8], [5, 5]), jnp.zeros(3, int))
    assert after.message.tolist() == [[0, 0], [1, 1], [0, 0]]
    heard = env.read(step.view.observation)["neighbours"]
    assert heard[0, 1, -3:].tolist() == [1, 1, 1]


def test_a_delivered_load_is_replaced(delivery):
    env, state = delivery
    near = state.task.position.at[0].set(jnp.asarray([7.2, 1.0]))
    state = state._replace(task=state.task._replace(position=near))
    state = put(env, state, [7, 1], [5, 5], [5, 5])
    after, step = take_step(env, state, jnp.asarray([RIGHT, STAY, STAY]))
    assert int(after.task.delivered) == 1
    assert step.reward[0] == pytest.approx((2 + 0.5 * 0.75) / 3)
    place_of_new = jnp.linalg.norm(after.task.position[0] - after.task.sites, axis=-1).min()
    assert place_of_new <= 2**0.5
    assert env.metrics(after)["delivered"] == pytest.approx(1 / 3)


# ------------------------------------------------------------------ pursuit


@pytest.fixture(scope="module")
def pursuit():
    env = envs.make("swarm/pursuit-2-2", time_limit=10, evaders="learned")
    return env, reset(env)[0]


@pytest.mark.slow
def test_a_caught_evader_is_dead_and_the_pursuers_paid(pursuit):
    env, state = pursuit
    state = place(state, [1, 1], [7, 7], [1.5, 1.5], [4, 1])
    state = state._replace(task=state.task._replace(gap=env._gap(state, env._closest(state))))
    after, step = take_step(env, state, jnp.zeros(4, int))
    assert after.alive.tolist() == [True, True, False, True]
    assert step.view.alive.tolist() == after.alive.tolist()
    assert step.terminated.tolist() == [False, False, True, False]
    assert not step.last
    closing = 2 * (0.5**0.5 / 2) / env.side  # who is caught is no longer counted
    assert step.reward.tolist() == pytest.approx([10 + closing, 10 + closing, -20, 0])
    assert step.view.legal_actions[2].tolist() == [True, False, False, False, False]
    assert not step.view.observation[2].any()
    assert env.read(step.view.observation)["neighbours"][3, :, -1].tolist() == [1, 0, 0, 0]


def test_the_episode_ends_when_all_are_caught(pursuit):
    env, state = pursuit
    state, step = take_step(
        env, place(state, [1, 1], [7, 7], [1, 1.5], [7, 6.5]), jnp.zeros(4, int)
    )
    assert step.last
    assert step.terminated.all()
    assert env.metrics(state)["caught"] == 1


def test_at_the_limit_the_living_are_truncated_and_the_dead_terminated(pursuit):
    env, state = pursuit
    state = place(state, [1, 1], [7, 7], [1.5, 1.5], [4, 1])._replace(time=jnp.asarray(9))
    _, step = take_step(env, state, jnp.zeros(4, int))
    assert step.last
    assert step.terminated.tolist() == [False, False, True, False]
    assert step.truncated.tolist() == [True, True, False, True]


def test_teams_are_in_the_spec(pursuit):
    env, _ = pursuit
    assert env.spec.teams == (0, 0, 1, 1)
    assert env.spec.reward == "individual"
    scripted = envs.make("swarm/pursuit-2-2").spec
    assert (scripted.teams, scripted.reward, scripted.num_agents) == (None, "team", 2)


def test_scripted_evaders_flee():
    env = envs.make("swarm/pursuit-1-1", cells_per_agent=100)
    state = place(reset(env)[0], [3, 5], [5, 5])
    after, _ = take_step(env, state, jnp.zeros(1, int))
    assert after.drones.position[1, 0] > 5.5
    calm, _ = take_step(env, place(state, [1, 1], [9, 9]), jnp.zeros(1, int))
    assert calm.drones.position[1].tolist() == [9, 9]


# ------------------------------------------------------------------ flock


@pytest.mark.parametrize(
    ("positions", "reward"),
    [
        ([[9, 10], [10, 10], [11, 10]], 0.5 * 0.5),  # together: half a cell of progress
        ([[1, 10], [10, 10], [11, 10]], 0.5 * 0.5 / 3),  # one lost: two halves, and nothing
        ([[10, 10], [10.25, 10], [11, 10]], 0.5 * 0.5 - 0.25 * 2 / 3),  # two collide
        ([[39, 10], [40, 10], [41, 10]], 0.5),  # arrived
    ],
)
def test_the_flock_is_paid_for_progress_together(flock, positions, reward):
    env, state = flock
    _, step = take_step(env, place(state, *positions), jnp.full(3, RIGHT))
    assert step.reward.tolist() == pytest.approx([reward] * 3, rel=1e-4)


@pytest.mark.nightly
def test_the_beacon_is_across_the_arena():
    env = envs.make("swarm/flock-8")
    states, first = reset_many(env, jax.random.split(KEY, 16))
    distance = jnp.linalg.norm(states.task.beacon[:, None] - states.drones.position, axis=-1)
    assert distance.mean(-1).tolist() == pytest.approx([40] * 16, abs=3)
    assert ((states.task.beacon >= 0) & (states.task.beacon <= env.side)).all()
    direction = env.read(first.view.observation)["beacon"][..., :2]
    np.testing.assert_allclose(jnp.linalg.norm(direction, axis=-1), 1.0, rtol=1e-5)


def test_a_lone_drone_is_a_flock():
    env = envs.make("swarm/flock-1", obstacles=0.0)
    assert env.metrics(take_step(env, reset(env)[0], jnp.zeros(1, int))[0])["together"] == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("swarm/pursuit-3-2:evaders=wild", "evaders must be one of scripted, learned, not 'wild'"),
        ("swarm/pursuit-3-0", "num_evaders must be above 0"),
        ("swarm/flock-3:journey=0", "journey must be above 0"),
        ("swarm/search-3:dims=4", "dims must be one of 2, 3, not 4"),
        (
            "swarm/search-3:dynamics=warp",
            "dynamics must be one of velocity, acceleration, unicycle",
        ),
        ("swarm/search-3:randomise=wind+rain", "randomise must be one of .*, not 'rain'"),
        ("swarm/search-3:comm=loud", "comm must be one of none, status, learned"),
        ("swarm/search-3:comm_dropout=1.5", "comm_dropout must be from 0 to 1"),
        ("swarm/search-3:obstacles=0.9", "obstacles must be from 0 to 0.25"),
        *(
            (f"swarm/{task}:comm=loud", "comm must be one of none, status, learned")
            for task in ("coverage-3", "delivery-3", "flock-3", "hover-3", "pursuit-3-1")
        ),
    ],
)
def test_options_that_cannot_be_are_explained(name, message):
    with pytest.raises(OptionError, match=message):
        envs.make(name)
