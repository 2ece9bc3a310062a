"""Gaussian distributions over continuous actions in [-1, 1], clipped to that interval.

The action is clip(u, -1, 1) of u ~ N(mean, std²), each entry on its own. So an end of the interval
is taken with the probability of all that lies beyond it, and what lies between has the density of
the Gaussian. The log-probability of an action that is an end is the logarithm of the former, of any
other that of the latter: exact for the action as it is stored, whatever was drawn. Ratios of the
probabilities of two such policies are therefore exact too, and actions at the ends, which
controllers and saturated policies take all the time, are data like any other. (Fujita and Maeda
2018, "Clipped Action Policy Gradient", arXiv 1802.07564.)
"""

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Array, Float, PRNGKeyArray


def sample(
    mean: Float[Array, "*b"], std: Float[Array, "*b"], key: PRNGKeyArray
) -> Float[Array, "*b"]:
    """Draw actions."""
    return jnp.clip(mean + std * jax.random.normal(key, mean.shape), -1.0, 1.0)


def log_prob(
    mean: Float[Array, "*b"], std: Float[Array, "*b"], action: Float[Array, "*b"]
) -> Float[Array, "*b"]:
    """Log-probability of each entry: of a mass at the ends, of a density between."""
    between = norm.logpdf(action, mean, std)
    low, high = norm.logcdf((-1.0 - mean) / std), norm.logcdf((mean - 1.0) / std)
    return jnp.where(action <= -1.0, low, jnp.where(action >= 1.0, high, between))


def entropy(mean: Float[Array, "*b"], std: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Entropy of each entry in nats: what the negative `log_prob` comes to on average."""
    low, high = (-1.0 - mean) / std, (1.0 - mean) / std
    log_below, log_above = norm.logcdf(low), norm.logcdf(-high)
    below, above = jnp.exp(log_below), jnp.exp(log_above)
    between = (1 - below - above) * (0.5 + jnp.log(std) + 0.5 * jnp.log(2 * jnp.pi))
    edges = 0.5 * (low * norm.pdf(low) - high * norm.pdf(high))
    return between + edges - below * log_below - above * log_above
