"""Temporal differences against numbers computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.losses import double_q_values, masked_mean, q_lambda_targets, td_targets


def test_masked_mean_counts_only_what_the_mask_keeps() -> None:
    x, mask = jnp.array([1.0, 2.0, jnp.nan, 6.0]), jnp.array([True, True, False, True])
    assert masked_mean(x, mask) == pytest.approx(3.0)
    assert masked_mean(x, jnp.zeros(4, bool)) == 0.0


def test_masked_entries_give_no_gradient() -> None:
    gradient = jax.grad(lambda x: masked_mean(x**2, jnp.array([True, False])))(
        jnp.array([3.0, 5.0])
    )
    np.testing.assert_allclose(gradient, [6.0, 0.0])


def test_td_targets_stop_at_termination_and_pass_no_gradient() -> None:
    target = td_targets(jnp.array([1.0, 1.0]), jnp.array([0.9, 0.0]), jnp.array([10.0, 10.0]))
    np.testing.assert_allclose(target, [10.0, 1.0])
    gradient = jax.grad(lambda v: td_targets(jnp.ones(1), jnp.ones(1), v).sum())(jnp.ones(1))
    assert gradient == 0.0


def test_double_q_chooses_with_one_network_values_with_the_other_and_never_illegally() -> None:
    selector = jnp.array([[[1.0, 5.0, 9.0]]])
    target = jnp.array([[[10.0, 20.0, 30.0]]])
    legal = jnp.array([[[True, True, False]]])
    np.testing.assert_allclose(double_q_values(target, selector, legal), [[20.0]])


def test_lambda_targets_by_hand() -> None:
    # λ = 0.5, γ = 1; three steps, the last one terminal.
    r, v_t = jnp.array([1.0, 2.0, 3.0]), jnp.array([20.0, 30.0, 99.0])
    discount, goes_on = jnp.array([1.0, 1.0, 0.0]), jnp.array([True, True, False])
    # G_2 = 3; G_1 = 2 + .5·30 + .5·3 = 18.5; G_0 = 1 + .5·20 + .5·18.5 = 20.25
    np.testing.assert_allclose(q_lambda_targets(r, discount, v_t, goes_on, 0.5), [20.25, 18.5, 3.0])
    one_step = q_lambda_targets(r, jnp.full(3, 0.9), v_t, goes_on, 0.0)
    np.testing.assert_allclose(one_step, [1 + 18.0, 2 + 27.0, 3 + 89.1])


@pytest.mark.parametrize(("discount", "expected"), [(0.0, [6.5, 2.0]), (0.5, [11.5, 22.0])])
def test_lambda_targets_never_look_past_an_episode(discount: float, expected: list[float]) -> None:
    # The second step ends an episode: it is terminal, or cut off in a view of the value 40.
    r, v_t = jnp.array([1.0, 2.0, 50.0, 4.0]), jnp.array([20.0, 40.0, 90.0, 10.0])
    discounts, goes_on = jnp.array([0.5, discount, 0.5, 0.5]), jnp.array([True, False, True, False])
    # 2 + d 40 =: G alone, and 1 + ½ (½ 20 + ½ G).
    targets = q_lambda_targets(r, discounts, v_t, goes_on, 0.5)
    np.testing.assert_allclose(targets[:2], expected)


@pytest.mark.parametrize("weight", [[[1.0, 0.0], [2.0, 5.0]], [1.5, 2.0]])
def test_weights_of_steps_or_of_windows(weight: list) -> None:
    mask = jnp.array([[True, True], [True, False]])[..., None] & jnp.array([True, False])
    x = jnp.where(mask, jnp.arange(1.0, 9.0).reshape(2, 2, 2), jnp.nan)
    weights = jnp.broadcast_to(jnp.array(weight).reshape(2, -1), (2, 2))
    expected = (1 * weights[0, 0] + 3 * weights[0, 1] + 5 * weights[1, 0]) / 3
    np.testing.assert_allclose(masked_mean(x, mask, jnp.array(weight)), expected)
