"""Garbage is collected rarely only until a run's first update."""

import gc
from collections.abc import Iterator

import pytest

from offmarl import cli
from offmarl._garbage import collect_as_before, collect_rarely


@pytest.fixture(autouse=True)
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
