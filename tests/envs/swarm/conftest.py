import jax.numpy as jnp
import pytest

from offmarl import envs

from .acting import reset


@pytest.fixture(scope="session")
def flock():
    """A flock of three, and a state in which its beacon is at (40, 10)."""
    env = envs.make("swarm/flock-3", randomise="none", obstacles=0.0, time_limit=50)
    state, _ = reset(env)
    return env, state._replace(task=state.task._replace(beacon=jnp.asarray([40.0, 10.0])))
