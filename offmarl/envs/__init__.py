"""Environments: multi-agent tasks as pure functions, by name.

``make("swarm/coverage-8")`` builds one, `describe` lists them, `autoreset` keeps one going. Listing
imports no JAX.
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names

if TYPE_CHECKING:
    from offmarl.envs.base import AutoReset as AutoReset
    from offmarl.envs.base import Environment as Environment
    from offmarl.envs.base import EnvState as EnvState
    from offmarl.envs.base import Scene as Scene
    from offmarl.envs.base import autoreset as autoreset
    from offmarl.envs.base import has_shaping as has_shaping
    from offmarl.envs.base import restart as restart
    from offmarl.envs.base import transition as transition
    from offmarl.envs.catalogue import EnvInfo as EnvInfo
    from offmarl.envs.earlier import make_for as make_for
    from offmarl.envs.pettingzoo import PettingZooPolicy as PettingZooPolicy
    from offmarl.envs.pettingzoo import to_pettingzoo as to_pettingzoo
    from offmarl.envs.registry import describe as describe
    from offmarl.envs.registry import family_of as family_of
    from offmarl.envs.registry import info as info
    from offmarl.envs.registry import make as make
    from offmarl.envs.registry import names as names
    from offmarl.envs.registry import register as register
    from offmarl.envs.registry import short_name as short_name
    from offmarl.envs.registry import source as source
    from offmarl.envs.scripted import register_policy as register_policy
    from offmarl.envs.scripted import scripted_policies as scripted_policies
    from offmarl.envs.scripted import scripted_policy as scripted_policy
    from offmarl.envs.sides import Seat as Seat
    from offmarl.envs.sides import Side as Side
    from offmarl.envs.sides import TeamPolicy as TeamPolicy
    from offmarl.envs.sides import compose as compose
    from offmarl.envs.sides import play_side as play_side
    from offmarl.envs.states import record_states as record_states
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, pettingzoo="pettingzoo")
