"""Check a vault and sum it up: verification, digests, statistics."""
