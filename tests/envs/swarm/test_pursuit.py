"""Pursuit: scripted drones on either side, and the time that rewards depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs

from .acting import place, reset, take_step


@pytest.mark.slow
def test_a_drone_at_the_speed_that_it_should_have_does_not_accelerate():
    """Evaders, too, whose top speed is not that of the others."""
    env = envs.make("swarm/pursuit-1-1:evaders=learned,dynamics=acceleration,action=continuous")
    fastest = jnp.asarray([[kind.top_speed, 0.0] for kind in env._kinds])
    assert fastest[0, 0] != fastest[1, 0]
    own = jnp.concatenate([jnp.zeros((2, 2)), fastest], -1)
    legal = jnp.ones((2, 2), bool)
    action = env._encode(jnp.asarray([[1.0, 0.0]] * 2), own, legal)
    np.testing.assert_allclose(action, 0.0, atol=1e-6)


def test_agents_and_state_show_the_time():
    env = envs.make("swarm/pursuit-2-1", evaders="learned", time_limit=4)
    state, first = reset(env)
    _, after = take_step(env, state, jnp.zeros(3, jnp.int32))
    for view, time in ((first.view, 0.0), (after.next_view, 0.25)):
        np.testing.assert_array_equal(env.read(view.observation)["time"], [[time]] * 3)
        assert view.state[-1] == time


@pytest.mark.slow
def test_scripted_pursuers_catch_an_evader_that_rests():
    env = envs.make("swarm/pursuit-3-1:evaders=learned,pursuers=scripted")
    spec = env.spec
    assert (spec.num_agents, spec.teams, spec.reward) == (1, None, "individual")

    state, timestep = reset(env, jax.random.key(1))
    earned = 0.0
    while not timestep.last:
        state, timestep = take_step(env, state, jnp.zeros(1, jnp.int32))
        earned += float(timestep.reward[0])
    assert env.metrics(state)["caught"] == 1
    assert -20 <= earned <= -10


def test_scripted_pursuers_keep_apart_from_one_another_and_not_from_their_prey():
    """Inside the environment they do, so the policy of their side must, too."""
    env = envs.make("swarm/pursuit-2-1:evaders=learned,action=continuous")
    state, first = reset(env)
    positions = jnp.array([[3.0, 3.0], [3.0, 4.5], [5.0, 3.0]])
    state = state._replace(drones=state.drones._replace(position=positions))
    _, step = take_step(env, state, jnp.zeros((3, 2)))
    observation, policy = step.next_view.observation, env.scripted()
    places = env.read(jnp.arange(observation.shape[-1], dtype=float))["neighbours"].astype(int)

    def commands(of_team):
        seen = observation
        for agent, row in enumerate(env.read(observation)["neighbours"]):
            for slot, neighbour in enumerate(row):
                if neighbour[-1] > 0 and neighbour[-2] == of_team:
                    seen = seen.at[agent, places[slot]].set(0.0)
        action, *_ = policy.act((), (), seen, first.view.legal_actions, jax.random.key(0))
        return np.asarray(action)[:2]

    everyone, no_evader, no_mate = commands(None), commands(1), commands(0)
    np.testing.assert_array_equal(everyone, no_evader)
    assert (everyone != no_mate).any()


# ------------------------------------------------------------------ rules


@pytest.fixture(scope="module")
def pursuit():
    env = envs.make("swarm/pursuit-2-2", time_limit=10, evaders="learned")
    return env, reset(env)[0]


def test_each_side_sees_the_nearest_of_the_other(pursuit):
    env, state = pursuit
    after, step = take_step(
        env, place(state, [[1, 1], [7, 7], [3, 1], [7, 5.5]]), jnp.zeros(4, int)
    )
    nearest = env.read(step.view.observation)["opponents"][:, 0]
    offset = nearest[:, :2] * after.params.sight[:, None]
    np.testing.assert_allclose(offset, [[2, 0], [0, -1.5], [-2, 0], [0, 1.5]], atol=1e-5)
    assert nearest[:, -1].tolist() == [1] * 4


@pytest.mark.slow
def test_a_caught_evader_is_dead_and_the_pursuers_paid(pursuit):
    env, state = pursuit
    state = place(state, [[1, 1], [7, 7], [1.5, 1.5], [4, 1]])
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
        env, place(state, [[1, 1], [7, 7], [1, 1.5], [7, 6.5]]), jnp.zeros(4, int)
    )
    assert step.last
    assert step.terminated.all()
    assert env.metrics(state)["caught"] == 1


def test_at_the_limit_the_living_are_truncated_and_the_dead_terminated(pursuit):
    env, state = pursuit
    state = place(state, [[1, 1], [7, 7], [1.5, 1.5], [4, 1]])._replace(time=jnp.asarray(9))
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
    state = place(reset(env)[0], [[3, 5], [5, 5]])
    after, _ = take_step(env, state, jnp.zeros(1, int))
    assert after.drones.position[1, 0] > 5.5
    calm, _ = take_step(env, place(state, [[1, 1], [9, 9]]), jnp.zeros(1, int))
    assert calm.drones.position[1].tolist() == [9, 9]
