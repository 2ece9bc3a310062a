"""The recurrence of a gated recurrent unit over many steps, with a gradient of its own.

Automatic differentiation of a scan computes the gradient of the weights in each step, and adds up
small matrices. Here the reverse scan computes only what depends on the step after it, and the
gradients of the weights are products over all steps at once.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from offmarl.networks.linear import orthogonal, product


class GRUWeights(NamedTuple):
    """The parameters of a gated recurrent unit; the gates are reset, update and new, in order."""

    input_kernel: Float[Array, "I gates"]
    input_bias: Float[Array, "gates"]
    kernel: Float[Array, "H gates"]
    bias: Float[Array, "H"]
    """Bias of the recurrent part of the gate "new"."""


class _Step(NamedTuple):
    """The results of one step or more."""

    memory: Float[Array, "*b H"]
    gates: Float[Array, "*b both"]
    """Reset and update, in order."""
    new: Float[Array, "*b H"]
    recurrent: Float[Array, "*b H"]
    """Recurrent part of the gate "new"."""


_Residuals = tuple[GRUWeights, Array, Array, Array, _Step]
"""The arguments of `unroll_gru`, and the results of all steps."""


def gru_step(
    weights: GRUWeights, carry: Float[Array, "*b H"], x: Float[Array, "*b I"]
) -> Float[Array, "*b H"]:
    """Return the memory after one step (Cho et al. 2014, arXiv 1406.1078)."""
    return _step(weights, carry, x @ weights.input_kernel, _sigmoid_of_sum).memory


def _step(
    weights: GRUWeights, carry: Array, projected: Array, sigmoid_of_sum: Callable[..., Array]
) -> _Step:
    size = carry.shape[-1]
    recalled = carry @ weights.kernel
    bias, bias_new = weights.input_bias[: 2 * size], weights.input_bias[2 * size :]
    gates = sigmoid_of_sum(projected[..., : 2 * size], recalled[..., : 2 * size], bias)
    reset, update = jnp.split(gates, 2, axis=-1)
    recurrent = recalled[..., 2 * size :] + weights.bias
    new = jnp.tanh(projected[..., 2 * size :] + bias_new + reset * recurrent)
    return _Step((1 - update) * new + update * carry, gates, new, recurrent)


def _sigmoid_of_sum(*terms: Array) -> Array:
    return jax.nn.sigmoid(sum(terms))


def _apart(index: Array) -> Callable[..., Array]:
    """Return `_sigmoid_of_sum` as a loop of its own in the step with this index.

    On a CPU, XLA would fuse it with the rest of the step into one loop, which takes four times as
    long, since LLVM does not vectorise it. XLA fuses nothing with a conditional. The index is never
    negative.
    """

    def on_cpu(*terms: Array) -> Array:
        return jax.lax.cond(index >= 0, _sigmoid_of_sum, lambda term, *_: term, *terms)

    return partial(jax.lax.platform_dependent, cpu=on_cpu, default=_sigmoid_of_sum)


@jax.custom_vjp
def unroll_gru(
    weights: GRUWeights,
    carry: Float[Array, "M H"],
    x: Float[Array, "T M I"],
    first: Bool[Array, "T M"],
) -> Float[Array, "T M H"]:
    """Return the memory after each of T steps, for M sequences.

    It has the gradient of automatic differentiation, also under `jax.vmap` and for second
    derivatives. Forward-mode differentiation is not possible.
    """
    return _unroll(weights, carry, x, first).memory


def _unroll(weights: GRUWeights, carry: Array, x: Array, first: Array) -> _Step:
    def step(carry: Array, inputs: tuple[Array, Array, Array]) -> tuple[Array, _Step]:
        index, projected, is_first = inputs
        after = _step(weights, _emptied(carry, is_first), projected, _apart(index))
        return after.memory, after

    inputs = jnp.arange(len(x)), product(x, weights.input_kernel), first
    steps: _Step = jax.lax.scan(step, carry, inputs)[1]
    return steps


def _forward(weights: GRUWeights, carry: Array, x: Array, first: Array) -> tuple[Array, _Residuals]:
    steps = _unroll(weights, carry, x, first)
    return steps.memory, (weights, carry, x, first, steps)


def _backward(
    residuals: _Residuals, d_memory: Float[Array, "T M H"]
) -> tuple[GRUWeights, Array, Array, None]:
    """Return the gradients of the arguments; ``d_x`` is the gradient of ``x``, and so on.

    The first two gates are kept apart from the third, so that no array of all gates is copied.
    """
    weights, carry, x, first, steps = residuals
    size = len(weights.kernel)
    kernel, kernel_new = weights.kernel[:, : 2 * size], weights.kernel[:, 2 * size :]
    before = _emptied(jnp.concatenate([carry[None], steps.memory[:-1]]), first)

    def step(
        d_carry: Array, inputs: tuple[Array, Array, Array, _Step]
    ) -> tuple[Array, tuple[Array, ...]]:
        d_memory, is_first, before, (_, gates, new, recurrent) = inputs
        reset, update = jnp.split(gates, 2, axis=-1)
        d = d_memory + d_carry
        d_new = d * (1 - update) * (1 - new**2)
        d_update = d * (before - new) * update * (1 - update)
        d_reset = d_new * recurrent * reset * (1 - reset)
        d_gates, d_recurrent = jnp.concatenate([d_reset, d_update], -1), d_new * reset
        d_before = d * update + d_gates @ kernel.T + d_recurrent @ kernel_new.T
        return _emptied(d_before, is_first), (d_gates, d_recurrent, d_new)

    inputs = d_memory, first, before, steps
    d_carry, parts = jax.lax.scan(step, jnp.zeros_like(carry), inputs, reverse=True)
    d_gates, d_recurrent, d_new = (_flat(part) for part in parts)
    flat_x, before = _flat(x).T, _flat(before).T
    d_weights = GRUWeights(
        input_kernel=jnp.concatenate([flat_x @ d_gates, flat_x @ d_new], -1),
        input_bias=jnp.concatenate([d_gates.sum(0), d_new.sum(0)]),
        kernel=jnp.concatenate([before @ d_gates, before @ d_recurrent], -1),
        bias=d_recurrent.sum(0),
    )
    input_kernel, input_kernel_new = jnp.split(weights.input_kernel, [2 * size], axis=1)
    d_x = d_gates @ input_kernel.T + d_new @ input_kernel_new.T
    return d_weights, d_carry, d_x.reshape(x.shape), None


unroll_gru.defvjp(_forward, _backward)


def _emptied(carry: Float[Array, "*b H"], first: Bool[Array, "*b"]) -> Float[Array, "*b H"]:
    return jnp.where(first[..., None], 0.0, carry)


def _flat(x: Float[Array, "T M _"]) -> Float[Array, "TM _"]:
    """Join time and sequences; see `offmarl.networks.linear`."""
    return x.reshape(-1, x.shape[-1])


@partial(jax.jit, static_argnums=(1, 2))
def orthogonal_gates(
    key: PRNGKeyArray, shape: tuple[int, int], dtype: jnp.dtype = jnp.float32
) -> Float[Array, "H gates"]:
    """Return the recurrent kernel of a GRU: an orthogonal ``(H, H)`` block for each gate.

    JAX traces it once for each shape; see `offmarl.networks.linear.orthogonal`.
    """
    hidden, width = shape
    draw = orthogonal()
    keys = jax.random.split(key, width // hidden)
    blocks = jax.lax.map(lambda key: draw(key, (hidden, hidden), dtype), keys)
    return jnp.moveaxis(blocks, 0, 1).reshape(shape)
