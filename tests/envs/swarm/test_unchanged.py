"""Environments as they were recorded before there were collisions, quadrotors and more.

Recorded states are bytes, so the leaves of the states must stay what they were, in their order, and
the same keys must give the same episodes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs
from offmarl._compiling import QUICKLY
from offmarl.envs.states import to_bytes

STEPS = 4

EXPECTED = {
    "swarm/coverage-4": (58, 137, 648, 4.20496, 88.9429, 405.61),
    "swarm/search-5:comm=status,randomise=all,obstacles=0.1": (69, 65, 424, 0, 31.168, 33.6598),
    "swarm/delivery-4:dynamics=unicycle,comm=learned,comm_dropout=0.3": (
        68,
        64,
        328,
        -0.11832,
        28.2365,
        39.6311,
    ),
    "swarm/pursuit-3-2:evaders=learned,dynamics=acceleration,heterogeneous=true": (
        50,
        26,
        205,
        0.406183,
        29.373,
        16.1641,
    ),
    "swarm/pursuit-3-2:evaders=learned,pursuers=scripted": (40, 26, 205, 0, 6.56804, 3.62122),
    "swarm/flock-5": (33, 136, 665, 0.0212113, 67.5529, 16.9748),
}


def summary(name):
    """Return sizes of observation, global state and recorded state, and sums over an episode."""
    env = envs.make(name)
    reset, step = (jax.jit(f, compiler_options=QUICKLY) for f in (env.reset, env.step))
    state, timestep = reset(jax.random.key(3))
    size = jax.eval_shape(to_bytes, state).size
    weights = np.linspace(0, 1, env.spec.observation_size)
    sums = np.zeros(3)
    for time in range(STEPS):
        action = jnp.arange(time, time + env.spec.num_agents) % env.spec.num_actions
        state, timestep = step(jax.random.key(time), state, action)
        view = jax.device_get(timestep.view)
        parts = timestep.reward.sum(), (view.observation @ weights).sum(), view.state.sum()
        sums += np.array(parts, float)
    return env.spec.observation_size, env.spec.state_size, size, *sums


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if "pursuers=scripted" in name else [pytest.mark.nightly])
        for name in EXPECTED
    ],
)
def test_the_same_keys_give_the_same_episodes(name):
    assert summary(name) == pytest.approx(EXPECTED[name], rel=1e-3, abs=1e-3)
