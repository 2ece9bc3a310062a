"""Networks that all agents share, and running statistics for normalisation.

Both torsos have the same methods, so that programs work with either:
``initial_carry(num_agents)``, a call for one step, and ``unroll`` for the steps of a window. They
take observations of any shape: an `offmarl.networks.Encoder` turns those that are not float32
vectors into vectors, which are the torso's input.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from offmarl.networks.encoders import central
from offmarl.networks.gru import GRUWeights, gru_step, orthogonal_gates, unroll_gru
from offmarl.networks.linear import AgentId, Dense, InputLayer, orthogonal
from offmarl.types import ArrayTree, EnvSpec, Sequence, View, map_tree

Activation = Literal["relu", "tanh"]
"""Function after a hidden layer."""

_ACTIVATIONS = {"relu": nn.relu, "tanh": nn.tanh}


class _Constants(nn.Module):
    """Appends ``count`` learned numbers, the same for all inputs."""

    count: int

    @nn.compact
    def __call__(self, outputs: Float[Array, "*b outputs"]) -> Float[Array, "*b _"]:
        if not self.count:
            return outputs
        constants = self.param("constants", nn.initializers.zeros, (self.count,))
        shape = (*outputs.shape[:-1], self.count)
        return jnp.concatenate([outputs, jnp.broadcast_to(constants, shape)], axis=-1)


class _Affine(nn.Module):
    """The parameters of a linear layer."""

    inputs: int
    outputs: int

    @nn.compact
    def __call__(self) -> tuple[Float[Array, "inputs outputs"], Float[Array, "outputs"]]:
        kernel = nn.initializers.lecun_normal()
        return (
            self.param("kernel", kernel, (self.inputs, self.outputs)),
            self.param("bias", nn.initializers.zeros, (self.outputs,)),
        )


class FeedForward(nn.Module):
    """Hidden layers without memory: two by default, Linear - ReLU - Linear - ReLU - Linear.

    Attributes
    ----------
    outputs
        Outputs per agent, such as one per action.
    hidden
        Width of the hidden layers.
    agent_id
        How agents are distinguished; see `AgentId`.
    output_scale
        Scale of the orthogonal initialisation of the last layer; see `SMALL`.
    constants
        Number of additional outputs that are learned and do not depend on the input. They are zero
        at first.
    encoder
        A module that turns the input into a vector for each agent, or into `Inputs`; None if the
        input is either.
    layers
        Number of hidden layers; None for 2.
    activation
        Function after each hidden layer.
    """

    outputs: int
    hidden: int = 64
    agent_id: AgentId = "onehot"
    output_scale: float = 1.0
    constants: int = 0
    encoder: nn.Module | None = None
    layers: int | None = None
    activation: Activation = "relu"

    @staticmethod
    def initial_carry(_num_agents: int) -> tuple[()]:
        """Return an empty tuple, since this torso has no memory."""
        return ()

    @nn.compact
    def __call__(
        self, carry: tuple[()], observation: ArrayTree
    ) -> tuple[Float[Array, "*b N _"], tuple[()]]:
        """Apply the network to one step, or to any number of steps."""
        x = observation if self.encoder is None else self.encoder(observation)
        wide, narrow = (orthogonal(scale) for scale in (2**0.5, self.output_scale))
        activate = _ACTIVATIONS[self.activation]
        x = activate(InputLayer(self.hidden, self.agent_id, name="Dense_0")(x))
        layers = 2 if self.layers is None else self.layers
        for index in range(1, layers):
            x = activate(Dense(self.hidden, kernel_init=wide, name=f"Dense_{index}")(x))
        x = Dense(self.outputs, kernel_init=narrow, name=f"Dense_{layers}")(x)
        return _Constants(self.constants)(x), carry

    def unroll(
        self, observation: ArrayTree, _first: Bool[Array, "T *b"], _carry: ArrayTree = None
    ) -> tuple[Float[Array, "T *b N _"], tuple[()]]:
        """Apply the network to all steps of a window."""
        return self((), observation)

    def unroll_batch(
        self, observation: ArrayTree, _first: Bool[Array, "B T"]
    ) -> Float[Array, "B T N _"]:
        """Apply the network to windows."""
        return self((), observation)[0]


class Recurrent(nn.Module):
    """A recurrent torso, by default Linear - ReLU - GRU - ReLU - Linear (Cho et al. 2014).

    Attributes
    ----------
    outputs, hidden, agent_id, output_scale, constants, encoder
        As in `FeedForward`.
    layers
        Number of hidden layers beside the GRU, None for 1: the first is before it, others after it.
    activation
        Function after the GRU and each hidden layer.
    """

    outputs: int
    hidden: int = 64
    agent_id: AgentId = "onehot"
    output_scale: float = 1.0
    constants: int = 0
    encoder: nn.Module | None = None
    layers: int | None = None
    activation: Activation = "relu"

    def setup(self) -> None:  # noqa: D102
        wide, narrow = (orthogonal(scale) for scale in (2**0.5, self.output_scale))
        self.embed = InputLayer(self.hidden, self.agent_id)
        self.input_gates = _Affine(self.hidden, 3 * self.hidden)
        self.recurrent_kernel = self.param(
            "recurrent_kernel", orthogonal_gates, (self.hidden, 3 * self.hidden)
        )
        self.recurrent_bias = self.param("recurrent_bias", nn.initializers.zeros, (self.hidden,))
        self.after = [Dense(self.hidden, kernel_init=wide) for _ in range(1, self.layers or 1)]
        self.head = Dense(self.outputs, kernel_init=narrow)
        self.append = _Constants(self.constants)

    def initial_carry(self, num_agents: int) -> Float[Array, "N hidden"]:
        """Return the memory at the start of an episode: zeros."""
        return jnp.zeros((num_agents, self.hidden))

    def __call__(
        self, carry: Float[Array, "*b N hidden"], observation: ArrayTree
    ) -> tuple[Float[Array, "*b N _"], Float[Array, "*b N hidden"]]:
        """Apply the network to one step."""
        carry = gru_step(self._weights(), carry, self._embedded(observation))
        return self._outputs(carry), carry

    def unroll(
        self,
        observation: ArrayTree,
        first: Bool[Array, "T *b"],
        carry: Float[Array, "*b N hidden"] | None = None,
    ) -> tuple[Float[Array, "T *b N _"], Float[Array, "T *b N hidden"]]:
        """Apply the network to all steps of a window, and return the memory after each.

        The memory is ``carry`` at the beginning of the window, by default empty, and empty where
        ``first`` marks the beginning of an episode. Everything except the recurrence is one matrix
        product over all steps.
        """
        memory = self._memory(self._embedded(observation), first, carry)
        return self._outputs(memory), memory

    def unroll_batch(
        self, observation: ArrayTree, first: Bool[Array, "B T"]
    ) -> Float[Array, "B T N _"]:
        """Apply the network to windows; see `offmarl.networks.unroll_batch`."""
        embedded = self._embedded(observation).swapaxes(0, 1)
        return self._outputs(self._memory(embedded, first.T, None)).swapaxes(0, 1)

    def _embedded(self, observation: ArrayTree) -> Float[Array, "*b N hidden"]:
        x = observation if self.encoder is None else self.encoder(observation)
        return _ACTIVATIONS[self.activation](self.embed(x))

    def _memory(
        self, embedded: Float[Array, "T *b N hidden"], first: Bool[Array, "T *b"], carry: Any
    ) -> Float[Array, "T *b N hidden"]:
        """Return the memory after each step; ``(*b, N)`` is one axis in the recurrence."""
        steps, hidden = len(embedded), self.hidden
        first = jnp.broadcast_to(first[..., None], embedded.shape[:-1]).reshape(steps, -1)
        x = embedded.reshape(steps, -1, hidden)
        carry = jnp.zeros(x.shape[1:], x.dtype) if carry is None else carry.reshape(-1, hidden)
        return unroll_gru(self._weights(), carry, x, first).reshape(embedded.shape)

    def _weights(self) -> GRUWeights:
        kernel, bias = self.input_gates()
        return GRUWeights(kernel, bias, self.recurrent_kernel, self.recurrent_bias)

    def _outputs(self, memory: Float[Array, "*b N hidden"]) -> Float[Array, "*b N _"]:
        activate = _ACTIVATIONS[self.activation]
        x = activate(memory)
        for layer in self.after:
            x = activate(layer(x))
        return self.append(self.head(x))


MIN_VARIANCE = 1e-2
"""Lower bound of the variance by which values are normalised."""


class Moments(NamedTuple):
    """Running mean and variance of one or several streams of batches of numbers."""

    weight: Float[Array, "*streams"]
    """Number of values."""
    mean: Float[Array, "*streams"]
    squares: Float[Array, "*streams"]
    """Sum of squared differences from the mean."""

    @classmethod
    def zero(cls, *streams: int) -> "Moments":
        """Return the statistics of no values."""
        return cls(jnp.zeros(streams), jnp.zeros(streams), jnp.zeros(streams))

    @property
    def std(self) -> Float[Array, "*streams"]:
        """The standard deviation, at least 0.1; 1 without values.

        The bound is that of Yu et al.'s code. Without it, values relative to a deviation of almost
        0 are huge where rewards are rare, and MAPPO did not learn RobotWarehouse.
        """
        variance = (self.squares / self.weight.clip(1)).clip(MIN_VARIANCE)
        return jnp.where(self.weight > 0, jnp.sqrt(variance), 1.0)

    def update(self, batch: Float[Array, "*b"], mask: Bool[Array, "*b"]) -> "Moments":
        """Add a batch (Chan, Golub and LeVeque 1983); masked-out entries are not counted.

        Of several streams, each is updated under `jax.vmap`.
        """
        size = mask.sum()
        mean = jnp.where(mask, batch, 0).sum() / size.clip(1)
        squares = jnp.where(mask, (batch - mean) ** 2, 0).sum()
        weight, shift = self.weight + size, mean - self.mean
        share = size / weight.clip(1)
        return Moments(
            weight,
            self.mean + shift * share,
            self.squares + squares + shift**2 * self.weight * share,
        )


def unroll_batch(
    network: Any, params: ArrayTree, observation: ArrayTree, first: Bool[Array, "B T"]
) -> Float[Array, "B T N _"]:
    """Apply a torso, or a network with the same methods, to windows of steps.

    Parameters
    ----------
    network, params
        The torso and its parameters.
    observation
        The observations of each slot: leaves of ``(B, T, N, ...)``.
    first
        Slots that begin an episode, as in `offmarl.types.Sequence`: the memory is empty there, and
        at the beginning of each window.
    """
    unrolled: Array = network.apply(params, observation, first, method="unroll_batch")
    return unrolled


def unroll_part(
    network: Any, params: ArrayTree, batch: Sequence, slots: slice
) -> Float[Array, "B T N _"]:
    """Return a torso's outputs in some slots of windows; without a memory it sees no others."""
    observation = batch.view.observation
    if not jax.tree.leaves(network.initial_carry(1)):
        observation = jax.tree.map(lambda leaf: leaf[:, slots], observation)
        outputs: Array = network.apply(params, (), observation)[0]
        return outputs
    return unroll_batch(network, params, observation, batch.first)[:, slots]


@dataclass(frozen=True)
class Unshared:
    """A network for each agent with parameters of its own; it has the methods of a torso.

    The leaves of the parameters have an axis of agents in front.

    Parameters
    ----------
    torso
        The network of one agent. It needs no agent id.
    spec
        The spec of the environment. All agents have all leaves of observations.
    sees
        Whether the input of the network is the agents' observations, or a `View` with the state,
        which all agents see. In place of a missing state they see all observations.
    """

    torso: FeedForward | Recurrent
    spec: EnvSpec
    sees: Literal["observation", "view"] = "observation"

    def initial_carry(self, num_agents: int) -> ArrayTree:
        """Return the memory of all agents at the start of an episode."""
        return self.torso.initial_carry(num_agents)

    def init(self, key: PRNGKeyArray, carry: ArrayTree, inputs: ArrayTree) -> ArrayTree:
        """Draw the parameters of each agent's network.

        One after the other: see `offmarl.programs.start`.
        """
        parts = self._split(inputs)
        carry, part = jax.tree.map(lambda leaf: leaf[0], (_split_carry(carry), parts))
        part = part if self.sees == "observation" else part._replace(state=parts.state)
        keys = jax.random.split(key, self.spec.num_agents)
        return jax.lax.map(lambda key: self.torso.init(key, carry, part), keys)

    def apply(self, params: ArrayTree, *args: Any, method: str = "__call__") -> ArrayTree:
        """Apply each agent's network; arguments and results are those of the torso's method."""
        if method == "__call__":
            carry, inputs = args
        else:
            inputs, first, carry = (*args, None)[:3]

        def of_agent(params: ArrayTree, inputs: ArrayTree, carry: ArrayTree) -> ArrayTree:
            if method == "__call__":
                return self.torso.apply(params, carry, inputs)
            memory = () if method == "unroll_batch" else (carry,)
            return self.torso.apply(params, inputs, first, *memory, method=method)

        parts = self._split(inputs), _split_carry(carry)
        axes: Any = 0 if self.sees == "observation" else View(0, None, 0, 0)  # type: ignore[arg-type]
        outputs = jax.vmap(of_agent, in_axes=(0, axes, 0))(params, *parts)
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf.squeeze(-2), 0, -2), outputs)

    def _split(self, inputs: ArrayTree) -> ArrayTree:
        """Move the axis of agents to the front, and leave an axis of size 1 in its place."""
        if self.sees == "observation":
            ranks = map_tree(lambda leaf: len(leaf.shape), self.spec.observation_spec)
            return jax.tree.map(lambda leaf, rank: _split(leaf, -rank - 1), inputs, ranks)
        return View(
            Unshared(self.torso, self.spec)._split(inputs.observation),
            central(inputs),
            _split(inputs.legal_actions, -2),
            _split(inputs.alive, -1),
        )


def _split(leaf: Array, axis: int) -> Array:
    return jnp.expand_dims(jnp.moveaxis(leaf, axis, 0), axis)


def _split_carry(carry: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda leaf: _split(leaf, -2), carry)
