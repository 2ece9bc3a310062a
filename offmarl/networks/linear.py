"""Linear layers over any number of leading axes, computed as products of two matrices.

XLA on a CPU computes the gradient of a kernel as a product over all leading axes. If there are
several, it first writes transposed copies of its operands, which takes longer than the product.
"""

import flax.linen as nn
import jax
from jaxtyping import Array, Float


def product(
    x: Float[Array, "*b inputs"], kernel: Float[Array, "inputs outputs"]
) -> Float[Array, "*b outputs"]:
    """Return ``x @ kernel``, with the leading axes of ``x`` joined to one."""
    flat: Array = x.reshape(-1, x.shape[-1]) @ kernel
    return flat.reshape(*x.shape[:-1], kernel.shape[-1])


class Dense(nn.Dense):
    """A dense layer like Flax's, with the same name and parameters."""

    def __call__(self, inputs: Float[Array, "*b inputs"]) -> Float[Array, "*b outputs"]:
        """Apply the layer."""
        flat: jax.Array = super().__call__(inputs.reshape(-1, inputs.shape[-1]))
        return flat.reshape(*inputs.shape[:-1], self.features)
