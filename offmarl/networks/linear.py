"""Linear layers over any number of leading axes, computed as products of two matrices.

XLA on a CPU computes the gradient of a kernel as a product over all leading axes. If there are
several, it first writes transposed copies of its operands, which takes longer than the product.
"""

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float


def product(
    x: Float[Array, "*b inputs"], kernel: Float[Array, "inputs outputs"]
) -> Float[Array, "*b outputs"]:
    """Return ``x @ kernel``, with the leading axes of ``x`` joined to one."""
    flat: Array = x.reshape(-1, x.shape[-1]) @ kernel
    return flat.reshape(*x.shape[:-1], kernel.shape[-1])


class Dense(nn.Module):
    """A layer with the parameters of Flax's dense layer.

    Attributes
    ----------
    features
        Number of outputs.
    kernel_init
        Initialises the kernel, ``(inputs, features)``; the bias is zero at first.
    """

    features: int
    kernel_init: Any = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x: Float[Array, "*b inputs"]) -> Float[Array, "*b {self.features}"]:
        """Apply the layer."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        return product(x, kernel) + self.param("bias", nn.initializers.zeros, (self.features,))
