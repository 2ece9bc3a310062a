"""Normalisation by running statistics."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Moments(NamedTuple):
    """Running mean and variance of a stream of batches of numbers."""

    weight: Float[Array, ""]
    """How many numbers were seen."""
    mean: Float[Array, ""]
    squares: Float[Array, ""]
    """Sum of squared differences from the mean."""

    @classmethod
    def zero(cls) -> "Moments":
        """Start with nothing seen."""
        return cls(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()))

    @property
    def std(self) -> Float[Array, ""]:
        """The standard deviation; 1 before anything was seen."""
        return jnp.where(self.weight > 0, jnp.sqrt(self.squares / self.weight.clip(1) + 1e-6), 1.0)

    def update(self, batch: Float[Array, "*b"], mask: Bool[Array, "*b"]) -> "Moments":
        """Take a batch in (Chan, Golub and LeVeque 1983); masked-out entries are not counted."""
        size = mask.sum().clip(1)
        mean = jnp.where(mask, batch, 0).sum() / size
        squares = jnp.where(mask, (batch - mean) ** 2, 0).sum()
        weight, shift = self.weight + size, mean - self.mean
        return Moments(
            weight,
            self.mean + shift * size / weight,
            self.squares + squares + shift**2 * self.weight * size / weight,
        )
