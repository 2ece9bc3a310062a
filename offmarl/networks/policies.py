"""Policies with one network that all agents share.

A `PolicyConfig` describes the network in plain data. Programs with any other kind of policy build
an `offmarl.types.Policy` themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

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
)
from offmarl.errors import ShapeError
from offmarl.networks.encoders import blank_view, observation_encoder
from offmarl.networks.inputs import AgentId
from offmarl.networks.torsos import FeedForward, Recurrent
from offmarl.types import ArrayTree, Continuous, EnvSpec, Policy

_LEAST_STD = 0.01
"""Minimum standard deviation; it keeps the likelihood of noise-free data finite."""

ContinuousHead = Literal["gaussian", "tanh_gaussian"]

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
        deviation is learned, and does not depend on the observation.
    hidden
        Width of the hidden layers.
    agent_id
        How the network distinguishes the agents; see `AgentId`.
    """

    kind: Literal["random", "feedforward", "recurrent"]
    head: Literal["softmax", "gaussian", "tanh_gaussian", "q"] = "softmax"
    hidden: int = 64
    agent_id: AgentId = "onehot"


class QParams(NamedTuple):
    """Parameters of a policy with a "q" head, which explores by uniform legal actions."""

    network: ArrayTree
    epsilon: Float[Array, ""]
    """Probability of exploring; an array, so that a schedule never recompiles."""


def stochastic_head(
    spec: EnvSpec, continuous: ContinuousHead = "gaussian"
) -> Literal["softmax", "gaussian", "tanh_gaussian"]:
    """Return the head of a stochastic policy for the actions of an environment.

    Parameters
    ----------
    spec
        The environment's spec.
    continuous
        The head to return if actions are continuous.
    """
    return continuous if isinstance(spec.action, Continuous) else "softmax"


def agent_network(config: PolicyConfig, spec: EnvSpec) -> FeedForward | Recurrent:
    """Build the network of a policy, with one output per action.

    Observations that are not float32 vectors are encoded first: see `offmarl.networks.Encoder`.

    A Gaussian head has two outputs for each entry of the action: first all means, then all
    spreads, from which softplus makes the standard deviations.

    Raises
    ------
    ShapeError
        The head does not fit the environment's actions.
    """
    gaussian = config.head in ("gaussian", "tanh_gaussian")
    if gaussian and not isinstance(spec.action, Continuous):
        raise ShapeError(
            f"{spec.name or 'this dataset'} has {spec.action_size} discrete actions, and a "
            f'{config.head} head is for continuous ones: choose the head "softmax".'
        )
    torso = FeedForward if config.kind == "feedforward" else Recurrent
    return torso(
        outputs=spec.action_size if gaussian else spec.num_actions,
        hidden=config.hidden,
        agent_id=config.agent_id,
        output_scale=1.0 if config.head == "q" else 0.01,
        constants=spec.action_size if gaussian else 0,
        encoder=observation_encoder(spec, config.hidden),
    )


def agent_head(config: PolicyConfig) -> Head:
    """Return the head of a policy; action values are treated as logits."""
    return _HEADS.get(config.head, categorical)


def _clipped_gaussian(outputs: Array, legal_actions: Array) -> Distribution:
    return ClippedGaussian(*_mean_and_std(outputs), legal_actions)


def _tanh_gaussian(outputs: Array, legal_actions: Array) -> Distribution:
    return TanhGaussian(*_mean_and_std(outputs), legal_actions)


def _mean_and_std(outputs: Float[Array, "*b _"]) -> tuple[Array, Array]:
    mean, spread = jnp.split(outputs, 2, axis=-1)
    return mean, jax.nn.softplus(spread) + _LEAST_STD


_HEADS: dict[str, Head] = {"gaussian": _clipped_gaussian, "tanh_gaussian": _tanh_gaussian}


def init_policy(config: PolicyConfig, spec: EnvSpec, key: PRNGKeyArray) -> ArrayTree:
    """Draw a policy's parameters: `QParams`, network parameters, or an empty tuple."""
    if config.kind == "random":
        return ()
    params = _init(agent_network(config, spec), spec, key)
    return QParams(params, jnp.zeros(())) if config.head == "q" else params


@partial(jax.jit, static_argnums=(0, 1))
def _init(network: FeedForward | Recurrent, spec: EnvSpec, key: PRNGKeyArray) -> ArrayTree:
    """Draw a network's parameters; compiled once for equal networks and specs."""
    carry = network.initial_carry(spec.num_agents)
    return network.init(key, carry, blank_view(spec).observation)


def make_policy(config: PolicyConfig, spec: EnvSpec, greedy: bool = False) -> Policy:
    """Build the functions of a policy.

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
        continuous = isinstance(spec.action, Continuous)
        return Policy(lambda: (), _act_anywhere if continuous else _act_uniformly)
    network, head = agent_network(config, spec), agent_head(config)
    has_values = config.head == "q"

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


def _act_uniformly(
    _params: ArrayTree,
    carry: ArrayTree,
    _observation: ArrayTree,
    legal_actions: Bool[Array, "N A"],
    key: PRNGKeyArray,
) -> tuple[Int[Array, "N"], Float[Array, "N"], ArrayTree]:
    action, log_prob = categorical(
        jnp.zeros(legal_actions.shape), legal_actions
    ).sample_and_log_prob(key)
    return action, log_prob, carry


def _act_anywhere(
    _params: ArrayTree,
    carry: ArrayTree,
    _observation: ArrayTree,
    legal_actions: Bool[Array, "N A"],
    key: PRNGKeyArray,
) -> tuple[Float[Array, "N A"], Float[Array, "N"], ArrayTree]:
    """Act uniformly over [-1, 1]; entries that an agent does not have are 0 and do not count."""
    action = jax.random.uniform(key, legal_actions.shape, minval=-1.0, maxval=1.0)
    log_prob = -jnp.log(2.0) * legal_actions.sum(-1)
    return jnp.where(legal_actions, action, 0.0), log_prob, carry


def _epsilon_greedy(
    values: Float[Array, "N A"],
    legal_actions: Bool[Array, "N A"],
    epsilon: Float[Array, ""],
    key: PRNGKeyArray,
) -> tuple[Int[Array, "N"], Float[Array, "N"]]:
    best = mask_illegal(values, legal_actions).argmax(-1)
    uniform = legal_actions / legal_actions.sum(-1, keepdims=True)
    log_probs = jnp.log((1 - epsilon) * jax.nn.one_hot(best, values.shape[-1]) + epsilon * uniform)
    action = jax.random.categorical(key, log_probs)
    return action, select(log_probs, action)
