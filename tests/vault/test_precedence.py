"""Conditions of ``offmarl filter`` against results computed by hand."""

import operator

import numpy as np
import pytest

from offmarl.errors import ExpressionError
from offmarl.vault.transform.expression import parse
from offmarl.vault.transform.selection import OF_EPISODES

NUMBERS = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
COLUMNS = {
    "complete": np.ones(5, bool),
    "length": NUMBERS,
    "return": NUMBERS * 10,
    "terminated": np.array([True, True, False, False, True]),
    "tier": np.array(["good", "poor", "good", "poor", "good"]),
    "policy": np.array([0.0, 1.0, 0.0, 1.0, 2.0]),
    "policy name": np.array(["a", "b", "a", "b", "c"]),
}


def holds(text):
    """The lengths of the episodes of which it holds."""
    return NUMBERS[parse(text, OF_EPISODES).holds(COLUMNS, 5)].astype(int).tolist()


def is_true(text):
    """Whether a condition that depends on no episode holds."""
    found = holds(text)
    assert found in ([], [1, 2, 3, 4, 5])
    return bool(found)


@pytest.mark.parametrize(
    "text",
    [
        "1+2*3<8",
        "1+2*3==7",
        "(1+2)*3==9",
        "10-4-3==3",
        "10-(4-3)==9",
        "12/3/2==2",
        "12/3*2==8",
        "12*3/2==18",
        "7%4*2==6",
        "2*7%4==2",
        "1+7%4==4",
        "-2*3==-6",
        "-2+3==1",
        "2--3==5",
        "--2==2",
        "-(2+3)==-5",
        "1.5e1==15",
        ".5+.5==1",
        "1<2<3",
        "1<2<=2==2!=3>1>=1",
        "true or true and false",
        "(false or true) and true",
        "not false and true",
        "not (true and false)",
        "not not true",
        "not 1==2",
        "'a'=='a'",
        "'a' in ('b', 'a')",
        "3 not in (1, 2)",
        "3 in (1, 1+2)",
    ],
)
def test_true(text):
    assert is_true(text)


@pytest.mark.parametrize(
    "text",
    [
        "1<3<2",
        "3>2>2",
        "1<2>3",
        "3==3!=3",
        "(true or true) and false",
        "false and true or false",
        "not true or false",
        "not (false or true)",
        "'a'!='a'",
        "'a' in ('b', 'c')",
        "3 not in (1, 3)",
    ],
)
def test_false(text):
    assert not is_true(text)


@pytest.mark.parametrize(
    ("sign", "meaning"),
    [
        ("<", operator.lt),
        ("<=", operator.le),
        (">", operator.gt),
        (">=", operator.ge),
        ("==", operator.eq),
        ("!=", operator.ne),
    ],
)
def test_comparisons_from_either_side(sign, meaning):
    assert holds(f"length {sign} 3") == NUMBERS[meaning(NUMBERS, 3)].tolist()
    assert holds(f"3 {sign} length") == NUMBERS[meaning(3, NUMBERS)].tolist()


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("1 < length < 4", [2, 3]),
        ("1 < length <= 4 and terminated", [2]),
        ("length < 4 > length", [1, 2, 3]),
        ("10 < return <= 40 != return", [2, 3]),
        ("terminated or length == 3 and tier == 'poor'", [1, 2, 5]),
        ("(terminated or length == 3) and tier == 'good'", [1, 3, 5]),
        ("not terminated", [3, 4]),
        ("not terminated and length > 3", [4]),
        ("terminated == false", [3, 4]),
        ("terminated != true", [3, 4]),
        ("length in (2, 4)", [2, 4]),
        ("length not in (2, 4)", [1, 3, 5]),
        ("tier not in ('poor', \"other\")", [1, 3, 5]),
        ("length in (2, 4) in (1, 2)", [2]),
        ("return / length == 10 and -length < -3", [4, 5]),
        ("return - length * 9 == length", [1, 2, 3, 4, 5]),
        ("length % 2 == 0", [2, 4]),
        # A percentile is of what it is compared with, from either side.
        ("length >= p50", [3, 4, 5]),
        ("p50 < return", [4, 5]),
        ("length == p0 or return == p100", [1, 5]),
        ("length * 2 > p75", [5]),
        ("p25 <= length <= p75", [2, 3, 4]),
        ("length > p62.5", [4, 5]),
        # A policy is a name beside text, and a number beside numbers.
        ("policy == 'b'", [2, 4]),
        ("'c' == policy", [5]),
        ("policy != 1", [1, 3, 5]),
        ("policy >= 1", [2, 4, 5]),
        ("policy in ('a', 'c')", [1, 3, 5]),
        ("policy + 1 == 3", [5]),
    ],
)
def test_episodes(text, lengths):
    assert holds(text) == lengths


def test_what_is_asked_for():
    assert parse("length > 3 and tier == 'length'", OF_EPISODES).names == {"length", "tier"}
    assert parse("1 < 2", OF_EPISODES).names == frozenset()


NESTED = [("(", "length == 1", ")"), ("not ", "length == 1", ""), ("-", "length == -1", "")]


@pytest.mark.parametrize(("before", "inner", "after"), NESTED)
def test_twenty_levels_and_no_more(before, inner, after):
    parse(before * 20 + inner + after * 20, OF_EPISODES)
    with pytest.raises(ExpressionError, match="more than 20 levels"):
        parse(before * 21 + inner + after * 21, OF_EPISODES)


@pytest.mark.parametrize(
    "text",
    [
        " and ".join(["(length > 0)"] * 50),
        " and ".join(["not length < 1"] * 50),
        "+".join(["-length"] * 50) + " < 0",
    ],
)
def test_many_parts_side_by_side_are_not_deep(text):
    assert is_true(text)


def test_the_longest():
    text = "length > 0 and ".ljust(1989) + "length > 0"
    assert len(text) == 1999
    assert is_true(text + " ")
    with pytest.raises(ExpressionError, match="longer than 2000"):
        parse(text + "  ", OF_EPISODES)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("length = 3", "Equality is `==`."),
        ("length == 3 & row == 1", "Join conditions by `and` and `or`."),
        ("length == 3 | row == 1", "Join conditions by `and` and `or`."),
        ("tier == 'good", "Text needs quotes on both sides."),
        ('tier == "good', "Text needs quotes on both sides."),
        ("length === 3 and tier == 'good'", "Equality is `==`."),
        ("lengthy > 3", "did you mean length? Known: "),
        ("xyzzy > 3", "\nKnown: "),
    ],
)
def test_advice(text, advice):
    with pytest.raises(ExpressionError) as raised:
        parse(text, OF_EPISODES)
    assert advice in str(raised.value)
    for text in ("length ~ 3", "length[3] == 'a'", "length ** 3 > 1 and tier == 'good'"):
        with pytest.raises(ExpressionError) as raised:
            parse(text, OF_EPISODES)
        assert str(raised.value).endswith("^")


def test_the_place_of_a_mistake_in_a_long_line_and_on_another():
    text = "length > 0 and " * 10 + "wrong > 0 and " + "length > 0 and " * 5 + "length > 0"
    with pytest.raises(ExpressionError) as raised:
        parse(text, OF_EPISODES)
    _, line, arrow, _ = str(raised.value).split("\n")
    assert line == "  " + text[110:190]
    assert arrow == "  " + " " * 40 + "^"
    with pytest.raises(ExpressionError) as raised:
        parse("length > 0\nand ?", OF_EPISODES)
    assert "\n  length > 0 and ?\n                 ^" in str(raised.value)


def test_percentiles_that_are_not_to_be_had():
    with pytest.raises(ExpressionError, match="percentiles are of episodes"):
        parse("length > p50", OF_EPISODES, percentiles=False)
    parse("length > p100", OF_EPISODES)
    with pytest.raises(ExpressionError, match="from p0 to p100"):
        parse("length > p100.5", OF_EPISODES)
