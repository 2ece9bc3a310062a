"""The language of ``offmarl filter``: conditions on episodes, or on steps.

::

    condition  = all, { "or", all } ;
    all        = one, { "and", one } ;
    one        = "not", one | comparison ;
    comparison = sum, { ( "<" | "<=" | ">" | ">=" | "==" | "!=" ), sum
                      | [ "not" ], "in", "(", sum, { ",", sum }, ")" } ;
    sum        = product, { ( "+" | "-" ), product } ;
    product    = factor, { ( "*" | "/" | "%" ), factor } ;
    factor     = "-", factor | number | text | name | percentile | "(", condition, ")" ;

Comparisons chain as Python's do. ``p90`` is the 90th percentile, over complete episodes, of what it
is compared with. Text is evaluated by nothing but this grammar.
"""

import difflib
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from offmarl.errors import ExpressionError
from offmarl.vault.layout import NumpyArray

Kind = Literal["number", "text", "truth", "policy", "percentile"]
"""What a value is. A policy is compared with numbers by its id, and with text by its name."""

Columns = Mapping[str, NumpyArray]
"""Name to one value for each episode (or step); the names of policies are under ``policy name``."""

POLICY_NAME = "policy name"

COMPLETE = "complete"
"""The column of the episodes that percentiles are taken over."""

_LONGEST = 2000
_DEEPEST = 20
_TOKEN = re.compile(
    r"\s*(?:(?P<percentile>p\d+(?:\.\d+)?\b)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<text>\"[^\"]*\"|'[^']*')"
    r"|(?P<sign><=|>=|==|!=|[-<>+*/%(),])|(?P<end>$))"
)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_COMPUTE: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "%": operator.mod,
}


class Expression(NamedTuple):
    """A condition that was understood.

    Attributes
    ----------
    text
        As it was written.
    names
        What it asks for.
    """

    text: str
    names: frozenset[str]
    condition: Callable[[Columns], NumpyArray]

    def holds(self, columns: Columns, count: int) -> NumpyArray:
        """Return where the condition holds, ``(count,)`` booleans."""
        with np.errstate(all="ignore"):
            return np.broadcast_to(np.asarray(self.condition(columns), bool), count)


def parse(
    text: str,
    names: Mapping[str, Kind],
    hints: Mapping[str, str] | None = None,
    percentiles: bool = True,
) -> Expression:
    """Read a condition.

    Parameters
    ----------
    text
        The condition.
    names
        What it may ask for, and what kind of value each is.
    hints
        What to say where it asks for something else.
    percentiles
        Whether it may compare with percentiles; not where columns come in blocks.

    Raises
    ------
    ExpressionError
        It is not of the grammar, or compares what cannot be compared; the message shows where.
    """
    parser = _Parser(text, names, hints or {}, percentiles)
    found = parser.condition()
    parser.expect("end", "", "the end, `and` or `or`")
    parser.require(found, "truth")
    return Expression(text, frozenset(parser.asked), found.value)


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class _Term(NamedTuple):
    """A part of an expression: what kind of value it has, and how to find it."""

    kind: Kind
    at: int
    value: Callable[[Columns], Any]


class _Parser:
    def __init__(
        self, text: str, names: Mapping[str, Kind], hints: Mapping[str, str], percentiles: bool
    ):
        self.asked: set[str] = set()
        self._text = text.replace("\n", " ")
        self._names = names
        self._hints = hints
        self._percentiles = percentiles
        self._depth = 0
        self._tokens = self._split()
        self._next = 0

    # ------------------------------------------------------------------------------ tokens

    def _split(self) -> list[_Token]:
        if len(self._text) > _LONGEST:
            raise ExpressionError(f"the expression is longer than {_LONGEST} characters.")
        tokens: list[_Token] = []
        at = 0
        while not tokens or tokens[-1].kind != "end":
            match = _TOKEN.match(self._text, at)
            if match is None or match.lastgroup is None:
                at += len(self._text[at:]) - len(self._text[at:].lstrip())
                raise self._error(at, f"{self._text[at]!r} means nothing here", _advice(self._text))
            kind = match.lastgroup
            tokens.append(_Token(kind, match[kind], match.start(kind)))
            at = match.end()
        return tokens

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._token
        self._next += 1
        return token

    def _taken(self, *texts: str) -> _Token | None:
        """Take the next token if it is one of these signs or words."""
        if self._token.text in texts and self._token.kind in ("sign", "name"):
            return self._take()
        return None

    def expect(self, kind: str, text: str, what: str) -> None:
        """Take a token that must be there."""
        token = self._take()
        if token.kind != kind or token.text != text:
            raise self._unexpected(token, what)

    def require(self, term: _Term, kind: Kind) -> None:
        """Refuse a value of another kind."""
        if term.kind != kind and (term.kind, kind) != ("policy", "number"):
            wanted = {"truth": "a condition", "number": "a number"}.get(kind, f"a {kind}")
            raise self._error(term.at, f"{wanted} is needed here, and this is a {term.kind}")

    # ------------------------------------------------------------------------------ grammar

    def condition(self) -> _Term:
        """Parse the whole, or what is between parentheses."""
        return self._joined("or", np.logical_or, self._all)

    def _all(self) -> _Term:
        return self._joined("and", np.logical_and, self._one)

    def _joined(self, word: str, join: Any, part: Callable[[], _Term]) -> _Term:
        left = part()
        while self._taken(word):
            right = part()
            self.require(left, "truth")
            self.require(right, "truth")
            left = _Term("truth", left.at, _both(join, left, right))
        return left

    def _one(self) -> _Term:
        token = self._taken("not")
        if token is None:
            return self._comparison()
        term = self._deeper(self._one)
        self.require(term, "truth")
        return _Term("truth", token.at, lambda columns: np.logical_not(term.value(columns)))

    def _comparison(self) -> _Term:
        left = self._sum()
        parts: list[_Term] = []
        while sign := self._taken(*_COMPARE, "in", "not"):
            if sign.text == "not":
                self.expect("name", "in", "`in`")
            if sign.text in _COMPARE:
                right = self._sum()
                parts.append(self._compare(left, sign, right))
                left = right
            else:
                parts.append(self._among(left, sign))
        if not parts:
            return left
        whole = parts[0]
        for part in parts[1:]:
            whole = _Term("truth", whole.at, _both(np.logical_and, whole, part))
        return whole

    def _among(self, left: _Term, sign: _Token) -> _Term:
        self.expect("sign", "(", "values in parentheses, such as (1, 2)")
        equal = _Token("sign", "==", sign.at)
        found = self._compare(left, equal, self._sum())
        while self._taken(","):
            one = self._compare(left, equal, self._sum())
            found = _Term("truth", left.at, _both(np.logical_or, found, one))
        self.expect("sign", ")", "`,` or `)`")
        if sign.text == "in":
            return found
        return _Term("truth", left.at, lambda columns: np.logical_not(found.value(columns)))

    def _sum(self) -> _Term:
        return self._computed(("+", "-"), self._product)

    def _product(self) -> _Term:
        return self._computed(("*", "/", "%"), self._factor)

    def _computed(self, signs: tuple[str, ...], part: Callable[[], _Term]) -> _Term:
        left = part()
        while sign := self._taken(*signs):
            right = part()
            self.require(left, "number")
            self.require(right, "number")
            left = _Term("number", left.at, _both(_COMPUTE[sign.text], left, right))
        return left

    def _factor(self) -> _Term:
        token = self._take()
        if token.kind == "sign" and token.text == "-":
            term = self._deeper(self._factor)
            self.require(term, "number")
            return _Term("number", token.at, lambda columns: -term.value(columns))
        if token.kind == "sign" and token.text == "(":
            term = self._deeper(self.condition)
            self.expect("sign", ")", "`)`")
            return term
        return self._value(token)

    def _value(self, token: _Token) -> _Term:
        if token.kind == "number":
            number = np.float64(token.text)
            return _Term("number", token.at, lambda _: number)
        if token.kind == "text":
            return _Term("text", token.at, lambda _: token.text[1:-1])
        if token.kind == "percentile":
            return self._percentile(token)
        if token.kind == "name" and token.text not in ("and", "or", "not", "in"):
            return self._name(token)
        raise self._unexpected(token, "a name, a number or a text in quotes")

    def _percentile(self, token: _Token) -> _Term:
        if not self._percentiles:
            raise self._error(token.at, "percentiles are of episodes, and this is about steps")
        percentile = float(token.text[1:])
        if percentile > 100:
            raise self._error(token.at, "percentiles are from p0 to p100")
        return _Term("percentile", token.at, lambda _: percentile)

    def _name(self, token: _Token) -> _Term:
        if token.text in ("true", "false"):
            return _Term("truth", token.at, lambda _: token.text == "true")
        if token.text not in self._names:
            near = difflib.get_close_matches(token.text, self._names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            hint = self._hints.get(token.text) or f"{hint}Known: {', '.join(self._names)}."
            raise self._error(token.at, f"there is no {token.text!r:.40}", hint)
        self.asked.add(token.text)
        return _Term(self._names[token.text], token.at, lambda columns: columns[token.text])

    def _deeper(self, part: Callable[[], _Term]) -> _Term:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._error(self._token.at, f"more than {_DEEPEST} levels are nested here")
        term = part()
        self._depth -= 1
        return term

    # ------------------------------------------------------------------------------ comparing

    def _compare(self, left: _Term, sign: _Token, right: _Term) -> _Term:
        left, right = _resolve_names(left, right), _resolve_names(right, left)
        a, b = _resolve_percentile(left, right), _resolve_percentile(right, left)
        if a.kind != b.kind or a.kind == "percentile":
            raise self._error(sign.at, f"a {left.kind} and a {right.kind} cannot be compared")
        if a.kind != "number" and sign.text not in ("==", "!="):
            raise self._error(sign.at, f"of a {a.kind} only == and != can be asked")
        return _Term("truth", left.at, _both(_COMPARE[sign.text], a, b))

    # ------------------------------------------------------------------------------ errors

    def _unexpected(self, token: _Token, wanted: str) -> ExpressionError:
        found = f"found {token.text!r:.40}" if token.text else "the expression ends"
        return self._error(token.at, f"expected {wanted}, and {found}")

    def _error(self, at: int, what: str, more: str = "") -> ExpressionError:
        begin = max(0, at - 40)
        place = f"\n  {self._text[begin : at + 40]}\n  {' ' * (at - begin)}^"
        return ExpressionError(f"{what}:{place}" + (f"\n{more}" if more else ""))


def _both(function: Callable[[Any, Any], Any], left: _Term, right: _Term) -> Any:
    return lambda columns: function(left.value(columns), right.value(columns))


def _resolve_names(term: _Term, other: _Term) -> _Term:
    """Take a policy for its name where it is compared with text, and else for its id."""
    if term.kind != "policy":
        return term
    if other.kind == "text":
        return _Term("text", term.at, lambda columns: columns[POLICY_NAME])
    return _Term("number", term.at, term.value)


def _resolve_percentile(term: _Term, other: _Term) -> _Term:
    if term.kind != "percentile" or other.kind != "number":
        return term
    return _Term(
        "number", term.at, lambda columns: _percentile(columns, other.value(columns), term)
    )


def _percentile(columns: Columns, values: Any, term: _Term) -> Any:
    """Return a percentile of the values of complete episodes, as far as they are numbers."""
    complete = columns[COMPLETE]
    values = np.broadcast_to(values, complete.shape)[complete]
    values = values[np.isfinite(values)]
    percentile = term.value(columns)
    if not len(values):
        raise ExpressionError(
            f"p{percentile:g} is a percentile of complete episodes, those that the environment "
            "ended, and the data has none with a value to compare: compare with a number."
        )
    return np.percentile(values, percentile)


def _advice(text: str) -> str:
    if re.search(r"(?<![<>=!])=(?!=)", text):
        return "Equality is `==`."
    if "&" in text or "|" in text:
        return "Conditions are joined by `and` and `or`."
    return "Text stands between quotes." if "'" in text or '"' in text else ""
