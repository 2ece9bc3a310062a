"""Vaults made of vaults: joined, filtered, sampled, split, cut, and coded anew."""

from offmarl.vault.transform.operations import cat, dedup, filter, recode, sample, slice, split
from offmarl.vault.transform.salvaging import Salvage, salvage

__all__ = [
    "Salvage",
    "cat",
    "dedup",
    "filter",
    "recode",
    "salvage",
    "sample",
    "slice",
    "split",
]
