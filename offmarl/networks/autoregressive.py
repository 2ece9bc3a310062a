"""Policies in which the agents act in turn: each knows what those before it have chosen.

The product of the agents' conditional distributions is a distribution of joint actions. It can
represent any correlation between the agents, which independent policies cannot. In return, acting
is central: all observations and earlier actions go through one network.

`AgentSequence` is an encoder-decoder of retention layers (Sable, Mahjoub et al. 2024, arXiv
2410.01706). The encoder sees the observations of all agents and steps; the decoder the encoded
observation of each agent, and the actions of those before it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.distributions import Distribution
from offmarl.networks.action_values import as_vectors
from offmarl.networks.encoders import Encoder, blank_view, observation_encoder
from offmarl.networks.linear import SMALL, AgentId, Dense, InputLayer, id_features, orthogonal
from offmarl.networks.policies import Head
from offmarl.networks.retention import GatedLayer, Retention
from offmarl.types import ArrayTree, Continuous, EnvSpec, Policy


class SequenceMemory(NamedTuple):
    """Memory of an `AgentSequence`: a matrix for each of K blocks and H heads."""

    encoder: Float[Array, "*b K H D D"]
    """Memory of the observations."""
    actions: Float[Array, "*b K H D D"]
    """Memory of the actions, read by the actions themselves."""
    decoder: Float[Array, "*b K H D D"]
    """Memory of the actions, read by the encoded observations."""


class Decoded(NamedTuple):
    """The outputs of an `AgentSequence` for each agent."""

    policy: Float[Array, "*b N _"]
    """Inputs of the policy's head."""
    features: Float[Array, "*b N hidden"]
    """Inputs of the action values."""


class _EncoderBlock(nn.Module):
    hidden: int
    heads: int
    decay: float

    def setup(self) -> None:
        self.retention = Retention(self.hidden, self.heads, causal=False, decay=self.decay)
        self.layer, self.norms = GatedLayer(self.hidden), [nn.RMSNorm() for _ in range(2)]

    def __call__(self, x: Array, memory: Array, first: Array | None) -> tuple[Array, Array]:
        """Encode a window; or one step, if ``first`` is None."""
        y, memory = _retain(self.retention, memory, x, x, first)
        x = self.norms[0](x + y)
        return self.norms[1](x + self.layer(x)), memory


class _DecoderBlock(nn.Module):
    hidden: int
    heads: int
    decay: float

    def setup(self) -> None:
        self.among_actions, self.of_actions = (
            Retention(self.hidden, self.heads, causal=True, decay=self.decay) for _ in range(2)
        )
        self.layer, self.norms = GatedLayer(self.hidden), [nn.RMSNorm() for _ in range(3)]

    def __call__(
        self, x: Array, encoded: Array, memories: tuple[Array, Array], first: Array | None
    ) -> tuple[Array, tuple[Array, Array]]:
        """Decode a window; or agents of one step, if ``first`` is None."""
        y, among = _retain(self.among_actions, memories[0], x, x, first)
        token = self.norms[0](x + y)
        y, of = _retain(self.of_actions, memories[1], encoded, token, first)
        x = self.norms[1](encoded + y)
        return self.norms[2](x + self.layer(x)), (among, of)


def _retain(
    layer: Retention, memory: Array, query: Array, token: Array, first: Array | None
) -> tuple[Array, Array]:
    if first is None:
        return layer.step(memory, query, token)
    return layer(memory, query, token, first)


class _Output(nn.Module):
    """Linear - GELU - RMSNorm - Linear, with small outputs at first."""

    hidden: int
    outputs: int

    @nn.compact
    def __call__(self, x: Float[Array, "*b _"]) -> Float[Array, "*b outputs"]:
        x = nn.gelu(Dense(self.hidden, kernel_init=orthogonal(2**0.5))(x))
        return Dense(self.outputs, kernel_init=orthogonal(SMALL))(nn.RMSNorm()(x))


class AgentSequence(nn.Module):
    """Encoder-decoder over the agents of each step, with memory of the steps before.

    Attributes
    ----------
    num_agents, action_size
        N and A.
    continuous
        Whether actions are continuous. Values are then those of given actions, and the outputs for
        the policy are A means and A learned spreads; for discrete actions, A logits.
    hidden, heads, blocks
        Width of the tokens, heads of each retention layer, and blocks of encoder and decoder.
    agent_id
        How agents are distinguished, in observations and actions; see `AgentId`.
    decay
        Scale of the decay of the memory; see `offmarl.networks.retention.decays`. 0 for no memory
        of earlier steps.
    encoder
        Encodes observations that are not vectors; None for vectors.
    """

    num_agents: int
    action_size: int
    continuous: bool
    hidden: int = 128
    heads: int = 4
    blocks: int = 1
    agent_id: AgentId = "onehot"
    decay: float = 0.5
    encoder: Encoder | None = None

    def setup(self) -> None:  # noqa: D102
        wide = orthogonal(2**0.5)
        sizes = self.hidden, self.heads, self.decay
        self.embed = InputLayer(self.hidden, self.agent_id)
        self.embed_action = Dense(self.hidden, kernel_init=wide)
        self.start = self.param("start", nn.initializers.normal(1.0), (self.hidden,))
        self.encoder_norms = [nn.RMSNorm() for _ in range(self.blocks)]
        self.action_norm = nn.RMSNorm()
        self.encoder_blocks = [_EncoderBlock(*sizes) for _ in range(self.blocks)]
        self.decoder_blocks = [_DecoderBlock(*sizes) for _ in range(self.blocks)]
        self.policy_output = _Output(self.hidden, self.action_size)
        self.value_output = _Output(self.hidden, 1 if self.continuous else self.action_size)
        if self.continuous:
            self.spread = self.param("spread", nn.initializers.zeros, (self.action_size,))

    def empty(self, lead: tuple[int, ...] = ()) -> SequenceMemory:
        """Return the memory at the start of an episode: zeros."""
        width = self.hidden // self.heads
        zeros = jnp.zeros((*lead, self.blocks, self.heads, width, width))
        return SequenceMemory(zeros, zeros, zeros)

    # ---------------------------------------------------------------------------------- windows

    def __call__(
        self,
        observation: ArrayTree,
        action: Float[Array, "*b T N A"],
        first: Bool[Array, "*b T"],
        order: Int[Array, "N"],
    ) -> Decoded:
        """Apply the network to all steps of windows, in which the actions are given.

        Parameters
        ----------
        observation
            Observations, leaves of ``(*b, T, N, ...)``.
        action
            Actions as vectors; see `offmarl.networks.as_vectors`.
        first
            Steps that begin an episode.
        order
            The agents in the order in which they choose; the same in all steps.

        Returns
        -------
        The outputs, with the agents in their own order. What belongs to an agent depends on the
        observations of all agents, but only on the actions of those before it.
        """
        memory = self.empty(first.shape[:-1])
        of_agents = id_features(self.agent_id, self.num_agents)
        ids = jnp.broadcast_to(of_agents, (*action.shape[:-1], of_agents.shape[-1]))
        tokens = jnp.take(self.token(action, ids), order, axis=-2)
        start = jnp.broadcast_to(self.first_token(), tokens[..., :1, :].shape)
        tokens = jnp.concatenate([start, tokens[..., :-1, :]], axis=-2)
        x = jnp.take(self._embedded(observation), order, axis=-2)
        encoded, _ = self._encode(x, memory.encoder, first)
        decoded, _ = self._decode(tokens, encoded, memory[1:], first)
        own_order = jnp.argsort(order)
        return Decoded(*(jnp.take(x, own_order, axis=-2) for x in decoded))

    # ---------------------------------------------------------------------------------- one step

    def observe(
        self, memory: SequenceMemory, observation: ArrayTree
    ) -> tuple[Float[Array, "*b N hidden"], SequenceMemory]:
        """Begin a step: return the encoded observations, and the memory before the first action."""
        faded = SequenceMemory(*(self.encoder_blocks[0].retention.decayed(x) for x in memory))
        encoded, of_encoder = self._encode(self._embedded(observation), faded.encoder, None)
        return encoded, faded._replace(encoder=of_encoder)

    def respond(
        self,
        memory: SequenceMemory,
        encoded: Float[Array, "*b hidden"],
        token: Float[Array, "*b hidden"],
    ) -> tuple[Decoded, SequenceMemory]:
        """Return the outputs for the next agent, and the memory after it.

        ``encoded`` is its observation, and ``token`` the action of the agent before it, from
        `token`; for the first agent from `first_token`.
        """
        x, encoded = token[..., None, :], encoded[..., None, :]
        decoded, memories = self._decode(x, encoded, memory[1:], None)
        return Decoded(*(x.squeeze(-2) for x in decoded)), SequenceMemory(memory[0], *memories)

    def token(
        self, action: Float[Array, "*b A"], ids: Float[Array, "*b F"]
    ) -> Float[Array, "*b hidden"]:
        """Return the token of an agent's action, from its vector and the agent's `id_features`."""
        return self.action_norm(nn.gelu(self.embed_action(jnp.concatenate([action, ids], -1))))

    def first_token(self) -> Float[Array, "hidden"]:
        """Return the token that the first agent gets in place of an action."""
        return self.action_norm(nn.gelu(self.start))

    # ---------------------------------------------------------------------------------- values

    def values(self, features: Float[Array, "*b hidden"]) -> Float[Array, "*b A"]:
        """Return the values of all discrete actions of an agent."""
        return self.value_output(features)

    def value(
        self, features: Float[Array, "*b hidden"], action: Float[Array, "*b A"]
    ) -> Float[Array, "*b"]:
        """Return the value of a continuous action of an agent."""
        return self.value_output(jnp.concatenate([features, action], axis=-1)).squeeze(-1)

    # ---------------------------------------------------------------------------------- inside

    def _embedded(self, observation: ArrayTree) -> Float[Array, "*b N hidden"]:
        x = observation if self.encoder is None else self.encoder(observation)
        return nn.gelu(self.embed(x))

    def _encode(self, x: Array, memory: Array, first: Array | None) -> tuple[Array, Array]:
        after = []
        for index, (block, norm) in enumerate(
            zip(self.encoder_blocks, self.encoder_norms, strict=True)
        ):
            x, memory_of_block = block(norm(x), memory[..., index, :, :, :], first)
            after.append(memory_of_block)
        return x, jnp.stack(after, axis=-4)

    def _decode(
        self, x: Array, encoded: Array, memories: tuple[Array, Array], first: Array | None
    ) -> tuple[Decoded, tuple[Array, Array]]:
        after = []
        for index, block in enumerate(self.decoder_blocks):
            among, of = (memory[..., index, :, :, :] for memory in memories)
            x, memories_of_block = block(x, encoded, (among, of), first)
            after.append(memories_of_block)
        outputs = self.policy_output(x)
        if self.continuous:
            spread = jnp.broadcast_to(self.spread, outputs.shape)
            outputs = jnp.concatenate([outputs, spread], axis=-1)
        among, of = (jnp.stack(of_layer, axis=-4) for of_layer in zip(*after, strict=True))
        return Decoded(outputs, x), (among, of)


# -------------------------------------------------------------------------------------- policies


def make_agent_sequence(spec: EnvSpec, **options: Any) -> AgentSequence:
    """Build an `AgentSequence` for an environment; the options are its other attributes."""
    return AgentSequence(
        spec.num_agents,
        spec.action_size,
        isinstance(spec.action, Continuous),
        encoder=observation_encoder(spec, options.get("hidden", AgentSequence.hidden)),
        **options,
    )


def init_agent_sequence(network: AgentSequence, spec: EnvSpec, key: PRNGKeyArray) -> ArrayTree:
    """Draw the parameters of an `AgentSequence`, of its values too."""

    def everything(
        network: AgentSequence, observation: ArrayTree, action: Array, first: Array, order: Array
    ) -> Array:
        decoded = network(observation, action, first, order)
        if network.continuous:
            return network.value(decoded.features, action)
        return network.values(decoded.features)

    observation = jax.tree.map(lambda leaf: leaf[None], blank_view(spec).observation)
    action = jnp.zeros((1, spec.num_agents, spec.action_size))
    order, first = jnp.arange(spec.num_agents), jnp.zeros(1, bool)
    return network.init(key, observation, action, first, order, method=everything)


def make_sequence_policy(
    network: AgentSequence, head: Head, spec: EnvSpec, greedy: bool = False
) -> Policy:
    """Build a policy whose agents act in turn, in the order of their numbers.

    Parameters
    ----------
    network
        The network, whose parameters are those of the policy.
    head
        Makes the distribution of an agent's action from the network's outputs.
    spec
        The spec of the environment that it acts in.
    greedy
        Each agent takes its best action, given those of the agents before it.

    Returns
    -------
    Policy
        The log-probability of an agent's action is conditional on those of the agents before it,
        so the sum over the agents is that of the joint action.
    """
    Choose = Callable[[Distribution, Array], Array]

    def in_turn(
        params: ArrayTree,
        memory: SequenceMemory,
        observation: ArrayTree,
        legal_actions: Bool[Array, "N A"],
        choose: Choose,
        choice: Array,
    ) -> tuple[Array, Float[Array, "N"], SequenceMemory]:
        """Let each agent act by ``choose(distribution, its entry of choice)``."""

        def agent(
            carry: tuple[SequenceMemory, Array], x: tuple[Array, ...]
        ) -> tuple[tuple[SequenceMemory, Array], tuple[Array, Array]]:
            memory, token = carry
            encoded, legal, ids, entry = x
            decoded, memory = network.apply(params, memory, encoded, token, method="respond")
            distribution = head(decoded.policy, legal)
            action = choose(distribution, entry)
            vector = as_vectors(spec, action[None])[0]
            token = network.apply(params, vector, ids, method="token")
            return (memory, token), (action, distribution.log_prob(action))

        encoded, memory = network.apply(params, memory, observation, method="observe")
        token = network.apply(params, method="first_token")
        ids = id_features(network.agent_id, spec.num_agents)
        xs = (encoded, legal_actions, ids, choice)
        (memory, _), (action, log_prob) = jax.lax.scan(agent, (memory, token), xs)
        return action, log_prob, memory

    def act(
        params: ArrayTree,
        memory: SequenceMemory,
        observation: ArrayTree,
        legal_actions: Bool[Array, "N A"],
        key: PRNGKeyArray,
    ) -> tuple[Array, Float[Array, "N"], SequenceMemory]:
        def choose(distribution: Distribution, key: PRNGKeyArray) -> Array:
            return distribution.mode() if greedy else distribution.sample(key)

        keys = jax.random.split(key, spec.num_agents)
        action, log_prob, memory = in_turn(params, memory, observation, legal_actions, choose, keys)
        return action, jnp.zeros(spec.num_agents) if greedy else log_prob, memory

    def log_prob(
        params: ArrayTree,
        memory: SequenceMemory,
        observation: ArrayTree,
        legal_actions: Bool[Array, "N A"],
        action: Array,
    ) -> tuple[Float[Array, "N"], SequenceMemory]:
        def given(_: Distribution, action: Array) -> Array:
            return action

        return in_turn(params, memory, observation, legal_actions, given, action)[1:]

    return Policy(network.empty, act, log_prob, draws=lambda _params: not greedy, joint=True)
