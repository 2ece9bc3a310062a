"""Conservative Q-learning (Kumar et al. 2020, arXiv 2006.04779), over joint actions."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray


def sample_legal_actions(
    key: PRNGKeyArray, legal_actions: Bool[Array, "*b A"], num_samples: int
) -> Int[Array, "K *b"]:
    """Draw K actions for every agent and step, uniformly among the legal ones."""
    so_far = jnp.cumsum(legal_actions, axis=-1)
    count = so_far[..., -1]
    rank = jax.random.randint(key, (num_samples, *count.shape), 0, jnp.maximum(count, 1))
    # The action of rank r is the one that r legal ones, and the illegal ones between, come before.
    return (so_far <= rank[..., None]).sum(-1)


def conservative_gap(
    q_others: Float[Array, "K *b"], q_data: Float[Array, "*b"]
) -> Float[Array, "*b"]:
    """Log-sum-exp over the values of other actions and the data's own, minus the data's.

    Never negative. Minimising it pushes down the values of actions the data does not hold; every
    action among ``q_others`` must be legal, or values that nobody uses are pushed instead.
    """
    everything = jnp.concatenate([q_others, q_data[None]])
    return jax.nn.logsumexp(everything, axis=0) - q_data
