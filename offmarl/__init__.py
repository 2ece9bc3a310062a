"""Offline multi-agent reinforcement learning in JAX: datasets, replay, environments, programs.

| area | names |
|---|---|
| data | `open`, `load_dataset`, `from_arrays`, `Dataset`, `vault` (create, read, ...), `hub` |
| replay | `mix` (of vaults), `replay` (windows on the device, or streamed from disk) |
| environments | `envs` (`envs.make`, `envs.register`), `rollout` |
| networks | `networks`, `distributions` |
| losses | `losses` |
| training | `programs`, `config` (arguments of programs), `checkpoint`, `tracking` |
| recording | `record` (Python environments), `record_episodes` (the same, in processes) |
| | `replay_episode` (recorded episodes, played again) |
| evaluation | `evaluation`, `load_policy`, `load_critic`, `ope` (from data alone) |
| statistics | `statistics` (intervals, profiles), `report` (tables, figures, pages) |
| testing | `testing` (conformance tests for storage drivers and environments) |
| records | `View`, `Timestep`, `Transition`, `Sequence`, `FinalObservations` |
| specifications | `EnvSpec`, `ArraySpec`, `Discrete`, `Continuous` |
| errors | `OffmarlError`, `OptionError`, `UnknownNameError`, `ShapeError`, `InvalidValueError` |
| | `VaultError`, `VaultNotFoundError`, `VaultExistsError`, `VaultFormatError`, `VaultFullError` |
| | `VaultLayoutError`, `VaultLockedError`, `VaultConflictError`, `ExpressionError` |
| | `ChecksumError`, `VaultChecksumError`, `HubChecksumError` |
| | `HubError`, `HubUnreachableError`, `CardError` |
| | `RunError`, `CheckpointError`, `NotLearnedError`, `MissingExtraError`, `PluginError` |
| | `NotFiniteError`, `ProcessLostError` |

Names are imported on first use, so ``import offmarl`` is fast and imports neither JAX nor
TensorStore.
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_getattr
from offmarl._version import __version__
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
    NotFiniteError,
    NotLearnedError,
    OffmarlError,
    OptionError,
    PluginError,
    ProcessLostError,
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
from offmarl.paths import register_names, register_scheme

if TYPE_CHECKING:
    from pathlib import Path

    from offmarl import (
        checkpoint,
        config,
        distributions,
        envs,
        evaluation,
        hub,
        losses,
        networks,
        ope,
        programs,
        replay,
        report,
        rollout,
        statistics,
        testing,
        tracking,
        vault,
    )
    from offmarl.hub import load_dataset
    from offmarl.hub.remote import HubDriver
    from offmarl.programs.critic import load_critic
    from offmarl.programs.policy import load_policy
    from offmarl.programs.python import record, record_episodes
    from offmarl.programs.replaying import replay_episode
    from offmarl.types import (
        ArraySpec,
        Continuous,
        Discrete,
        EnvSpec,
        FinalObservations,
        Sequence,
        Timestep,
        Transition,
        View,
    )
    from offmarl.vault import Dataset, from_arrays, mix
    from offmarl.vault import open_vault as open
    from offmarl.vault.location import Url

__all__ = [
    "ArraySpec",
    "CardError",
    "CheckpointError",
    "ChecksumError",
    "Continuous",
    "Dataset",
    "Discrete",
    "EnvSpec",
    "ExpressionError",
    "FinalObservations",
    "HubChecksumError",
    "HubError",
    "HubUnreachableError",
    "InvalidValueError",
    "MissingExtraError",
    "NotFiniteError",
    "NotLearnedError",
    "OffmarlError",
    "OptionError",
    "PluginError",
    "ProcessLostError",
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
    "checkpoint",
    "config",
    "distributions",
    "envs",
    "evaluation",
    "from_arrays",
    "hub",
    "load_critic",
    "load_dataset",
    "load_policy",
    "losses",
    "mix",
    "networks",
    "ope",
    "open",
    "programs",
    "record",
    "record_episodes",
    "replay",
    "replay_episode",
    "report",
    "rollout",
    "statistics",
    "testing",
    "tracking",
    "vault",
]

_HOMES = {
    "Dataset": "offmarl.vault:Dataset",
    "from_arrays": "offmarl.vault:from_arrays",
    "load_dataset": "offmarl.hub:load_dataset",
    "load_critic": "offmarl.programs.critic:load_critic",
    "load_policy": "offmarl.programs.policy:load_policy",
    "mix": "offmarl.vault:mix",
    "open": "offmarl.vault:open_vault",
    "record": "offmarl.programs.python:record",
    "record_episodes": "offmarl.programs.python:record_episodes",
    "replay_episode": "offmarl.programs.replaying:replay_episode",
    **{
        name: f"offmarl.types:{name}"
        for name in (
            "ArraySpec",
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
"""Names that are neither modules of the package nor imported above, and where each is defined."""

if not TYPE_CHECKING:  # type checkers take any name from a module that has this
    __getattr__ = lazy_getattr(__name__, _HOMES)


def _find_dataset(name: str, one: bool) -> "Path | None":
    from offmarl.hub.cache import find  # it imports the hub's client

    return find(name, one)


def _open_published(url: "Url") -> "HubDriver":
    from offmarl.hub.remote import HubDriver

    return HubDriver(url)


# `offmarl.paths` is a layer below the hub and cannot import it, so they are connected here.
register_names(_find_dataset)
register_scheme("hf", _open_published)


def __dir__() -> list[str]:
    return sorted(__all__)
