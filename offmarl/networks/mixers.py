"""The monotonic mixing network of QMIX (Rashid et al. 2018, arXiv 1803.11485)."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from offmarl.networks.encoders import blank_view, central, state_encoder
from offmarl.types import ArrayTree, EnvSpec


class MixerWeights(NamedTuple):
    """The mixing function of one state; computed once, then applied to any number of joint values.

    ``w1`` and ``w2`` are not negative, so Q_tot does not decrease if an agent's value increases.
    """

    w1: Float[Array, "*b N embed"]
    b1: Float[Array, "*b embed"]
    w2: Float[Array, "*b embed"]
    b2: Float[Array, "*b"]


class Mixer(nn.Module):
    """The hypernetworks, which map a global state to the weights of its mixing function.

    Attributes
    ----------
    num_agents
        N.
    embed
        Width of the mixing function's hidden layer.
    hidden
        Width of the hypernetworks' hidden layer.
    encoder
        Turns states into vectors; None if they are. See `make_mixer`.
    """

    num_agents: int
    embed: int = 32
    hidden: int = 64
    encoder: nn.Module | None = None

    @nn.compact
    def __call__(self, state: ArrayTree) -> MixerWeights:
        """Compute the mixing functions of a batch of states, `offmarl.networks.central`."""
        if self.encoder is not None:
            state = self.encoder(state)

        def hypernet(hidden: int, outputs: int) -> Array:
            return nn.Dense(outputs)(nn.relu(nn.Dense(hidden)(state)))

        w1 = hypernet(self.hidden, self.num_agents * self.embed)
        return MixerWeights(
            w1=jnp.abs(w1.reshape(*state.shape[:-1], self.num_agents, self.embed)),
            b1=nn.Dense(self.embed)(state),
            w2=jnp.abs(hypernet(self.hidden, self.embed)),
            b2=hypernet(self.embed, 1).squeeze(-1),
        )


def make_mixer(spec: EnvSpec, embed: int = 32, hidden: int = 64) -> Mixer:
    """Build the mixer for the states of an environment, or for its observations if it has none."""
    return Mixer(spec.num_agents, embed, hidden, state_encoder(spec, hidden))


def init_mixer(mixer: Mixer, spec: EnvSpec, key: PRNGKeyArray) -> ArrayTree:
    """Draw a mixer's parameters."""
    return mixer.init(key, central(blank_view(spec)))


def mix(weights: MixerWeights, q: Float[Array, "*b N"]) -> Float[Array, "*b"]:
    """Return Q_tot of the agents' values under mixing functions with the same leading axes."""
    hidden = nn.elu(jnp.einsum("...n,...ne->...e", q, weights.w1) + weights.b1)
    return (hidden * weights.w2).sum(-1) + weights.b2


def mixing_coefficients(weights: MixerWeights) -> Float[Array, "*b N"]:
    """Return each agent's share of the mixing weights; the shares of a state sum to one.

    This is MAICQ's k_i(s) without the nonlinearity (Yang et al. 2021, arXiv 2106.03400, eq. 12).
    It weighs the actors' losses; no gradient flows through it.
    """
    share = jnp.einsum("...ne,...e->...n", weights.w1, weights.w2)
    return jax.lax.stop_gradient(share / (share.sum(-1, keepdims=True) + 1e-8))
