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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
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
ANY_TEAM_RETURN = "return_TEAM"
"""Stands for the returns of all teams where there are several, such as ``return_evaders``."""
_FAMILIES = {EXTRA: ANY_EXTRA, "return_": ANY_TEAM_RETURN}

COMPLETE = "complete"
"""The column that selects the episodes percentiles are computed over."""

_Compute = Callable[[Columns], Any]
_Function = Callable[[Any, Any], Any]

_LONGEST = 2000
_DEEPEST = 20
_TOKEN = re.compile(
    r"(?P<percentile>p[0-9]+(?:\.[0-9]+)?\b)"
    r"|(?P<sign>(?:not\s+in|not|and|or|in)\b|<=|>=|==|!=|\*(?!\*)|/(?!/)|[-<>+%(),])"
    r"|(?P<truth>(?:true|false)\b)"
    r"|(?P<name>(?:extras\.)?[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![A-Za-z0-9_]))"
    r"|(?P<text>\"[^\"]*\"|'[^']*')"
    r"|(?P<unknown>\*\*|//|\S)"
)
_ADVICE = {
    "=": "Equality is `==`.",
    **dict.fromkeys("&|", "Join conditions by `and` and `or`."),
    **dict.fromkeys("\"'", "Text needs quotes on both sides."),
}
_OPERATORS: dict[type[ast.AST], _Function] = {
    ast.And: np.logical_and,
    ast.Or: np.logical_or,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
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
    """Parse a condition."""
    return _parse(text, "truth", names, hints or {}, percentiles)


def parse_number(text: str, names: Mapping[str, Kind]) -> Expression:
    """Parse a formula of numbers, such as ``reward / 10``; conditions in it count as 0 or 1.

    Parameters and errors are those of `parse`.
    """
    return _parse(text, "number", names, {}, percentiles=False)


def _parse(
    text: str, kind: Kind, names: Mapping[str, Kind], hints: Mapping[str, str], percentiles: bool
) -> Expression:
    if len(text) > _LONGEST:
        raise ExpressionError(f"the expression is longer than {_LONGEST} characters.")
    parser = _Parser(text.replace("\n", " ").strip(), kind, names, hints, percentiles)
    compute = parser.value(parser.tree(), kind)
    used = {token["name"] for token in _TOKEN.finditer(parser.text) if token["name"]}
    return Expression(text, frozenset(used), compute)


class _Term(NamedTuple):
    """A part of an expression: the kind of its value, and how to compute it."""

    kind: Kind
    compute: _Compute


@dataclass(frozen=True)
class _Parser:
    """Builds functions from the nodes of a syntax tree; refuses nodes of every other type."""

    text: str
    kind: Kind
    """Kind of the whole value; within a number, truths count as 0 or 1."""
    names: Mapping[str, Kind]
    hints: Mapping[str, str]
    percentiles: bool

    def tree(self) -> ast.expr:
        """Return the syntax tree of the text, with placeholders for words and numbers."""
        self._check_tokens()
        masked = re.sub(r"\s", " ", _TOKEN.sub(_placeholder, self.text))
        try:
            return ast.parse(masked, mode="eval").body
        except SyntaxError as error:
            raise self._misplaced(error) from error

    def _check_tokens(self) -> None:
        """Refuse unknown characters; bound the recursion of Python's parser, and of this one."""
        signs = [0]  # before the next value, within each open parenthesis
        for token in _TOKEN.finditer(self.text):
            if token["unknown"]:
                what = f"{token[0]!r} means nothing here"
                raise self._error(token.start(), what, _ADVICE.get(token[0], ""))
            if token[0] == "(":
                signs.append(0)
            elif token[0] in ("not", "-"):
                signs[-1] += 1
            else:
                if token[0] == ")" and len(signs) > 1:
                    signs.pop()
                signs[-1] = 0
            if max(len(signs) - 1, sum(signs)) > _DEEPEST:
                raise self._error(token.start(), f"more than {_DEEPEST} levels are nested here")

    # ------------------------------------------------------------------------------ nodes

    def value(self, node: ast.expr, kind: Kind) -> _Compute:
        """Return what computes a node, whose value must be of a kind."""
        found, compute = self._term(node)
        if found == kind or (found, kind) == ("policy", "number"):
            return compute
        if (found, kind, self.kind) == ("truth", "number", "number"):
            return lambda columns: np.asarray(compute(columns), float)
        needed = "a condition" if kind == "truth" else "a number"
        raise self._error(node.col_offset, f"{needed} is needed here, and this is a {found}")

    def _term(self, node: ast.expr) -> _Term:
        match node:
            case ast.BoolOp(op, values):
                truths = [self.value(value, "truth") for value in values]
                return _Term("truth", _fold(_OPERATORS[type(op)], truths))
            case ast.UnaryOp(ast.Not(), operand):
                truth = self.value(operand, "truth")
                return _Term("truth", lambda columns: np.logical_not(truth(columns)))
            case ast.UnaryOp(ast.USub(), operand):
                number = self.value(operand, "number")
                return _Term("number", lambda columns: -number(columns))
            case ast.BinOp(op=op) if type(op) in _OPERATORS:
                return _Term("number", self._computed(node))
            case ast.Compare():
                return _Term("truth", self._compared(node))
            case ast.Name() | ast.Constant():
                end = node.end_col_offset or 0
                if token := _TOKEN.fullmatch(self.text, node.col_offset, end):
                    return self._leaf(token)
                what = "an operator is missing in what begins here"
            case ast.Call():
                what = "functions cannot be called here"
            case ast.Tuple():
                what = "several values are only allowed after `in`"
            case _:
                what = "this is not supported here"
        raise self._error(node.col_offset, what)

    def _computed(self, node: ast.expr) -> _Compute:
        """Build a chain of arithmetic without recursion, since it may have many links."""
        links: list[ast.BinOp] = []
        while isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            links.append(node)
            node = node.left
        first = self.value(node, "number")
        steps = [(_OPERATORS[type(one.op)], self.value(one.right, "number")) for one in links[::-1]]

        def compute(columns: Columns) -> Any:
            result = first(columns)
            for function, right in steps:
                result = function(result, right(columns))
            return result

        return compute

    def _compared(self, node: ast.Compare) -> _Compute:
        left, before = self._term(node.left), node.left
        parts: list[_Compute] = []
        for sign, other in zip(node.ops, node.comparators, strict=True):
            after = _TOKEN.finditer(self.text, before.end_col_offset or 0)
            at = next(token.start() for token in after if token[0] != ")")
            if isinstance(sign, ast.In | ast.NotIn):
                parts.append(self._among(left, sign, other, at))
            else:
                right = self._term(other)
                parts.append(self._compare(left, type(sign), right, at))
                left = right
            before = other
        return _fold(np.logical_and, parts)

    def _among(self, left: _Term, sign: ast.cmpop, values: ast.expr, at: int) -> _Compute:
        """Build ``left in (values)``; a single value in parentheses is no tuple to Python."""
        options = values.elts if isinstance(values, ast.Tuple) else [values]
        if not options:
            raise self._error(values.col_offset, "`in` needs values, such as (1, 2)")
        if options == [values] and "(" not in self.text[at : values.col_offset]:
            what = "`in` needs values in parentheses, such as (1, 2)"
            raise self._error(values.col_offset, what)
        equal = ast.Eq if isinstance(sign, ast.In) else ast.NotEq
        found = [self._compare(left, equal, self._term(option), at) for option in options]
        return _fold(np.logical_or if equal is ast.Eq else np.logical_and, found)

    def _compare(self, left: _Term, sign: type[ast.cmpop], right: _Term, at: int) -> _Compute:
        a, b = _beside(left, right), _beside(right, left)
        if a.kind != b.kind or a.kind == "percentile":
            raise self._error(at, f"a {left.kind} and a {right.kind} cannot be compared")
        if a.kind != "number" and sign not in (ast.Eq, ast.NotEq):
            raise self._error(at, f"a {a.kind} can be compared by == and != only")
        return _fold(_OPERATORS[sign], [a.compute, b.compute])

    def _leaf(self, token: re.Match[str]) -> _Term:
        text = token[0]
        match token.lastgroup:
            case "number":
                number = np.float64(text)
                return _Term("number", lambda _: number)
            case "text":
                return _Term("text", lambda _: text[1:-1])
            case "truth":
                return _Term("truth", lambda _: text == "true")
            case "percentile" if not self.percentiles:
                raise self._error(token.start(), "percentiles are of episodes, not of steps")
            case "percentile" if float(text[1:]) > 100:
                raise self._error(token.start(), "percentiles are from p0 to p100")
            case "percentile":
                return _Term("percentile", lambda _: float(text[1:]))
        return self._name(text, token.start())

    def _name(self, name: str, at: int) -> _Term:
        known = next((any_ for start, any_ in _FAMILIES.items() if name.startswith(start)), name)
        if known not in self.names:
            near = difflib.get_close_matches(name, self.names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            hint = self.hints.get(known) or f"{hint}Known: {', '.join(self.names)}."
            raise self._error(at, f"there is no {name!r:.40}", hint)
        return _Term(self.names[known], operator.itemgetter(name))

    # ------------------------------------------------------------------------------ errors

    def _misplaced(self, error: SyntaxError) -> ExpressionError:
        at = error.offset - 1 if error.offset else len(self.text)
        if "never closed" in error.msg:
            return self._error(at, "this parenthesis is not closed")
        if "comma" in error.msg:
            return self._error(at, "an operator is missing in what begins here")
        if at >= len(self.text):
            return self._error(at, "a value is missing, and the expression ends")
        # Python counts `not in` as two tokens, and its error may be at the second.
        *_, token = (token for token in _TOKEN.finditer(self.text) if token.start() <= at)
        return self._error(token.start(), f"{token[0]!r:.40} cannot stand here")

    def _error(self, at: int, what: str, more: str = "") -> ExpressionError:
        begin = max(0, at - 40)
        place = f"\n  {self.text[begin : at + 40]}\n  {' ' * (at - begin)}^"
        return ExpressionError(f"{what}:{place}" + (f"\n{more}" if more else ""))


def _placeholder(token: re.Match[str]) -> str:
    """Return what Python's parser reads instead: as long, and never a keyword of Python."""
    if token["text"]:
        return f"'{'_' * (len(token[0]) - 2)}'"
    return token["sign"] or "_" * len(token[0])


def _fold(function: _Function, parts: Sequence[_Compute]) -> _Compute:
    """Join values from left to right by a function of two."""
    return lambda columns: reduce(function, (part(columns) for part in parts))


def _beside(term: _Term, other: _Term) -> _Term:
    """Return what a policy or a percentile means beside what it is compared with."""
    match term.kind, other.kind:
        case "policy", "text":
            return _Term("text", operator.itemgetter(POLICY_NAME))
        case "policy", _:
            return term._replace(kind="number")
        case "percentile", "number" | "policy":
            return _Term("number", partial(_percentile, term.compute, other.compute))
    return term


def _percentile(percentile_of: _Compute, values_of: _Compute, columns: Columns) -> Any:
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
