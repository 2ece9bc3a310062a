"""Neural networks: encoders, torsos, mixers, critics, and policies."""

from offmarl.networks.action_values import ActionValue, Critics, as_vectors, make_critics
from offmarl.networks.deterministic import NoisyParams, differentiable_action, squash
from offmarl.networks.encoders import (
    Encoder,
    ViewEncoder,
    blank_view,
    central,
    observation_encoder,
    state_encoder,
    view_encoder,
)
from offmarl.networks.inputs import AgentId, InputLayer, Inputs
from offmarl.networks.mixers import (
    Mixer,
    MixerKind,
    MixerWeights,
    PooledMixer,
    init_mixer,
    make_mixer,
    mix,
    mixing_coefficients,
    mixing_weights,
)
from offmarl.networks.policies import (
    AgentNetwork,
    Head,
    PolicyConfig,
    QParams,
    agent_head,
    agent_network,
    init_policy,
    make_policy,
    stochastic_head,
)
from offmarl.networks.pooling import AttentionPool, CriticKind, PooledEncoder, critic_encoder
from offmarl.networks.torsos import FeedForward, Moments, Recurrent, unroll_batch
from offmarl.networks.unshared import Unshared

__all__ = [
    "ActionValue",
    "AgentId",
    "AgentNetwork",
    "AttentionPool",
    "CriticKind",
    "Critics",
    "Encoder",
    "FeedForward",
    "Head",
    "InputLayer",
    "Inputs",
    "Mixer",
    "MixerKind",
    "MixerWeights",
    "Moments",
    "NoisyParams",
    "PolicyConfig",
    "PooledEncoder",
    "PooledMixer",
    "QParams",
    "Recurrent",
    "Unshared",
    "ViewEncoder",
    "agent_head",
    "agent_network",
    "as_vectors",
    "blank_view",
    "central",
    "critic_encoder",
    "differentiable_action",
    "init_mixer",
    "init_policy",
    "make_critics",
    "make_mixer",
    "make_policy",
    "mix",
    "mixing_coefficients",
    "mixing_weights",
    "observation_encoder",
    "squash",
    "state_encoder",
    "stochastic_head",
    "unroll_batch",
    "view_encoder",
]
