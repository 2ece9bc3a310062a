"""Deterministic policies, which explore by noise (Lillicrap et al. 2016, arXiv 1509.02971).

A continuous action is the tanh of the network's output. The logits of discrete actions are made
deterministic by the Gumbel noise: a sample is a function of the logits and the noise, through which
the straight-through estimate of the gradient flows (Lowe et al. 2017, arXiv 1706.02275).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from offmarl.distributions import ClippedGaussian, categorical, uniform_action
from offmarl.types import ArrayTree, Continuous, EnvSpec, Policy


class NoisyParams(NamedTuple):
    """Parameters of a deterministic policy, and of its exploration.

    They are arrays, so that a schedule never recompiles.
    """

    network: ArrayTree
    noise: Float[Array, ""]
    """Standard deviation of the Gaussian noise on continuous actions, which are then clipped to
    [-1, 1]. Discrete actions explore by their Gumbel noise."""
    uniform: Float[Array, ""]
    """1 to act uniformly at random, 0 to act by the network."""


def squash(
    outputs: Float[Array, "*b A"], legal_actions: Bool[Array, "*b A"]
) -> Float[Array, "*b A"]:
    """Return the continuous action of a network's outputs; entries that an agent lacks are 0."""
    return jnp.where(legal_actions, jnp.tanh(outputs), 0.0)


def differentiable_action(
    spec: EnvSpec,
    outputs: Float[Array, "*b A"],
    legal_actions: Bool[Array, "*b A"],
    key: PRNGKeyArray,
    temperature: float | Float[Array, ""] = 1.0,
) -> Float[Array, "*b A"]:
    """Return actions as vectors, through which gradients flow to a network's outputs.

    Parameters
    ----------
    spec
        The environment's spec.
    outputs, legal_actions
        Outputs of the network, and the legal actions.
    key, temperature
        Of the Gumbel noise of discrete actions.
    """
    if isinstance(spec.action, Continuous):
        return squash(outputs, legal_actions)
    return categorical(outputs, legal_actions).relaxed_sample(key, temperature)


def noisy_policy(network: Any, spec: EnvSpec, greedy: bool) -> Policy:
    """Build a deterministic policy with exploration, whose parameters are `NoisyParams`.

    The log-probabilities of its actions are exact: those of a clipped Gaussian around the action,
    of the softmax of the logits, or of a uniform distribution.
    """

    def act(
        params: NoisyParams,
        carry: ArrayTree,
        observation: ArrayTree,
        legal_actions: Bool[Array, "N A"],
        key: PRNGKeyArray,
    ) -> tuple[Array, Float[Array, "N"], ArrayTree]:
        outputs, carry = network.apply(params.network, carry, observation)
        if isinstance(spec.action, Continuous):
            best = squash(outputs, legal_actions)
            noisy = _explore(params, best, legal_actions, key)
        else:
            best = categorical(outputs, legal_actions).mode()
            logits = jnp.where(params.uniform > 0, 0.0, outputs)
            noisy = categorical(logits, legal_actions).sample_and_log_prob(key)
        return *((best, jnp.zeros(spec.num_agents)) if greedy else noisy), carry

    def draws(params: NoisyParams) -> bool:
        explores = bool((params.noise > 0).any() | (params.uniform > 0).any())
        return not greedy and (explores or not isinstance(spec.action, Continuous))

    return Policy(lambda: network.initial_carry(spec.num_agents), act, draws=draws)


def _explore(
    params: NoisyParams,
    action: Float[Array, "N A"],
    legal_actions: Bool[Array, "N A"],
    key: PRNGKeyArray,
) -> tuple[Float[Array, "N A"], Float[Array, "N"]]:
    """Return actions with noise and their log-probabilities; 0 for actions without noise."""
    noise_key, uniform_key = jax.random.split(key)
    has_noise, is_uniform = params.noise > 0, params.uniform > 0
    std = jnp.broadcast_to(jnp.where(has_noise, params.noise, 1.0), action.shape)
    drawn, log_prob = ClippedGaussian(action, std, legal_actions).sample_and_log_prob(noise_key)
    drawn, log_prob = jnp.where(has_noise, drawn, action), jnp.where(has_noise, log_prob, 0.0)
    anywhere, of_anywhere = uniform_action(uniform_key, legal_actions)
    return jnp.where(is_uniform, anywhere, drawn), jnp.where(is_uniform, of_anywhere, log_prob)
