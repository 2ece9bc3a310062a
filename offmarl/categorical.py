"""Categorical distributions over legal actions."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def mask_illegal(
    scores: Float[Array, "*b A"], legal_actions: Bool[Array, "*b A"]
) -> Float[Array, "*b A"]:
    """Logits or values with those of illegal actions put out of reach.

    Finite, because gradients through infinities are NaN, and far from the largest float, so that
    sums of a few of them stay finite too.
    """
    return jnp.where(legal_actions, scores, -1e9)


def log_prob(logits: Float[Array, "*b A"], action: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """Log-probability of an action under masked logits."""
    return select(jax.nn.log_softmax(logits), action)


def entropy(logits: Float[Array, "*b A"]) -> Float[Array, "*b"]:
    """Entropy in nats under masked logits; masked actions add nothing."""
    log_probs = jax.nn.log_softmax(logits)
    return -(jnp.exp(log_probs) * log_probs).sum(-1)


def select(values: Float[Array, "*b A"], action: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """Pick the value of each action taken.

    By comparison rather than by indexing: the gradient of an index is a scatter, which costs
    several times as much on every backend for the few actions there are.
    """
    taken = action[..., None] == jnp.arange(values.shape[-1])
    return jnp.where(taken, values, 0.0).sum(-1)
