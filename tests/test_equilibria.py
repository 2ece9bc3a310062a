"""Meta-strategies of tables that were solved by hand."""

import numpy as np
import pytest

from offmarl.equilibria import (
    alpha_rank,
    coarse_correlated,
    meta_strategy,
    nash,
    require_constant_sum,
)
from offmarl.errors import OptionError

RPS = np.array([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])
ROCK_WINS_2 = np.array([[0.0, -1, 2], [1, 0, -1], [-2, 1, 0]])
"""A win with rock counts twice: paper is played in half of the games, the others in a quarter."""
DILEMMA = np.array([[[3.0, 0], [5, 1]], [[3.0, 5], [0, 1]]])
CHICKEN = np.array([[[6.0, 2], [7, 0]], [[6.0, 7], [2, 0]]])


def zero_sum(table):
    return np.stack([table, -table])


@pytest.mark.parametrize("meta", ["nash", "cce", "alpha-rank", "uniform"])
def test_rock_paper_scissors_is_played_in_thirds(meta):
    for weights in meta_strategy(meta, zero_sum(RPS)):
        np.testing.assert_allclose(weights, np.full(3, 1 / 3), atol=1e-6)


def test_the_newest_member_alone_is_self_play():
    assert [x.tolist() for x in meta_strategy("last", np.zeros((2, 2, 3)))] == [[0, 1], [0, 0, 1]]


def test_nash_of_a_biased_game_and_of_a_constant_sum():
    for offset in (0, 3):
        for weights in nash(zero_sum(ROCK_WINS_2) + offset):
            np.testing.assert_allclose(weights, [0.25, 0.5, 0.25], atol=1e-9)


def test_nash_of_a_saddle_point_and_of_other_numbers_of_members():
    rows, columns = nash(zero_sum(np.array([[4.0, 2, 3], [1, 0, 5]])))
    np.testing.assert_allclose(rows, [1, 0], atol=1e-9)
    np.testing.assert_allclose(columns, [0, 1, 0], atol=1e-9)
    rows, columns = nash(zero_sum(np.vstack([RPS, [-5.0, -1, -1]])))
    np.testing.assert_allclose([*rows, *columns], [1 / 3] * 3 + [0] + [1 / 3] * 3, atol=1e-9)


@pytest.mark.parametrize("solve", [coarse_correlated, alpha_rank])
def test_a_dominated_member_is_not_played(solve):
    np.testing.assert_allclose(solve(DILEMMA), [[0, 0], [0, 1]], atol=1e-5)


def test_alpha_rank_counts_wins_and_not_their_size():
    np.testing.assert_allclose(alpha_rank(zero_sum(ROCK_WINS_2)), np.full((3, 3), 1 / 9), atol=0.2)
    for weights in meta_strategy("alpha-rank", zero_sum(ROCK_WINS_2)):
        np.testing.assert_allclose(weights, np.full(3, 1 / 3), atol=1e-6)


def test_a_coarse_correlated_equilibrium_of_chicken_has_the_largest_sum():
    # (0, 0) twice for each of (0, 1) and (1, 0): Aumann's 10.5, and no gain by a fixed member.
    joint = coarse_correlated(CHICKEN)
    assert (joint * CHICKEN.sum(0)).sum() == pytest.approx(10.5)
    np.testing.assert_allclose(joint, [[0.5, 0.25], [0.25, 0]], atol=1e-9)


def test_nash_refuses_a_general_sum_and_three_seats():
    for table in (DILEMMA, np.zeros((3, 2, 2, 2))):
        with pytest.raises(OptionError, match="not a zero-sum game of two sides: give --meta cce"):
            nash(table)
    require_constant_sum(np.array([[1.0, 2], [1, 0]]), "this")


def test_a_table_that_cannot_be_solved_is_refused():
    with pytest.raises(OptionError, match="no equilibrium of the table is found"):
        coarse_correlated(np.full((2, 2, 2), 1e300) * [[[1, -1], [-1, 1]], [[-1, 1], [1, -1]]])


def test_three_seats_are_ranked():
    payoffs = np.zeros((3, 2, 2, 2))
    for seat in range(3):
        payoffs[seat] += np.expand_dims(np.arange(2.0), [x for x in range(3) if x != seat])
    assert alpha_rank(payoffs)[1, 1, 1] == pytest.approx(1, abs=1e-4)
    assert coarse_correlated(payoffs)[1, 1, 1] == pytest.approx(1)
