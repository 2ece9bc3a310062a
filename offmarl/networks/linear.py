"""Linear layers over any number of leading axes, and how their kernels are initialised.

The layers are computed as products of two matrices. XLA on a CPU computes the gradient of a kernel
as a product over all leading axes. If there are several, it first writes transposed copies of its
operands, which takes longer than the product.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


def product(
    x: Float[Array, "*b inputs"], kernel: Float[Array, "inputs outputs"]
) -> Float[Array, "*b outputs"]:
    """Return ``x @ kernel``, with the leading axes of ``x`` joined to one."""
    flat: Array = x.reshape(-1, x.shape[-1]) @ kernel
    return flat.reshape(*x.shape[:-1], kernel.shape[-1])


def orthogonal(scale: float = 1.0) -> Callable[..., Float[Array, "..."]]:
    """Return an initialiser of kernels with orthogonal columns, or rows if these are fewer.

    It draws what Flax's initialiser draws. Under `jax.vmap`, however, the matrices follow one
    another: jaxlib 0.10 divides a batched QR factorisation among the threads that XLA computes
    with, and waits for them in one of these threads, so that two such factorisations in one program
    can wait for each other for ever on a CPU with two cores.
    """

    def init(
        key: PRNGKeyArray, shape: Sequence[int], dtype: Any = jnp.float32
    ) -> Float[Array, "..."]:
        kernel: Array = _drawing(scale, tuple(shape), jnp.dtype(dtype))(key)
        return kernel

    return init


@cache
def _drawing(
    scale: float, shape: tuple[int, ...], dtype: jnp.dtype
) -> Callable[[PRNGKeyArray], Float[Array, "..."]]:
    """Return ``draw(key)``, the same function for the same arguments.

    Flax evaluates an initialiser wherever its parameter is used, to check the shape. JAX traces the
    same function once for all of them.
    """
    draw = nn.initializers.orthogonal(scale)
    one_by_one: Any = jax.custom_batching.sequential_vmap
    drawn: Callable[[PRNGKeyArray], Array] = jax.jit(
        one_by_one(lambda key: draw(key, shape, dtype))
    )
    return drawn


class Dense(nn.Module):
    """A layer with the parameters of Flax's dense layer."""

    features: int
    kernel_init: Any = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x: Float[Array, "*b inputs"]) -> Float[Array, "*b {self.features}"]:
        """Apply the layer."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        return product(x, kernel) + self.param("bias", nn.initializers.zeros, (self.features,))
