"""Neural networks: torsos shared by all agents, mixers, and policies described by data."""

from offmarl.networks.head import GAUSSIAN, SOFTMAX, Head
from offmarl.networks.mixer import Mixer, MixerWeights, credit, mix
from offmarl.networks.policy import (
    PolicyConfig,
    QParams,
    agent_head,
    agent_network,
    draws_actions,
    init_policy,
    make_policy,
    stochastic_head,
)
from offmarl.networks.torso import FeedForward, Recurrent

__all__ = [
    "GAUSSIAN",
    "SOFTMAX",
    "FeedForward",
    "Head",
    "Mixer",
    "MixerWeights",
    "PolicyConfig",
    "QParams",
    "Recurrent",
    "agent_head",
    "agent_network",
    "credit",
    "draws_actions",
    "init_policy",
    "make_policy",
    "mix",
    "stochastic_head",
]
