"""Datasets and policies on the hub: the catalogue, downloading and publishing.

>>> hub.pull("og_marl/smac_v1/3m/Good").paths
>>> dataset = hub.load_dataset("og_marl/smac_v1/3m/Good")
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names

if TYPE_CHECKING:
    from offmarl.hub.card import Card as Card
    from offmarl.hub.card import cards as cards
    from offmarl.hub.policies import PulledPolicy as PulledPolicy
    from offmarl.hub.policies import PushedPolicy as PushedPolicy
    from offmarl.hub.policies import pull_policy as pull_policy
    from offmarl.hub.policies import push_policy as push_policy
    from offmarl.hub.pulling import Plan as Plan
    from offmarl.hub.pulling import Pulled as Pulled
    from offmarl.hub.pulling import load_dataset as load_dataset
    from offmarl.hub.pulling import plan as plan
    from offmarl.hub.pulling import pull as pull
    from offmarl.hub.pushing import Pushed as Pushed
    from offmarl.hub.pushing import push as push
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
