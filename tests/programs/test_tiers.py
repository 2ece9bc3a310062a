import pytest

from offmarl.errors import UnknownNameError
from offmarl.programs.tiers import FRACTIONS, best, first_to_reach, parse_tiers

RETURNS = [1.0, 2.9, 3.1, 2.0, 5.2, 7.7, 9.6, 9.0]


@pytest.mark.parametrize(("tier", "index"), [("poor", 1), ("medium", 4), ("good", 5)])
def test_a_tier_is_the_first_checkpoint_so_far_on_the_way(tier, index):
    """From random 0.5 to expert 9.5 the thresholds are 2.75, 5 and 7.25."""
    assert first_to_reach(FRACTIONS[tier], RETURNS, 0.5, 9.5) == index


def test_the_thresholds_themselves_count():
    assert first_to_reach(0.5, [1.0, 2.0, 3.0], 0.0, 4.0) == 1


def test_returns_may_be_negative():
    assert first_to_reach(0.5, [-22.0, -12.0, -11.0, -1.3], -22.0, -1.2) == 2


def test_where_none_reaches_the_best_stands_in():
    assert first_to_reach(0.75, [1.0, 3.0, 2.0], 0.0, 40.0) == 1


def test_the_best_is_the_first_of_equals():
    assert best([1.0, 4.0, 4.0, 2.0]) == 1


def test_names_are_read_once_each():
    assert parse_tiers("random, expert,random") == ["random", "expert"]


def test_a_tier_that_does_not_exist_is_named_with_the_nearest():
    with pytest.raises(UnknownNameError, match="no tier named 'meduim': did you mean medium"):
        parse_tiers("random,meduim")
