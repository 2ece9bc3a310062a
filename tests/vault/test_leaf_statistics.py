"""Statistics of every leaf: known numbers, against NumPy, sketches' bounds, and what is kept."""

from dataclasses import astuple, replace

import numpy as np
import pytest

from offmarl import vault
from offmarl.vault.check.leaf_statistics import (
    QUANTILES,
    store_statistics,
    stored_statistics,
)
from offmarl.vault.format import layout
from offmarl.vault.format.column_statistics import (
    QuantileSketch,
    RangesAccumulator,
    capacity_for,
)

from .experience import CONTINUOUS, SPEC, make, recorded, written
from .test_stock import to_stock, write_stock


def assert_same_statistics(actual, expected):
    assert actual.keys() == expected.keys()
    for name, leaf in actual.items():
        for ours, theirs in zip(astuple(leaf), astuple(expected[name]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, err_msg=name)


# ---------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("spec", [SPEC, CONTINUOUS])
def test_statistics_are_those_of_numpy(tmp_path, spec):
    data = recorded(tmp_path / "a.vlt", spec)
    steps, statistics = data.transitions(), data.statistics()
    alive = steps.view.alive
    assert not alive.all()
    masked = {"observation": steps.view.observation, "legal_actions": steps.view.legal_actions}
    masked |= {"action": steps.action, "behaviour_log_prob": steps.behaviour_log_prob}
    unmasked = {"state": steps.view.state, "reward": steps.reward, "terminated": steps.terminated}
    for name, array in (masked | unmasked).items():
        for index in np.ndindex(array.shape[2:]):
            values = array[(..., *index)]
            values = values[alive[..., index[0]]] if name in masked else values.ravel()
            values = values[np.isfinite(values)].astype(float)
            figures = [leaf[index] for leaf in astuple(statistics[name])[:6]]
            assert figures[0] == len(values)
            expected = [values.mean(), values.std(), values.min(), values.max()]
            np.testing.assert_allclose(figures[2:], expected, rtol=1e-9, atol=1e-12)
            np.testing.assert_array_equal(
                statistics[name].quantiles[(slice(None), *index)],
                np.quantile(values, QUANTILES, method="inverted_cdf"),
            )
    assert {leaf.quantile_error for leaf in statistics.values()} == {0.0}


@pytest.mark.parametrize("axis", [None, 0, (0, 1)])
def test_pooled_columns_are_those_of_numpy(axis):
    rng = np.random.default_rng(0)
    values = rng.normal(3.0, 2.0, (50, 4, 3)) * np.arange(1, 5)[:, None]
    values[rng.random(values.shape) < 0.2] = np.nan
    values[:, 1, 1] = np.inf  # a column without a number
    accumulator = RangesAccumulator(4, 3)
    accumulator.add(values)
    pooled = accumulator.ranges.pooled(axis)
    axes = (0, 1, 2) if axis is None else (0, *(x + 1 for x in np.atleast_1d(axis)))
    finite = np.where(np.isfinite(values), values, np.nan)
    np.testing.assert_allclose(pooled.low, np.nanmin(finite, axis=axes))
    np.testing.assert_allclose(pooled.high, np.nanmax(finite, axis=axes))
    np.testing.assert_allclose(pooled.mean, np.nanmean(finite, axis=axes))
    np.testing.assert_allclose(pooled.std, np.nanstd(finite, axis=axes))
    np.testing.assert_array_equal(pooled.finite, np.isfinite(finite).sum(axis=axes))


def test_padding_is_left_out(tmp_path):
    spec = replace(SPEC, observation_sizes=(3, 1), action_sizes=(4, 2))
    steps, finals = make(spec)
    steps.view.observation[:, :, 1, 1:] = 0
    steps.action[...] = 0
    steps.view.legal_actions[..., 0] = True
    written(tmp_path / "a.vlt", (steps, finals), spec=spec)
    statistics = vault.open_vault(tmp_path / "a.vlt").statistics()["observation"]
    assert (statistics.count > 0).tolist() == [[True] * 3, [True, False, False]]
    assert np.isnan(statistics.mean[1, 1:]).all() and np.isnan(statistics.quantiles[:, 1, 1:]).all()
    pooled = statistics.ranges.pooled(0)
    np.testing.assert_allclose(pooled.mean[1:], statistics.mean[0, 1:])
    assert pooled.finite[0] == statistics.count[:, 0].sum()


def test_values_that_are_far_from_zero():
    values = np.float32(1e6) + np.random.default_rng(0).normal(size=(5000, 2)).astype(np.float32)
    ranges = RangesAccumulator(2)
    for part in np.array_split(values, 7):
        ranges.add(part)
    np.testing.assert_allclose(ranges.ranges.std, values.astype(float).std(0), rtol=1e-9)
    pooled = ranges.ranges.pooled()
    np.testing.assert_allclose(pooled.std, values.astype(float).std(), rtol=1e-9)
    np.testing.assert_allclose(pooled.mean, values.astype(float).mean(), rtol=1e-12)


# ---------------------------------------------------------------------------------- sketches


@pytest.mark.parametrize("ordered", [False, True])
def test_quantiles_of_much_data_are_within_the_bound(ordered):
    rng = np.random.default_rng(1)
    values = np.stack([rng.normal(size=60_000), rng.integers(0, 5, 60_000)], 1).astype(np.float32)
    if ordered:
        values.sort(0)
    sketch = QuantileSketch(2, 256)
    for part in np.array_split(values, 17):
        sketch.add(part)
    assert sketch.count == 60_000 and 0 < sketch.error < 0.05
    assert sum(part.shape[1] for level in sketch._levels for part in level) < 256 * 10
    at = np.linspace(0.01, 0.99, 33)
    quantiles = sketch.quantiles(at)
    for column in range(2):
        exact = np.sort(values[:, column])
        low = np.searchsorted(exact, quantiles[:, column]) / len(exact)
        high = np.searchsorted(exact, quantiles[:, column], side="right") / len(exact)
        assert (low <= at + sketch.error).all() and (high >= at - sketch.error).all()
        assert np.isin(quantiles[:, column], exact).all()


def test_what_is_not_finite_is_no_quantile():
    sketch = QuantileSketch(3, 8)
    rows = [[1, np.nan, -np.inf], [2, np.nan, 5], [3, np.nan, np.inf], [4, np.nan, 7]]
    sketch.add(np.array(rows, np.float32))
    quantiles = sketch.quantiles(np.array([0.25, 0.5, 1.0]))
    np.testing.assert_array_equal(quantiles, [[1, np.nan, 5], [2, np.nan, 5], [4, np.nan, 7]])
    empty = QuantileSketch(2, 8)
    assert empty.error == 0
    assert np.isnan(empty.quantiles(np.array([0.5]))).all()


def test_the_error_of_a_sketch_is_that_of_its_halved_levels():
    sketch = QuantileSketch(1, 4)
    for part in np.split(np.arange(8.0)[:, None], [3]):
        sketch.add(part)
    # Level 0 was halved twice, and level 1 once: two values stand for four each.
    assert sketch.quantiles(np.array([0.0, 0.5, 0.51, 1.0])).ravel().tolist() in (
        [x, x, y, y] for x in range(4) for y in range(4, 8)
    )
    assert sketch.error == (np.sqrt(2 * np.log(2 / 0.001) * (1 + 1 + 4)) + 4) / 8


@pytest.mark.parametrize(
    ("columns", "count", "memory", "capacity"),
    [
        (8, 10**6, 2**26, 2**15),
        (2000, 10**6, 2**26, 512),  # 2000 columns of 13 levels of 512 numbers of 4 bytes
        (2000, 10**6, 4 * 2000 * 512 * 13, 512),
        (2000, 10**6, 4 * 2000 * 512 * 13 - 1, 256),
        (1, 0, 4 * 2**15 * 2, 2**15),
        (1, 0, 4 * 2**15 * 2 - 1, 2**14),
        (10**7, 10**6, 2**26, 2**6),
    ],
)
def test_capacity_follows_from_the_memory(columns, count, memory, capacity):
    assert capacity_for(columns, count, memory) == capacity


# ---------------------------------------------------------------------------------- what is kept


def test_statistics_are_computed_once_and_again_after_an_append(tmp_path, monkeypatch):
    data = recorded(tmp_path / "a.vlt")
    digest = data.digest()
    first = data.statistics()
    dataset = vault.open_vault(data.path)
    assert dataset.digest() == digest and vault.verify(data.path, deep=True).sound
    with monkeypatch.context() as patched:
        patched.setattr(vault.Dataset, "transitions", None)  # nothing is read
        assert_same_statistics(dataset.statistics(), first)
    vault.compact(data.path)
    assert_same_statistics(stored_statistics(vault.open_vault(data.path)), first)

    with vault.resume(data.path) as writer:
        writer.append(*make(steps=3, seed=9))
    longer = vault.open_vault(data.path)
    assert not store_statistics(dataset, first)  # of what it was before
    assert stored_statistics(longer) is None
    assert longer.statistics()["reward"].count.tolist() == [86, 86]
    assert stored_statistics(vault.open_vault(data.path)) is not None
    mapped = vault.map(longer, tmp_path / "b.vlt", lambda _: {})
    assert stored_statistics(mapped) is None or mapped.digest() == longer.digest()


@pytest.mark.parametrize(
    "damage",
    [
        lambda x: {**x, "leaves": {**x["leaves"], "extras.cost": x["leaves"]["reward"]}},
        lambda x: {**x, "leaves": {**x["leaves"], "reward": x["leaves"]["state"]}},
        lambda x: {**x, "of": 3},
        lambda _: {},
        lambda _: "nonsense",
    ],
)
def test_damaged_statistics_are_computed_again(tmp_path, damage):
    data = recorded(tmp_path / "a.vlt")
    first = data.statistics()
    value = layout.dump_json(damage(data.store.get_json(layout.STATISTICS_KEY)))
    data.store.commit({layout.STATISTICS_KEY: value}, fence={}).result()
    again = vault.open_vault(data.path)
    assert stored_statistics(again) is None
    assert_same_statistics(again.statistics(), first)


def test_what_must_not_change_stays_as_it_is(tmp_path):
    write_stock(tmp_path / "s.vlt" / "s", to_stock(make(steps=30)[0]))
    foreign = vault.open_vault(tmp_path / "s.vlt" / "s")
    before = {p: p.read_bytes() for p in foreign.path.rglob("*") if p.is_file()}
    assert foreign.statistics()["reward"].count.tolist() == [60, 60]
    assert before == {p: p.read_bytes() for p in foreign.path.rglob("*") if p.is_file()}

    busy = recorded(tmp_path / "a.vlt")
    with vault.resume(busy.path):
        busy.statistics()
    assert stored_statistics(vault.open_vault(busy.path)) is None
