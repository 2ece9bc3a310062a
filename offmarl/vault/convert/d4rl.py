"""Steps of a single agent end to end, in the columns of D4RL: ``.npz`` and HDF5 files.

Arrays ``observations (T, ...)``, ``actions (T, A)`` in [-1, 1], ``rewards`` and ``terminals (T,)``,
and optionally ``timeouts (T,)`` and ``next_observations (T, ...)``. Other arrays and groups, such
as ``infos``, are left out.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from offmarl.errors import VaultError
from offmarl.types import EnvSpec
from offmarl.vault.convert.common import Imported, end_to_end
from offmarl.vault.convert.containers import StrPath
from offmarl.vault.format.layout import NumpyArray

_NEEDED = ("observations", "actions", "rewards", "terminals")
_OPTIONAL = {"timeouts": "truncations", "next_observations": "next_obs"}
"""Further arrays, and what `end_to_end` calls them."""
_NUMBERS = ("rewards", "terminals", "timeouts")


def read_d4rl(
    source: StrPath, env_spec: EnvSpec | None = None, time_limit: int | None = None
) -> AbstractContextManager[Imported]:
    """Read the steps of a single agent in .npz or HDF5, as D4RL ships them."""
    return end_to_end(source, "D4RL", _wanted, _convert, _check, env_spec, time_limit)


def _wanted(names: set[str]) -> list[str]:
    return [*_NEEDED, *(name for name in _OPTIONAL if name in names)]


def _check(source: Path, arrays: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        if not array.shape or (name in _NUMBERS and array.shape[1:] not in ((), (1,))):
            raise VaultError(
                f"{source} is not of D4RL's layout: {name} has shape {array.shape}, and must have "
                "an entry for each step of one agent."
            )


def _convert(arrays: dict[str, NumpyArray]) -> dict[str, NumpyArray]:
    axes = {name: () if name in _NUMBERS else x.shape[1:] or (1,) for name, x in arrays.items()}
    return {
        _OPTIONAL.get(name, name): x.reshape(len(x), 1, *axes[name]) for name, x in arrays.items()
    }
