"""Datasets of other projects: read into vaults, and written from them.

To add a layout, write a reader in a module of its own and list it in `READERS`: the command line
and its help follow. A reader is a context manager that takes the source, and ``env_spec`` and
``time_limit`` if its layout does not record them. It yields an `Imported`.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from offmarl.errors import OptionError, unknown_name
from offmarl.terminal import Progress, quiet
from offmarl.types import EnvSpec
from offmarl.vault.convert.admission import Treatment
from offmarl.vault.convert.arrays import from_arrays
from offmarl.vault.convert.columns import read_numpy, read_zarr, write_numpy, write_zarr
from offmarl.vault.convert.common import Imported, write_vault
from offmarl.vault.convert.containers import StrPath
from offmarl.vault.convert.end_to_end import read_d4rl, read_omar, read_omiga
from offmarl.vault.convert.games import read_ah2ac2
from offmarl.vault.convert.minari import read_minari, write_minari
from offmarl.vault.convert.overcooked import read_overcooked
from offmarl.vault.convert.pymarl import read_pymarl, write_pymarl
from offmarl.vault.dataset import Dataset, open_vault
from offmarl.vault.format.compat import LIMIT_UNKNOWN, MEANINGS, may_have_limit
from offmarl.vault.format.layout import Codec

READERS: dict[str, Callable[..., AbstractContextManager[Imported]]] = {
    "pymarl": read_pymarl,
    "cfcql": read_pymarl,
    "alberdice": read_pymarl,
    "omiga": read_omiga,
    "omar": read_omar,
    "d4rl": read_d4rl,
    "minari": read_minari,
    "numpy": read_numpy,
    "zarr": read_zarr,
    "overcooked-ai": read_overcooked,
    "ah2ac2": read_ah2ac2,
}
"""Readers by the name of their layout. The first line of a docstring is the layout's summary."""

WRITERS: dict[str, Callable[[Dataset, StrPath, Progress], Path]] = {
    "pymarl": write_pymarl,
    "minari": write_minari,
    "numpy": write_numpy,
    "zarr": write_zarr,
}
"""Writers by the name of their layout."""

__all__ = [
    "READERS",
    "WRITERS",
    "Imported",
    "Treatment",
    "export_dataset",
    "from_arrays",
    "import_dataset",
]


def import_dataset(
    source: StrPath,
    path: StrPath,
    layout: str = "pymarl",
    *,
    env_spec: EnvSpec | None = None,
    time_limit: int | None = None,
    codec: Codec = "raw",
    terms: Mapping[str, str] | None = None,
    on_invalid: Treatment = "cut",
    progress: Progress = quiet,
) -> Dataset:
    """Make a vault from a dataset of another project.

    Parameters
    ----------
    source
        A file or folder, or the name of a Minari dataset.
    path
        The vault to write, of one row with the episodes end to end.
    layout
        Layout of the source, a name of `READERS`.
    env_spec
        The environment, whose sizes must be those of the data; inferred from the data if None.
    time_limit
        Steps after which the environment truncates episodes, so that these ends are not read as
        terminations; the limit of ``env_spec`` if None.
    codec
        As for `offmarl.vault.create`.
    terms
        The dataset's ``licence`` (an SPDX identifier) and ``citation``, for the provenance.
    on_invalid
        As for `from_arrays`.
    progress
        Shows the progress.

    Raises
    ------
    UnknownNameError
        There is no such layout.
    OptionError
        ``env_spec`` or ``time_limit`` was given, and the layout records both.
    VaultError
        The source cannot be read, or is not of the layout.
    ShapeError
        The sizes of the data are not those of ``env_spec``.
    InvalidValueError
        A value does not fit: see `offmarl.vault.convert.admission`.
    """
    read = _named(READERS, layout)
    options = _accepted(read, layout, env_spec=env_spec, time_limit=time_limit)
    with read(source, **options) as dataset:
        provenance: dict[str, Any] = {"source": dataset.origin | dict(terms or {})}
        provenance |= {"policies": [*dataset.policies]} if dataset.policies else {}
        write_vault(path, dataset, provenance, codec, on_invalid, progress, source)
    data = open_vault(path)
    takes_limit = "time_limit" in inspect.signature(read).parameters and env_spec is None
    if takes_limit and (doubt := _doubt(data, time_limit)):
        warnings.warn(doubt, stacklevel=2)
    return data


def _doubt(data: Dataset, time_limit: int | None) -> str:
    """Return what is doubtful about the time limit of converted episodes; empty if nothing is."""
    if time_limit is None:
        return f"{MEANINGS[LIMIT_UNKNOWN]}." if may_have_limit(data.episodes) else ""
    if (longest := data.episodes.length.max(initial=0)) <= time_limit:
        return ""
    return (
        f"episodes have up to {longest} steps, more than the time limit of {time_limit} that was "
        "given: convert them again with another one."
    )


def export_dataset(
    source: StrPath | Dataset, path: StrPath, layout: str, *, progress: Progress = quiet
) -> Path:
    """Write a vault in the layout of another project.

    Parameters
    ----------
    source
        A vault, open or by its path.
    path
        The file or folder to write; for Minari, the dataset's name.
    layout
        A name of `WRITERS`.
    progress
        Shows the progress.

    Raises
    ------
    UnknownNameError
        There is no such layout.
    VaultExistsError
        The path exists.
    ShapeError
        The layout cannot hold the data.
    """
    write = _named(WRITERS, layout)
    return write(source if isinstance(source, Dataset) else open_vault(source), path, progress)


def _named(table: Mapping[str, Any], layout: str) -> Any:
    if layout not in table:
        raise unknown_name("layout", layout, table, see="offmarl convert --help")
    return table[layout]


def _accepted(read: Callable[..., Any], layout: str, **options: Any) -> dict[str, Any]:
    """Return the options that are given; `OptionError` if the reader does not take one."""
    accepted = {name: value for name, value in options.items() if value is not None}
    if unknown := accepted.keys() - inspect.signature(read).parameters.keys():
        flags = {"env_spec": "--env", "time_limit": "--time-limit"}
        raise OptionError(
            f"the layout {layout} takes no {' and no '.join(flags[name] for name in unknown)}: its "
            "datasets record the environment and how episodes ended."
        )
    return accepted
