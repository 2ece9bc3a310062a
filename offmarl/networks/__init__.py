"""Neural networks: torsos shared by all agents, mixers, and policies described by data."""

from offmarl.networks.mixer import Mixer, MixerWeights, credit, mix
from offmarl.networks.policy import (
    PolicyConfig,
    QParams,
    agent_network,
    init_policy,
    make_policy,
)
from offmarl.networks.torso import FeedForward, Recurrent

__all__ = [
    "FeedForward",
    "Mixer",
    "MixerWeights",
    "PolicyConfig",
    "QParams",
    "Recurrent",
    "agent_network",
    "credit",
    "init_policy",
    "make_policy",
    "mix",
]
