"""Mixers: a joint value of the agents' values that does not decrease if one of them increases.

`Mixer` is the network of QMIX (Rashid et al. 2018, arXiv 1803.11485), and `PooledMixer` one of its
kind for any number of agents. `LinearMixer` is a weighted sum (Wang et al. 2023, arXiv 2307.11620).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.distributions import select
from offmarl.networks.encoders import (
    CentralInput,
    PooledEncoder,
    blank_view,
    central,
    observation_encoder,
    state_encoder,
)
from offmarl.networks.linear import SMALL, Dense, InputLayer, orthogonal
from offmarl.networks.policies import AgentNetwork, PolicyConfig, agent_network, init_network
from offmarl.networks.torsos import unroll_batch
from offmarl.types import ArrayTree, EnvSpec, Sequence, View

INIT_SCALE = 0.001
"""Scale of the first weights of hypernetworks.

Q_tot changes by the gain Σ_e w1 w2 for each unit of an agent's value. With Flax's usual
initialisation the gain grows with the square of the state's size: about 3 for entries in [-1, 1],
and 30 in [-3, 3]. Errors of the agents' values grow by it with every target, the more so in the
final states that a time limit leaves, which are bootstrapped from and never learned, and Q_tot
leaves what the rewards allow. Weights that are almost zero at first let the gain grow only as far
as the data asks for. `benchmarks/ablation.py` compares this with other remedies.
"""


_TINY = 1e-30


class MixerWeights(NamedTuple):
    """The mixing function of one state; computed once, then applied to any number of joint values.

    ``w1`` and ``w2`` are not negative, so Q_tot does not decrease if an agent's value increases.
    """

    w1: Float[Array, "*b N embed"]
    b1: Float[Array, "*b embed"]
    w2: Float[Array, "*b embed"]
    b2: Float[Array, "*b"]


class LinearWeights(NamedTuple):
    """The weights of one state's `LinearMixer`; they are not negative."""

    w: Float[Array, "*b N"]
    b: Float[Array, "*b"]


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
    init_scale
        Scale of the orthogonal initialisation of all layers; see `INIT_SCALE`. None for Flax's own
        initialisation, with which Q_tot diverges in many environments.
    """

    num_agents: int
    embed: int = 32
    hidden: int = 64
    encoder: nn.Module | None = None
    init_scale: float | None = INIT_SCALE

    @nn.compact
    def __call__(self, state: ArrayTree) -> MixerWeights:
        """Compute the mixing functions of a batch of states, `offmarl.networks.central`."""
        if self.encoder is not None:
            state = self.encoder(state)

        dense = _dense(self.init_scale)

        def hypernet(hidden: int, outputs: int) -> Array:
            return dense(outputs)(nn.relu(dense(hidden)(state)))

        w1 = hypernet(self.hidden, self.num_agents * self.embed)
        return MixerWeights(
            w1=jnp.abs(w1.reshape(*state.shape[:-1], self.num_agents, self.embed)),
            b1=dense(self.embed)(state),
            w2=jnp.abs(hypernet(self.hidden, self.embed)),
            b2=hypernet(self.embed, 1).squeeze(-1),
        )


class PooledMixer(nn.Module):
    """A mixer of any number of agents: a hypernetwork gives each agent its row of weights.

    The mixing function is that of QMIX, with the mean over the agents in place of the sum, so that
    Q_tot has the same scale for any N. An agent's weights depend on its own observation and on the
    pooled observations of all: if the agents change places, Q_tot stays the same. Attributes are
    those of `Mixer`; ``observation`` encodes observations that are not vectors.
    """

    embed: int = 32
    hidden: int = 64
    observation: nn.Module | None = None
    init_scale: float | None = INIT_SCALE

    @nn.compact
    def __call__(self, view: View) -> MixerWeights:
        """Compute the mixing functions of a batch of views."""
        inputs = PooledEncoder(self.hidden, self.observation)(view)
        dense = _dense(self.init_scale)

        def hypernet(outputs: int) -> Array:
            return dense(outputs)(nn.relu(dense(self.hidden)(inputs.shared)))

        rows = nn.relu(InputLayer(self.hidden, "none", name="row_hidden")(inputs))
        rows = dense(self.embed, name="row")(rows)
        return MixerWeights(
            w1=jnp.abs(rows) / rows.shape[-2],
            b1=dense(self.embed, name="b1")(inputs.shared),
            w2=jnp.abs(hypernet(self.embed)),
            b2=hypernet(1).squeeze(-1),
        )


class LinearMixer(nn.Module):
    """Maps a global state to a weight for each agent and a constant, by one hidden layer.

    Attributes
    ----------
    num_agents
        N.
    hidden
        Width of the hidden layer.
    encoder
        Turns states into vectors; None if they are. See `make_linear_mixer`.
    """

    num_agents: int
    hidden: int = 64
    encoder: nn.Module | None = None

    @nn.compact
    def __call__(self, state: ArrayTree) -> LinearWeights:
        """Compute the weights of a batch of states, `offmarl.networks.central`."""
        state = state if self.encoder is None else self.encoder(state)
        x = nn.relu(Dense(self.hidden, name="hidden_layer")(state))
        weights = Dense(self.num_agents, name="weights")(x)
        constant = Dense(1, kernel_init=orthogonal(SMALL), name="constant")(x)
        return LinearWeights(jnp.abs(weights), constant.squeeze(-1))


def _dense(scale: float | None) -> Callable[..., Dense]:
    """Return a linear layer whose weights are orthogonal and of some scale at first."""
    if scale is None:
        return Dense
    return partial(Dense, kernel_init=orthogonal(scale))


def make_mixer(
    spec: EnvSpec, embed: int = 32, hidden: int = 64, kind: CentralInput = "state"
) -> Mixer | PooledMixer:
    """Build the mixer of an environment.

    A mixer of the kind "state" sees the global state, or all observations if there is none.
    """
    if kind == "pooled":
        return PooledMixer(embed, hidden, observation_encoder(spec, hidden))
    return Mixer(spec.num_agents, embed, hidden, state_encoder(spec, hidden))


def make_linear_mixer(spec: EnvSpec, hidden: int = 64) -> LinearMixer:
    """Build the linear mixer of an environment; it sees what a mixer of the kind "state" sees."""
    return LinearMixer(spec.num_agents, hidden, state_encoder(spec, hidden))


def init_mixer(
    mixer: Mixer | PooledMixer | LinearMixer, spec: EnvSpec, key: PRNGKeyArray
) -> ArrayTree:
    """Draw a mixer's parameters."""
    return mixer.init(key, _seen(mixer, blank_view(spec)))


def mixing_weights(mixer: Any, params: ArrayTree, view: View) -> Any:
    """Return the mixing functions of views with any number of leading axes.

    ``mixer`` comes from `make_mixer`, or is a module that takes what `central` returns. The result
    is `MixerWeights`; `LinearWeights` of a mixer from `make_linear_mixer`.
    """
    return mixer.apply(params, _seen(mixer, view))


def _seen(mixer: Any, view: View) -> ArrayTree:
    """Return the part of a view that a mixer sees."""
    return view if isinstance(mixer, PooledMixer) else central(view)


def mix(weights: MixerWeights, q: Float[Array, "*b N"]) -> Float[Array, "*b"]:
    """Return Q_tot of the agents' values under mixing functions with the same leading axes."""
    hidden = nn.elu(jnp.einsum("...n,...ne->...e", q, weights.w1) + weights.b1)
    return (hidden * weights.w2).sum(-1) + weights.b2


def mix_each(weights: MixerWeights, q: Float[Array, "*b N K"]) -> Float[Array, "*b K"]:
    """Return Q_tot of K joint actions under each mixing function.

    The result is that of `mix` for each of them. With the joint actions side by side, both layers
    and their gradients are products of matrices, which on a CPU are faster than `mix` under
    `jax.vmap`.
    """
    hidden = nn.elu(jnp.einsum("...nk,...ne->...ke", q, weights.w1) + weights.b1[..., None, :])
    return jnp.einsum("...ke,...e->...k", hidden, weights.w2) + weights.b2[..., None]


class MixedParams(NamedTuple):
    """Parameters of the agents' action values, and of the mixer that makes Q_tot of them."""

    agent: ArrayTree
    mixer: ArrayTree


AllValues = tuple[Float[Array, "B T N A"], MixerWeights]
"""The agents' values of all actions, and the functions that mix them."""


class MixedValues(NamedTuple):
    """The agents' network of action values, and the mixer that makes Q_tot of them."""

    agent: AgentNetwork
    mixer: Mixer | PooledMixer

    @classmethod
    def make(cls, config: PolicyConfig, spec: EnvSpec, mixer: Mixer | PooledMixer) -> "MixedValues":
        """Build the agents' network beside a mixer."""
        # The mixer begins near 0. Beside agents that do, too, both would hardly learn at first.
        return cls(agent_network(config, spec, output_scale=1.0), mixer)

    def init(self, spec: EnvSpec, agent_key: PRNGKeyArray, mixer_key: PRNGKeyArray) -> MixedParams:
        """Draw the parameters."""
        agent = init_network(self.agent, spec, agent_key)
        return MixedParams(agent, init_mixer(self.mixer, spec, mixer_key))

    def of_all_actions(self, params: MixedParams, batch: Sequence) -> tuple[AllValues, AllValues]:
        """Return Q_i of all actions and the mixing functions, before the steps and after them."""
        q = unroll_batch(self.agent, params.agent, batch.view.observation, batch.first)
        slots = q, mixing_weights(self.mixer, params.mixer, batch.view)
        return jax.tree.map(lambda x: x[:, :-1], slots), jax.tree.map(lambda x: x[:, 1:], slots)

    def of_joint_actions(
        self,
        params: MixedParams,
        view: View,
        first: Bool[Array, "B T"],
        action: Int[Array, "B T N"],
    ) -> Float[Array, "B T 1"]:
        """Return Q_tot of the actions taken in windows; dead agents add nothing."""
        q = select(unroll_batch(self.agent, params.agent, view.observation, first), action)
        weights = mixing_weights(self.mixer, params.mixer, view)
        return mix(weights, q * view.alive)[..., None]


def mix_counterfactuals(
    weights: MixerWeights, q_taken: Float[Array, "*b N"], q: Float[Array, "*b N A"]
) -> Float[Array, "*b N A"]:
    """Return Q_tot with the action of one agent at a time replaced by each of its actions.

    Parameters
    ----------
    weights
        The mixing functions.
    q_taken
        The agents' values of the actions taken, which the other agents keep.
    q
        The agents' values of all actions.

    Returns
    -------
    Q_tot(s, a_i, a_-i) for each agent i and each of its actions a_i.
    """
    preactivation = jnp.einsum("...n,...ne->...e", q_taken, weights.w1) + weights.b1
    change = (q - q_taken[..., None])[..., None] * weights.w1[..., None, :]
    hidden = nn.elu(preactivation[..., None, None, :] + change)
    return jnp.einsum("...nae,...e->...na", hidden, weights.w2) + weights.b2[..., None, None]


def mix_linearly(weights: LinearWeights, values: Float[Array, "*b N"]) -> Float[Array, "*b"]:
    """Return the weighted sum of the agents' values, plus the constant."""
    return (weights.w * values).sum(-1) + weights.b


def mixing_coefficients(weights: MixerWeights) -> Float[Array, "*b N"]:
    """Return each agent's share of the mixing weights; the shares of a state sum to one.

    This is MAICQ's k_i(s) without the nonlinearity (Yang et al. 2021, arXiv 2106.03400, eq. 12).
    It weighs the actors' losses; no gradient flows through it.
    """
    # Weights may be tiny at first: each factor is scaled by its largest entry before the product.
    w1 = weights.w1 / jnp.maximum(weights.w1.max((-2, -1), keepdims=True), _TINY)
    w2 = weights.w2 / jnp.maximum(weights.w2.max(-1, keepdims=True), _TINY)
    share = jnp.einsum("...ne,...e->...n", w1, w2)
    return jax.lax.stop_gradient(share / jnp.maximum(share.sum(-1, keepdims=True), _TINY))
