"""Datasets of other projects, to vaults and from them."""

from collections.abc import Callable
from pathlib import Path, PurePath

from offmarl.vault.convert.columns import convert_numpy, convert_zarr, export_numpy, export_zarr
from offmarl.vault.convert.flat import convert_omar, convert_omiga
from offmarl.vault.convert.minari import convert_minari, export_minari
from offmarl.vault.convert.pymarl import convert_pymarl
from offmarl.vault.convert.to_pymarl import export_pymarl

READERS: dict[str, Callable[..., PurePath]] = {
    "pymarl": convert_pymarl,
    "cfcql": convert_pymarl,
    "omiga": convert_omiga,
    "omar": convert_omar,
    "minari": convert_minari,
    "numpy": convert_numpy,
    "zarr": convert_zarr,
}
"""What makes a vault of a dataset, by the name of its layout."""

WRITERS: dict[str, Callable[..., Path]] = {
    "pymarl": export_pymarl,
    "minari": export_minari,
    "numpy": export_numpy,
    "zarr": export_zarr,
}
"""What writes a vault in another layout, by its name."""

__all__ = [
    "READERS",
    "WRITERS",
    "convert_minari",
    "convert_numpy",
    "convert_omar",
    "convert_omiga",
    "convert_pymarl",
    "convert_zarr",
    "export_minari",
    "export_numpy",
    "export_pymarl",
    "export_zarr",
]
