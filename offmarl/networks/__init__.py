"""Neural networks: torsos shared by all agents, mixers, and policies described by data."""

from offmarl.networks.mixer import Mixer, MixerWeights, credit, mix
from offmarl.networks.policy import (
    PolicyConfig,
    QParams,
    action_log_prob,
    agent_network,
    init_policy,
    make_policy,
    mask_illegal,
)
from offmarl.networks.torso import FeedForward, Recurrent

__all__ = [
    "FeedForward",
    "Mixer",
    "MixerWeights",
    "PolicyConfig",
    "QParams",
    "Recurrent",
    "action_log_prob",
    "agent_network",
    "credit",
    "init_policy",
    "make_policy",
    "mask_illegal",
    "mix",
]
