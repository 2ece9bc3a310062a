"""Losses of on-policy actor-critics: generalised advantages and the clipped surrogate.

One trajectory of one agent, unbatched: ``_tm1`` is the step an action was taken in, ``_t`` the one
it led to.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def generalised_advantages(
    r_t: Float[Array, "T"],
    discount_t: Float[Array, "T"],
    last_t: Bool[Array, "T"],
    v_tm1: Float[Array, "T"],
    v_t: Float[Array, "T"],
    lambda_: float,
) -> Float[Array, "T"]:
    """Generalised advantage estimation over a stretch of time that may hold several episodes.

    δ_t = r_t + discount_t v_t − v_tm1, and A_tm1 = δ_t + λ discount_t (1 − last_t) A_t
    (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    Parameters
    ----------
    r_t
        Rewards.
    discount_t
        γ, and 0 where the agent terminated. A truncated step keeps its discount: it bootstraps.
    last_t
        Whether the episode ended, by either cause: no advantage flows back across it.
    v_tm1, v_t
        Values of the views before the steps and of the views they truly led to. At an episode's
        end the latter is not the value of the next row, which belongs to another episode.
    lambda_
        λ, in [0, 1].
    """
    delta_t = r_t + discount_t * v_t - v_tm1
    decay_t = lambda_ * discount_t * ~last_t

    def step(advantage: Array, xs: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, decay = xs
        advantage = delta + decay * advantage
        return advantage, advantage

    _, advantage = jax.lax.scan(step, jnp.zeros((), v_t.dtype), (delta_t, decay_t), reverse=True)
    return advantage


def clipped_surrogate(
    log_prob_tm1: Float[Array, "*b"],
    behaviour_log_prob_tm1: Float[Array, "*b"],
    advantage_tm1: Float[Array, "*b"],
    epsilon: float,
) -> Float[Array, "*b"]:
    """Loss of each step under the clipped objective of PPO.

    −min(ρ A, clip(ρ, 1 − ε, 1 + ε) A), with ρ the ratio of the probabilities of the action taken
    (Schulman et al. 2017, arXiv 1707.06347, eq. 7).
    """
    ratio = jnp.exp(log_prob_tm1 - behaviour_log_prob_tm1)
    clipped = jnp.clip(ratio, 1 - epsilon, 1 + epsilon)
    return -jnp.minimum(ratio * advantage_tm1, clipped * advantage_tm1)
