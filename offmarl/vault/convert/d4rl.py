"""Steps of a single agent end to end, in the columns of D4RL: ``.npz`` and HDF5 files."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from zipfile import ZipFile

import numpy as np

from offmarl.errors import VaultError
from offmarl.paths import local
from offmarl.types import EnvSpec
from offmarl.vault.convert import common
from offmarl.vault.convert.common import HDF5, Imported, StrPath, open_datasets, readable
from offmarl.vault.convert.flat import _check_lengths, _imported, _Steps
from offmarl.vault.layout import NumpyArray

_NEEDED = ("observations", "actions", "rewards", "terminals")
_OPTIONAL = {"timeouts": "truncations", "next_observations": "next_obs"}
"""Further arrays, and their names on disk and for `_imported`."""
_NUMBERS = ("rewards", "terminals", "timeouts")


@contextmanager
def read_d4rl(
    source: StrPath, env_spec: EnvSpec | None = None, time_limit: int | None = None
) -> Iterator[Imported]:
    """Read the steps of a single agent in .npz or HDF5, as D4RL ships them.

    Other arrays and groups, such as ``infos``, are left out.

    Parameters
    ----------
    source
        Arrays ``observations (T, ...)``, ``actions (T, A)`` in [-1, 1], ``rewards`` and
        ``terminals (T,)``, and optionally ``timeouts (T,)`` and ``next_observations (T, ...)``.
    env_spec, time_limit
        As for `offmarl.vault.convert.import_dataset`.

    Raises
    ------
    VaultError, ShapeError
        The file cannot be read, is not of this layout, or its sizes are not those of ``env_spec``.
    """
    source, names = local(source), dict(zip(_NEEDED, _NEEDED, strict=True)) | _OPTIONAL
    with ExitStack() as stack:
        with readable(source):
            if source.suffix not in HDF5:
                ZipFile(source).close()  # np.load also reads others
            opened = open_datasets if source.suffix in HDF5 else np.load
            found = stack.enter_context(opened(source))
            common.check_layout(source, "D4RL's", found, _NEEDED)
            arrays = {name: common.plain(found[name], name) for name in names if name in found}
        for name, array in arrays.items():
            if not array.shape or (name in _NUMBERS and array.shape[1:] not in ((), (1,))):
                raise VaultError(
                    f"{source} is not of D4RL's layout: {name} has shape {array.shape}, and must "
                    "have an entry for each step of one agent."
                )
        _check_lengths(source, {name: array.shape[0] for name, array in arrays.items()})

        def read(start: int, stop: int) -> dict[str, NumpyArray]:
            with readable(source):
                block = {name: array[start:stop] for name, array in arrays.items()}
            axes = {
                name: () if name in _NUMBERS else x.shape[1:] or (1,) for name, x in block.items()
            }
            return {names[name]: x.reshape(len(x), 1, *axes[name]) for name, x in block.items()}

        origin = {"format": "d4rl", "file": source.name, "sha256": common.sha256(source)}
        yield _imported(_Steps(arrays["rewards"].shape[0], read), origin, env_spec, time_limit)
