"""Networks whose parameters the agents do not share."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from offmarl.networks.torsos import FeedForward, Recurrent
from offmarl.types import ArrayTree


@dataclass(frozen=True)
class Unshared:
    """A torso with parameters of its own for each agent; it is used as the torso is.

    Each agent's network computes only that agent's rows of the input. If the torso has an encoder,
    every network encodes the observations of all agents, so the cost grows with the square of their
    number.

    Attributes
    ----------
    torso
        The network of one agent. It needs no agent id.
    num_agents
        N.
    """

    torso: FeedForward | Recurrent
    num_agents: int

    def initial_carry(self, num_agents: int) -> ArrayTree:
        """Return the memory at the start of an episode."""
        return self.torso.initial_carry(num_agents)

    def init(self, key: PRNGKeyArray, carry: ArrayTree, observation: ArrayTree) -> ArrayTree:
        """Draw the parameters of all agents, which have a leading axis of agents.

        The agents follow one another: `jax.vmap` would turn orthogonal initialisation into a
        batched QR factorisation, which can deadlock on a CPU with few cores.
        """
        keys = jax.random.split(key, self.num_agents)
        return jax.lax.map(lambda key: self.torso.init(key, carry, observation), keys)

    def apply(self, params: ArrayTree, *inputs: Any, method: str | None = None) -> Any:
        """Apply the torso, or one of its methods, with each agent's parameters."""
        per_agent = inputs[:1] if method == "unroll" else inputs  # ``first`` has no agents

        def of_agent(params: ArrayTree, agent: Array) -> Any:
            select = self.torso.encoder is None
            rows = (
                jax.tree.map(lambda x: x[..., agent, None, :], per_agent) if select else per_agent
            )
            outputs = self.torso.apply(params, *rows, *inputs[len(rows) :], method=method)
            return jax.tree.map(lambda x: x[..., 0 if select else agent, :], outputs)

        return jax.vmap(of_agent, out_axes=-2)(params, jnp.arange(self.num_agents))
