"""Rankings by estimates."""

import numpy as np
import pytest

from offmarl.errors import ShapeError
from offmarl.ope import compare_with_returns, rank_correlation, regret
from offmarl.statistics import Estimate

RETURNS = np.array([1.0, 5.0, 2.0, 4.0])


@pytest.mark.parametrize(
    ("estimates", "correlation"),
    [
        ([10, 40, 20, 30], 1.0),
        ([4, 1, 3, 2], -1.0),
        ([1, 2, 3, 4], 0.4),  # 1 - 6 (0 + 4 + 1 + 1) / (4 * 15)
        ([0, 0, 1, 2], 0.5 / np.sqrt(4.5 * 5)),  # ranks 1.5, 1.5, 3, 4 and 1, 4, 2, 3
        ([1, 1, 1, 1], None),
    ],
)
def test_spearman(estimates, correlation):
    assert rank_correlation(np.array(estimates, float), RETURNS) == pytest.approx(correlation)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_has_no_rank(value):
    for pair in ((RETURNS, np.array([1, value, 2, 3])), (np.array([1, value, 2, 3]), RETURNS)):
        for function in (rank_correlation, regret):
            with pytest.raises(ShapeError, match="not finite: leave its policy out"):
                function(*pair)


def test_there_is_no_correlation_of_two_policies():
    assert rank_correlation(RETURNS[:2], RETURNS[:2]) is None


def test_regret_is_lost_by_trying_the_best_estimates_only():
    estimates = np.array([3.0, 0.0, 2.0, 1.0])
    assert [regret(estimates, RETURNS, k) for k in (1, 2, 3, 4)] == [4.0, 3.0, 1.0, 0.0]
    assert regret(RETURNS, RETURNS) == 0
    for returns in ([0.0, 5.0, 10.0], [10.0, 5.0, 0.0]):  # the order of ties does not matter
        assert [regret(np.ones(3), np.array(returns), k) for k in (1, 2, 3)] == [10.0, 5.0, 0.0]
    with pytest.raises(ShapeError, match=r"regret@5 of 4 policies"):
        regret(estimates, RETURNS, 5)
    with pytest.raises(ShapeError, match=r"\(3,\) and returns \(4,\)"):
        regret(estimates[:3], RETURNS)


def test_the_choice_is_the_best_mean_over_seeds():
    settings = {"even": ["a", "b"], "lucky": ["c", "d"], "diverged": ["e"]}
    values = {
        name: Estimate(x) for name, x in zip("abcde", (2.0, 3.0, 4.0, 0.0, np.nan), strict=True)
    }
    result = compare_with_returns({"fqe": values}, settings, {})
    assert result["chosen"] == {"fqe": {"setting": "even", "estimate": 2.5}}
    assert result["notes"] == (
        "e is left out of choices and rankings: its estimate by fqe is not finite.",
    )
    returns = {"a": [1.0], "b": [2.0], "c": [3.0], "d": [2.0], "e": [0.0]}
    returns = {name: np.array(r) for name, r in returns.items()}
    true_returns = {"true_return": 1.5, "best_true_return": 2.5}
    result = compare_with_returns({"fqe": values}, settings, returns)
    assert result["chosen"] == {"fqe": {"setting": "even", "estimate": 2.5} | true_returns}
    assert (
        result["ranking"]["fqe"]["policies"] == 4 and result["ranking"]["fqe"]["chance_regret"] == 1
    )
