"""Networks whose size does not depend on the number of agents: they pool over the agents.

The global state of many environments grows with the number of agents N, and so does everything that
reads it. A pooled critic or mixer reads the agents' observations instead: a network that all share
encodes each, and attention combines the encodings. The same parameters fit any N, and the order of
the agents does not matter.
"""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from offmarl.networks.encoders import ViewEncoder, observation_encoder, view_encoder
from offmarl.networks.inputs import Inputs
from offmarl.networks.linear import Dense
from offmarl.types import EnvSpec, View

CriticKind = Literal["state", "pooled"]
"""What a critic of each agent sees beside the agent's own observation. "state": the global state,
whose size usually depends on the number of agents. "pooled": the observations of all agents, pooled
by attention; the same parameters fit any number of agents.
"""


class AttentionPool(nn.Module):
    """Combines any number of vectors to one: weighted means, by attention with learned queries.

    Each head has a query that does not depend on the input (Lee et al. 2019, "Set Transformer",
    arXiv 1810.00825), so the cost is linear in N. Queries are zero at first, so that all heads
    begin as plain means.

    Attributes
    ----------
    features
        Size of the result; a multiple of ``heads``.
    heads
        Number of queries.
    """

    features: int
    heads: int = 4

    @nn.compact
    def __call__(
        self, x: Float[Array, "*b N F"], mask: Bool[Array, "*b N"]
    ) -> Float[Array, "*b {self.features}"]:
        """Pool over N; vectors outside the mask are left out, except if the mask is empty."""
        hidden = nn.relu(Dense(self.features, kernel_init=nn.initializers.he_normal())(x))
        logits = Dense(self.heads, kernel_init=nn.initializers.zeros)(hidden)
        weights = jax.nn.softmax(jnp.where(mask[..., None], logits, -1e9), axis=-2)
        means = jnp.einsum("...nh,...nf->...hf", weights, hidden)
        return nn.relu(_HeadDense(self.features, name="Dense_2")(means))


class _HeadDense(nn.Module):
    """A dense layer whose outputs are divided among the heads; each head has an input of its own.

    Attention weights sum to one, so the layer of the mean is the mean of the layer's outputs, and
    takes one product for each head instead of one for each of the N vectors.
    """

    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "*b H F"]) -> Float[Array, "*b {self.features}"]:
        """Apply part h of the layer to vector h, and concatenate."""
        heads, size = x.shape[-2:]
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (size, self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        parts = jnp.einsum("...hf,fhg->...hg", x, kernel.reshape(size, heads, -1))
        return parts.reshape(*parts.shape[:-2], -1) + bias


class PooledEncoder(nn.Module):
    """Encodes what a critic of each agent sees: all agents' observations, pooled, and its own.

    Attributes
    ----------
    hidden
        Size of the pooled vector.
    observation
        Encodes observations; None for vectors.
    """

    hidden: int = 64
    observation: nn.Module | None = None

    @nn.compact
    def __call__(self, view: View) -> Inputs:
        """Encode a batch of any number of leading axes."""
        own = view.observation if self.observation is None else self.observation(view.observation)
        return Inputs(AttentionPool(self.hidden)(own, view.alive), own)


def critic_encoder(
    spec: EnvSpec, hidden: int = 64, kind: CriticKind = "state"
) -> ViewEncoder | PooledEncoder:
    """Return an encoder of what a critic of each agent sees."""
    if kind == "pooled":
        return PooledEncoder(hidden, observation_encoder(spec, hidden))
    return view_encoder(spec, hidden)
