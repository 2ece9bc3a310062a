"""Neural networks: encoders, torsos that all agents share, mixers, and policies."""

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

__all__ = [
    "AgentId",
    "AttentionPool",
    "CriticKind",
    "Encoder",
    "FeedForward",
    "Head",
    "InputLayer",
    "Inputs",
    "Mixer",
    "MixerKind",
    "MixerWeights",
    "Moments",
    "PolicyConfig",
    "PooledEncoder",
    "PooledMixer",
    "QParams",
    "Recurrent",
    "ViewEncoder",
    "agent_head",
    "agent_network",
    "blank_view",
    "central",
    "critic_encoder",
    "init_mixer",
    "init_policy",
    "make_mixer",
    "make_policy",
    "mix",
    "mixing_coefficients",
    "mixing_weights",
    "observation_encoder",
    "state_encoder",
    "stochastic_head",
    "unroll_batch",
    "view_encoder",
]
