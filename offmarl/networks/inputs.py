"""What goes into the first layer of a network: a part for each agent, and a part for all."""

from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from offmarl.networks.linear import orthogonal, product

AgentId = Literal["onehot", "sinusoidal", "none"]
"""How a network that all agents share distinguishes them.

"onehot": by the agent's one-hot index. The network's size then depends on the number of agents N,
and its parameters fit this N only. "sinusoidal": by sines and cosines of the agent's place i / N in
the team, 16 numbers for any N. "none": not at all, so agents with equal observations act alike.
"""

_OCTAVES = 8
"""Frequencies of the sinusoidal features: 1, 2, 4 and so on up to 128 periods over the team."""


class Inputs(NamedTuple):
    """The input of a network for N agents: a vector for each, and one that all of them share.

    A network treats it as the concatenation of both for each agent, but does not compute it.
    """

    shared: Float[Array, "*b S"]
    own: Float[Array, "*b N O"]


class InputLayer(nn.Module):
    """A linear layer over the shared vector, each agent's own vector, and the agent's id.

    It computes what a dense layer computes on their concatenation, and has the same parameters. But
    the product with the shared vector is computed once, not once for each agent, and the one-hot
    ids select rows of the kernel.

    Attributes
    ----------
    features
        Number of outputs per agent.
    agent_id
        How agents are distinguished; see `AgentId`.
    kernel_init
        Initialises the kernel, ``(S + O + ids, features)``.
    """

    features: int
    agent_id: AgentId = "onehot"
    kernel_init: Any = orthogonal(2**0.5)

    @nn.compact
    def __call__(
        self, inputs: Inputs | Float[Array, "*b N O"]
    ) -> Float[Array, "*b N {self.features}"]:
        """Apply the layer to a batch of any number of leading axes."""
        shared, own = inputs if isinstance(inputs, Inputs) else (None, inputs)
        ids = id_features(self.agent_id, own.shape[-2])
        sizes = (0 if shared is None else shared.shape[-1], own.shape[-1], ids.shape[-1])
        kernel = self.param("kernel", self.kernel_init, (sum(sizes), self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        of_shared, of_own, of_id = jnp.split(kernel, np.cumsum(sizes)[:-1].tolist())
        constant = of_id if self.agent_id == "onehot" else jnp.asarray(ids) @ of_id
        outputs = product(own, of_own) + (constant + bias)
        return outputs if shared is None else outputs + product(shared, of_shared)[..., None, :]


def id_features(agent_id: AgentId, num_agents: int) -> Float[np.ndarray, "N F"]:
    """Return the numbers that distinguish N agents; F is 0 for "none"."""
    if agent_id == "onehot":
        return np.eye(num_agents, dtype=np.float32)
    if agent_id == "sinusoidal":
        turns = np.arange(num_agents)[:, None] / num_agents * 2.0 ** np.arange(_OCTAVES)
        angles = 2 * np.pi * turns
        return np.concatenate([np.sin(angles), np.cos(angles)], -1).astype(np.float32)
    return np.zeros((num_agents, 0), np.float32)
