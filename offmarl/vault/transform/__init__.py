"""Vaults made of vaults: joined, filtered, sampled, split, cut, and coded anew."""

from offmarl.vault.transform.operations import cat, dedup, filter, recode, sample, slice, split

__all__ = ["cat", "dedup", "filter", "recode", "sample", "slice", "split"]
