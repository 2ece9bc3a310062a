"""HDF5 files of multi-agent MuJoCo with the steps end to end, as OMIGA and ComaDICE ship them.

Arrays ``o (T, N, O)``, ``s (T, N, S)``, ``a (T, N, A)``, and ``r`` and ``d``, ``(T, 1)`` or one for
each agent: rewards, and 1 at the last step of an episode. The outcome of an episode's last action
is not recorded there. The states of the agents are joined to the global state.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from offmarl.errors import VaultError
from offmarl.types import EnvSpec
from offmarl.vault.convert.common import Imported, end_to_end
from offmarl.vault.convert.containers import StrPath
from offmarl.vault.format.layout import NumpyArray

_NEEDED = ("s", "o", "a", "r", "d")


def read_omiga(
    source: StrPath, env_spec: EnvSpec | None = None, time_limit: int | None = None
) -> AbstractContextManager[Imported]:
    """Read HDF5 files of multi-agent MuJoCo, as OMIGA and ComaDICE ship them."""
    return end_to_end(source, "OMIGA", lambda _: _NEEDED, _convert, _check, env_spec, time_limit)


def _check(source: Path, arrays: Mapping[str, Any]) -> None:
    shape = arrays["o"].shape
    if len(shape) != 3 or not shape[1]:
        raise VaultError(f"{source} is not of OMIGA's layout: o has shape {shape}.")


def _convert(arrays: dict[str, NumpyArray]) -> dict[str, NumpyArray]:
    s, o, a, r, d = (arrays[name] for name in _NEEDED)
    each = o.shape[:2]
    return {
        "observations": o,
        "infos.state": s.reshape(len(o), -1),
        "actions": a,
        "rewards": np.broadcast_to(r.reshape(len(o), -1), each),
        "terminals": np.broadcast_to(d.reshape(len(o), -1), each),
    }
