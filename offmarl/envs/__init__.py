"""Environments: multi-agent tasks as pure functions, by name.

``make("swarm/coverage-8")`` builds one, `describe` lists them, `autoreset` keeps one going. Listing
imports no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from offmarl.envs.catalogue import EnvInfo
from offmarl.envs.registry import (
    describe,
    family_of,
    info,
    make,
    names,
    register,
    short_name,
    source,
)

if TYPE_CHECKING:
    from offmarl.envs.base import (
        AutoReset,
        Environment,
        EnvState,
        Scene,
        autoreset,
        has_shaping,
        restart,
        transition,
    )
    from offmarl.envs.pettingzoo import PettingZooPolicy, to_pettingzoo
    from offmarl.envs.scripted import register_policy, scripted_policies, scripted_policy
    from offmarl.envs.sides import Seat, Side, TeamPolicy, compose, play_side
    from offmarl.envs.states import record_states

__all__ = [
    "AutoReset",
    "EnvInfo",
    "EnvState",
    "Environment",
    "PettingZooPolicy",
    "Scene",
    "Seat",
    "Side",
    "TeamPolicy",
    "autoreset",
    "compose",
    "describe",
    "family_of",
    "has_shaping",
    "info",
    "make",
    "names",
    "play_side",
    "record_states",
    "register",
    "register_policy",
    "restart",
    "scripted_policies",
    "scripted_policy",
    "short_name",
    "source",
    "to_pettingzoo",
    "transition",
]

_HOMES = {
    "record_states": "states",
    **dict.fromkeys(("register_policy", "scripted_policies", "scripted_policy"), "scripted"),
    **dict.fromkeys(("Seat", "Side", "TeamPolicy", "compose", "play_side"), "sides"),
}
"""Modules of the names above that import JAX; the others are in ``base``."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("PettingZooPolicy", "to_pettingzoo"):
        from offmarl._imports import import_optional

        import_optional("pettingzoo", "pettingzoo")
        from offmarl.envs import pettingzoo

        return getattr(pettingzoo, name)
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'base')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
