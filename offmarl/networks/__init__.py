"""Neural networks: torsos that all agents share, mixers, and policies."""

from offmarl.networks.mixers import Mixer, MixerWeights, mix, mixing_coefficients
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
    "FeedForward",
    "Head",
    "Mixer",
    "MixerWeights",
    "Moments",
    "PolicyConfig",
    "QParams",
    "Recurrent",
    "agent_head",
    "agent_network",
    "init_policy",
    "make_policy",
    "mix",
    "mixing_coefficients",
    "stochastic_head",
    "unroll_batch",
]
