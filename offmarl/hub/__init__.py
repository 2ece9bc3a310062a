"""Datasets and policies on the hub: the catalogue, downloading and publishing.

>>> hub.pull("og_marl/smac_v1/3m/Good").paths
>>> dataset = hub.load_dataset("og_marl/smac_v1/3m/Good")
"""

from offmarl.hub.card import Card, cards
from offmarl.hub.policies import PulledPolicy, PushedPolicy, pull_policy, push_policy
from offmarl.hub.pull import Plan, Pulled, load_dataset, plan, pull
from offmarl.hub.push import Pushed, push

__all__ = [
    "Card",
    "Plan",
    "Pulled",
    "PulledPolicy",
    "Pushed",
    "PushedPolicy",
    "cards",
    "load_dataset",
    "plan",
    "pull",
    "pull_policy",
    "push",
    "push_policy",
]
