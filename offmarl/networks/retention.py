"""Retention: layers over sequences of steps and agents, with a memory of constant size.

A token is what one agent contributes to one step. Head h of a layer keeps a matrix S, to which each
token adds the product of its key and its value, and which decays by κ from step to step:

    S_t = κ S_{t-1} + Σ_j k_{t,j}ᵀ v_{t,j},    y_{t,i} = q_{t,i} S_t

(Sun et al. 2023, arXiv 2307.08621; with several agents a step, Mahjoub et al. 2024, arXiv
2410.01706). The sum runs over all agents of the step; in a causal layer over the agents up to i, in
the order of the sequence. Windows are computed in parallel, as products of masked matrices, and
single steps by the recurrence. Both give the same numbers.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from offmarl.networks.linear import Dense

_CHUNK = 192
"""Largest number of tokens whose scores are computed at once. Longer windows are cut into chunks of
whole steps, because the scores take memory with the square of the number of tokens."""


def decays(heads: int, scale: float) -> Float[np.ndarray, "H"]:
    """Return κ of each head: ``scale`` times 1 - 1/32 to 1 - 1/512, in equal ratios.

    With a scale of 0, steps do not remember those before them.
    """
    return (scale * (1 - np.geomspace(1 / 32, 1 / 512, heads))).astype(np.float32)


class Retention(nn.Module):
    """Gated multi-head retention of tokens whose width, ``hidden``, is a multiple of ``heads``.

    An agent always reads all tokens of earlier steps. If ``causal``, it reads only its own token
    and those of the agents before it, among the tokens of its step. ``decay`` is that of `decays`.
    """

    hidden: int
    heads: int = 4
    causal: bool = False
    decay: float = 0.5

    def setup(self) -> None:  # noqa: D102
        self.decays = decays(self.heads, self.decay)
        self.query, self.key, self.value = (_linear(self.hidden) for _ in range(3))
        self.gate, self.output = (_linear(self.hidden) for _ in range(2))
        self.norm = nn.LayerNorm(reduction_axes=-1, feature_axes=(-2, -1))

    def __call__(
        self,
        memory: Float[Array, "*b H D D"],
        query: Float[Array, "*b T N hidden"],
        token: Float[Array, "*b T N hidden"],
        first: Bool[Array, "*b T"],
    ) -> tuple[Float[Array, "*b T N hidden"], Float[Array, "*b H D D"]]:
        """Apply the layer to all steps of a window; return outputs and the memory after it."""
        y, memory = retain(
            memory, *self._projections(query, token), first, self.decays, self.causal
        )
        return self._outputs(y, token), memory

    def step(
        self,
        memory: Float[Array, "*b H D D"],
        query: Float[Array, "*b N hidden"],
        token: Float[Array, "*b N hidden"],
    ) -> tuple[Float[Array, "*b N hidden"], Float[Array, "*b H D D"]]:
        """Add the tokens of one or several agents of the current step, then read for them.

        The memory must have decayed since the step before: see `decayed`.
        """
        q, k, v = self._projections(query, token)
        memory = memory + jnp.einsum("...nhd,...nhe->...hde", k, v)
        return self._outputs(jnp.einsum("...nhd,...hde->...nhe", q, memory), token), memory

    def decayed(self, memory: Float[Array, "*b H D D"]) -> Float[Array, "*b H D D"]:
        """Return the memory at the beginning of the next step."""
        return memory * self.decays[:, None, None]

    def _projections(self, query: Array, token: Array) -> tuple[Array, Array, Array]:
        def by_head(x: Array) -> Float[Array, "*b N H D"]:
            return x.reshape(*x.shape[:-1], self.heads, -1)

        return by_head(self.query(query)), by_head(self.key(token)), by_head(self.value(token))

    def _outputs(self, y: Float[Array, "*b N H D"], token: Array) -> Float[Array, "*b N hidden"]:
        normed = self.norm(y).reshape(token.shape)
        outputs: Array = self.output(nn.swish(self.gate(token)) * normed)
        return outputs


def retain(
    memory: Float[Array, "*b H D D"],
    q: Float[Array, "*b T N H D"],
    k: Float[Array, "*b T N H D"],
    v: Float[Array, "*b T N H D"],
    first: Bool[Array, "*b T"],
    decay: Float[np.ndarray, "H"],
    causal: bool,
) -> tuple[Float[Array, "*b T N H D"], Float[Array, "*b H D D"]]:
    """Return what all agents read in a window, and the memory after it."""
    steps, agents = q.shape[-4:-2]
    most = max(_CHUNK // agents, 1)
    size = max(n for n in range(1, min(steps, most) + 1) if steps % n == 0)
    if size == steps:
        return _retain_chunk(memory, q, k, v, first, decay, causal)

    def split(x: Array, axis: int) -> Array:
        axis += x.ndim
        x = x.reshape(*x.shape[:axis], steps // size, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    def chunk(memory: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, first = x
        y, memory = _retain_chunk(memory, q, k, v, first, decay, causal)
        return memory, y

    xs = (*(split(x, -4) for x in (q, k, v)), split(first, -1))
    memory, y = jax.lax.scan(chunk, memory, xs)
    return jnp.moveaxis(y, 0, -5).reshape(q.shape), memory


def _retain_chunk(
    memory: Array,
    q: Array,
    k: Array,
    v: Array,
    first: Array,
    decay: Float[np.ndarray, "H"],
    causal: bool,
) -> tuple[Array, Array]:
    steps, agents = q.shape[-4:-2]
    age = np.arange(steps)[:, None] - np.arange(steps)
    episode = jnp.cumsum(first, axis=-1)[..., None, :]  # an axis for heads
    same = episode[..., :, None] == episode[..., None, :]
    # Decay of each step's tokens until each step, and of the memory before the window.
    token_decay = jnp.where(same & (age >= 0), decay[:, None, None] ** age.clip(0), 0.0)
    memory_decay = jnp.where(episode == 0, decay[:, None] ** np.arange(1, steps + 1), 0.0)

    weight = token_decay[..., :, None, :, None]
    if causal:
        later = np.triu(np.ones((agents, agents), bool), 1)
        weight = jnp.where((age == 0)[:, None, :, None] & later[:, None, :], 0.0, weight)
    scores = jnp.einsum("...tnhd,...smhd->...htnsm", q, k) * weight
    y = jnp.einsum("...htnsm,...smhe->...tnhe", scores, v)
    y += jnp.einsum("...tnhd,...hde,...ht->...tnhe", q, memory, memory_decay)
    added = jnp.einsum("...tnhd,...tnhe,...ht->...hde", k, v, token_decay[..., -1, :])
    return y, memory * memory_decay[..., -1, None, None] + added


class GatedLayer(nn.Module):
    """A hidden layer with gates and one width, (swish(x W) ∘ x V) U (Shazeer 2020, 2002.05202)."""

    hidden: int

    @nn.compact
    def __call__(self, x: Float[Array, "*b hidden"]) -> Float[Array, "*b hidden"]:
        """Apply the layer to a batch of any number of leading axes."""
        gated = nn.swish(_linear(self.hidden)(x)) * _linear(self.hidden)(x)
        outputs: Array = _linear(self.hidden)(gated)
        return outputs


def _linear(features: int) -> Dense:
    return Dense(features, use_bias=False)
