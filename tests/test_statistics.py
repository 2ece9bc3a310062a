"""The statistics against known numbers and slow references."""

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offmarl import statistics
from offmarl.errors import OptionError, ShapeError, UnknownNameError

TASKS = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 60.0]])
scores_of_any_shape = hnp.arrays(
    float,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=7),
    elements=st.floats(-100, 100),
)


def test_known_numbers():
    assert statistics.mean(TASKS) == 16.25
    assert statistics.median(TASKS) == np.median([2.5, 30.0])
    assert statistics.iqm(TASKS) == np.mean([3.0, 4.0, 10.0, 20.0])


@pytest.mark.parametrize(("runs", "expected"), [(1, 0.0), (3, 1.0), (5, 2.0), (7, 3.0)])
def test_iqm_of_few_runs_leaves_out_whole_ones(runs, expected):
    assert statistics.iqm(np.arange(float(runs))[:, None]) == expected


def test_profile_counts_runs_strictly_above():
    profile = statistics.performance_profile(TASKS, np.array([0.0, 1.0, 10.0, 60.0]))
    np.testing.assert_array_equal(profile, [1.0, 7 / 8, 3 / 8, 0.0])


def test_probability_of_improvement_counts_ties_half():
    x, y = np.array([[1.0, 5.0], [3.0, 5.0]]), np.array([[2.0, 5.0], [2.0, 5.0], [0.0, 9.0]])
    first = (1 + 3) / 6  # 1 beats 0; 3 beats all three
    second = (0.5 + 0.5 + 0) / 3
    assert statistics.probability_of_improvement(x, y) == pytest.approx((first + second) / 2)


@settings(max_examples=25)
@given(scores_of_any_shape, scores_of_any_shape)
def test_probabilities_of_improvement_are_complementary(x, y):
    y = np.resize(y, (len(y), x.shape[1]))
    total = statistics.probability_of_improvement(x, y) + statistics.probability_of_improvement(
        y, x
    )
    assert total == pytest.approx(1.0)


@given(scores_of_any_shape)
def test_estimates_take_axes_in_front(scores):
    batch = np.stack([scores, 2 * scores, scores - 1])
    for estimate in (statistics.mean, statistics.median, statistics.iqm):
        expected = [estimate(entry) for entry in batch]
        np.testing.assert_allclose(estimate(batch), expected, rtol=1e-12, atol=1e-12)


def reference_interval(scores, estimate, resamples, seed):
    """Draw one run at a time, as the definition says."""
    draw = np.random.default_rng(seed)
    runs, tasks = scores.shape
    values = []
    for _ in range(resamples):
        resample = np.empty_like(scores)
        for task in range(tasks):
            for run in range(runs):
                resample[run, task] = scores[draw.integers(runs), task]
        values.append(estimate(resample))
    return np.percentile(values, [2.5, 97.5])


@pytest.mark.parametrize("estimate", [statistics.iqm, statistics.mean, statistics.median])
def test_bootstrap_agrees_with_a_slow_reference(estimate):
    scores = np.random.default_rng(3).normal([0.0, 5.0], [1.0, 2.0], (10, 2))
    interval = statistics.bootstrap_interval(estimate, scores, seed=0, method="percentile")
    reference = reference_interval(scores, estimate, 4000, seed=1)
    np.testing.assert_allclose(interval, reference, atol=0.05)


def test_expanded_intervals_of_few_runs_are_cut_further_out():
    """Φ(-t): t is 2.776 for five runs and 2.262 for ten."""
    scores = np.random.default_rng(1).normal(size=(10, 1))
    means = []

    def mean(resamples):
        means.append(statistics.mean(resamples))
        return means[-1]

    for count, tail in ((5, 0.0027515), (10, 0.0118486)):
        interval = statistics.bootstrap_interval(mean, scores[:count], seed=0)
        np.testing.assert_allclose(interval, np.quantile(means[-1], [tail, 1 - tail]), rtol=1e-3)


def test_bootstrap_is_a_function_of_the_seed():
    def interval(seed):
        return statistics.bootstrap_interval(statistics.iqm, TASKS, seed=seed, resamples=50)

    assert interval(0) == interval(0)
    assert interval(0) != interval(1)


def test_bootstrap_of_a_profile_is_pointwise():
    taus = np.array([-1.0, 2.5, 100.0])
    low, high = statistics.bootstrap_interval(
        lambda drawn: statistics.performance_profile(drawn, taus), TASKS, seed=0
    )
    assert low.shape == high.shape == (3,)
    np.testing.assert_array_equal([low[0], low[2], high[0], high[2]], [1, 0, 1, 0])
    assert low[1] < 6 / 8 < high[1]


def test_there_is_no_interval_below_three_runs():
    statistics.bootstrap_interval(statistics.iqm, np.zeros((3, 2)), seed=0, resamples=10)
    for few in (np.zeros((2, 2)), np.zeros((1, 2))):
        with pytest.raises(ShapeError, match=f"at least 3 runs: got {len(few)}"):
            statistics.bootstrap_interval(statistics.iqm, few, seed=0)
        with pytest.raises(ShapeError, match="at least 3 runs"):
            statistics.bootstrap_interval(
                statistics.probability_of_improvement, np.zeros((3, 2)), few, seed=0
            )


def test_scores_are_normalised_from_random_to_expert():
    reference = statistics.Reference(random=-2.0, expert=8.0)
    scores = np.array([[-2.0, 8.0], [3.0, 10.0]])
    np.testing.assert_allclose(statistics.normalise(scores, reference), [[0, 1], [0.5, 1.2]])


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (np.zeros(3), r"\(3,\).*runs, tasks"),
        (np.zeros((0, 2)), r"\(0, 2\)"),
        (np.array([[np.nan]]), "NaN"),
    ],
)
def test_scores_that_make_no_sense_are_refused(scores, message):
    with pytest.raises(ShapeError, match=message):
        statistics.checked(scores)


def test_mean_interval_is_students():
    """scipy.stats.t.interval(0.95, 3, 2.5, sem) = 2.5 ± 3.18245 x 0.645497"""
    interval = statistics.mean_interval(np.array([1.0, 2.0, 3.0, 4.0]))
    np.testing.assert_allclose(interval, [2.5, 0.4457397, 4.5542603], rtol=1e-6)
    assert statistics.mean_interval(np.array([1.0, 2.0])) == (1.5, None, None)
    np.testing.assert_allclose(statistics.standard_error(np.array([[1.0, 2], [3, 2]])), [1, 0])
    assert np.isnan(statistics.standard_error(np.ones((1, 2)))).all()
    with pytest.raises(ShapeError, match="no values"):
        statistics.mean_interval(np.array([]))


@pytest.mark.parametrize("option", [{"method": "x"}, {"resamples": 0}, {"tests": 0}])
def test_intervals_that_cannot_be(option):
    with pytest.raises((OptionError, UnknownNameError)):
        statistics.bootstrap_interval(statistics.iqm, np.ones((3, 1)), seed=0, **option)
