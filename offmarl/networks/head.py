"""What a policy's outputs mean: the distribution of its actions."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl import categorical, gaussian

_LEAST_STD = 0.01
"""So that the likelihood of data without any noise stays finite."""


class Head(NamedTuple):
    """Pure functions of a policy's outputs and the legal actions, ``(*b, N, A)``.

    Actions are ``(*b, N)``, and ``(*b, N, A)`` where they are continuous; log-probabilities and
    entropies, in nats, ``(*b, N)``.
    """

    sample: Callable[[Array, Array, PRNGKeyArray], Array]
    """``(outputs, legal_actions, key) -> action``"""
    mode: Callable[[Array, Array], Array]
    """``(outputs, legal_actions) -> action``, the best one."""
    log_prob: Callable[[Array, Array, Array], Array]
    """``(outputs, legal_actions, action) -> log_prob``"""
    entropy: Callable[[Array, Array], Array]
    """``(outputs, legal_actions) -> entropy``"""


# ---------------------------------------------------------------------------------- discrete


def _sample_softmax(
    outputs: Float[Array, "*b N A"], legal_actions: Bool[Array, "*b N A"], key: PRNGKeyArray
) -> Int[Array, "*b N"]:
    return jax.random.categorical(key, categorical.mask_illegal(outputs, legal_actions))


def _best(
    outputs: Float[Array, "*b N A"], legal_actions: Bool[Array, "*b N A"]
) -> Int[Array, "*b N"]:
    return categorical.mask_illegal(outputs, legal_actions).argmax(-1)


def _log_prob_softmax(
    outputs: Float[Array, "*b N A"],
    legal_actions: Bool[Array, "*b N A"],
    action: Int[Array, "*b N"],
) -> Float[Array, "*b N"]:
    return categorical.log_prob(categorical.mask_illegal(outputs, legal_actions), action)


def _entropy_softmax(
    outputs: Float[Array, "*b N A"], legal_actions: Bool[Array, "*b N A"]
) -> Float[Array, "*b N"]:
    return categorical.entropy(categorical.mask_illegal(outputs, legal_actions))


SOFTMAX = Head(_sample_softmax, _best, _log_prob_softmax, _entropy_softmax)
"""Outputs are a logit for each action; those of illegal actions are put out of reach."""


# ---------------------------------------------------------------------------------- continuous


def _parameters(
    outputs: Float[Array, "*b N _"],
) -> tuple[Float[Array, "*b N A"], Float[Array, "*b N A"]]:
    mean, spread = jnp.split(outputs, 2, axis=-1)
    return mean, jax.nn.softplus(spread) + _LEAST_STD


def _sample_gaussian(
    outputs: Float[Array, "*b N _"], legal_actions: Bool[Array, "*b N A"], key: PRNGKeyArray
) -> Float[Array, "*b N A"]:
    return jnp.where(legal_actions, gaussian.sample(*_parameters(outputs), key), 0.0)


def _middle(
    outputs: Float[Array, "*b N _"], legal_actions: Bool[Array, "*b N A"]
) -> Float[Array, "*b N A"]:
    mean, _ = _parameters(outputs)
    return jnp.where(legal_actions, jnp.clip(mean, -1.0, 1.0), 0.0)


def _log_prob_gaussian(
    outputs: Float[Array, "*b N _"],
    legal_actions: Bool[Array, "*b N A"],
    action: Float[Array, "*b N A"],
) -> Float[Array, "*b N"]:
    log_prob = gaussian.log_prob(*_parameters(outputs), action)
    return jnp.where(legal_actions, log_prob, 0.0).sum(-1)


def _entropy_gaussian(
    outputs: Float[Array, "*b N _"], legal_actions: Bool[Array, "*b N A"]
) -> Float[Array, "*b N"]:
    entropy = gaussian.entropy(*_parameters(outputs))
    return jnp.where(legal_actions, entropy, 0.0).sum(-1)


GAUSSIAN = Head(_sample_gaussian, _middle, _log_prob_gaussian, _entropy_gaussian)
"""Outputs are the means of the entries, then their spreads; see `offmarl.gaussian`. Entries that an
agent has not are 0, and do not count."""


HEADS = {"softmax": SOFTMAX, "gaussian": GAUSSIAN}
