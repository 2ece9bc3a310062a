"""The sum tree against NumPy, and prioritised draws against their exact distribution."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from offmarl.replay.priorities import FAN_OUT, Prioritised, SumTree, window_priorities
from offmarl.replay.starts import Uniform, segments

SIZE = 200  # of the trees below: two levels; deeper ones follow
CHANGES = 8

put = jax.jit(SumTree.put)
draw = jax.jit(SumTree.draw, static_argnums=2)
of = jax.jit(SumTree.of)
numbers = st.floats(0, 1e6, width=32, allow_subnormal=False)


@settings(max_examples=30)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, SIZE - 1), numbers, numbers), min_size=1, max_size=8),
        max_size=4,
    ),
    st.floats(0, 10, width=32, allow_subnormal=False),
)
@pytest.mark.slow
def test_sums_are_those_of_numpy(changes, unit: float) -> None:
    known, open_ = np.zeros(SIZE, np.float32), np.ones(SIZE, np.float32)
    tree = of(jnp.asarray(known), jnp.asarray(open_))
    for change in changes:
        columns = zip(*(change * CHANGES)[:CHANGES], strict=True)
        leaves, new_known, new_open = map(np.array, columns)
        for values, new in ((known, new_known), (open_, new_open)):
            values[leaves] = 0
            np.maximum.at(values, leaves, new.astype(np.float32))
        tree = put(tree, *map(jnp.asarray, (leaves, np.float32(new_known), np.float32(new_open))))
    expected = known.astype(np.float64) + unit * open_
    indices = jnp.arange(SIZE)
    np.testing.assert_allclose(tree.values(indices, jnp.float32(unit)), expected, rtol=1e-5)
    np.testing.assert_allclose(tree.total(jnp.float32(unit)), expected.sum(), rtol=1e-5)
    same = of(jnp.asarray(known), jnp.asarray(open_))
    chex.assert_trees_all_close(tree.levels, same.levels, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, FAN_OUT + 1, 2 * FAN_OUT**2 + 3])
def test_draws_are_in_proportion(size: int) -> None:
    rng = np.random.default_rng(size)
    values = rng.random(size).astype(np.float32) ** 4
    values[rng.random(size) < 0.3] = 0
    values[0] = 1
    tree = of(jnp.asarray(values), jnp.zeros(size))
    draws = np.concatenate([draw(tree, jax.random.key(i), 10_000, 1.0) for i in range(5)])
    counts = np.bincount(draws, minlength=size)
    assert len(counts) == size
    assert not counts[values == 0].any()
    shares = values.astype(np.float64) / values.sum(dtype=np.float64)
    bins = np.arange(size) if size < 1000 else np.arange(size) * 500 // size
    expected = np.bincount(bins, shares) * len(draws)
    positive = expected > 0
    test = chisquare(np.bincount(bins, counts)[positive], expected[positive])
    assert positive.sum() == 1 or test.pvalue > 0.001


def test_a_value_that_is_far_smaller_than_the_sum_is_never_lost() -> None:
    """A running difference of float32 would leave 0, or what rounding left, in its place."""
    tree = of(jnp.full(SIZE, 1e-3), jnp.zeros(SIZE))
    for value in (1e12, 1e-3):
        tree = put(tree, np.array([5]), np.float32([value]), np.float32([0]))
    np.testing.assert_allclose(tree.total(1.0), SIZE * 1e-3, rtol=1e-6)


def test_only_positive_values_are_drawn() -> None:
    """Parallel sums of float32 may round so that a 0 seems to have a share."""
    rng = np.random.default_rng(0)
    for seed in range(20):
        values = (10.0 ** rng.integers(-30, 8, SIZE)).astype(np.float32)
        values[rng.random(SIZE) < 0.8] = 0
        values[3] = 1e-30
        draws = draw(of(jnp.asarray(values), jnp.zeros(SIZE)), jax.random.key(seed), 2000, 1.0)
        assert (values[np.asarray(draws)] > 0).all()


# ---------------------------------------------------------------------------------- priorities


def test_a_windows_priority_by_hand() -> None:
    errors = jnp.array([[1.0, -4.0, 2.0], [3.0, 9.0, 9.0], [5.0, 5.0, 5.0], [jnp.nan, jnp.inf, 0]])
    mask = jnp.array([[True, True, True], [True, False, False], [False] * 3, [True] * 3])
    result = window_priorities(errors, mask, 0.5)
    means = [0.9 * 4 + 0.1 * 7 / 3, 3.0, 0.0, 0.9 * 1e9 + 0.1 * 1e9 / 3]
    np.testing.assert_allclose(result, np.sqrt(np.minimum(np.array(means) + 1e-6, 1e9)), rtol=1e-5)


TABLES = {
    "uniform": Uniform(90),
    "mixture": segments(np.array([0, 50]), np.array([40, 40]), np.array([0.7, 0.3]), 90),
}


def probabilities(name: str) -> np.ndarray:
    if name == "uniform":
        return np.full(90, 1 / 90)
    return np.concatenate([np.full(40, 0.7 / 40), np.zeros(10), np.full(40, 0.3 / 40)])


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_draws_follow_the_priorities(name: str) -> None:
    """Windows never learned from have the largest priority so far."""
    draws = Prioritised(TABLES[name], 0.5, 0.4, 100, 90, 64)
    key = jax.random.split(jax.random.key(1), 100)
    priorities = jax.jit(lambda draws: draws.begin())(draws)
    take = jax.jit(lambda draws, *rest: draws.draw(*rest))
    learned = jax.jit(lambda draws, *rest: draws.reprioritise(*rest))
    base = probabilities(name)
    errors = np.random.default_rng(0).exponential(10, 90).astype(np.float32)
    seen = np.zeros(90, bool)
    for update in range(6):
        largest = max([1.0, *((errors[seen] + 1e-6) ** 0.5)])
        exact = base * np.where(seen, (errors + 1e-6) ** 0.5, largest)
        slots, ratios = take(draws, priorities, key[update])
        exact /= exact.sum()
        np.testing.assert_allclose(ratios, base[slots] / exact[slots], rtol=1e-4)
        batch = jnp.repeat(errors[np.asarray(slots)][:, None], 5, 1)
        priorities = learned(draws, priorities, slots, batch, jnp.ones((64, 5), bool))
        seen[np.asarray(slots)] = True
    exact = base * np.where(seen, (errors + 1e-6) ** 0.5, max((errors[seen] + 1e-6) ** 0.5))
    samples = [draw(priorities.tree, k, 10_000, priorities.largest) for k in key[:4]]
    counts = np.bincount(np.concatenate(samples), minlength=90)
    assert not counts[base == 0].any()
    expected = 4e4 * exact / exact.sum()
    assert chisquare(counts[base > 0], expected[base > 0]).pvalue > 0.001


def test_importance_weights_grow_to_their_power_of_one() -> None:
    """Over the largest of the windows that count."""
    draws = Prioritised(Uniform(9), 0.5, 0.4, 11, 9, 2)
    ratios, mask = jnp.array([1.0, 4.0, 0.25, 100.0]), jnp.ones((4, 3), bool).at[3].set(False)
    for update, exponent in ((0, 0.4), (5, 0.7), (10, 1.0)):
        weights = draws.weigh(ratios, mask, update)[:3]
        np.testing.assert_allclose(
            weights, np.array([1, 4, 0.25]) ** exponent / 4**exponent, rtol=1e-6
        )
    none = draws.weigh(ratios, jnp.zeros_like(mask), 0)
    np.testing.assert_allclose(none, ratios**0.4, rtol=1e-6)
