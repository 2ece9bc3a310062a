"""Conditions: their meaning, what is refused, and the position in error messages."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offmarl import vault
from offmarl.errors import ExpressionError
from offmarl.vault.transform.expression import parse
from offmarl.vault.transform.selection import OF_EPISODES

from .experience import SPEC, make


@pytest.mark.parametrize(
    ("text", "message", "at"),
    [
        ("", "a value is missing, and the expression ends", 0),
        ("return", "a condition is needed here, and this is a number", 0),
        ("return > > 1", "'>' cannot stand here", 9),
        ("return > 1 length", "'length' cannot stand here", 11),
        ("retrun > 1", "did you mean return", 0),
        ("length = 3", "Equality is `==`", 7),
        ("length > 3 & row == 1", "Join conditions by `and` and `or`", 11),
        ("length > 3 and (row == 1", "this parenthesis is not closed", 15),
        ("tier == 3", "a text and a number cannot be compared", 5),
        ("tier < 'a'", "a text can be compared by == and != only", 5),
        ("terminated > 1", "a truth and a number", 11),
        ("not length", "a condition is needed", 4),
        ("length + tier > 3", "a number is needed here, and this is a text", 9),
        ("length and row == 1", "a condition is needed here", 0),
        ("length in 3", "values in parentheses", 10),
        ("length in ()", "`in` needs values, such as (1, 2)", 10),
        ("length not in ()", "`in` needs values, such as (1, 2)", 14),
        ("not in", "'not in' cannot stand here", 0),
        ("(not in", "'not in' cannot stand here", 1),
        ("length > 3 and not  in", "'not  in' cannot stand here", 15),
        ("p90 > p10", "a percentile and a percentile", 4),
        ("return > p101", "from p0 to p100", 9),
        ("row == 1 and p50", "a condition is needed here, and this is a percentile", 13),
        ("__import__('os') == 1", "functions cannot be called here", 0),
        ("__import__ == 1", "there is no '__import__'", 0),
        ("return.real > 1", "'.' means nothing here", 6),
        ("reward > 1", "select by steps", 0),
        ("(length > 3 row == 1)", "an operator is missing in what begins here", 1),
        ("length > 3)", "')' cannot stand here", 10),
        ("length >", "a value is missing, and the expression ends", 8),
        ("'a' 'b' == tier", "an operator is missing", 0),
        ("'''a''' == tier", "an operator is missing", 0),
        ("p90.5.5 < length", "an operator is missing", 0),
        ("length in (3) + 1", "values in parentheses", 10),
        ("length == (1, 2)", "only allowed after `in`", 10),
        ("length in ((1, 2), 3)", "only allowed after `in`", 11),
        ("(" * 60 + "row == 1" + ")" * 60, "more than 20 levels", 21),
        ("not " * 60 + "row == 1", "more than 20 levels", 84),
        ("(not not " * 11 + "row == 1" + ")" * 11, "more than 20 levels", 91),
        ("row > 2**10**10", "'**' means nothing here", 7),
        ("row // 2 > 1", "'//' means nothing here", 4),
        ("policy < true", "a policy and a truth cannot be compared", 7),
    ],
)
def test_mistakes_are_pointed_at(text, message, at):
    with pytest.raises(ExpressionError) as raised:
        parse(text, OF_EPISODES, {"reward": "Steps have it: select by steps."})
    assert message in str(raised.value)
    _, line, arrow, *_ = str(raised.value).split("\n")
    assert line[len(arrow) - 1 :][:10] == text[at : at + 10]


HOSTILE = [
    "__import__('os').system('true')",
    "length.__class__ == 1",
    "length(3) > 1",
    "[length for length in (1, 2)] == 1",
    "(length := 3) == 3",
    "lambda: 1",
    "f'{length}' == tier",
    "b'a' == tier",
    "length == 0x10",
    "length == 1_000",
    "length == 1j",
    "length ** 99 > 1",
    "length > 2**10**10",
    "length in.5",
    "not in.5",
    "length // 2 == 1",
    "length << 99 > 1",
    "+length > 1",
    "*length > 1",
    "length is 1",
    "length == 3 if true else false",
    "length > 1 # and so on",
    "length > 1; row == 1",
    "length \\\n > 1",
    "length > 1\0",
    "ｌength > 1",
    "length > \u0663",
    "await length",
    "yield",
    "None == 1",
    "length @ row > 1",
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
        "length(" * 280,
        "(" * 20 + "length 1" + ")" * 20,
        "length > " + "9" * 1950 + " 1",
        "length 1 " * 220,
        "-(" * 900,
        "1 + " * 400 + "length 1",
        ("not " * 20 + "(") * 20 + "length > 1" + ")" * 20,
        ("-" * 20 + "(") * 20 + "length" + ")" * 20 + " > 1",
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
        ("length > 0" + " + 1" * 490, [False] * 3),
        ("length >= 0" + " <= length" * 180, [True] * 3),
        ("length in (" + "5, " * 600 + "1)", [False, True, False]),
        ("(length < 0 or true and not " * 20 + "length < 1" + ")" * 20, [True, False, False]),
        ("length == " + "-(1 * 1 * " * 20 + "1" + ")" * 20, [False, True, False]),
        ("tier == '\\n'", [False, False, True]),
        ("tier == 'b\0'", [False] * 3),
        ("tier == 'return'", [False] * 3),
    ],
)
def test_long_conditions_huge_numbers_and_text_without_escapes(text, expected):
    columns = {"length": np.arange(3.0), "tier": np.array(["a", "b\0c", "\\n"])}
    assert parse(text, OF_EPISODES).holds(columns, 3).tolist() == expected


def test_long_expressions_are_refused():
    with pytest.raises(ExpressionError, match="longer than 2000"):
        parse("row == 1 or " * 500 + "row == 1", OF_EPISODES)


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


@given(st.data())
def test_precedence_is_that_of_python(data):
    """Expressions over the same columns, evaluated by Python for each episode."""
    number = st.one_of(st.sampled_from(["length", "row", "index"]), st.integers(0, 9).map(str))
    arithmetic = st.recursive(
        number,
        lambda part: st.one_of(
            st.tuples(part, st.sampled_from("+-*"), part).map(" ".join),
            part.map("({})".format),
            part.map("-{}".format),
        ),
        max_leaves=5,
    )
    comparison = st.tuples(
        arithmetic, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), arithmetic
    ).map(" ".join)
    condition = st.recursive(
        comparison,
        lambda part: st.one_of(
            st.tuples(part, st.sampled_from(["and", "or"]), part).map(" ".join),
            part.map("({})".format),
            part.map("not {}".format),
        ),
        max_leaves=4,
    )
    text = data.draw(condition)
    columns = {"length": np.arange(8) % 5, "row": np.arange(8) // 4, "index": np.arange(8)}
    found = parse(text, OF_EPISODES).holds(columns, 8)
    names = [{name: int(column[i]) for name, column in columns.items()} for i in range(8)]
    assert found.tolist() == [bool(eval(text, {}, one)) for one in names]


def test_what_a_vault_does_not_tell_is_said(tmp_path):
    with vault.create(tmp_path / "a.vlt", SPEC, rows=2) as writer:
        writer.append(*make())
    with pytest.raises(ExpressionError, match="does not record the seed of its episodes"):
        vault.filter(tmp_path / "a.vlt", "seed == 1", tmp_path / "b.vlt")
    with pytest.raises(
        ExpressionError, match=r"no episodes of .* meet 'length > 99'.*length from 1 to"
    ):
        vault.filter(tmp_path / "a.vlt", "length > 99", tmp_path / "b.vlt")
    with pytest.raises(ExpressionError, match="percentiles are of episodes"):
        vault.filter(tmp_path / "a.vlt", "reward > p50", tmp_path / "b.vlt", by="steps")
    assert [path.name for path in tmp_path.iterdir()] == ["a.vlt"]
