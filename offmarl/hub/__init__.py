"""Datasets and policies on the hub: the catalogue, downloading and publishing.

>>> hub.pull("og_marl/smac_v1/3m/Good").paths
>>> dataset = hub.load_dataset("og_marl/smac_v1/3m/Good")
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names

if TYPE_CHECKING:
    from offmarl.hub.card import Card as Card, cards as cards
    from offmarl.hub.policies import (
        PulledPolicy as PulledPolicy,
        pull_policy as pull_policy,
        push_policy as push_policy,
    )
    from offmarl.hub.pulling import (
        PullPlan as PullPlan,
        Pulled as Pulled,
        load_dataset as load_dataset,
        plan as plan,
        pull as pull,
    )
    from offmarl.hub.pushing import Pushed as Pushed, push as push
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
