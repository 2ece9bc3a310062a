"""The language of conditions: what it means, what is refused, and where the message points."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offmarl import vault
from offmarl.errors import ExpressionError
from offmarl.vault.transform.columns import OF_EPISODES
from offmarl.vault.transform.expression import parse

from .experience import SPEC, make


@pytest.mark.parametrize(
    ("text", "message", "at"),
    [
        ("", "and the expression ends", 0),
        ("return", "a condition is needed here, and this is a number", 0),
        ("return > > 1", "found '>'", 9),
        ("return > 1 length", "expected the end, `and` or `or`, and found 'length'", 11),
        ("retrun > 1", "did you mean return", 0),
        ("length = 3", "Equality is `==`", 7),
        ("length > 3 & row == 1", "joined by `and` and `or`", 11),
        ("length > 3 and (row == 1", "expected `)`", 24),
        ("tier == 3", "a text and a number cannot be compared", 5),
        ("tier < 'a'", "only == and != can be asked", 5),
        ("terminated > 1", "a truth and a number", 11),
        ("not length", "a condition is needed", 4),
        ("length + tier > 3", "a number is needed here, and this is a text", 9),
        ("length and row == 1", "a condition is needed here", 0),
        ("length in 3", "values in parentheses", 10),
        ("p90 > p10", "a percentile and a percentile", 4),
        ("return > p101", "from p0 to p100", 9),
        ("row == 1 and p50", "a condition is needed here, and this is a percentile", 13),
        ("__import__('os') == 1", "there is no '__import__'", 0),
        ("return.real > 1", "'.' means nothing here", 6),
        ("reward > 1", "select by steps", 0),
        ("(" * 60 + "row == 1" + ")" * 60, "more than 20 levels", 21),
        ("not " * 60 + "row == 1", "more than 20 levels", 84),
    ],
)
def test_mistakes_are_pointed_at(text, message, at):
    with pytest.raises(ExpressionError) as raised:
        parse(text, OF_EPISODES, {"reward": "Steps have it: select by steps."})
    assert message in str(raised.value)
    _, line, arrow, *_ = str(raised.value).split("\n")
    assert line[len(arrow) - 1 :][:10] == text[at : at + 10]


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
    with pytest.raises(ExpressionError, match="does not tell the seed of its episodes"):
        vault.filter(tmp_path / "a.vlt", "seed == 1", tmp_path / "b.vlt")
    with pytest.raises(ExpressionError, match=r"none meet 'length > 99'.*length from 1 to"):
        vault.filter(tmp_path / "a.vlt", "length > 99", tmp_path / "b.vlt")
    with pytest.raises(ExpressionError, match="percentiles are of episodes"):
        vault.filter(tmp_path / "a.vlt", "reward > p50", tmp_path / "b.vlt", by="steps")
    assert [path.name for path in tmp_path.iterdir()] == ["a.vlt"]
