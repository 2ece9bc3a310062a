"""Offline multi-agent RL datasets and replay in JAX.

Names are loaded when they are first used, so that ``import offmarl`` costs next to nothing and
brings in neither JAX nor TensorStore.
"""

from typing import TYPE_CHECKING

from offmarl._lazy import lazy_getattr
from offmarl.errors import (
    CardError,
    CheckpointError,
    ChecksumError,
    ExpressionError,
    HubChecksumError,
    HubError,
    HubUnreachableError,
    InvalidValueError,
    MissingExtraError,
    OffmarlError,
    OptionError,
    PluginError,
    RunError,
    ShapeError,
    UnknownNameError,
    VaultChecksumError,
    VaultConflictError,
    VaultError,
    VaultExistsError,
    VaultFormatError,
    VaultFullError,
    VaultLayoutError,
    VaultLockedError,
    VaultNotFoundError,
)
from offmarl.paths import register_names

if TYPE_CHECKING:
    from pathlib import Path

    from offmarl import envs, hub, vault
    from offmarl.evaluation import load_policy
    from offmarl.hub import load_dataset
    from offmarl.programs.processes import record_episodes
    from offmarl.programs.python import record
    from offmarl.types import (
        Continuous,
        Discrete,
        EnvSpec,
        FinalObservations,
        Sequence,
        Timestep,
        Transition,
        View,
    )
    from offmarl.vault import open_vault as open

__version__ = "0.1.0"

__all__ = [
    "CardError",
    "CheckpointError",
    "ChecksumError",
    "Continuous",
    "Discrete",
    "EnvSpec",
    "ExpressionError",
    "FinalObservations",
    "HubChecksumError",
    "HubError",
    "HubUnreachableError",
    "InvalidValueError",
    "MissingExtraError",
    "OffmarlError",
    "OptionError",
    "PluginError",
    "RunError",
    "Sequence",
    "ShapeError",
    "Timestep",
    "Transition",
    "UnknownNameError",
    "VaultChecksumError",
    "VaultConflictError",
    "VaultError",
    "VaultExistsError",
    "VaultFormatError",
    "VaultFullError",
    "VaultLayoutError",
    "VaultLockedError",
    "VaultNotFoundError",
    "View",
    "__version__",
    "envs",
    "hub",
    "load_dataset",
    "load_policy",
    "open",
    "record",
    "record_episodes",
    "vault",
]

_HOMES = {
    "envs": "offmarl.envs",
    "hub": "offmarl.hub",
    "vault": "offmarl.vault",
    "load_dataset": "offmarl.hub:load_dataset",
    "open": "offmarl.vault.open:open_vault",
    "load_policy": "offmarl.evaluation:load_policy",
    "record": "offmarl.programs.python:record",
    "record_episodes": "offmarl.programs.processes:record_episodes",
    **{
        name: f"offmarl.types:{name}"
        for name in (
            "Continuous",
            "Discrete",
            "EnvSpec",
            "FinalObservations",
            "Sequence",
            "Timestep",
            "Transition",
            "View",
        )
    },
}

if not TYPE_CHECKING:  # type checkers take any name from a module that has this
    __getattr__ = lazy_getattr(__name__, _HOMES)


def _find_dataset(name: str) -> "Path | None":
    from offmarl.hub.cache import find  # it brings in the hub's client

    return find(name)


register_names(_find_dataset)


def __dir__() -> list[str]:
    return sorted(__all__)
