"""Vaults made from vaults: joined, filtered, sampled, split, cut, deduplicated, recoded, mapped."""

from offmarl.vault.transform.columns import Steps
from offmarl.vault.transform.verbs import cat, dedup, filter, map, recode, sample, slice, split

__all__ = ["Steps", "cat", "dedup", "filter", "map", "recode", "sample", "slice", "split"]
