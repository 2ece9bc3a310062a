"""Pursuit: scripted drones on either side, and the time that rewards depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs
from offmarl.errors import OptionError

from .acting import reset, take_step


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


def test_someone_must_learn():
    with pytest.raises(OptionError, match="both sides of pursuit are scripted"):
        envs.make("swarm/pursuit-3-1:pursuers=scripted")
