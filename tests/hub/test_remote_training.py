"""Training from the hub in little memory and on little disk, with slow connections that are cut."""

from pathlib import Path

import pytest

from benchmarks import remote

pytestmark = pytest.mark.nightly


def test_little_memory_and_disk(tmp_path: Path) -> None:
    """A vault that is six times as large as the cache; the processes are those of a user."""
    args = remote.Args(large=0.3, cache_gb=0.05, updates=400)
    result = remote.large(args, tmp_path)
    assert result["files"] > 3
    assert result["cache"] < 0.05 * 1.1
    assert max(result["push_gb"], result["peak_gb"]) < 1.0
