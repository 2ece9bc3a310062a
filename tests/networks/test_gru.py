"""The GRU over a window: values, and the gradient that it computes itself."""

from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.networks import Recurrent, unroll_batch
from offmarl.networks.gru import GRUWeights, gru_step, orthogonal_gates, unroll_gru

STEPS, ROWS, INPUTS, HIDDEN = 7, 5, 4, 3


def inputs(dtype: Any = np.float32, first: float = 0.3) -> tuple[GRUWeights, Any, Any, Any]:
    """Weights, the memory at the beginning, what is seen, and where episodes begin."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    gates = 3 * HIDDEN
    weights = GRUWeights(draw(INPUTS, gates), draw(gates), draw(HIDDEN, gates), draw(HIDDEN))
    features = draw(STEPS, ROWS, INPUTS)
    return weights, draw(ROWS, HIDDEN), features, jnp.asarray(rng.random((STEPS, ROWS)) < first)


def plain(weights: GRUWeights, carry: Any, x: Any, first: Any) -> Any:
    """Unroll step by step, without a gradient of its own."""
    memory = []
    for step in range(STEPS):
        carry = gru_step(weights, jnp.where(first[step][:, None], 0.0, carry), x[step])
        memory.append(carry)
    return jnp.stack(memory)


def weighed(unroll: Callable[..., Any], *args: Any) -> Any:
    """Return a scalar to which each entry of the memory contributes differently."""
    memory = unroll(*args)
    factors = np.random.default_rng(1).normal(size=(STEPS, ROWS, HIDDEN)).astype(memory.dtype)
    return (factors * memory + memory**2).sum()


@partial(jax.jit, static_argnums=0)
def gradients(unroll: Callable[..., Any], *args: Any) -> Any:
    """Return the gradients of the weights, of the memory at the beginning, and of the input."""
    return jax.grad(partial(weighed, unroll), argnums=(0, 1, 2))(*args)


@partial(jax.jit, static_argnums=0)
def unrolled(unroll: Callable[..., Any], *args: Any) -> Any:
    return unroll(*args)


assert_close = partial(chex.assert_trees_all_close, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", [0.0, 0.3, 1.0], ids=["no", "some", "all"])
def test_values_and_gradients_are_those_of_automatic_differentiation(first: float) -> None:
    args = inputs(first=first)
    assert_close(unrolled(unroll_gru, *args), unrolled(plain, *args))
    assert_close(gradients(unroll_gru, *args), gradients(plain, *args))


def test_the_memory_before_an_episode_gets_no_gradient() -> None:
    weights, carry, x, _ = inputs()
    first = jnp.zeros((STEPS, ROWS), bool).at[4, 2].set(True)

    def later(carry: Any, x: Any) -> Any:
        return unroll_gru(weights, carry, x, first)[4:, 2].sum()

    d_carry, d_x = jax.jit(jax.grad(later, (0, 1)))(carry, x)
    assert not d_carry.any()
    assert not d_x[:4].any()
    assert d_x[4:, 2].all()


@pytest.mark.slow
def test_second_derivatives() -> None:
    weights, *rest = inputs()

    def curvature(unroll: Callable[..., Any]) -> Any:
        slope = jax.grad(lambda kernel: weighed(unroll, weights._replace(kernel=kernel), *rest))
        return jax.jit(jax.grad(lambda kernel: (slope(kernel) ** 2).sum()))(weights.kernel)

    assert_close(curvature(unroll_gru), curvature(plain), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_gradients_of_several_networks_side_by_side() -> None:
    *args, first = inputs()
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, -leaf]), args)
    result = jax.vmap(lambda *own: gradients(unroll_gru, *own, first))(*several)
    for index in range(3):
        alone = gradients(unroll_gru, *jax.tree.map(lambda leaf, i=index: leaf[i], several), first)
        assert_close(jax.tree.map(lambda leaf, i=index: leaf[i], result), alone)


def test_forward_mode_is_refused() -> None:
    *args, first = inputs()
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(lambda *args: unroll_gru(*args, first), args, args)


def test_windows_are_unrolled_as_their_steps_are() -> None:
    network = Recurrent(2, hidden=HIDDEN, layers=2)
    rng = np.random.default_rng(3)
    observations = rng.normal(size=(4, STEPS, 2, 5)).astype(np.float32)
    first = rng.random((4, STEPS)) < 0.3
    empty = network.initial_carry(2)
    params = jax.jit(network.init)(jax.random.key(0), empty, observations[0, 0])
    result = jax.jit(partial(unroll_batch, network))(params, observations, first)
    in_time, _ = jax.jit(partial(network.apply, method="unroll"))(
        params, observations.swapaxes(0, 1), first.T
    )
    np.testing.assert_allclose(result, in_time.swapaxes(0, 1), rtol=1e-5, atol=1e-6)
    apply = jax.jit(network.apply)
    for window in range(4):
        memory = empty
        for step in range(STEPS):
            memory = memory * (not first[window, step])
            expected, memory = apply(params, memory, observations[window, step])
            np.testing.assert_allclose(result[window, step], expected, rtol=1e-4, atol=1e-5)


def test_each_gate_starts_with_an_orthogonal_block() -> None:
    kernel = jax.jit(orthogonal_gates, static_argnums=1)(jax.random.key(0), (4, 12))
    blocks = np.split(np.asarray(kernel), 3, axis=1)
    for block in blocks:
        np.testing.assert_allclose(block @ block.T, np.eye(4), atol=1e-5)
    assert not np.allclose(blocks[0], blocks[1])
    torso = Recurrent(outputs=2, hidden=4, agent_id="none")
    params = jax.jit(torso.init)(jax.random.key(1), torso.initial_carry(2), jnp.zeros((2, 4)))
    for block in np.split(np.asarray(params["params"]["recurrent_kernel"]), 3, axis=1):
        np.testing.assert_allclose(block @ block.T, np.eye(4), atol=1e-5)
