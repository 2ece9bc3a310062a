"""Policies described by data, so that a run on disk can be acted with by anyone.

A `PolicyConfig` says what the network is; parameters say the rest. Whatever trained them, a policy
is rebuilt with `make_policy` alone.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl import categorical
from offmarl.networks.torso import FeedForward, Recurrent
from offmarl.types import ArrayTree, EnvSpec, Policy


@dataclass(frozen=True)
class PolicyConfig:
    """What a policy is, in plain data.

    Parameters
    ----------
    kind
        "random": uniform over legal actions, no parameters. "feedforward" or "recurrent": the
        torso of that name.
    head
        "softmax": outputs are logits of the action distribution. "q": they are action values.
    hidden
        Width of the hidden layers.
    agent_id
        Whether the network is told which agent it acts for.
    """

    kind: Literal["random", "feedforward", "recurrent"]
    head: Literal["softmax", "q"] = "softmax"
    hidden: int = 64
    agent_id: bool = True


class QParams(NamedTuple):
    """Parameters of a policy with a "q" head: it takes a uniform legal action now and then."""

    network: ArrayTree
    epsilon: Float[Array, ""]
    """Probability of exploring; an array, so that a schedule never recompiles."""


def agent_network(config: PolicyConfig, spec: EnvSpec) -> FeedForward | Recurrent:
    """Build the network of a policy, with one output per action."""
    torso = FeedForward if config.kind == "feedforward" else Recurrent
    return torso(
        outputs=spec.num_actions,
        hidden=config.hidden,
        agent_id=config.agent_id,
        output_scale=0.01 if config.head == "softmax" else 1.0,
    )


def init_policy(config: PolicyConfig, spec: EnvSpec, key: PRNGKeyArray) -> ArrayTree:
    """Draw a policy's parameters: `QParams`, network parameters, or nothing at all."""
    if config.kind == "random":
        return ()
    network = agent_network(config, spec)
    carry = network.initial_carry(spec.num_agents)
    params = network.init(key, carry, jnp.zeros((spec.num_agents, spec.observation_size)))
    return QParams(params, jnp.zeros(())) if config.head == "q" else params


def make_policy(config: PolicyConfig, spec: EnvSpec, greedy: bool = False) -> Policy:
    """Build the functions that act.

    Parameters
    ----------
    config, spec
        The network, and the environment it acts in.
    greedy
        Take the best action always: the mode of a softmax head, no exploration of a q head.

    Returns
    -------
    Policy
        Its ``log_prob`` is that of the distribution acted with: 0 under a greedy policy.
    """
    if config.kind == "random":
        return Policy(lambda: (), _act_uniformly)
    network = agent_network(config, spec)

    def act(
        params: ArrayTree,
        carry: ArrayTree,
        observation: Float[Array, "N O"],
        legal_actions: Bool[Array, "N A"],
        key: PRNGKeyArray,
    ) -> tuple[Int[Array, "N"], Float[Array, "N"], ArrayTree]:
        weights = params.network if config.head == "q" else params
        outputs, carry = network.apply(weights, carry, observation)
        scores = categorical.mask_illegal(outputs, legal_actions)
        if greedy:
            action = scores.argmax(-1)
            return action, jnp.zeros(action.shape), carry
        if config.head == "q":
            action, log_prob = _epsilon_greedy(scores, legal_actions, params.epsilon, key)
        else:
            action = jax.random.categorical(key, scores)
            log_prob = categorical.log_prob(scores, action)
        return action, log_prob, carry

    return Policy(lambda: network.initial_carry(spec.num_agents), act)


def _act_uniformly(
    _params: ArrayTree,
    carry: ArrayTree,
    _observation: Float[Array, "N O"],
    legal_actions: Bool[Array, "N A"],
    key: PRNGKeyArray,
) -> tuple[Int[Array, "N"], Float[Array, "N"], ArrayTree]:
    logits = categorical.mask_illegal(jnp.zeros(legal_actions.shape), legal_actions)
    action = jax.random.categorical(key, logits)
    return action, categorical.log_prob(logits, action), carry


def _epsilon_greedy(
    values: Float[Array, "N A"],
    legal_actions: Bool[Array, "N A"],
    epsilon: Float[Array, ""],
    key: PRNGKeyArray,
) -> tuple[Int[Array, "N"], Float[Array, "N"]]:
    best = jax.nn.one_hot(values.argmax(-1), values.shape[-1])
    uniform = legal_actions / legal_actions.sum(-1, keepdims=True)
    log_probs = jnp.log((1 - epsilon) * best + epsilon * uniform)
    action = jax.random.categorical(key, log_probs)
    return action, categorical.select(log_probs, action)
