"""Conditions on episodes or steps, as ``offmarl filter`` takes them, and formulas of rewards.

A condition is a Python expression of a few kinds: ``and``, ``or``, ``not``, comparisons, ``in``
with values in parentheses, arithmetic, names, numbers, text in quotes, and percentiles. ``p90`` is
the 90th percentile, over complete episodes, of what it is compared with.

Python's parser finds the structure; nothing is executed as Python. Before parsing, words and
numbers are replaced by placeholders of the same length. Python's keywords, such as ``return``, can
therefore be names, text has no escapes, and positions in errors are correct.
"""

import ast
import difflib
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from offmarl.errors import ExpressionError
from offmarl.vault.layout import NumpyArray

Kind = Literal["number", "text", "truth", "policy", "percentile"]
"""Kind of a value. A policy is compared with numbers by its id, and with text by its name."""

Columns = Mapping[str, NumpyArray]
"""One value for each episode or step, by name; policies' names are under `POLICY_NAME`."""

POLICY_NAME = "policy name"

EXTRA = "extras."
"""Beginning of the names of extras, such as ``extras.cost``."""
ANY_EXTRA = f"{EXTRA}NAME"
"""Stands for all extras among the names that a condition may use."""
TEAM_RETURN = "return_"
"""Beginning of the names of returns where there are several teams, such as ``return_evaders``."""
ANY_TEAM_RETURN = f"{TEAM_RETURN}TEAM"
"""Stands for the returns of all teams."""
_FAMILIES = {EXTRA: ANY_EXTRA, TEAM_RETURN: ANY_TEAM_RETURN}

COMPLETE = "complete"
"""The column that selects the episodes percentiles are computed over."""

_LONGEST = 2000
_DEEPEST = 20
_TOKEN = re.compile(
    r"\s*(?:(?P<percentile>p[0-9]+(?:\.[0-9]+)?\b)"
    r"|(?P<sign>(?:not\s+in|not|and|or|in)\b|<=|>=|==|!=|[-<>+*/%(),])"
    r"|(?P<name>(?:extras\.)?[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![A-Za-z0-9_]))"
    r"|(?P<text>\"[^\"]*\"|'[^']*')"
    r"|(?P<end>$))"
)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_COMPUTE: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_REFUSED: dict[type[ast.expr], str] = {
    ast.Call: "functions cannot be called here",
    ast.Tuple: "several values are only allowed after `in`",
    ast.Constant: "an operator is missing in what begins here",
    ast.Name: "an operator is missing in what begins here",
}


class Expression(NamedTuple):
    """A parsed condition, or a formula of numbers.

    Attributes
    ----------
    text
        The expression as written.
    names
        The columns it uses.
    condition
        Computes it from the columns.
    """

    text: str
    names: frozenset[str]
    condition: Callable[[Columns], NumpyArray]

    def holds(self, columns: Columns, count: int) -> NumpyArray:
        """Return where the condition holds, ``(count,)`` booleans."""
        with np.errstate(all="ignore"):
            return np.broadcast_to(np.asarray(self.condition(columns), bool), count)

    def value(self, columns: Columns, shape: tuple[int, ...]) -> NumpyArray:
        """Return the numbers that a formula gives, in float64."""
        with np.errstate(all="ignore"):
            return np.broadcast_to(np.asarray(self.condition(columns), float), shape)


def parse(
    text: str,
    names: Mapping[str, Kind],
    hints: Mapping[str, str] | None = None,
    percentiles: bool = True,
) -> Expression:
    """Parse a condition.

    Parameters
    ----------
    text
        The condition.
    names
        The columns it may use, and the kind of each.
    hints
        Advice for other names that a user may try.
    percentiles
        Whether it may compare with percentiles; they need all values at once.

    Raises
    ------
    ExpressionError
        The text is not a condition, or compares values of different kinds. The message marks the
        place.
    """
    parser = _parser(text, names, hints or {}, percentiles)
    value = parser.condition().value
    return Expression(text, frozenset(parser.used), value)


def parse_number(text: str, names: Mapping[str, Kind]) -> Expression:
    """Parse a formula of numbers, such as ``reward / 10``; conditions in it count as 0 or 1.

    Parameters and errors are those of `parse`.
    """
    parser = _parser(text, names, {}, percentiles=False)
    value = parser.formula().value
    return Expression(text, frozenset(parser.used), value)


def _parser(
    text: str, names: Mapping[str, Kind], hints: Mapping[str, str], percentiles: bool
) -> "_Parser":
    if len(text) > _LONGEST:
        raise ExpressionError(f"the expression is longer than {_LONGEST} characters.")
    return _Parser(text, names, hints, percentiles)


class _Token(NamedTuple):
    kind: str
    text: str
    at: int

    @property
    def placeholder(self) -> str:
        """What Python's parser reads instead: of the same length, and never a keyword of Python."""
        size = len(self.text)
        if self.kind == "sign":
            return " ".join(self.text.split()).ljust(size)
        return f"'{'_' * (size - 2)}'" if self.kind == "text" else "_" * size


class _Term(NamedTuple):
    """A part of an expression: the kind of its value, its place, and how to compute it."""

    kind: Kind
    at: int
    value: Callable[[Columns], Any]


class _Parser:
    """Builds functions from the nodes of a syntax tree; refuses nodes of every other type."""

    def __init__(
        self, text: str, names: Mapping[str, Kind], hints: Mapping[str, str], percentiles: bool
    ):
        self.used: set[str] = set()
        self._text = text.replace("\n", " ").strip()
        self._names = names
        self._hints = hints
        self._percentiles = percentiles
        self._counts_truths = False
        self._tokens = self._split()
        self._numbers = {token.at: number for number, token in enumerate(self._tokens)}

    def _split(self) -> list[_Token]:
        tokens: list[_Token] = []
        at = 0
        while not tokens or tokens[-1].kind != "end":
            match = _TOKEN.match(self._text, at)
            if match is None or match.lastgroup is None:
                at += len(self._text[at:]) - len(self._text[at:].lstrip())
                raise self._error(at, f"{self._text[at]!r} means nothing here", _advice(self._text))
            tokens.append(
                _Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup))
            )
            at = match.end()
        return tokens

    def condition(self) -> _Term:
        """Return what the whole text means."""
        return self._truth(self._tree())

    def formula(self) -> _Term:
        """Return the number that the whole text means; conditions in it count as 0 or 1."""
        self._counts_truths = True
        return self._number(self._tree())

    def _tree(self) -> ast.expr:
        self._check_depth()
        masked = ""
        for token in self._tokens:
            masked = masked.ljust(token.at) + token.placeholder
        try:
            return ast.parse(masked, mode="eval").body
        except SyntaxError as error:
            raise self._misplaced(error) from error

    def _check_depth(self) -> None:
        """Bound the recursion of Python's parser, and of this one."""
        depth = signs = 0
        for token, after in pairwise(self._tokens):
            depth += (token.text == "(") - (token.text == ")")
            signs = signs + 1 if token.text in ("not", "-") else 0
            if max(depth, signs) > _DEEPEST:
                raise self._error(after.at, f"more than {_DEEPEST} levels are nested here")

    # ------------------------------------------------------------------------------ nodes

    def _term(self, node: ast.expr) -> _Term:
        token = self._tokens[self._numbers[node.col_offset]]
        match node:
            case ast.BoolOp(op, values):
                join = np.logical_and if isinstance(op, ast.And) else np.logical_or
                return _fold(join, [self._truth(value) for value in values])
            case ast.UnaryOp(ast.Not(), operand):
                return _Term("truth", token.at, _after(np.logical_not, self._truth(operand)))
            case ast.UnaryOp(ast.USub(), operand):
                return _Term("number", token.at, _after(operator.neg, self._number(operand)))
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.Mod()):
                return self._computed(node)
            case ast.Compare(left, _, comparators):
                return self._compared(self._term(left), comparators)
            case ast.Name() | ast.Constant():
                if node.end_col_offset == token.at + len(token.text):
                    return self._leaf(token)
        raise self._error(token.at, _REFUSED.get(type(node), "this is not supported here"))

    def _truth(self, node: ast.expr) -> _Term:
        return self._of_kind("truth", "a condition", node)

    def _number(self, node: ast.expr) -> _Term:
        return self._of_kind("number", "a number", node)

    def _of_kind(self, kind: Kind, words: str, node: ast.expr) -> _Term:
        term = self._term(node)
        if self._counts_truths and (term.kind, kind) == ("truth", "number"):
            return _Term("number", term.at, _after(_as_number, term))
        if term.kind != kind and (term.kind, kind) != ("policy", "number"):
            raise self._error(term.at, f"{words} is needed here, and this is a {term.kind}")
        return term

    def _computed(self, node: ast.expr) -> _Term:
        """Build a chain of arithmetic without recursion, since it may have many links."""
        links: list[ast.BinOp] = []
        while isinstance(node, ast.BinOp) and type(node.op) in _COMPUTE:
            links.append(node)
            node = node.left
        first = self._number(node)
        steps = [(_COMPUTE[type(link.op)], self._number(link.right)) for link in links[::-1]]

        def value(columns: Columns) -> Any:
            result = first.value(columns)
            for compute, right in steps:
                result = compute(result, right.value(columns))
            return result

        return _Term("number", first.at, value)

    def _compared(self, left: _Term, others: Iterable[ast.expr]) -> _Term:
        parts: list[_Term] = []
        for other in others:
            sign, bare = self._sign_before(other)
            if sign.text in _COMPARE:
                right = self._term(other)
                parts.append(self._compare(left, sign, right))
                left = right
            elif bare and not isinstance(other, ast.Tuple):
                at = other.col_offset
                raise self._error(at, "`in` needs values in parentheses, such as (1, 2)")
            else:
                parts.append(self._among(left, sign, other))
        return _fold(np.logical_and, parts)

    def _sign_before(self, node: ast.expr) -> tuple[_Token, bool]:
        """Return the comparison before a value, and whether no parenthesis is between."""
        behind = number = self._numbers[node.col_offset] - 1
        while self._tokens[number].text == "(":
            number -= 1
        return self._tokens[number], number == behind

    def _among(self, left: _Term, sign: _Token, values: ast.expr) -> _Term:
        """Build ``left in (values)``; a single value in parentheses is no tuple to Python."""
        options = values.elts if isinstance(values, ast.Tuple) else [values]
        if not options:
            raise self._error(values.col_offset, "`in` needs values, such as (1, 2)")
        equal = _Token("sign", "==", sign.at)
        found = [self._compare(left, equal, self._term(option)) for option in options]
        among = _fold(np.logical_or, found)
        return among if sign.text == "in" else among._replace(value=_after(np.logical_not, among))

    def _compare(self, left: _Term, sign: _Token, right: _Term) -> _Term:
        left, right = _resolve_policy(left, right), _resolve_policy(right, left)
        a, b = _resolve_percentile(left, right), _resolve_percentile(right, left)
        if a.kind != b.kind or a.kind == "percentile":
            raise self._error(sign.at, f"a {left.kind} and a {right.kind} cannot be compared")
        if a.kind != "number" and sign.text not in ("==", "!="):
            raise self._error(sign.at, f"a {a.kind} can be compared by == and != only")
        return _fold(_COMPARE[sign.text], [a, b])

    def _leaf(self, token: _Token) -> _Term:
        kind, text, at = token
        if kind == "number":
            return _constant("number", at, np.float64(text))
        if kind == "text":
            return _constant("text", at, text[1:-1])
        if kind == "percentile":
            return self._percentile(token)
        if text in ("true", "false"):
            return _constant("truth", at, text == "true")
        return self._name(token)

    def _percentile(self, token: _Token) -> _Term:
        if not self._percentiles:
            raise self._error(token.at, "percentiles are of episodes, not of steps")
        percentile = float(token.text[1:])
        if percentile > 100:
            raise self._error(token.at, "percentiles are from p0 to p100")
        return _constant("percentile", token.at, percentile)

    def _name(self, token: _Token) -> _Term:
        name = token.text
        known = next((any_ for start, any_ in _FAMILIES.items() if name.startswith(start)), name)
        if known not in self._names:
            near = difflib.get_close_matches(name, self._names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            hint = self._hints.get(known) or f"{hint}Known: {', '.join(self._names)}."
            raise self._error(token.at, f"there is no {name!r:.40}", hint)
        self.used.add(name)
        return _Term(self._names[known], token.at, lambda columns: columns[name])

    # ------------------------------------------------------------------------------ errors

    def _misplaced(self, error: SyntaxError) -> ExpressionError:
        at = error.offset - 1 if error.offset else len(self._text)
        if "never closed" in error.msg:
            return self._error(at, "this parenthesis is not closed")
        if "comma" in error.msg:
            return self._error(at, "an operator is missing in what begins here")
        if at == len(self._text):
            return self._error(at, "a value is missing, and the expression ends")
        # Python counts `not in` as two tokens, and its error may be at the second.
        token = next(token for token in self._tokens[::-1] if token.at <= at)
        return self._error(token.at, f"{token.text!r:.40} cannot stand here")

    def _error(self, at: int, what: str, more: str = "") -> ExpressionError:
        begin = max(0, at - 40)
        place = f"\n  {self._text[begin : at + 40]}\n  {' ' * (at - begin)}^"
        return ExpressionError(f"{what}:{place}" + (f"\n{more}" if more else ""))


def _advice(text: str) -> str:
    if re.search(r"(?<![<>=!])=(?!=)", text):
        return "Equality is `==`."
    if "&" in text or "|" in text:
        return "Join conditions by `and` and `or`."
    return "Text needs quotes on both sides." if "'" in text or '"' in text else ""


def _as_number(truth: Any) -> Any:
    return np.asarray(truth, float)


def _constant(kind: Kind, at: int, value: Any) -> _Term:
    return _Term(kind, at, lambda _: value)


def _after(function: Callable[[Any], Any], term: _Term) -> Callable[[Columns], Any]:
    return lambda columns: function(term.value(columns))


def _fold(function: Callable[[Any, Any], Any], terms: Sequence[_Term]) -> _Term:
    """Compute a truth from left to right by a function of two values."""

    def value(columns: Columns) -> Any:
        result = terms[0].value(columns)
        for term in terms[1:]:
            result = function(result, term.value(columns))
        return result

    return _Term("truth", terms[0].at, value)


def _resolve_policy(term: _Term, other: _Term) -> _Term:
    """Use a policy's name where it is compared with text, and otherwise its id."""
    if term.kind != "policy":
        return term
    if other.kind == "text":
        return _Term("text", term.at, lambda columns: columns[POLICY_NAME])
    return term._replace(kind="number")


def _resolve_percentile(term: _Term, other: _Term) -> _Term:
    if term.kind != "percentile" or other.kind != "number":
        return term
    return _Term("number", term.at, partial(_percentile, other.value, term.value))


def _percentile(
    values_of: Callable[[Columns], Any], percentile_of: Callable[[Columns], Any], columns: Columns
) -> Any:
    """Return a percentile of the finite values of complete episodes."""
    complete = columns[COMPLETE]
    values = np.broadcast_to(values_of(columns), complete.shape)[complete]
    values = values[np.isfinite(values)]
    percentile = percentile_of(columns)
    if not len(values):
        raise ExpressionError(
            f"p{percentile:g} is a percentile of complete episodes, those that the environment "
            "ended, and the data has none with a value to compare: compare with a number."
        )
    return np.percentile(values, percentile)
