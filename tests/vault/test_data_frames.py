"""The episode table as data frames of other libraries."""

import sys
from typing import Any

import numpy as np
import pytest

from offmarl.errors import MissingExtraError
from offmarl.teams import Team
from offmarl.vault.format import tables

from .experience import make

TEAMS = (Team("all", (0, 1)),)

COLUMNS = {
    "row": "int64",
    "start": "int64",
    "length": "int64",
    "episode_return": "double",
    "returns": "fixed_size_list<item: double>[2]",
    "complete": "bool",
    "terminated": "bool",
    "truncated": "bool",
    "cause": "dictionary<values=string, indices=int8, ordered=0>",
    "policy_id": "int64",
    "policy_ids": "fixed_size_list<item: int64>[2]",
    "final": "int64",
}


@pytest.fixture(scope="module")
def episodes() -> tables.Episodes:
    """Episodes of every cause, the last one unfinished."""
    data, _ = make(steps=60)
    signals = tables.Signals(data.reward, data.terminated, data.truncated, data.policy_id)
    ended, running = tables.scan(tables.none_running(2, tables.dtype(2, 2)), 0, signals)
    ended["cause"][:2] = tables.CUT, tables.OPEN
    table = tables.to_episodes(np.concatenate([ended, running[running["length"] > 0]]), TEAMS)
    assert set(table.cause) == set(tables.CAUSES)
    return table


def assert_same(columns: dict[str, list[Any]], episodes: tables.Episodes) -> None:
    assert [*columns] == [*COLUMNS]
    for name, values in columns.items():
        expected = getattr(episodes, "episode_returns" if name == "episode_return" else name)
        np.testing.assert_array_equal(np.array(values), expected)


def test_arrow(episodes: tables.Episodes) -> None:
    pytest.importorskip("pyarrow")
    table = episodes.to_arrow()
    assert {field.name: str(field.type) for field in table.schema} == COLUMNS
    assert_same(table.to_pydict(), episodes)


def test_pandas(episodes: tables.Episodes) -> None:
    pytest.importorskip("pandas")
    frame = episodes.to_pandas()
    assert_same(frame.to_dict("list"), episodes)
    assert frame["cause"].cat.categories.tolist() == tables.CAUSES.tolist()
    means = frame.groupby("cause", observed=True)["episode_return"].mean()
    cut = episodes.episode_returns[episodes.cause == "cut"]
    np.testing.assert_allclose(means["cut"], cut.mean())


def test_polars(episodes: tables.Episodes) -> None:
    pytest.importorskip("polars")
    frame = episodes.to_polars()
    assert_same(frame.to_dict(as_series=False), episodes)
    assert frame["returns"].dtype.shape == (2,)
    best = frame.filter(frame["complete"]).sort("episode_return")["episode_return"][-1]
    assert best == episodes.complete_returns.max()


def test_an_empty_table(episodes: tables.Episodes) -> None:
    pytest.importorskip("pyarrow")
    empty = episodes.take(slice(0, 0))
    assert len(empty.to_arrow()) == len(empty.to_pandas()) == len(empty.to_polars()) == 0


@pytest.mark.parametrize("package", ["pandas", "polars", "pyarrow"])
def test_a_missing_package_is_named(
    package: str, episodes: tables.Episodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    convert = {"pyarrow": "to_arrow"}.get(package, f"to_{package}")
    with pytest.raises(MissingExtraError, match=rf"{package} is not .* 'offmarl\[tables\]'"):
        getattr(episodes, convert)()
