"""Vaults made from vaults: joined, filtered, sampled, split, cut, without duplicates, recoded."""

from offmarl.vault.transform.verbs import cat, dedup, filter, recode, sample, slice, split

__all__ = ["cat", "dedup", "filter", "recode", "sample", "slice", "split"]
