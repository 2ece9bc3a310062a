"""Memory: garbage is collected rarely before a run's first update, and free memory returned."""

import gc
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from offmarl import _memory, cli
from offmarl._memory import collect_as_before, collect_rarely


@pytest.fixture
def threshold() -> Iterator[tuple[int, int, int]]:
    collect_as_before()
    before = gc.get_threshold()
    yield before
    collect_as_before()
    assert gc.get_threshold() == before


def test_the_threshold_of_before_comes_back(threshold: tuple[int, int, int]) -> None:
    collect_as_before()
    assert gc.get_threshold() == threshold
    collect_rarely()
    collect_rarely()  # a second call does not take the raised threshold for that of before
    assert gc.get_threshold()[0] > 10 * threshold[0]
    collect_as_before()
    assert gc.get_threshold() == threshold


def test_commands_raise_it(threshold: tuple[int, int, int]) -> None:
    with cli.exit_codes():
        assert gc.get_threshold()[0] > 10 * threshold[0]


def resident() -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in x)
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_free_memory_is_returned_below_blocks_in_use():
    blocks = [bytearray(10_000) for _ in range(10_000)]
    kept = blocks[::100]  # glibc itself returns only what is free above all of these
    full = resident()
    del blocks
    _memory.return_free()
    assert full - resident() > 80e6
    assert len(kept) == 100
