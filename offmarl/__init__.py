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

from offmarl._imports import lazy_names
from offmarl.paths import register_names, register_scheme

if TYPE_CHECKING:
    from pathlib import Path

    from offmarl import checkpoint as checkpoint
    from offmarl import config as config
    from offmarl import distributions as distributions
    from offmarl import envs as envs
    from offmarl import evaluation as evaluation
    from offmarl import hub as hub
    from offmarl import losses as losses
    from offmarl import networks as networks
    from offmarl import ope as ope
    from offmarl import programs as programs
    from offmarl import replay as replay
    from offmarl import report as report
    from offmarl import rollout as rollout
    from offmarl import statistics as statistics
    from offmarl import testing as testing
    from offmarl import tracking as tracking
    from offmarl import vault as vault
    from offmarl._version import __version__ as __version__
    from offmarl.errors import CardError as CardError
    from offmarl.errors import CheckpointError as CheckpointError
    from offmarl.errors import ChecksumError as ChecksumError
    from offmarl.errors import ExpressionError as ExpressionError
    from offmarl.errors import HubChecksumError as HubChecksumError
    from offmarl.errors import HubError as HubError
    from offmarl.errors import HubUnreachableError as HubUnreachableError
    from offmarl.errors import InvalidValueError as InvalidValueError
    from offmarl.errors import MissingExtraError as MissingExtraError
    from offmarl.errors import NotFiniteError as NotFiniteError
    from offmarl.errors import NotLearnedError as NotLearnedError
    from offmarl.errors import OffmarlError as OffmarlError
    from offmarl.errors import OptionError as OptionError
    from offmarl.errors import PluginError as PluginError
    from offmarl.errors import ProcessLostError as ProcessLostError
    from offmarl.errors import RunError as RunError
    from offmarl.errors import ShapeError as ShapeError
    from offmarl.errors import UnknownNameError as UnknownNameError
    from offmarl.errors import VaultChecksumError as VaultChecksumError
    from offmarl.errors import VaultConflictError as VaultConflictError
    from offmarl.errors import VaultError as VaultError
    from offmarl.errors import VaultExistsError as VaultExistsError
    from offmarl.errors import VaultFormatError as VaultFormatError
    from offmarl.errors import VaultFullError as VaultFullError
    from offmarl.errors import VaultLayoutError as VaultLayoutError
    from offmarl.errors import VaultLockedError as VaultLockedError
    from offmarl.errors import VaultNotFoundError as VaultNotFoundError
    from offmarl.hub.pulling import load_dataset as load_dataset
    from offmarl.hub.remote import HubDriver
    from offmarl.programs.critic import load_critic as load_critic
    from offmarl.programs.policy import load_policy as load_policy
    from offmarl.programs.processes import record_episodes as record_episodes
    from offmarl.programs.python import record as record
    from offmarl.programs.replaying import replay_episode as replay_episode
    from offmarl.types import ArraySpec as ArraySpec
    from offmarl.types import Continuous as Continuous
    from offmarl.types import Discrete as Discrete
    from offmarl.types import EnvSpec as EnvSpec
    from offmarl.types import FinalObservations as FinalObservations
    from offmarl.types import Sequence as Sequence
    from offmarl.types import Timestep as Timestep
    from offmarl.types import Transition as Transition
    from offmarl.types import View as View
    from offmarl.vault.convert import from_arrays as from_arrays
    from offmarl.vault.dataset import Dataset as Dataset
    from offmarl.vault.dataset import open_vault
    from offmarl.vault.location import Url
    from offmarl.vault.mixture import mix as mix

    open = open_vault
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)


def _find_dataset(name: str, one: bool) -> "Path | None":
    from offmarl.hub.cache import find  # it imports the hub's client

    return find(name, one)


def _open_published(url: "Url") -> "HubDriver":
    from offmarl.hub.remote import HubDriver

    return HubDriver(url)


# `offmarl.paths` is a layer below the hub and cannot import it, so they are connected here.
register_names(_find_dataset)
register_scheme("hf", _open_published)
