"""The step size of a baseline under each schedule."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from baselines import bc
from offmarl.programs import hyperparameters

from .test_updates import SPEC, sequence


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [("linear", [1, 0.5, 0]), ("cosine", [1, 0.5, 0]), ("constant", [1, 1, 1])],
)
def test_the_step_size_over_two_updates_and_after_them(schedule, sizes):
    rate = 1e-4
    args = bc.Args(
        Path(), updates=2, hidden=2, learning_rate=rate, schedule=schedule, agent_id="none"
    )
    program, hyper = bc.make(SPEC, args, None), hyperparameters(args)
    batch = sequence([[[0, 2], [1, 1]], [[2, 0], [0, 0]]])
    update = jax.jit(program.stages[0].update)
    state = jax.eval_shape(program.init, jax.random.key(0), hyper)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    moved = []
    for _ in range(3):
        before = state.params["params"]["head"]["bias"]
        state, _ = update(state, batch, jax.random.key(1), hyper)
        moved.append(float(jnp.abs(state.params["params"]["head"]["bias"] - before).max()))
    # Gradients hardly change, and then Adam moves by just the step size.
    np.testing.assert_allclose(moved, rate * np.array(sizes), rtol=0.02, atol=1e-9)
