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
from offmarl.networks.mixers import (
    Mixer,
    MixerWeights,
    init_mixer,
    make_mixer,
    mix,
    mixing_coefficients,
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
from offmarl.networks.torsos import FeedForward, Moments, Recurrent, unroll_batch

__all__ = [
    "Encoder",
    "FeedForward",
    "Head",
    "Mixer",
    "MixerWeights",
    "Moments",
    "PolicyConfig",
    "QParams",
    "Recurrent",
    "ViewEncoder",
    "agent_head",
    "agent_network",
    "blank_view",
    "central",
    "init_mixer",
    "init_policy",
    "make_mixer",
    "make_policy",
    "mix",
    "mixing_coefficients",
    "observation_encoder",
    "state_encoder",
    "stochastic_head",
    "unroll_batch",
    "view_encoder",
]
