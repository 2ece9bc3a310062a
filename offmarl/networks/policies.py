"""Policies whose network all agents share, or of which each agent has its own.

A `PolicyConfig` describes the network in plain data. Programs with any other kind of policy build
an `offmarl.types.Policy` themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.distributions import (
    ClippedGaussian,
    Distribution,
    TanhGaussian,
    categorical,
    mask_illegal,
    select,
    uniform_action,
)
from offmarl.errors import ShapeError
from offmarl.networks.encoders import blank_view, observation_encoder
from offmarl.networks.linear import SMALL, AgentId
from offmarl.networks.torsos import Activation, FeedForward, Recurrent, Unshared
from offmarl.types import ArrayTree, Continuous, EnvSpec, Policy

_LEAST_STD = 0.01
"""Minimum standard deviation; it keeps the likelihood of noise-free data finite."""

_LOG_STD = (-5.0, 2.0)
"""Range of the logarithms of standard deviations that depend on the observation."""

ContinuousHead = Literal["gaussian", "tanh_gaussian", "soft_gaussian"]

AgentNetwork = FeedForward | Recurrent | Unshared
"""A network of the agents: they share it, or each has its own."""

Head = Callable[[Float[Array, "*b N _"], Bool[Array, "*b N A"]], Distribution]
"""Returns the distribution of actions for a network's outputs and the legal actions."""


@dataclass(frozen=True)
class PolicyConfig:
    """The description of a policy, in plain data.

    Parameters
    ----------
    kind
        "random": uniform over legal discrete actions, or over [-1, 1]; no parameters.
        "feedforward" or "recurrent": the torso of that name.
    head
        "softmax": outputs are logits of the action distribution. "q": outputs are action values.
        "gaussian" and "tanh_gaussian": outputs are means of a Gaussian over continuous actions,
        which is clipped or squashed by tanh to [-1, 1]; see `offmarl.distributions`. Its standard
        deviation is learned, and does not depend on the observation. "soft_gaussian": the same as
        "tanh_gaussian", but the standard deviation depends on the observation, as in soft
        actor-critics. "deterministic": outputs are actions before tanh, or logits of discrete
        ones; the policy explores by noise, see `NoisyParams`.
    hidden
        Width of the hidden layers.
    agent_id
        How the network distinguishes the agents; see `AgentId`.
    share_parameters
        Whether all agents share one network. Otherwise each has one of its own, and ``agent_id`` is
        not used.
    layers
        Number of hidden layers; None for the torso's default: 2, or 1 beside a GRU.
    activation
        Function after each hidden layer.
    """

    kind: Literal["random", "feedforward", "recurrent"]
    head: Literal["softmax", "gaussian", "tanh_gaussian", "soft_gaussian", "deterministic", "q"] = (
        "softmax"
    )
    hidden: int = 64
    agent_id: AgentId = "onehot"
    share_parameters: bool = True
    layers: int | None = None
    activation: Activation = "relu"


class QParams(NamedTuple):
    """Parameters of a policy with a "q" head, which explores by uniform legal actions."""

    network: ArrayTree
    epsilon: Float[Array, ""]
    """Probability of exploring; an array, so that a schedule never recompiles."""


def stochastic_head(
    spec: EnvSpec, continuous: ContinuousHead = "gaussian"
) -> Literal["softmax", "gaussian", "tanh_gaussian", "soft_gaussian"]:
    """Return the head of a stochastic policy for the actions of an environment.

    Parameters
    ----------
    spec
        The environment's spec.
    continuous
        The head to return if actions are continuous.
    """
    return continuous if isinstance(spec.action, Continuous) else "softmax"


def make_network(
    config: PolicyConfig,
    spec: EnvSpec,
    outputs: int,
    encoder: nn.Module | None,
    sees: Literal["observation", "view"] = "observation",
    output_scale: float = 1.0,
    constants: int = 0,
) -> AgentNetwork:
    """Build a network of the agents, such as a policy's or a critic's.

    Parameters
    ----------
    config
        Its kind, size and activation, and whether the agents share it.
    spec
        The spec of the environment.
    outputs, encoder, output_scale, constants
        See `offmarl.networks.FeedForward`.
    sees
        Whether the encoder takes observations or a `View`.

    Raises
    ------
    ShapeError
        The agents do not share parameters, and only some of them have a leaf of the observations.
    """
    torso = FeedForward if config.kind == "feedforward" else Recurrent
    network = torso(
        outputs=outputs,
        hidden=config.hidden,
        agent_id=config.agent_id if config.share_parameters else "none",
        output_scale=output_scale,
        constants=constants,
        encoder=encoder,
        layers=config.layers,
        activation=config.activation,
    )
    if config.share_parameters:
        return network
    if spec.is_per_agent:
        raise ShapeError(
            f"agents of {spec.name or 'this dataset'} have different observations, which networks "
            "without shared parameters do not support: use shared parameters."
        )
    return Unshared(network, spec, sees)


def agent_network(config: PolicyConfig, spec: EnvSpec, output_scale: float = SMALL) -> AgentNetwork:
    """Build the network of a policy, with one output per action.

    Observations that are not float32 vectors are encoded first: see `offmarl.networks.Encoder`.
    ``output_scale`` is that of `offmarl.networks.FeedForward`.

    A Gaussian head has two outputs for each entry of the action: first all means, then all
    spreads, from which softplus makes the standard deviations. The spreads of a "soft_gaussian"
    head are the logarithms of the standard deviations.

    Raises
    ------
    ShapeError
        The head does not fit the environment's actions.
    """
    gaussian = config.head in ("gaussian", "tanh_gaussian", "soft_gaussian")
    constants = config.head in ("gaussian", "tanh_gaussian")
    if gaussian and not isinstance(spec.action, Continuous):
        raise ShapeError(
            f"{spec.name or 'this dataset'} has {spec.action_size} discrete actions, and a "
            f'{config.head} head is for continuous ones: choose the head "softmax".'
        )
    continuous = gaussian or config.head == "deterministic"
    outputs = spec.action_size if continuous else spec.num_actions
    return make_network(
        config,
        spec,
        outputs=2 * outputs if config.head == "soft_gaussian" else outputs,
        encoder=observation_encoder(spec, config.hidden),
        output_scale=output_scale,
        constants=outputs if constants else 0,
    )


def agent_head(config: PolicyConfig) -> Head:
    """Return the head of a policy; action values are treated as logits."""
    return _HEADS.get(config.head, categorical)


def _mean_and_std(outputs: Float[Array, "*b _"]) -> tuple[Array, Array]:
    mean, spread = jnp.split(outputs, 2, axis=-1)
    return mean, jax.nn.softplus(spread) + _LEAST_STD


def _soft_gaussian(outputs: Array, legal_actions: Array) -> Distribution:
    mean, log_std = jnp.split(outputs, 2, axis=-1)
    return TanhGaussian(mean, jnp.exp(jnp.clip(log_std, *_LOG_STD)), legal_actions)


_HEADS: dict[str, Head] = {
    "gaussian": lambda outputs, legal: ClippedGaussian(*_mean_and_std(outputs), legal),
    "tanh_gaussian": lambda outputs, legal: TanhGaussian(*_mean_and_std(outputs), legal),
    "soft_gaussian": _soft_gaussian,
}


def init_policy(config: PolicyConfig, spec: EnvSpec, key: PRNGKeyArray) -> ArrayTree:
    """Draw a policy's parameters.

    They are `QParams` or `NoisyParams` without exploration, network parameters, or an empty tuple.
    """
    if config.kind == "random":
        return ()
    params = init_network(agent_network(config, spec), spec, key)
    if config.head == "deterministic":
        return NoisyParams(params, jnp.zeros(()), jnp.zeros(()))
    return QParams(params, jnp.zeros(())) if config.head == "q" else params


@partial(jax.jit, static_argnums=(0, 1))
def init_network(network: AgentNetwork, spec: EnvSpec, key: PRNGKeyArray) -> ArrayTree:
    """Draw a network's parameters; compiled once for equal networks and specs."""
    carry = network.initial_carry(spec.num_agents)
    return network.init(key, carry, blank_view(spec).observation)


@lru_cache(maxsize=64)
def make_policy(config: PolicyConfig, spec: EnvSpec, greedy: bool = False) -> Policy:
    """Build the functions of a policy, which are the same for equal arguments.

    Parameters
    ----------
    config
        The policy's description.
    spec
        The spec of the environment that it acts in.
    greedy
        Always take the best action: the mode of a stochastic head, the highest value of a q head.

    Returns
    -------
    Policy
        ``act`` returns the log-probability of the action that it took; 0 for a greedy policy.
        ``log_prob`` belongs to the stochastic policy; it is None for a "q" head.
    """
    if config.kind == "random":
        return _random_policy(isinstance(spec.action, Continuous))
    network, head = agent_network(config, spec), agent_head(config)
    if config.head == "deterministic":
        return noisy_policy(network, spec, greedy)
    return head_policy(network, head, spec, greedy, has_values=config.head == "q")


@lru_cache(maxsize=64)
def head_policy(
    network: AgentNetwork, head: Head, spec: EnvSpec, greedy: bool = False, has_values: bool = False
) -> Policy:
    """Build the policy of a network and a head, or of action values with `QParams`."""

    def act(
        params: ArrayTree,
        carry: ArrayTree,
        observation: ArrayTree,
        legal_actions: Bool[Array, "N A"],
        key: PRNGKeyArray,
    ) -> tuple[Array, Float[Array, "N"], ArrayTree]:
        outputs, carry = network.apply(params.network if has_values else params, carry, observation)
        if greedy:
            action = head(outputs, legal_actions).mode()
            log_prob = jnp.zeros(spec.num_agents)
        elif has_values:
            action, log_prob = _epsilon_greedy(outputs, legal_actions, params.epsilon, key)
        else:
            action, log_prob = head(outputs, legal_actions).sample_and_log_prob(key)
        return action, log_prob, carry

    def log_prob(
        params: ArrayTree,
        carry: ArrayTree,
        observation: ArrayTree,
        legal_actions: Bool[Array, "N A"],
        action: Array,
    ) -> tuple[Float[Array, "N"], ArrayTree]:
        outputs, carry = network.apply(params, carry, observation)
        return head(outputs, legal_actions).log_prob(action), carry

    def draws(params: ArrayTree) -> bool:
        return not greedy and (not has_values or bool((params.epsilon > 0).any()))

    return Policy(
        initial_carry=lambda: network.initial_carry(spec.num_agents),
        act=act,
        log_prob=None if has_values else log_prob,
        draws=draws,
    )


def _random_policy(continuous: bool) -> Policy:
    def act(
        _params: ArrayTree,
        carry: ArrayTree,
        _observation: ArrayTree,
        legal_actions: Bool[Array, "N A"],
        key: PRNGKeyArray,
    ) -> tuple[Array, Float[Array, "N"], ArrayTree]:
        if continuous:
            return *uniform_action(key, legal_actions), carry
        uniform = categorical(jnp.zeros(legal_actions.shape), legal_actions)
        return *uniform.sample_and_log_prob(key), carry

    return Policy(lambda: (), act)


def _epsilon_greedy(
    values: Float[Array, "N A"],
    legal_actions: Bool[Array, "N A"],
    epsilon: Float[Array, ""],
    key: PRNGKeyArray,
) -> tuple[Int[Array, "N"], Float[Array, "N"]]:
    best = mask_illegal(values, legal_actions).argmax(-1)
    legal = legal_actions | ~legal_actions.any(-1, keepdims=True)  # the dead may have none
    uniform = legal / legal.sum(-1, keepdims=True)
    log_probs = jnp.log((1 - epsilon) * jax.nn.one_hot(best, values.shape[-1]) + epsilon * uniform)
    action = jax.random.categorical(key, log_probs)
    return action, select(log_probs, action)


# ------------------------------------------------------------------------------------------- noise

# Deterministic policies explore by noise (Lillicrap et al. 2016, arXiv 1509.02971). A continuous
# action is the tanh of the network's output. The logits of discrete actions are made deterministic
# by the Gumbel noise: a sample is a function of the logits and the noise, through which the
# straight-through estimate of the gradient flows (Lowe et al. 2017, arXiv 1706.02275).


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
            action = squash(outputs, legal_actions)
            if not greedy:
                return *_explore(params, action, legal_actions, key), carry
        elif greedy:
            action = categorical(outputs, legal_actions).mode()
        else:
            logits = jnp.where(params.uniform > 0, 0.0, outputs)
            return *categorical(logits, legal_actions).sample_and_log_prob(key), carry
        return action, jnp.zeros(spec.num_agents), carry

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
    noisy, log_prob = ClippedGaussian(action, std, legal_actions).sample_and_log_prob(noise_key)
    noisy, log_prob = jnp.where(has_noise, noisy, action), jnp.where(has_noise, log_prob, 0.0)
    anywhere, of_anywhere = uniform_action(uniform_key, legal_actions)
    return jnp.where(is_uniform, anywhere, noisy), jnp.where(is_uniform, of_anywhere, log_prob)
