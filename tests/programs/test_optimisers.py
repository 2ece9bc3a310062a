"""The shared optimiser and schedules against numbers computed by hand."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.programs import clipped_adam, grad_norm, linear_schedule, training_progress


def test_gradients_are_clipped_before_adam():
    optimiser = clipped_adam(7e-4, 0.5, eps=1e-5)
    state = optimiser.init(jnp.zeros(2))
    _, state = optimiser.update(jnp.array([300.0, 400.0]), state)  # norm 500 becomes 0.5
    step, _ = optimiser.update(jnp.array([0.03, 0.04]), state)
    mean = (0.9 * 0.1 * np.array([0.3, 0.4]) + 0.1 * np.array([0.03, 0.04])) / (1 - 0.9**2)
    square = 0.999 * 0.001 * np.array([0.09, 0.16]) + 0.001 * np.array([0.0009, 0.0016])
    expected = -7e-4 * mean / (np.sqrt(square / (1 - 0.999**2)) + 1e-5)
    np.testing.assert_allclose(step, expected, rtol=1e-4)


def test_the_norm_is_over_all_gradients():
    np.testing.assert_allclose(grad_norm({"a": jnp.array([3.0]), "b": jnp.array([[4.0]])}), 5.0)


def test_progress_counts_the_last_update_which_may_go_beyond_the_total():
    # 100 steps are 4 updates of 2 x 16 = 32 steps.
    args = SimpleNamespace(total_steps=100, num_envs=2, num_steps=16)
    progress = [training_progress(args, jnp.array(done)) for done in (0, 1, 4, 9)]
    np.testing.assert_allclose(progress, [0, 0.25, 1, 1])


@pytest.mark.parametrize(
    ("over", "wanted"), [(1.0, [1, 0.75, 0.5, 0]), (0.5, [1, 0.5, 0, 0]), (0.0, [0, 0, 0, 0])]
)
def test_a_linear_schedule(over, wanted):
    done = jnp.array([0.0, 0.25, 0.5, 1.0])
    np.testing.assert_allclose(linear_schedule(done, 1.0, 0.0, jnp.float32(over)), wanted)
