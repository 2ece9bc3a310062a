"""Freed memory is returned to the system."""

import platform
from pathlib import Path

import pytest

from offmarl import _heap


def resident() -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in x)
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_free_memory_is_returned_below_blocks_in_use():
    blocks = [bytearray(10_000) for _ in range(10_000)]
    kept = blocks[::100]  # glibc itself returns only what is free above all of these
    full = resident()
    del blocks
    _heap.return_free()
    assert full - resident() > 80e6
    assert len(kept) == 100
