"""Encoders: they turn observations and states of any shape into vectors.

Torsos and mixers work on vectors. Data whose `EnvSpec` describes other arrays is encoded first: by
convolutions for images, by one encoder for each leaf for dictionaries. An encoder of float32
vectors has no parameters and returns its input.
"""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from offmarl.networks.linear import Dense, Inputs, product
from offmarl.types import ArraySpec, ArrayTree, EnvSpec, View, empty_view, flatten_tree

Leaves = tuple[tuple[str, ArraySpec], ...]
"""The arrays of an observation or a state: path and spec of each, in order. Hashable."""

_PICTURE = 32
"""Pixels along both sides from which an image is taken for a picture, and not for a small grid."""

_GRID_LAYERS = ((32, 3, 1), (32, 2, 2))
"""Features, kernel size and stride of the convolutions of a small grid. Strides divide sizes."""

_PICTURE_LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Convolutions of a picture (Mnih et al. 2015, doi 10.1038/nature14236)."""


class Encoder(nn.Module):
    """Encodes an array or a tree of arrays as one vector.

    The shape of a leaf decides how it is encoded. Images have the channels last; a grid of integers
    or booleans without channels has one; axes in front of the last three become channels, too.

    - Images: two convolutions for small grids, three larger ones for pictures, which are images of
      at least 32 x 32 cells; then a linear layer and ReLU.
    - Vectors, single numbers and matrices of floats: they are flattened. In a tree, each has its
      own linear layer and ReLU. An array that is not in a tree is returned as it is.

    The encodings of a tree's leaves are concatenated in the order of their names. `as_input` says
    how numbers that are not float32 are scaled.

    Attributes
    ----------
    leaves
        The arrays, without the axis of agents.
    hidden
        Width of the encoding of each leaf.
    agents
        Number of agents, if the arrays have an axis of agents; None for the arrays of a state.
    """

    leaves: Leaves
    hidden: int = 64
    agents: int | None = None

    @nn.compact
    def __call__(self, tree: ArrayTree) -> Float[Array, "*b _"]:
        """Encode a batch of any number of leading axes."""
        arrays = flatten_tree(tree)
        return jnp.concatenate([self._leaf(*leaf, arrays[leaf[0]]) for leaf in self.leaves], -1)

    def _leaf(self, path: str, spec: ArraySpec, array: Array) -> Float[Array, "*b _"]:
        x = as_input(array, spec)
        if is_image(spec):
            encoded = self._image(path, _with_channels(x, spec))
        else:
            encoded = x.reshape(*x.shape[: x.ndim - len(spec.shape)], spec.size)
            encoded = self._dense(f"{path}_dense", encoded) if path else encoded
        return encoded if spec.agents is None else self._for_all_agents(encoded, spec.agents)

    def _image(self, path: str, x: Float[Array, "*b H W C"]) -> Float[Array, "*b _"]:
        layers = _PICTURE_LAYERS if min(x.shape[-3:-1]) >= _PICTURE else _GRID_LAYERS
        prefix = f"{path}_" if path else ""
        for index, layer in enumerate(layers):
            x = nn.relu(_Convolution(*layer, name=f"{prefix}conv_{index}")(x))
        return self._dense(f"{prefix}dense", x.reshape(*x.shape[:-3], -1))

    def _dense(self, name: str, x: Float[Array, "*b _"]) -> Float[Array, "*b hidden"]:
        layer = Dense(self.hidden, kernel_init=nn.initializers.he_normal(), name=name)
        return nn.relu(layer(x))

    def _for_all_agents(self, x: Float[Array, "*b some _"], of: tuple[int, ...]) -> Array:
        """Return zeros for the agents that do not have the leaf."""
        assert self.agents is not None
        blank = jnp.zeros((*x.shape[:-2], self.agents, x.shape[-1]))
        return blank.at[..., jnp.array(of), :].set(x)


class _Convolution(nn.Module):
    """A convolution whose stride divides its size; zeros surround the image.

    On CPUs it is one matrix product over patches: there, XLA's convolutions take ten times as long
    inside of a compiled loop of updates. The parameters are the same.
    """

    features: int
    size: int
    stride: int

    @nn.compact
    def __call__(self, x: Float[Array, "*b H W C"]) -> Float[Array, "*b h w features"]:
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.he_normal(), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        apply = by_patches if jax.default_backend() == "cpu" else by_convolution
        return apply(x, kernel, self.stride) + bias


def by_convolution(
    x: Float[Array, "*b H W C"], kernel: Float[Array, "k k C F"], stride: int
) -> Float[Array, "*b h w F"]:
    """Convolve images with a kernel whose size the stride divides, by XLA's convolution."""
    padding = [_padding(size, len(kernel), stride) for size in x.shape[-3:-1]]
    flat = x.reshape(-1, *x.shape[-3:])
    dimensions = ("NHWC", "HWIO", "NHWC")
    outputs = jax.lax.conv_general_dilated(
        flat, kernel, (stride, stride), padding, dimension_numbers=dimensions
    )
    return outputs.reshape(*x.shape[:-3], *outputs.shape[1:])


def by_patches(
    x: Float[Array, "*b H W C"], kernel: Float[Array, "k k C F"], stride: int
) -> Float[Array, "*b h w F"]:
    """Convolve as `by_convolution`, by a matrix product over the patches of all positions.

    Blocks of as many pixels as the stride become the channels of a smaller image; a patch is a few
    of its neighbouring cells.
    """
    blocks = len(kernel) // stride
    padding = [_padding(size, len(kernel), stride) for size in x.shape[-3:-1]]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [*padding, (0, 0)])
    *lead, height, width, channels = x.shape
    cells = x.reshape(*lead, height // stride, stride, width // stride, stride, channels)
    cells = jnp.moveaxis(cells, -4, -3).reshape(*lead, height // stride, width // stride, -1)
    rows, columns = (size // stride - blocks + 1 for size in (height, width))
    patches = jnp.concatenate(
        [cells[..., i : i + rows, j : j + columns, :] for i, j in np.ndindex(blocks, blocks)], -1
    )
    parts = kernel.reshape(blocks, stride, blocks, stride, channels, -1)
    return product(patches, parts.swapaxes(1, 2).reshape(patches.shape[-1], -1))


def _padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return the zeros before and after an axis, so that every ``stride`` pixels give a value."""
    around = kernel - stride
    before = (around // stride // 2) * stride
    return before, around - before + -size % stride


class JointEncoder(nn.Module):
    """Encodes the agents' observations as one vector: that of each agent, concatenated."""

    encoder: Encoder

    def __call__(self, observation: ArrayTree) -> Float[Array, "*b _"]:
        """Encode a batch of any number of leading axes."""
        return _joined(self.encoder(observation))


class ActionEncoder(nn.Module):
    """Encodes each agent's observation and a continuous action, or noise, as one vector."""

    observation: nn.Module | None = None

    def __call__(self, inputs: tuple[ArrayTree, Float[Array, "*b N A"]]) -> Float[Array, "*b N _"]:
        """Encode a batch of any number of leading axes."""
        x, action = inputs
        x = x if self.observation is None else self.observation(x)
        return jnp.concatenate([x, action], axis=-1)


class ViewEncoder(nn.Module):
    """Encodes what a critic of each agent sees: the global state and the agent's observation.

    Vectors need no encoders. Where there is no state, the encodings of all agents' observations
    take its place; a `JointEncoder` is for the state of all observations that `Unshared` shows.
    """

    observation: Encoder | None = None
    state: Encoder | JointEncoder | None = None

    def __call__(self, view: View) -> Inputs:
        """Encode a batch of any number of leading axes: the state is the shared part."""
        x = view.observation if self.observation is None else self.observation(view.observation)
        if not has_state(view):
            state = _joined(x)
        else:
            state = view.state if self.state is None else self.state(view.state)
        return Inputs(state, x)


def observation_encoder(spec: EnvSpec, hidden: int = 64) -> Encoder | None:
    """Return an encoder of each agent's observation; None if observations are float32 vectors."""
    if spec.observation is None:
        return None
    return Encoder(tuple(spec.observation_leaves.items()), hidden, spec.num_agents)


def state_encoder(spec: EnvSpec, hidden: int = 64) -> Encoder | JointEncoder | None:
    """Return an encoder of what `central` returns; None if that is a float32 vector."""
    if not spec.state_size:
        leaves = tuple(spec.observation_leaves.items())
        return JointEncoder(Encoder(leaves, hidden, spec.num_agents))
    return None if spec.global_state is None else Encoder(tuple(spec.state_leaves.items()), hidden)


def view_encoder(spec: EnvSpec, hidden: int = 64) -> ViewEncoder:
    """Return an encoder of what a critic of each agent sees."""
    return ViewEncoder(observation_encoder(spec, hidden), state_encoder(spec, hidden))


def blank_view(spec: EnvSpec) -> View:
    """Return a view of zeros on the device, to draw parameters and to allocate buffers with."""
    view: View = jax.tree.map(jnp.asarray, empty_view(spec))
    return view


def has_state(view: View) -> bool:
    """Return whether a view has a state of its own, apart from the observations."""
    return any(leaf.shape[-1:] != (0,) for leaf in jax.tree.leaves(view.state))


def central(view: View) -> ArrayTree:
    """Return what mixers see of a view: the state, or all observations if there is no state."""
    return view.state if has_state(view) else view.observation


def is_image(spec: ArraySpec) -> bool:
    """Return whether convolutions encode a leaf: it has channels, or is a grid of integers."""
    rank = len(spec.shape)
    return rank > 2 or (rank == 2 and "float" not in spec.dtype)


def as_input(array: Array, spec: ArraySpec) -> Float[Array, "*b"]:
    """Return the numbers of a leaf as float32 of moderate size, for a network.

    The bytes of pictures, images of at least 32 x 32 cells, are divided by 255. Other integers may
    be counts, codes or positions of any size: they become sign(x) log(1 + abs(x)), so that 1 is not
    negligible beside 255 (Hafner et al. 2023, arXiv 2301.04104). Booleans become 0 and 1.
    """
    x = jnp.asarray(array).astype(jnp.float32)
    if spec.dtype == "bool" or "float" in spec.dtype:
        return x
    sides = spec.shape if len(spec.shape) == 2 else spec.shape[-3:-1]
    if spec.dtype == "uint8" and is_image(spec) and min(sides) >= _PICTURE:
        return x / 255
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def _with_channels(x: Float[Array, "..."], spec: ArraySpec) -> Float[Array, "*b H W C"]:
    """Give a grid a channel, and turn axes in front of an image into channels."""
    rank = len(spec.shape)
    lead = x.shape[: x.ndim - rank]
    if rank == 2:
        return x[..., None]
    *stack, height, width, channels = spec.shape
    images = x.reshape(*lead, -1, height, width, channels)
    return jnp.moveaxis(images, -4, -2).reshape(*lead, height, width, -1) if stack else x


def _joined(x: Float[Array, "*b N _"]) -> Float[Array, "*b _"]:
    return x.reshape(*x.shape[:-2], -1)


# ----------------------------------------------------------------------------------------- pooling

# The global state of many environments grows with the number of agents N, and so does everything
# that reads it. A pooled critic or mixer reads the agents' observations instead: a network that all
# share encodes each, and attention combines the encodings. The same parameters fit any N, and the
# order of the agents does not matter.


CentralInput = Literal["state", "pooled"]
"""What a mixer sees, or a critic of each agent beside the agent's own observation. "state": the
global state, whose size usually depends on the number of agents. "pooled": the observations of all
agents, pooled by attention; the same parameters fit any number of agents.
"""


class AttentionPool(nn.Module):
    """Combines any number of vectors to one: weighted means, by attention with learned queries.

    Each head has a query that does not depend on the input (Lee et al. 2019, "Set Transformer",
    arXiv 1810.00825), so the cost is linear in N. Queries are zero at first, so that all heads
    begin as plain means. The size of the result is a multiple of ``heads``.
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
    """Encodes what a critic of each agent sees: all agents' observations, pooled, and its own."""

    hidden: int = 64
    observation: nn.Module | None = None

    @nn.compact
    def __call__(self, view: View) -> Inputs:
        """Encode a batch of any number of leading axes."""
        x = view.observation if self.observation is None else self.observation(view.observation)
        return Inputs(AttentionPool(self.hidden)(x, view.alive), x)


def critic_encoder(
    spec: EnvSpec, hidden: int = 64, kind: CentralInput = "state"
) -> ViewEncoder | PooledEncoder:
    """Return an encoder of what a critic of each agent sees."""
    if kind == "pooled":
        return PooledEncoder(hidden, observation_encoder(spec, hidden))
    return view_encoder(spec, hidden)
