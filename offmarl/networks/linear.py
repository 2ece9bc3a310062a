"""Linear layers over any number of leading axes, and what goes into the first one of a network.

The layers are computed as products of two matrices. XLA on a CPU computes the gradient of a kernel
as a product over all leading axes. If there are several, it first writes transposed copies of its
operands, which takes longer than the product.

The input of a network has a part for each agent, and a part for all.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray


def product(
    x: Float[Array, "*b inputs"], kernel: Float[Array, "inputs outputs"]
) -> Float[Array, "*b outputs"]:
    """Return ``x @ kernel``, with the leading axes of ``x`` joined to one."""
    flat: Array = x.reshape(-1, x.shape[-1]) @ kernel
    return flat.reshape(*x.shape[:-1], kernel.shape[-1])


SMALL = 0.01
"""Scale of a last layer's first weights, of policies and of values that bootstrap.

Policies begin near the uniform one. Values begin near 0, as in DDPG (Lillicrap et al. 2016,
arXiv 1509.02971, section 7): where episodes are truncated, targets repeat what the first networks
make of a state, and this shrinks only by γ with each copy to the target networks. So for thousands
of updates policies would follow differences that no reward has made.
"""


@cache
def orthogonal(scale: float = 1.0) -> Callable[..., Float[Array, "..."]]:
    """Return an initialiser of kernels with orthogonal columns, or rows if these are fewer.

    It draws what Flax's initialiser draws. Under `jax.vmap`, however, the matrices follow one
    another: jaxlib 0.10 divides a batched QR factorisation among the threads that XLA computes
    with, and waits for them in one of these threads, so that two such factorisations in one program
    can wait for each other for ever on a CPU with two cores.

    Flax evaluates an initialiser wherever its parameter is used, to check the shape. It is the same
    function for the same scale, so that JAX traces it once for each shape.
    """
    draw = nn.initializers.orthogonal(scale)
    one_by_one: Any = jax.custom_batching.sequential_vmap

    @partial(jax.jit, static_argnums=(1, 2))
    def init(
        key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any = jnp.float32
    ) -> Float[Array, "..."]:
        kernel: Array = one_by_one(lambda key: draw(key, shape, dtype))(key)
        return kernel

    return init


class Dense(nn.Module):
    """A layer with the parameters of Flax's dense layer."""

    features: int
    kernel_init: Any = nn.initializers.lecun_normal()
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*b inputs"]) -> Float[Array, "*b {self.features}"]:
        """Apply the layer."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        outputs = product(x, kernel)
        if not self.use_bias:
            return outputs
        return outputs + self.param("bias", nn.initializers.zeros, (self.features,))


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
        if sizes[-1]:  # without ids, the product of empty matrices would stop ONNX Runtime
            bias += of_id if self.agent_id == "onehot" else ids @ of_id
        outputs = product(own, of_own) + bias
        return outputs if shared is None else outputs + product(shared, of_shared)[..., None, :]


def id_features(agent_id: AgentId, num_agents: int) -> Float[Array, "N F"]:
    """Return the numbers that distinguish N agents; F is 0 for "none"."""
    if agent_id == "onehot":
        return jnp.eye(num_agents)  # traced where shapes alone are asked for
    if agent_id == "sinusoidal":
        turns = np.arange(num_agents)[:, None] / num_agents * 2.0 ** np.arange(_OCTAVES)
        angles = 2 * np.pi * turns
        return jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], -1), jnp.float32)
    return jnp.zeros((num_agents, 0))
