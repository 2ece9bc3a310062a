"""Environments: multi-agent tasks as pure functions, by name.

``make("swarm/coverage-8")`` builds one, `describe` lists them, `autoreset` keeps one going. Listing
imports no JAX.
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names

if TYPE_CHECKING:
    from offmarl.envs.base import (
        AutoReset as AutoReset,
        EnvState as EnvState,
        Environment as Environment,
        Scene as Scene,
        autoreset as autoreset,
        has_shaping as has_shaping,
        restart as restart,
        transition as transition,
    )
    from offmarl.envs.catalogue import EnvInfo as EnvInfo
    from offmarl.envs.pettingzoo import (
        PettingZooPolicy as PettingZooPolicy,
        to_pettingzoo as to_pettingzoo,
    )
    from offmarl.envs.registry import (
        describe as describe,
        family_of as family_of,
        info as info,
        make as make,
        names as names,
        register as register,
        short_name as short_name,
        source as source,
    )
    from offmarl.envs.scripted import (
        register_policy as register_policy,
        scripted_policies as scripted_policies,
        scripted_policy as scripted_policy,
    )
    from offmarl.envs.sides import (
        Seat as Seat,
        Side as Side,
        TeamPolicy as TeamPolicy,
        compose as compose,
        play_side as play_side,
    )
    from offmarl.envs.states import record_states as record_states
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, pettingzoo="pettingzoo")
