"""Verifying, repairing and compacting vaults."""
