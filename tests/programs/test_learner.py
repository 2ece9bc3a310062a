"""The optimiser that all baselines share, by its steps on a gradient that does not change."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from offmarl.programs import LearnerArgs, hyperparameters, make_optimiser, policy_config
from offmarl.programs.program import structure

RATE = 1e-4


class Params(NamedTuple):
    actor: jax.Array
    critic: jax.Array


def sizes(args: LearnerArgs, count: int, **options) -> np.ndarray:
    """Return how far each update moves a parameter: Adam moves by just the step size."""
    hyper, gradient = hyperparameters(args), jnp.ones(())

    @jax.jit
    def update(state, done):
        optimiser = make_optimiser(structure(args), hyper, done, **options)
        step, state = optimiser.update(gradient, state)
        return -step, state

    state, steps = make_optimiser(structure(args), hyper).init(gradient), []
    for done in range(count):
        step, state = update(state, jnp.int32(done))
        steps.append(float(step))
    return np.array(steps)


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("constant", [1, 1, 1, 1, 1]),
        ("linear", [1, 0.75, 0.5, 0.25, 0]),
        ("cosine", [1, 0.5 + 0.125**0.5, 0.5, 0.5 - 0.125**0.5, 0]),
    ],
)
def test_the_step_size_over_four_updates_and_after_them(schedule, wanted):
    args = LearnerArgs(Path(), updates=4, learning_rate=RATE, schedule=schedule)
    np.testing.assert_allclose(sizes(args, 5), RATE * np.array(wanted), rtol=1e-4, atol=1e-10)
    longer = {"updates": 8}  # half of the way after four updates
    half = {"constant": 1, "linear": 0.5, "cosine": 0.5}[schedule]
    np.testing.assert_allclose(sizes(args, 5, **longer)[4], RATE * half, rtol=1e-4)


def test_without_clipping_and_schedule_the_optimiser_is_adam_to_the_bit():
    args = LearnerArgs(Path(), learning_rate=3e-4)
    gradient = jax.random.normal(jax.random.key(0), (50,)) * 1e3
    plain = optax.adam(jnp.float32(3e-4))
    ours = make_optimiser(structure(args), hyperparameters(args), 7)
    assert jax.tree.structure(ours.init(gradient)) == jax.tree.structure(plain.init(gradient))
    for _ in range(2):
        steps, expected = (
            jax.jit(opt.update)(gradient, opt.init(gradient))[0] for opt in (ours, plain)
        )
        np.testing.assert_array_equal(steps, expected)


@pytest.mark.parametrize(("separately", "actor"), [(False, 0.3 / 50), (True, 0.3)])
def test_clipping_scales_the_gradients_down_to_the_norm(separately, actor):
    args = LearnerArgs(Path(), learning_rate=1.0, max_grad_norm=0.5)
    gradient = Params(jnp.float32(0.3), jnp.float32(25.0))
    optimiser = make_optimiser(structure(args), hyperparameters(args), separately=separately)
    _, (_, (adam, _)) = jax.jit(optimiser.update)(gradient, optimiser.init(gradient))
    np.testing.assert_allclose(adam.mu.actor, 0.1 * actor, rtol=1e-3)
    np.testing.assert_allclose(adam.mu.critic, 0.05, rtol=1e-3)


def test_the_network_follows_the_arguments():
    args = LearnerArgs(Path(), network="feedforward", hidden=32, layers=3, agent_id="none")
    config = policy_config(structure(args), "q", activation="tanh")
    assert (config.kind, config.head, config.hidden) == ("feedforward", "q", 32)
    assert (config.layers, config.agent_id, config.activation) == (3, "none", "tanh")
