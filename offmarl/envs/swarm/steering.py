"""Parts of scripted controllers that several tasks use."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from offmarl.envs.swarm.dynamics import OBSTACLE_RADIUS


def around(
    offset: Float[Array, "N K D"], known: Float[Array, "N K 1"], desired: Float[Array, "N D"]
) -> Float[Array, "N D"]:
    """Return the velocity that leads around obstacles ahead."""
    distance = jnp.maximum(length_of(offset)[..., None], 0.1)
    gap = jnp.maximum(distance - OBSTACLE_RADIUS, 0.1)
    normal = -offset / distance
    into = jnp.maximum(-(normal * desired[:, None]).sum(-1, keepdims=True), 0.0)
    return jnp.where((known > 0) & (gap < 1.5), normal * (into + 0.1 / gap), 0.0).sum(1)


def length_of(vector: Float[Array, "*b D"]) -> Float[Array, "*b"]:
    """Return the lengths of vectors."""
    return jnp.sqrt(jnp.square(vector).sum(-1))
