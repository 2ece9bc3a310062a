"""Critics that bootstrap from themselves begin near 0, whatever the view."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl._compiling import QUICKLY
from offmarl.types import Continuous
from tests.rollouts import SPEC, sequence

from .building import build, spread_like

CONTINUOUS = replace(SPEC, action=Continuous(3))


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("iql_cql", SPEC),
        ("maicq", SPEC),
        ("omiga", CONTINUOUS),
        ("matd3_bc", CONTINUOUS),
    ],
)
def test_first_values_are_near_0(name, spec):
    """Where episodes are truncated, targets would repeat them for thousands of updates."""
    program, hyper = build(name, spec, network="feedforward")
    state = jax.jit(program.init, compiler_options=QUICKLY)(jax.random.key(0), hyper)
    count = spec.num_agents
    actions = jnp.zeros((3, 2, count, 3)) if spec is CONTINUOUS else jnp.zeros((3, 2, count), int)
    view = sequence(actions, spec).view_tm1
    view = jax.tree.map(lambda leaf: leaf if leaf.dtype == bool else spread_like(leaf, 2.0), view)
    first = jnp.zeros((3, 2), bool)
    critic = program.values
    values = jax.jit(critic.apply)(critic.params(state), view, first, actions)
    assert np.abs(values).max() < 0.2
