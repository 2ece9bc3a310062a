"""MAC-Flow: losses by hand, what it learns from, and which joint modes survive distillation."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from baselines import mac_flow
from offmarl._compiling import QUICKLY
from offmarl.programs import TD_ERRORS
from offmarl.types import Continuous, EnvSpec
from tests.rollouts import SPEC, sequence

from .building import blank, build, repeated, spread_like

CONTINUOUS = replace(SPEC, action=Continuous(3))
KEY = jax.random.key(1)


def build_flow(spec: EnvSpec, **options: Any) -> tuple[Any, Any, Any]:
    """Return a program, its model and its hyperparameters."""
    sizes = {"hidden": 4, "critic_hidden": 4, "layers": 2, "flow_steps": 2} | options
    program, hyper = build(mac_flow, spec, **sizes)
    return program, mac_flow.make_model(spec, mac_flow.Args(vault=Path(), **sizes)), hyper


def with_outputs(state: Any, velocity: Any, policy: Any, values: Any, target: Any) -> Any:
    """Return a state whose networks have these outputs for every input."""

    def critics(outputs: list[Any]) -> Any:
        networks = jax.tree.map(lambda leaf: leaf, state.target)
        for params, output in zip(networks, outputs, strict=True):
            params["params"]["Dense_1"]["bias"] = jnp.array(output)
        return networks

    params = jax.tree.map(lambda leaf: leaf, state.params)
    params.flow["params"]["FeedForward_0"]["Dense_2"]["bias"] = jnp.array(velocity)
    params.policy["params"]["Dense_2"]["bias"] = jnp.array(policy)
    return state._replace(params=params._replace(critics=critics(values)), target=critics(target))


BATCH: dict[str, Any] = {
    "alive": jnp.ones((3, 3, 2), bool).at[0, 1:, 1].set(False),
    "reward": jnp.array([[[0.0, 2.0], [9.0, 9.0]], [[1.0, 1.0], [3.0, 5.0]], [[50.0, 50.0]] * 2]),
    "terminated": jnp.zeros((3, 2, 2), bool).at[1, 1].set(True),
    "truncated": jnp.zeros((3, 2, 2), bool).at[0, 1].set(True).at[2, 0].set(True),
    "mask": jnp.array([[True, True], [True, True], [True, False]]),
    "next_known": jnp.array([[True, True], [True, False], [False, True]]),
}
"""Three windows: the first is truncated, and its second agent dead from the second step on; the
second terminates; the third is truncated, and what follows its step is not known."""


def test_an_update_with_continuous_actions_by_hand() -> None:
    program, model, hyper = build_flow(CONTINUOUS, gamma=0.5, distillation_weight=3.0)
    velocity = [0.5, -0.5, 0.25, 0.0, 0.5, 1.0]
    state = with_outputs(
        blank(program, hyper), velocity, [0.5, -2.0, 0.25], [[1.0], [2.0]], [[2.0], [4.0]]
    )
    action = np.random.default_rng(0).uniform(-1, 1, (3, 2, 2, 3)).astype(np.float32)
    legal = jnp.ones((3, 3, 2, 3), bool).at[1, :, 1, 2].set(False)
    batch = sequence(action, legal_actions=legal, **BATCH)
    loss = jax.jit(partial(mac_flow.loss, model, True), compiler_options=QUICKLY)
    total, metrics = loss(state.params, state.target, batch, KEY, hyper)

    counts = np.array(batch.mask[..., None, None] & BATCH["alive"][:, :-1, :, None] & legal[:, :-1])
    flow_key, noise_key = jax.random.split(KEY)
    noise = jax.random.normal(jax.random.split(flow_key)[0], action.shape)
    field = np.reshape(velocity, (2, 3))
    expected = np.mean((field - (action - noise))[counts] ** 2)
    np.testing.assert_allclose(metrics["flow_loss"], expected, rtol=1e-5)
    # The flow moves the policies' noise by the velocity, which does not change on the way.
    noise = jax.random.normal(noise_key, (3, 3, 2, 3))[:, :-1]
    distance = np.mean((np.array([0.5, -2.0, 0.25]) - np.clip(noise + field, -1, 1))[counts] ** 2)
    np.testing.assert_allclose(metrics["distillation_loss"], distance, rtol=1e-5)
    # Of four steps both agents are alive in, and of one with one alive, the mean is 1½ and ¾.
    np.testing.assert_allclose(metrics["q_tot"], (4 * 1.5 + 0.75) / 5, rtol=1e-6)
    np.testing.assert_allclose(metrics["policy_loss"], 3 * distance - 1, rtol=1e-5)
    # Targets: 1 + ½ (3 / 2) with one agent left; 9 + ½ (3 / 2), truncated; 1 + ½ 3; 4, terminated.
    # What follows the last step is not known.
    targets, share = np.array([1.75, 9.75, 2.5, 4.0]), np.array([1, 0.5, 1, 1])
    errors = np.stack([share - targets, 2 * share - targets])
    np.testing.assert_allclose(metrics["critic_loss"], (errors**2).mean(), rtol=1e-6)
    largest = np.abs(errors).max(0)
    expected = [[largest[0], largest[1]], [largest[2], largest[3]], [0, 0]]
    np.testing.assert_allclose(metrics[TD_ERRORS], expected, rtol=1e-6)
    parts = (metrics[f"{name}_loss"] for name in ("flow", "policy", "critic"))
    np.testing.assert_allclose(total, sum(parts), rtol=1e-6)


def test_the_flow_learns_from_points_on_the_way_from_noise_to_the_data() -> None:
    _, model, _ = build_flow(CONTINUOUS)
    velocity = SimpleNamespace(
        apply=lambda slope, _seen, _alive, x, t: slope * x + t[..., None, None]
    )
    action = np.random.default_rng(0).uniform(-1, 1, (1, 2, 2, 3)).astype(np.float32)
    batch = sequence(action, mask=jnp.array([[True, False]]))
    loss = mac_flow.flow_loss(model._replace(flow=velocity), 3.0, batch, KEY)
    noise_key, time_key = jax.random.split(KEY)
    noise, time = jax.random.normal(noise_key, action.shape), jax.random.uniform(time_key, (1, 2))
    z, a, t = np.asarray(noise)[0, 0], action[0, 0], float(time[0, 0])
    expected = np.mean((3 * ((1 - t) * z + t * a) + t - (a - z)) ** 2)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_an_update_with_discrete_actions_by_hand() -> None:
    program, model, hyper = build_flow(SPEC, gamma=0.5)
    values, target = [1.0, 2.0, 4.0], [1.0, 3.0, 2.0]
    logits = np.log([1.0, 2.0, 5.0])
    state = with_outputs(
        blank(program, hyper), [9.0, 0, 0, 0, 0, 9.0], logits, [values] * 2, [target] * 2
    )
    action = [[[0, 2], [1, 1]], [[2, 2], [0, 0]], [[1, 1], [0, 0]]]
    legal = jnp.ones((3, 3, 2, 3), bool).at[0, 0, 0, 0].set(False).at[0, 1, 0, 2].set(False)
    batch = sequence(action, legal_actions=legal, **BATCH)
    loss = jax.jit(partial(mac_flow.loss, model, False), compiler_options=QUICKLY)
    _, metrics = loss(state.params, state.target, batch, KEY, hyper)
    # The flow ends at the first agent's action 0, where it is legal, and the second one's 2.
    noise = jax.random.normal(jax.random.split(KEY)[1], (3, 3, 2, 3))
    else_best = 1 + int(noise[0, 0, 0, 2] > noise[0, 0, 0, 1])
    likelihoods = [[2 / 7, 5 / 7][else_best - 1], 5 / 8, 1 / 3, *[1 / 8, 5 / 8] * 3]
    expected = -np.log(likelihoods).mean()
    np.testing.assert_allclose(metrics["distillation_loss"], expected, rtol=1e-5)
    # The values of the policies: over all actions, over the last two, and over the first two.
    mean = [(1 + 4 + 20) / 8, (4 + 20) / 7, (1 + 4) / 3]
    of_team = [(mean[1] + mean[0]) / 2, mean[2] / 2, *[mean[0]] * 3]
    np.testing.assert_allclose(metrics["q_tot"], np.mean(of_team), rtol=1e-5)
    # Policies choose the likeliest legal action: 1 (value 3) where 2 is not legal, else 2 (2).
    np.testing.assert_allclose(
        metrics["critic_loss"],
        np.mean(
            np.square(
                [
                    (1 + 4) / 2 - (1 + 0.5 * 3 / 2),
                    2 / 2 - (9 + 0.5 * 2 / 2),
                    (4 + 4) / 2 - (1 + 0.5 * 2),
                    (1 + 1) / 2 - 4,
                ]
            )
        ),
        rtol=1e-5,
    )
    assert metrics["policy_loss"] == pytest.approx(
        float(metrics["distillation_loss"] - metrics["q_tot"]), rel=1e-5
    )


@pytest.mark.slow
def test_the_value_changes_only_the_policy_and_its_scale_is_fixed() -> None:
    """If all values have one sign, a scale with a gradient would cancel the value's own."""
    program, model, hyper = build_flow(CONTINUOUS, distillation_weight=0.0)
    rng, state = np.random.default_rng(0), spread_like(blank(program, hyper), 0.5)
    for params in state.params.critics:
        params["params"]["Dense_1"]["bias"] += 100.0
    batch = sequence(rng.uniform(-1, 1, (3, 2, 2, 3)).astype(np.float32), **BATCH)
    batch = batch._replace(next_known=jnp.zeros((3, 2), bool), terminated=batch.terminated & False)
    loss = partial(mac_flow.loss, model, True)
    gradient = jax.jit(jax.grad(loss, has_aux=True))
    gradients, metrics = gradient(state.params, state.target, batch, KEY, hyper)
    assert metrics["critic_loss"] == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients.critics))
    assert metrics["q_tot"] > 50
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients.policy)) > 1e-5


# ---------------------------------------------------------------------------------- learning


@pytest.mark.nightly
def test_the_flow_keeps_joint_modes_and_the_value_chooses_one() -> None:
    """Data of two joint modes, (+, +) and (-, -), of which the first is worth more."""
    spec = EnvSpec("", 2, 2, 2, Continuous(1))
    options = {"hidden": 32, "critic_hidden": 16, "flow_steps": 10, "learning_rate": 3e-3}
    program, model, hyper = build_flow(spec, gamma=0.0, distillation_weight=0.1, **options)
    sign = np.repeat([[[1.0]], [[-1.0]]], 64, axis=0).astype(np.float32)
    action = jnp.asarray(0.7 * sign[..., None, None] * np.ones((1, 1, 2, 1)), jnp.float32)[:, 0]
    over = jnp.ones((128, 1, 2), bool)
    batch = sequence(
        action,
        legal_actions=jnp.ones((128, 2, 2, 1), bool),
        terminated=over,
        reward=jnp.asarray(2.0 + sign[..., 0, None] * np.ones((1, 1, 2)), jnp.float32),
    )

    state = repeated(program, hyper, batch, 300)
    noise = jax.random.normal(KEY, (128, 1, 2, 1))
    joint = jax.jit(partial(mac_flow.flow_actions, model))(state.params.flow, batch.view_tm1, noise)
    agree = (joint[:, 0, 0, 0] * joint[:, 0, 1, 0]) > 0
    assert agree.mean() > 0.9
    assert 0.3 < (joint[:, 0, 0, 0] > 0).mean() < 0.7
    policy, legal = program.policy(False), jnp.ones((2, 1), bool)
    act = partial(policy.act, program.policy_params(state), policy.initial_carry())
    draw = jax.jit(jax.vmap(lambda key: act(jnp.zeros((2, 2)), legal, key)[0]))
    assert (draw(jax.random.split(KEY, 200)) > 0).mean() > 0.95
