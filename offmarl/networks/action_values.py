"""Critics that value the actions of an agent, or of all agents together.

A joint critic sees the global state and the actions of all agents (Lowe et al. 2017, arXiv
1706.02275); others see the action of their agent alone, and its observation or the state. All give
a value for each agent, so that each agent can learn from its own reward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.networks.encoders import (
    Encoder,
    JointEncoder,
    blank_view,
    central,
    observation_encoder,
    state_encoder,
)
from offmarl.networks.linear import SMALL, AgentId, Dense, InputLayer, Inputs, orthogonal
from offmarl.types import ArrayTree, Continuous, EnvSpec, View

CriticInput = Literal["observation", "state", "joint"]
"""What the critic of an agent sees beside the agent's own observation and action. "observation":
nothing. "state": the global state. "joint": the global state and the actions of all agents."""


class ActionValue(nn.Module):
    """Values of some agents, Linear - ReLU - Linear - ReLU - Linear.

    The state and the actions of all agents pass the first layer once, not once for each agent.

    Attributes
    ----------
    outputs
        Values per agent: 1, or one for each discrete action of the agent.
    hidden
        Width of the hidden layers.
    sees
        What the input includes.
    agent_id
        How agents are distinguished; see `AgentId`.
    observation, state
        Encoders of what is not a vector; None for vectors.
    normalised
        Whether the inputs of both ReLUs are normalised (Ba et al. 2016), which keeps values of
        actions that the data lack from growing (Ball et al. 2023, arXiv 2302.02948).
    """

    outputs: int = 1
    hidden: int = 64
    sees: CriticInput = "joint"
    agent_id: AgentId = "onehot"
    observation: Encoder | None = None
    state: Encoder | JointEncoder | None = None
    normalised: bool = False

    @nn.compact
    def __call__(
        self,
        view: View,
        action: Float[Array, "*#b N A"],
        own: Float[Array, "*#b R A"],
        agents: Int[Array, "R"],
    ) -> Float[Array, "*#b R outputs"]:
        """Return the values of ``R`` agents.

        The view and ``action`` may lack leading axes of ``own``, such as that of sampled actions.

        Parameters
        ----------
        view
            The view that the actions are taken in.
        action
            Actions of all agents; discrete ones are one-hot.
        own
            The action of each of the R agents, which in its own value takes the place of its action
            in ``action``; zeros if there is an output for each action.
        agents
            Indices of the R agents; all of them, unless there is no agent id.
        """
        wide = orthogonal(2**0.5)
        x = view.observation if self.observation is None else self.observation(view.observation)
        x = x[..., agents, :]
        if self.sees != "joint" and self.outputs == 1:
            lead = jnp.broadcast_shapes(x.shape[:-1], own.shape[:-1])
            x = jnp.concatenate(
                [jnp.broadcast_to(part, (*lead, part.shape[-1])) for part in (x, own)], -1
            )
        if self.sees == "observation":
            x = InputLayer(self.hidden, self.agent_id)(x)
        else:
            state = central(view) if self.state is None else self.state(central(view))
            x = InputLayer(self.hidden, self.agent_id)(Inputs(state, x))
        if self.sees == "joint":
            num_agents, num_actions = action.shape[-2:]
            kernel = self.param("actions", wide, (num_agents * num_actions, self.hidden))
            kernel = kernel.reshape(num_agents, num_actions, self.hidden)
            x = x + jnp.einsum("...na,nah->...h", action, kernel)[..., None, :]
            change = own - action[..., agents, :]
            x = x + jnp.einsum("...ra,rah->...rh", change, kernel[agents])
        x = Dense(self.hidden, kernel_init=wide)(self._activated(x))
        x = self._activated(x)
        return Dense(self.outputs, kernel_init=orthogonal(SMALL))(x)

    def _activated(self, x: Array) -> Array:
        return nn.relu(nn.LayerNorm()(x) if self.normalised else x)


@dataclass(frozen=True)
class Critics:
    """Several critics of the same kind, each with a value for every agent; see `make_critics`.

    Attributes
    ----------
    network
        The network of each critic.
    num_agents
        N.
    count
        K, the number of critics: 2 for the smaller of two estimates.
    share_parameters
        Whether the agents share the parameters of a critic, or each has its own.
    """

    network: ActionValue
    num_agents: int
    count: int = 1
    share_parameters: bool = True

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> tuple[ArrayTree, ...]:
        """Draw the parameters of all critics."""
        view, action = blank_view(spec), jnp.zeros((self.num_agents, spec.action_size))

        def draw(key: PRNGKeyArray) -> ArrayTree:
            agents = jnp.arange(self.num_agents if self.share_parameters else 1)
            return self.network.init(key, view, action, action[agents], agents)

        keys = jax.random.split(key, self.count)
        if self.share_parameters:
            return tuple(draw(key) for key in keys)
        # One after another, because `jax.vmap` makes orthogonal initialisation a batched QR
        # factorisation, which can deadlock on a CPU with few cores.
        return tuple(jax.lax.map(draw, jax.random.split(key, self.num_agents)) for key in keys)

    def values(
        self,
        params: Sequence[ArrayTree],
        view: View,
        action: Float[Array, "*#b N A"],
        own: Float[Array, "*#b N A"] | None = None,
    ) -> Float[Array, "K *#b N outputs"]:
        """Return the values of all critics whose parameters are given.

        Leading axes are broadcast: the actions may have an axis of samples in front.

        Parameters
        ----------
        params
            Parameters of some or all of the critics.
        view
            The view that the actions are taken in.
        action
            Actions of all agents, as `as_vectors` returns them.
        own
            Each agent's own action, in place of the one in ``action``, for its own value only. By
            default no action is replaced.
        """
        own = action if own is None else own
        return jnp.stack([self._values(critic, view, action, own) for critic in params])

    def _values(self, params: ArrayTree, view: View, action: Array, own: Array) -> Array:
        agents = jnp.arange(self.num_agents)
        if self.share_parameters:
            shared: Array = self.network.apply(params, view, action, own, agents)
            return shared

        def of_agent(params: ArrayTree, own: Array, agent: Array) -> Array:
            values: Any = self.network.apply(params, view, action, own[..., None, :], agent[None])
            return values[..., 0, :]

        return jax.vmap(of_agent, (0, -2, 0), -2)(params, own, agents)


def make_critics(
    spec: EnvSpec,
    *,
    outputs: int = 1,
    hidden: int = 64,
    count: int = 1,
    sees: CriticInput = "joint",
    share_parameters: bool = True,
    agent_id: AgentId = "onehot",
) -> Critics:
    """Build critics for an environment; see `ActionValue` and `Critics` for the arguments."""
    network = ActionValue(
        outputs,
        hidden,
        sees,
        agent_id if share_parameters else "none",
        observation_encoder(spec, hidden),
        None if sees == "observation" else state_encoder(spec, hidden),
    )
    return Critics(network, spec.num_agents, count, share_parameters)


def as_vectors(
    spec: EnvSpec, action: Array, legal_actions: Bool[Array, "*b N A"] | None = None
) -> Float[Array, "*b N A"]:
    """Return actions as critics take them: discrete ones are one-hot.

    With ``legal_actions``, entries of continuous actions that an agent lacks are 0, whatever the
    data hold there.
    """
    if isinstance(spec.action, Continuous):
        return action if legal_actions is None else jnp.where(legal_actions, action, 0.0)
    return jax.nn.one_hot(action, spec.num_actions)
