"""Counting distinct rows: exactly if they fit in memory, approximately if not."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from offmarl.report.accumulators import Distinct, entropy, hash_rows

ROWS = arrays.arrays(
    np.float32,
    st.tuples(st.integers(0, 30), st.integers(0, 3)),
    elements=st.sampled_from([-1.0, -0.0, 0.0, 1.0, 2.0, 1e-30]),
)


@given(ROWS, st.integers(1, 5))
def test_rows_are_told_apart_whatever_parts_they_come_in(rows, parts):
    distinct = Distinct()
    for part in np.array_split(rows, parts):
        distinct.add(hash_rows(part))
    expected, counts = np.unique(rows + 0, axis=0, return_counts=True)
    assert (distinct.count, distinct.total, distinct.exact) == (len(expected), len(rows), True)
    assert sorted(distinct.occurrences.tolist()) == sorted(counts.tolist())


def test_several_arrays_are_one_row():
    state = np.float32([[0, 1], [0, 1], [1, 0]])
    action = np.int32([0, 1, 0])
    first, second, third = hash_rows(state, action).tolist()
    assert len({first, second, third}) == 3
    assert hash_rows(state[:1], action[:1]).tolist() == [first]
    assert first != hash_rows(action[:1], state[:1])[0]


def test_rows_that_differ_in_one_bit_have_other_hashes():
    rows = np.tile(np.arange(5, dtype=np.int32), (161, 1))
    for bit in range(160):
        rows[bit, bit // 32] ^= np.int32(np.uint32(1 << bit % 32).view(np.int32))
    assert len(set(hash_rows(rows).tolist())) == 161


def test_beyond_the_capacity_it_is_a_good_estimate():
    distinct = Distinct(capacity=4096)
    rng = np.random.default_rng(0)
    keys = hash_rows(np.arange(100_000, dtype=np.int32))
    for _ in range(20):
        distinct.add(keys[rng.permutation(len(keys))[:50_000]])
    totals = 20 * [50_000]
    assert not distinct.exact and distinct.total == sum(totals)
    assert len(distinct.occurrences) <= 4096
    assert abs(distinct.count - 100_000) < 5_000  # three standard deviations
    # What is held was counted from its first occurrence on.
    assert abs(distinct.occurrences.mean() - 10) < 0.2


def test_the_order_does_not_matter():
    keys = hash_rows(np.random.default_rng(0).integers(0, 5_000, 20_000).astype(np.int32))
    results = []
    for order in (keys, keys[::-1], np.sort(keys)):
        distinct = Distinct(capacity=1_000)
        for part in np.array_split(order, 13):
            distinct.add(part)
        results.append((distinct.count, sorted(distinct.occurrences.tolist())))
    assert results[0] == results[1] == results[2]


def test_entropy():
    assert entropy(np.array([2, 2, 0, 4])) == 1.5
    assert entropy(np.array([7])) == entropy(np.zeros(3, int)) == 0.0
