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
from offmarl.errors import ShapeError
from offmarl.networks.head import HEADS, SOFTMAX, Head
from offmarl.networks.torso import FeedForward, Recurrent
from offmarl.types import ArrayTree, Continuous, EnvSpec, Policy


@dataclass(frozen=True)
class PolicyConfig:
    """What a policy is, in plain data.

    Parameters
    ----------
    kind
        "random": uniform over legal actions, or over [-1, 1] where they are continuous; no
        parameters. "feedforward" or "recurrent": the torso of that name.
    head
        "softmax": outputs are logits of the action distribution. "q": they are action values.
        "gaussian": they are means of a clipped Gaussian over continuous actions, see
        `offmarl.gaussian`; its spread is learnt, and does not depend on what is observed.
    hidden
        Width of the hidden layers.
    agent_id
        Whether the network is told which agent it acts for.
    """

    kind: Literal["random", "feedforward", "recurrent"]
    head: Literal["softmax", "gaussian", "q"] = "softmax"
    hidden: int = 64
    agent_id: bool = True


class QParams(NamedTuple):
    """Parameters of a policy with a "q" head: it takes a uniform legal action now and then."""

    network: ArrayTree
    epsilon: Float[Array, ""]
    """Probability of exploring; an array, so that a schedule never recompiles."""


def stochastic_head(spec: EnvSpec) -> Literal["softmax", "gaussian"]:
    """Name the head of a stochastic policy for the kind of actions that there is."""
    return "gaussian" if isinstance(spec.action, Continuous) else "softmax"


def agent_network(config: PolicyConfig, spec: EnvSpec) -> FeedForward | Recurrent:
    """Build the network of a policy, with one output per action; its head tells what they mean.

    A "gaussian" head has two for each entry of the action: all means, then all spreads.

    Raises
    ------
    ShapeError
        The head is not for the environment's kind of actions.
    """
    gaussian = config.head == "gaussian"
    if gaussian and not isinstance(spec.action, Continuous):
        raise ShapeError(
            f"{spec.name or 'this dataset'} has {spec.action_size} discrete actions, and a "
            'gaussian head is for continuous ones: choose the head "softmax".'
        )
    torso = FeedForward if config.kind == "feedforward" else Recurrent
    return torso(
        outputs=spec.action_size if gaussian else spec.num_actions,
        hidden=config.hidden,
        agent_id=config.agent_id,
        output_scale=1.0 if config.head == "q" else 0.01,
        constants=spec.action_size if gaussian else 0,
    )


def agent_head(config: PolicyConfig) -> Head:
    """Return what the outputs of a policy's network mean; values are taken for logits."""
    return HEADS.get(config.head, SOFTMAX)


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
        Take the best action always: the mode of a stochastic head, no exploration of a q head.

    Returns
    -------
    Policy
        Its ``log_prob`` is that of the distribution acted with: 0 under a greedy policy.
    """
    if config.kind == "random":
        continuous = isinstance(spec.action, Continuous)
        return Policy(lambda: (), _act_anywhere if continuous else _act_uniformly)
    network, head = agent_network(config, spec), agent_head(config)

    def act(
        params: ArrayTree,
        carry: ArrayTree,
        observation: Float[Array, "N O"],
        legal_actions: Bool[Array, "N A"],
        key: PRNGKeyArray,
    ) -> tuple[Array, Float[Array, "N"], ArrayTree]:
        weights = params.network if config.head == "q" else params
        outputs, carry = network.apply(weights, carry, observation)
        if greedy:
            action, log_prob = head.mode(outputs, legal_actions), jnp.zeros(len(observation))
        elif config.head == "q":
            action, log_prob = _epsilon_greedy(outputs, legal_actions, params.epsilon, key)
        else:
            action = head.sample(outputs, legal_actions, key)
            log_prob = head.log_prob(outputs, legal_actions, action)
        return action, log_prob, carry

    return Policy(lambda: network.initial_carry(spec.num_agents), act)


def draws_actions(config: PolicyConfig, params: ArrayTree, greedy: bool) -> bool:
    """Whether the policy that `make_policy` builds draws its actions at random.

    Parameters
    ----------
    config, greedy
        As for `make_policy`.
    params
        Its parameters: a policy with a "q" head draws only where it explores.
    """
    if config.kind == "random":
        return True
    return not greedy and (config.head != "q" or bool(params.epsilon > 0))


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


def _act_anywhere(
    _params: ArrayTree,
    carry: ArrayTree,
    _observation: Float[Array, "N O"],
    legal_actions: Bool[Array, "N A"],
    key: PRNGKeyArray,
) -> tuple[Float[Array, "N A"], Float[Array, "N"], ArrayTree]:
    """Act uniformly over [-1, 1]; entries that an agent has not are 0, and do not count."""
    action = jax.random.uniform(key, legal_actions.shape, minval=-1.0, maxval=1.0)
    log_prob = -jnp.log(2.0) * legal_actions.sum(-1)
    return jnp.where(legal_actions, action, 0.0), log_prob, carry


def _epsilon_greedy(
    values: Float[Array, "N A"],
    legal_actions: Bool[Array, "N A"],
    epsilon: Float[Array, ""],
    key: PRNGKeyArray,
) -> tuple[Int[Array, "N"], Float[Array, "N"]]:
    best = categorical.mask_illegal(values, legal_actions).argmax(-1)
    uniform = legal_actions / legal_actions.sum(-1, keepdims=True)
    log_probs = jnp.log((1 - epsilon) * jax.nn.one_hot(best, values.shape[-1]) + epsilon * uniform)
    action = jax.random.categorical(key, log_probs)
    return action, categorical.select(log_probs, action)
