"""Datasets of other projects, to vaults and from them."""

from offmarl.vault.convert.pymarl import convert_pymarl
from offmarl.vault.convert.to_pymarl import export_pymarl

__all__ = ["convert_pymarl", "export_pymarl"]
