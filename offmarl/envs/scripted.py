"""Scripted policies of environments, by name.

An environment offers its own, the policy ``scripted``, with a method ``scripted() -> Policy``.
`register_policy` adds others to any family of environments. Code that is not registered is named
``path/to/file.py:FUNCTION`` or ``package.module:FUNCTION``, where ``FUNCTION(env)`` returns the
policy.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from offmarl import records
from offmarl._imports import code_digest
from offmarl.envs.base import Environment
from offmarl.envs.registry import call, family_of
from offmarl.errors import OptionError, UnknownNameError, unknown_name
from offmarl.types import Policy

SCRIPTED = "scripted"
"""Name of the policy that an environment's method ``scripted`` returns."""

_registered: dict[str, dict[str, Callable[[Any], Policy]]] = {}


def register_policy(family: str, name: str, make: Callable[[Any], Policy]) -> None:
    """Offer a scripted policy for a family of environments, in this process.

    Parameters
    ----------
    family
        One of `offmarl.envs.names`, such as ``"swarm/pursuit-N-M"``.
    name
        Name of the policy, such as ``"ambush"``.
    make
        ``make(env)`` returns the policy of all agents; its parameters are an empty tuple.

    Raises
    ------
    UnknownNameError
        There is no such family.
    """
    _registered.setdefault(family_of(family), {})[name] = make


def scripted_policies(env: Environment) -> dict[str, Policy]:
    """Return the scripted policies that an environment offers, by name.

    They act for all agents, and their parameters are an empty tuple.
    """
    policies: dict[str, Policy] = {}
    if hasattr(env, "scripted"):
        policies[SCRIPTED] = env.scripted()
    family = ""
    with suppress(UnknownNameError):  # code of the user's own has none
        family = family_of(env.spec.name)
    return policies | {name: make(env) for name, make in _registered.get(family, {}).items()}


def scripted_policy(env: Environment, name: str) -> Policy:
    """Return a scripted policy by its name.

    Parameters
    ----------
    env
        The environment.
    name
        A name that `scripted_policies` has, or code as ``path/to/file.py:FUNCTION`` or
        ``package.module:FUNCTION``, which is imported. `Policy.code` is then a checksum of the
        file and of those around it that it imports.

    Raises
    ------
    UnknownNameError
        The environment offers no such policy.
    OptionError
        The code cannot be imported, or does not return a policy.
    """
    policies = scripted_policies(env)
    if ":" in name and name not in policies:
        return _imported(env, name)
    if name not in policies:
        raise unknown_name(f"scripted policy of {env.spec.name}", name, policies)
    return policies[name]


def _imported(env: Environment, name: str) -> Policy:
    make, file = records.import_code(name, "--opponents")
    policy = call(name, make, env)
    if not isinstance(policy, Policy):
        raise OptionError(
            f"{name} returned {policy!r:.80}, which is not a policy: return an offmarl Policy of "
            "all agents, whose parameters are an empty tuple."
        )
    return policy._replace(code=code_digest(Path(file))) if file else policy
