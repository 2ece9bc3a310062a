"""Folders of ``.npy`` files with the steps end to end, as OMAR ships them.

A folder has files ``obs_i``, ``acs_i``, ``rews_i``, ``next_obs_i`` and ``dones_i`` for each agent i
from 0, and optionally ``states_i`` and ``next_states_i``. Shorter observations and states are
padded with zeros. Episodes end at the time limit whether ``dones`` says so or not; OMAR's particle
environments have 25 steps.
"""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from offmarl.errors import VaultError
from offmarl.paths import local
from offmarl.types import EnvSpec
from offmarl.vault.convert.common import Imported, end_to_end
from offmarl.vault.convert.containers import StrPath
from offmarl.vault.format.layout import NumpyArray

_KINDS = ("obs", "acs", "rews", "next_obs", "dones")
_STATES = ("states", "next_states")


def read_omar(
    source: StrPath, env_spec: EnvSpec | None = None, time_limit: int | None = None
) -> AbstractContextManager[Imported]:
    """Read folders of .npy files of particle environments and MuJoCo, as OMAR ships them."""
    if not local(source).is_dir():
        raise VaultError(f"{source} is not a folder: OMAR's datasets are folders of .npy files.")
    return end_to_end(source, "OMAR", _wanted, _convert, _check, env_spec, time_limit)


def _wanted(names: set[str]) -> list[str]:
    agents = range(max(sum(bool(re.fullmatch(r"obs_\d+", name)) for name in names), 1))
    kinds = (*_KINDS, *(_STATES if "states_0" in names else ()))
    return [f"{kind}_{agent}" for kind in kinds for agent in agents]


def _check(source: Path, arrays: Mapping[str, Any]) -> None:
    if empty := [name for name, array in arrays.items() if not array.size]:
        shape = arrays[empty[0]].shape
        raise VaultError(f"{source}: {empty[0]} has shape {shape}, and no steps.")


def _convert(arrays: dict[str, NumpyArray]) -> dict[str, NumpyArray]:
    of_kind: dict[str, list[NumpyArray]] = {}
    for name, array in arrays.items():
        of_kind.setdefault(name.rpartition("_")[0], []).append(array)
    found = {kind: _stack(agents) for kind, agents in of_kind.items()}
    renamed = {
        "observations": found["obs"],
        "actions": found["acs"],
        "rewards": found["rews"][..., 0],
        "terminals": found["dones"][..., 0],
        "next_obs": found["next_obs"],
    }
    if "states" in found:
        states = {"infos.state": found["states"], "next_states": found["next_states"]}
        renamed |= {name: x.reshape(len(x), -1) for name, x in states.items()}
    return renamed


def _stack(arrays: list[NumpyArray]) -> NumpyArray:
    """Stack the agents' arrays ``(T, ...)`` to ``(T, N, D)``, padded with zeros."""
    flat = [array.reshape(len(array), -1) for array in arrays]
    width = max(array.shape[1] for array in flat)
    return np.stack([np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in flat], axis=1)
