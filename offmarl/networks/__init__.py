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
from offmarl.networks.mixers import (
    Mixer,
    MixerWeights,
    init_mixer,
    make_mixer,
    mix,
    mixing_coefficients,
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
from offmarl.networks.torsos import FeedForward, Moments, Recurrent, unroll_batch
from offmarl.networks.unshared import Unshared

__all__ = [
    "ActionValue",
    "AgentNetwork",
    "Critics",
    "Encoder",
    "FeedForward",
    "Head",
    "Mixer",
    "MixerWeights",
    "Moments",
    "NoisyParams",
    "PolicyConfig",
    "QParams",
    "Recurrent",
    "Unshared",
    "ViewEncoder",
    "agent_head",
    "agent_network",
    "as_vectors",
    "blank_view",
    "central",
    "differentiable_action",
    "init_mixer",
    "init_policy",
    "make_critics",
    "make_mixer",
    "make_policy",
    "mix",
    "mixing_coefficients",
    "observation_encoder",
    "squash",
    "state_encoder",
    "stochastic_head",
    "unroll_batch",
    "view_encoder",
]
