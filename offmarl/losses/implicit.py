"""Weights of implicit constraint Q-learning (Yang et al. 2021, arXiv 2106.03400)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def softmax_weights(
    x: Float[Array, "B *rest"], mask: Bool[Array, "B *rest"], temperature: float
) -> Float[Array, "B *rest"]:
    """Softmax of x / temperature over the batch axis, scaled to a mean of one over the mask.

    The batch stands in for the data's states and actions, so that the normaliser of the implicit
    policy need not be learnt (eq. 9 there). No gradient flows through the weights.
    """
    logits = jnp.where(mask, x / temperature, -jnp.inf)
    some = mask.any(axis=0, keepdims=True)
    weights = jax.nn.softmax(jnp.where(some, logits, 0.0), axis=0)
    return jax.lax.stop_gradient(weights * mask.sum(axis=0, keepdims=True) * mask)
