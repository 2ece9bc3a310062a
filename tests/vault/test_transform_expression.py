"""Conditions: what is refused, and their meaning against results computed by hand."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offmarl import vault
from offmarl.errors import ExpressionError
from offmarl.vault.transform.conditions import OF_EPISODES
from offmarl.vault.transform.expression import parse

from .experience import make, written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be parsed"),
        ("return", "a condition is needed, and this is a number: 'return'"),
        ("return > > 1", "cannot be parsed: invalid syntax"),
        ("return > 1 length", "cannot be parsed: invalid syntax"),
        ("retrun > 1", "there is no 'retrun': did you mean return? Known: return, "),
        ("xyzzy > 3", "there is no 'xyzzy': known: return, "),
        ("length = 3", "equality is `==`"),
        ("length > 3 & row == 1", "join conditions by `and` and `or`: '3 & row'"),
        ("length > 3 and (row == 1", "'(' was never closed"),
        ("tier == 'good", "unterminated string literal"),
        ("tier == 3", "a text and a number cannot be compared: '3'"),
        ("tier < 'a'", "a text can be compared by == and != only"),
        ("terminated > 1", "a truth and a number"),
        ("policy < true", "a policy and a truth cannot be compared"),
        ("not length", "a condition is needed, and this is a number: 'length'"),
        ("length + tier > 3", "a number is needed, and this is a text: 'tier'"),
        ("length in ()", "`in` needs values, such as (1, 2)"),
        ("p90 > p10", "a percentile and a percentile"),
        ("return > p101", "from p0 to p100: 'p101'"),
        ("__import__('os') == 1", "this is not supported: \"__import__('os')\""),
        ("reward > 1", "there is no 'reward': Steps have it: select by steps."),
        ("length == (1, 2)", "this is not supported: '(1, 2)'"),
        ("not " * 160 + "row == 1", "more than 100 levels"),
        ("row == 1 or " * 500 + "row == 1", "longer than 2000"),
        (lambda episode: True, "is not text: add a column"),
    ],
)
def test_mistakes_are_named_in_one_line(text, message):
    with pytest.raises(ExpressionError) as raised:
        parse(text, OF_EPISODES, {"reward": "Steps have it: select by steps."})
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


HOSTILE = [
    "__import__('os').system('true')",
    "length.__class__ == 1",
    "lambda: 1",
    "f'{length}' == tier",
    "b'a' == tier",
    "length == 1j",
    "length > 2**10**10",
    "not in.5",
    "length << 99 > 1",
    "+length > 1",
    "*length > 1",
    "length is 1",
    "length > 1 # and so on",
    "length > 1; row == 1",
    "length \\\n > 1",
    "length > 1\0",
    "ｌength > 1",
    "length > \u0663",
    "None == 1",
    "length in [1, 2]",
    "length in {1: 2}",
    "...",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_the_rest_of_python_is_refused(text):
    with pytest.raises(ExpressionError):
        parse(text, OF_EPISODES)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 2000,
        "-" * 2000,
        "not " * 500,
        "length > " + "9" * 1950 + " 1",
        "length 1 " * 220,
        "-(" * 900,
        ("not " * 20 + "(") * 20 + "length > 1" + ")" * 20,
        "1" + "**1" * 600 + " > length",
    ],
)
def test_hostile_text_is_refused_in_little_memory(text):
    tracemalloc.start()
    with pytest.raises(ExpressionError):
        parse(text, OF_EPISODES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5e6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("length > " + "9" * 1950, [False] * 3),
        ("length >= 0" + " <= length" * 180, [True] * 3),
        ("length in (" + "5, " * 600 + "1)", [False, True, False]),
        ("(length < 0 or true and not " * 20 + "length < 1" + ")" * 20, [True, False, False]),
        ("length == " + "-(1 * 1 * " * 20 + "1" + ")" * 20, [False, True, False]),
        ("tier == 'return'", [False] * 3),
        (" and ".join(["(length > 0)"] * 50), [False, True, True]),
        ("+".join(["-length"] * 50) + " < 0", [False, True, True]),
    ],
)
def test_long_conditions_and_huge_numbers(text, expected):
    columns = {"length": np.arange(3.0), "tier": np.array(["a", "b", "c"])}
    assert parse(text, OF_EPISODES).holds(columns, 3).tolist() == expected


# ---------------------------------------------------------------------------------- meaning


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
    """Return the lengths of the episodes that meet a condition."""
    return NUMBERS[parse(text, OF_EPISODES).holds(COLUMNS, 5)].astype(int).tolist()


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("terminated or length == 3 and tier == 'poor'", [1, 2, 5]),
        ("(terminated or length == 3) and tier == 'good'", [1, 3, 5]),
        ("not terminated", [3, 4]),
        ("terminated == false", [3, 4]),
        ("terminated != true", [3, 4]),
        ("tier not in ('poor', \"other\")", [1, 3, 5]),
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


def test_keywords_are_names():
    names = {"extras.NAME": "number", "return": "number"}
    columns = {"extras.lambda": np.arange(2), "return": np.array([5, 0])}
    parsed = parse("extras.lambda > 0 or return == 5 and 'return' != 'Return'", names)
    assert parsed.names == columns.keys()
    assert parsed.holds(columns, 2).all()


@given(
    st.text(
        alphabet="()<>=!+-*/%,'\"p9. \nabcreturnlengthandornotinpolicy_0123456789e", max_size=60
    )
)
def test_any_text_is_understood_or_refused(text):
    columns = {name: np.arange(4.0) for name in OF_EPISODES} | {"policy name": np.full(4, "a")}
    columns |= {n: np.full(4, "a") for n, kind in OF_EPISODES.items() if kind == "text"}
    columns |= {n: np.full(4, True) for n, kind in OF_EPISODES.items() if kind == "truth"}
    try:
        parsed = parse(text, OF_EPISODES)
    except ExpressionError:
        return
    assert parsed.holds(columns, 4).shape == (4,)


number = st.sampled_from(["length", "row", "index"]) | st.integers(0, 9).map(str)
divided = st.tuples(st.sampled_from("/%"), st.integers(1, 9)).map("{0[0]} {0[1]}".format)
arithmetic = st.recursive(
    number,
    lambda part: st.one_of(
        st.tuples(part, st.sampled_from("+-*"), part).map(" ".join),
        st.tuples(part, divided).map(" ".join),
        part.map("({})".format),
        part.map("-{}".format),
    ),
    max_leaves=5,
)
compared = st.tuples(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), arithmetic).map(" ".join)
values = st.lists(number.filter(str.isdigit), min_size=2, max_size=3).map(", ".join)
condition = st.recursive(
    st.one_of(
        st.tuples(arithmetic, compared).map(" ".join),
        st.tuples(arithmetic, compared, compared).map(" ".join),
        st.tuples(arithmetic, st.sampled_from(["in", "not in"]), values).map(
            lambda x: f"{x[0]} {x[1]} ({x[2]})"
        ),
        st.sampled_from(["true", "false"]),
    ),
    lambda part: st.one_of(
        st.tuples(part, st.sampled_from(["and", "or"]), part).map(" ".join),
        part.map("({})".format),
        part.map("not {}".format),
    ),
    max_leaves=4,
)


@given(condition)
def test_conditions_mean_what_they_do_in_python(text):
    """Python evaluates them for each episode."""
    columns = {"length": np.arange(8) % 5, "row": np.arange(8) // 4, "index": np.arange(8)}
    mask = parse(text, OF_EPISODES).holds(columns, 8)
    names = [{name: int(column[i]) for name, column in columns.items()} for i in range(8)]
    truths = {"true": True, "false": False}
    assert mask.tolist() == [bool(eval(text, truths, variables)) for variables in names]


def test_what_a_vault_does_not_tell_is_said(tmp_path):
    written(tmp_path / "a.vlt", make())
    with pytest.raises(ExpressionError, match="does not record the seed of its episodes"):
        vault.filter(tmp_path / "a.vlt", "seed == 1", tmp_path / "b.vlt")
    with pytest.raises(
        ExpressionError, match=r"no episodes of .* meet 'length > 99'.*length from 1 to"
    ):
        vault.filter(tmp_path / "a.vlt", "length > 99", tmp_path / "b.vlt")
    with pytest.raises(ExpressionError, match=r"an empty vault is not written\.$"):
        vault.filter(tmp_path / "a.vlt", "cause == 'none'", tmp_path / "b.vlt")
    with pytest.raises(ExpressionError, match="percentiles are of episodes"):
        vault.filter(tmp_path / "a.vlt", "reward > p50", tmp_path / "b.vlt", by="steps")
    assert [path.name for path in tmp_path.iterdir()] == ["a.vlt"]
