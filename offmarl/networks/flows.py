"""Flow policies: noise becomes an action along a learned velocity field, or in one step.

A flow that is trained by flow matching transports Gaussian noise to the data's joint actions
(Lipman et al. 2023, arXiv 2210.02747; Liu et al. 2023, arXiv 2209.03003). It can represent any
correlation between the agents. A one-step policy maps each agent's own observation and noise to its
action.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from offmarl.distributions import categorical
from offmarl.networks.encoders import Encoder, blank_view, observation_encoder
from offmarl.networks.linear import SMALL
from offmarl.networks.policies import AgentNetwork, PolicyConfig, make_network
from offmarl.networks.torsos import FeedForward
from offmarl.types import ArrayTree, Continuous, EnvSpec, Policy


class _WithNoise(nn.Module):
    """Each agent's observation, with its noise."""

    encoder: Encoder | None = None

    def __call__(self, inputs: tuple[ArrayTree, Float[Array, "*b N A"]]) -> Float[Array, "*b N _"]:
        observation, noise = inputs
        x = observation if self.encoder is None else self.encoder(observation)
        return jnp.concatenate([x, noise], axis=-1)


class JointFlow(nn.Module):
    """The velocity v(o, x, t) of the joint action x at time t, given all observations o.

    Attributes
    ----------
    num_agents, action_size
        N and A.
    hidden, layers
        Width and number of the hidden layers.
    encoder
        Encodes observations that are not vectors; None for vectors.
    """

    num_agents: int
    action_size: int
    hidden: int = 512
    layers: int = 4
    encoder: Encoder | None = None

    @nn.compact
    def __call__(
        self,
        observation: ArrayTree,
        alive: Bool[Array, "*b N"],
        action: Float[Array, "*b N A"],
        time: Float[Array, "*b"],
    ) -> Float[Array, "*b N A"]:
        """Return the velocities.

        Parameters
        ----------
        observation, alive
            The observations, and the agents that still act: nothing depends on the others.
        action
            The joint action on its way, at first noise.
        time
            From 0, where it is noise, to 1.
        """
        x = observation if self.encoder is None else self.encoder(observation)
        x = jnp.where(alive[..., None], jnp.concatenate([x, action], axis=-1), 0.0)
        inputs = jnp.concatenate([x.reshape(*time.shape, -1), time[..., None]], axis=-1)
        outputs = self.num_agents * self.action_size
        torso = FeedForward(outputs, self.hidden, agent_id="none", layers=self.layers)
        velocity, _ = torso((), inputs[..., None, :])  # as of one agent: the joint action
        return velocity.reshape(action.shape)


def integrate(
    velocity: Callable[[Float[Array, "*b N A"], Float[Array, "*b"]], Float[Array, "*b N A"]],
    noise: Float[Array, "*b N A"],
    steps: int,
) -> Float[Array, "*b N A"]:
    """Return where the flow takes noise from time 0 to 1, in steps of Euler's method.

    Parameters
    ----------
    velocity
        Function of the actions on their way, and of the time.
    noise
        Where the flow begins.
    steps
        Number of steps.
    """

    def step(action: Array, number: Array) -> tuple[Array, None]:
        time = jnp.broadcast_to(number / steps, action.shape[:-2])
        return action + velocity(action, time) / steps, None

    return jax.lax.scan(step, noise, jnp.arange(steps))[0]


# -------------------------------------------------------------------------------------- policies


def one_step_network(config: PolicyConfig, spec: EnvSpec) -> AgentNetwork:
    """Build the network of one-step policies.

    Its input is the pair of observations and noise ``(*b, N, A)``. Its outputs are continuous
    actions before they are clipped, or the logits of discrete ones.
    """
    encoder = _WithNoise(observation_encoder(spec, config.hidden))
    return make_network(config, spec, spec.action_size, encoder, output_scale=SMALL)


def init_one_step(network: AgentNetwork, spec: EnvSpec, key: PRNGKeyArray) -> ArrayTree:
    """Draw the parameters of one-step policies."""
    noise = jnp.zeros((spec.num_agents, spec.action_size))
    inputs = blank_view(spec).observation, noise
    return network.init(key, network.initial_carry(spec.num_agents), inputs)


def chosen_action(
    spec: EnvSpec, outputs: Float[Array, "*b N A"], legal_actions: Bool[Array, "*b N A"]
) -> Array:
    """Return the action of a flow's or a one-step policy's outputs.

    The likeliest legal discrete action; a continuous action, clipped to [-1, 1], with zeros in the
    entries that an agent lacks.
    """
    if isinstance(spec.action, Continuous):
        return jnp.where(legal_actions, jnp.clip(outputs, -1.0, 1.0), 0.0)
    return categorical(outputs, legal_actions).mode()


def make_one_step_policy(network: AgentNetwork, spec: EnvSpec, greedy: bool = False) -> Policy:
    """Build the policy of a one-step network.

    Parameters
    ----------
    network, spec
        The network, and the spec of the environment that it acts in.
    greedy
        Act with zeros in place of noise.

    Returns
    -------
    Policy
        Its likelihood is unknown, since different noise may give the same action: it has no
        ``log_prob``, and ``act`` returns NaN; 0 if it is greedy.
    """

    def act(
        params: ArrayTree,
        carry: ArrayTree,
        observation: ArrayTree,
        legal_actions: Bool[Array, "N A"],
        key: PRNGKeyArray,
    ) -> tuple[Array, Float[Array, "N"], ArrayTree]:
        shape = (spec.num_agents, spec.action_size)
        noise = jnp.zeros(shape) if greedy else jax.random.normal(key, shape)
        outputs, carry = network.apply(params, carry, (observation, noise))
        action = chosen_action(spec, outputs, legal_actions)
        return action, jnp.full(spec.num_agents, 0.0 if greedy else jnp.nan), carry

    return Policy(
        initial_carry=lambda: network.initial_carry(spec.num_agents),
        act=act,
        draws=lambda _params: not greedy,
    )
