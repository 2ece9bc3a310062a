"""Causal transformers over the steps of each agent."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.networks.linear import AgentId, InputLayer
from offmarl.types import ArrayTree

_INIT = nn.initializers.lecun_normal()
"""Weights of a layer with n inputs have the standard deviation 1/sqrt(n) at first.

GPT-2's 0.02 is meant for layers of 768 inputs and more. Layers of 32 inputs then change their input
by a few percent only, and an action that depends on the return-to-go and an earlier observation
together, but on neither alone, is not learned for thousands of updates.
"""

_TOKEN_INIT = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
"""Weights are uniform within ±1/sqrt(n), PyTorch's default."""

_SMALL_INIT = nn.initializers.normal(0.02)
"""Weights of actions, times and logits: small, so that they matter only once they are learned."""

_LONGEST_PERIOD = 10_000
"""Steps of the slowest of the sines and cosines that tell the time."""


class Trajectory(NamedTuple):
    """The steps that a `DecisionTransformer` sees, T of them for N agents."""

    return_to_go: Float[Array, "*b T N"]
    observation: ArrayTree
    """``(*b, T, N, ...)``"""
    action: Int[Array, "*b T N"]
    time: Int[Array, "*b T"]
    """Steps of the episode before each."""
    episode: Int[Array, "*b T"]
    """A number for each episode; steps of different ones do not see each other."""


class CausalTransformer(nn.Module):
    """Blocks of self-attention and a hidden layer, each with a residual connection.

    Layers are normalised before each part, and after the last (Radford et al. 2019, "GPT-2"). The
    ``width`` of the tokens is a multiple of the number of attention heads.
    """

    width: int = 32
    blocks: int = 2
    heads: int = 2

    @nn.compact
    def __call__(
        self, tokens: Float[Array, "*b L width"], mask: Bool[Array, "*#b L L"]
    ) -> Float[Array, "*b L width"]:
        """Transform tokens; the mask says which of the tokens (second axis) each one sees."""
        x = tokens
        for _ in range(self.blocks):
            attention = nn.MultiHeadDotProductAttention(self.heads, kernel_init=_INIT)
            x += attention(nn.LayerNorm()(x), mask=mask[..., None, :, :])
            hidden = nn.gelu(nn.Dense(2 * self.width, kernel_init=_INIT)(nn.LayerNorm()(x)))
            x += nn.Dense(self.width, kernel_init=_INIT)(hidden)
        return nn.LayerNorm()(x)


class DecisionTransformer(nn.Module):
    """Predicts each agent's action from its own returns-to-go, observations and earlier actions.

    Each step is three tokens: return-to-go, observation and action, in this order. The prediction
    is that of the observation's token, which sees no later token (Chen et al. 2021, arXiv
    2106.01345). All agents share the network; they do not see each other.

    Attributes
    ----------
    num_actions
        A.
    width
        Size of the tokens, a multiple of ``heads``.
    blocks, heads
        Number of blocks, and of attention heads in each.
    agent_id
        How agents are distinguished; see `AgentId`.
    encoder
        Turns observations into vectors; None if they are.
    """

    num_actions: int
    width: int = 32
    blocks: int = 2
    heads: int = 2
    agent_id: AgentId = "onehot"
    encoder: nn.Module | None = None

    @nn.compact
    def __call__(self, trajectory: Trajectory) -> Float[Array, "*b T N A"]:
        """Return the logits of all actions in each step."""
        tokens = self._tokens(trajectory)
        *lead, steps, kinds, agents, width = tokens.shape
        rows = jnp.moveaxis(tokens, -2, -4).reshape(*lead, agents, steps * kinds, width)
        episode = jnp.repeat(trajectory.episode, kinds, axis=-1)
        mask = episode[..., :, None] == episode[..., None, :]
        mask &= jnp.tril(jnp.ones(mask.shape[-2:], bool))
        rows = CausalTransformer(width, self.blocks, self.heads)(rows, mask[..., None, :, :])
        logits = nn.Dense(self.num_actions, use_bias=False, kernel_init=_SMALL_INIT)
        return jnp.moveaxis(logits(rows[..., 1::3, :]), -3, -2)

    def _tokens(self, trajectory: Trajectory) -> Float[Array, "*b T 3 N width"]:
        x = trajectory.observation
        x = x if self.encoder is None else self.encoder(x)
        observation = InputLayer(self.width, self.agent_id, _TOKEN_INIT, name="observation")(x)
        to_go = nn.Dense(
            self.width, kernel_init=_TOKEN_INIT, bias_init=_token_bias, name="return_to_go"
        )
        small = _SMALL_INIT
        action = nn.Embed(self.num_actions, self.width, embedding_init=small, name="action")
        time = nn.Dense(self.width, kernel_init=small, name="time")
        kinds = to_go(trajectory.return_to_go[..., None]), observation, action(trajectory.action)
        tokens = nn.tanh(jnp.stack(kinds, axis=-3))
        return tokens + time(time_features(trajectory.time, self.width))[..., None, None, :]


def _token_bias(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """Return PyTorch's default biases of a layer with one input, so that thresholds differ."""
    return jax.random.uniform(key, shape, dtype, -1.0, 1.0)


def time_features(time: Int[Array, "*b"], size: int) -> Float[Array, "*b size"]:
    """Return sines and cosines of the time with periods from 2π steps to 10,000 times as many."""
    rates = _LONGEST_PERIOD ** -jnp.linspace(0.0, 1.0, size // 2)
    angles = time[..., None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
