"""Temporal differences."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from offmarl import categorical


def masked_mean(x: Float[Array, "*b"], mask: Bool[Array, "*b"]) -> Float[Array, ""]:
    """Mean of ``x`` where ``mask`` holds; 0 where it holds nowhere."""
    return jnp.where(mask, x, 0.0).sum() / jnp.maximum(mask.sum(), 1)


def double_q_values(
    q_target_t: Float[Array, "*b A"],
    q_selector_t: Float[Array, "*b A"],
    legal_actions_t: Bool[Array, "*b A"],
) -> Float[Array, "*b"]:
    """Value the next step by double Q-learning (van Hasselt et al. 2015, arXiv 1509.06461).

    The best legal action according to ``q_selector_t``, valued by ``q_target_t``.
    """
    best = categorical.mask_illegal(q_selector_t, legal_actions_t).argmax(-1)
    return categorical.select(q_target_t, best)


def td_targets(
    r_t: Float[Array, "*b"], discount_t: Float[Array, "*b"], v_t: Float[Array, "*b"]
) -> Float[Array, "*b"]:
    """One-step targets, r + discount * v, through which no gradient flows.

    ``discount_t`` is γ (1 - terminated): 0 where nothing follows.
    """
    return jax.lax.stop_gradient(r_t + discount_t * v_t)


def lambda_targets(
    r_t: Float[Array, "T"],
    discount_t: Float[Array, "T"],
    v_tm1: Float[Array, "T"],
    has_next: Bool[Array, "T"],
    lambda_: float,
) -> Float[Array, "T"]:
    """TD(λ) targets of values along the data's own actions (Sutton and Barto, ch. 12).

    G_tm1 = r_t + discount_t ((1 - λ) v_t + λ G_t), computed backwards.

    Parameters
    ----------
    r_t, discount_t
        Reward of each step and the discount of what follows it.
    v_tm1
        Value of each step's own state and action.
    has_next
        Steps whose successor is in the window too. Where it is not, and the step is no terminal
        one, no target is known: the recursion bootstraps from the step's own value there, and
        the caller must mask the step out.
    lambda_
        λ; 0 gives one-step targets.

    Returns
    -------
    Targets of ``v_tm1``, through which no gradient flows.
    """
    v_t = jnp.append(v_tm1[1:], 0.0)

    def step(target_t: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        r, discount, own, following, follows = x
        target = r + discount * ((1 - lambda_) * following + lambda_ * target_t)
        target = jnp.where(follows, target, jnp.where(discount == 0.0, r, own))
        return target, target

    inputs = (r_t, discount_t, v_tm1, v_t, has_next)
    _, targets = jax.lax.scan(step, jnp.zeros_like(r_t[0]), inputs, reverse=True)
    return jax.lax.stop_gradient(targets)
