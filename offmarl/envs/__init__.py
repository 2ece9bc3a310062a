"""Environments: multi-agent tasks as pure functions, by name.

``make("swarm/coverage-8")`` builds one, `describe` lists them, `autoreset` keeps one going. Listing
imports no JAX.
"""

from typing import TYPE_CHECKING, Any

from offmarl.envs.catalogue import EnvInfo
from offmarl.envs.registry import (
    describe,
    family_of,
    info,
    make,
    make_for,
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
    from offmarl.envs.states import record_states

__all__ = [
    "AutoReset",
    "EnvInfo",
    "EnvState",
    "Environment",
    "PettingZooPolicy",
    "Scene",
    "autoreset",
    "describe",
    "family_of",
    "has_shaping",
    "info",
    "make",
    "make_for",
    "names",
    "record_states",
    "register",
    "restart",
    "short_name",
    "source",
    "to_pettingzoo",
    "transition",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("PettingZooPolicy", "to_pettingzoo"):
        from offmarl._imports import import_optional

        import_optional("pettingzoo", "pettingzoo")
        from offmarl.envs import pettingzoo

        return getattr(pettingzoo, name)
    from offmarl.envs import base, states

    return getattr(states if name == "record_states" else base, name)


def __dir__() -> list[str]:
    return sorted(__all__)
