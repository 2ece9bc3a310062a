"""Offline multi-agent reinforcement learning in JAX: datasets, replay, environments, programs.

| area | names |
|---|---|
| data | `open`, `list_datasets`, `load_dataset`, `from_arrays`, `Dataset`, `hub` |
| | `vault` (create, read, ...) |
| replay | `mix` (of vaults), `replay` (windows on the device, or streamed from disk) |
| environments | `envs` (`envs.make`, `envs.register`), `rollout` |
| networks | `networks`, `distributions` |
| losses | `losses` |
| training | `train`, `programs`, `config` (arguments of programs), `checkpoint`, `tracking` |
| recording | `record` (Python environments), `record_episodes` (the same, in processes) |
| | `record_tiers` (one's own policies), `replay_episode` (recorded episodes, played again) |
| evaluation | `evaluation`, `load_policy`, `load_critic`, `ope` (from data alone) |
| statistics | `compare`, `statistics` (intervals, profiles), `report` (tables, figures, pages) |
| testing | `testing` (conformance tests for storage drivers and environments) |
| records | `View`, `Timestep`, `Transition`, `Sequence`, `FinalObservations` |
| specifications | `EnvSpec`, `ArraySpec`, `Discrete`, `Continuous` |
| errors | `OffmarlError`, the base of those in `errors` |

Names are imported on first use, so ``import offmarl`` is fast and imports neither JAX nor
TensorStore.
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names
from offmarl.paths import finders, openers

if TYPE_CHECKING:
    from pathlib import Path

    from offmarl import (
        checkpoint as checkpoint,
        config as config,
        distributions as distributions,
        envs as envs,
        errors as errors,
        evaluation as evaluation,
        hub as hub,
        losses as losses,
        networks as networks,
        ope as ope,
        programs as programs,
        replay as replay,
        report as report,
        rollout as rollout,
        statistics as statistics,
        testing as testing,
        tracking as tracking,
        vault as vault,
    )
    from offmarl._version import __version__ as __version__
    from offmarl.api import (
        compare as compare,
        list_datasets as list_datasets,
        train as train,
    )
    from offmarl.errors import OffmarlError as OffmarlError
    from offmarl.hub.pulling import load_dataset as load_dataset
    from offmarl.hub.remote import HubDriver
    from offmarl.programs.runs.policy import load_critic as load_critic
    from offmarl.programs.runs.policy import load_policy as load_policy
    from offmarl.programs.recording.python import record_episodes as record_episodes
    from offmarl.programs.recording.python import record as record
    from offmarl.programs.recording.record import record_tiers as record_tiers
    from offmarl.programs.recording.replaying import replay_episode as replay_episode
    from offmarl.types import (
        ArraySpec as ArraySpec,
        Continuous as Continuous,
        Discrete as Discrete,
        EnvSpec as EnvSpec,
        FinalObservations as FinalObservations,
        Sequence as Sequence,
        Timestep as Timestep,
        Transition as Transition,
        View as View,
    )
    from offmarl.vault.convert import from_arrays as from_arrays
    from offmarl.vault.dataset import Dataset as Dataset, open_vault
    from offmarl.vault.storage.location import Url
    from offmarl.vault.mixture import mix as mix

    open = open_vault
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)


def _find_dataset(name: str, single: bool) -> "Path | None":
    from offmarl.hub.cache import find  # it imports the hub's client

    return find(name, single)


def _open_published(url: "Url") -> "HubDriver":
    from offmarl.hub.remote import HubDriver

    return HubDriver(url)


# `offmarl.paths` is a layer below the hub and cannot import it, so they are connected here.
finders.append(_find_dataset)
openers["hf"] = _open_published
