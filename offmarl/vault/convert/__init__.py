"""Datasets of other projects, to vaults and from them."""

from offmarl.vault.convert.columns import convert_numpy, convert_zarr, export_numpy, export_zarr
from offmarl.vault.convert.flat import convert_omar, convert_omiga
from offmarl.vault.convert.pymarl import convert_pymarl
from offmarl.vault.convert.to_pymarl import export_pymarl

__all__ = [
    "convert_numpy",
    "convert_omar",
    "convert_omiga",
    "convert_pymarl",
    "convert_zarr",
    "export_numpy",
    "export_pymarl",
    "export_zarr",
]
