"""Conditions on episodes or steps, as ``offmarl filter`` takes them, and formulas of rewards.

A condition is a Python expression of a few kinds: ``and``, ``or``, ``not``, comparisons, ``in``
with values in parentheses, arithmetic, names, numbers, text in quotes, and percentiles. ``p90`` is
the 90th percentile, over complete episodes, of the values that it is compared with.

Python's parser finds the structure, and only the nodes listed here have a meaning: every other one
is refused, and nothing is executed as Python. Python's keywords can be names, such as ``return``.
"""

import ast
import difflib
import operator
import re
from collections.abc import Callable, Mapping
from functools import reduce
from keyword import iskeyword
from typing import Any, Literal, NamedTuple

import numpy as np

from offmarl.errors import ExpressionError
from offmarl.vault.format.layout import NumpyArray

Kind = Literal["number", "text", "truth", "policy", "percentile"]
"""Kind of a value. A policy is compared with numbers by its id, and with text by its name."""

Columns = Mapping[str, NumpyArray]
"""One value for each episode or step, by name; those of policies' names end with `POLICY_NAME`."""

POLICY_NAME = " name"

EXTRA = "extras."
"""Beginning of the names of extras, such as ``extras.cost``."""
ANY_EXTRA = f"{EXTRA}NAME"
"""Stands for all extras among the names that a condition may use."""
ANY_TEAM_RETURN = "return_TEAM"
"""Stands for the returns of all teams where there are several, such as ``return_evaders``."""
ANY_POLICY = "policy_SIDE"
"""Stands for the policies of all agents and teams, such as ``policy_agent_0``."""
_FAMILIES = {EXTRA: ANY_EXTRA, "return_": ANY_TEAM_RETURN, "policy_": ANY_POLICY}

COMPLETE = "complete"
"""The column that selects the episodes percentiles are computed over."""

_LONGEST = 2000
_DEEPEST = 100
"""Levels of nodes within nodes."""
_QUOTED = r"\"[^\"]*\"?|'[^']*'?"
_WORD = re.compile(rf"{_QUOTED}|\bp[0-9]+\.[0-9]+|[A-Za-z_][A-Za-z0-9_]*")
_PERCENTILE = re.compile(r"p[0-9]+(_[0-9]+)?")
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
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
    """A parsed condition, or a formula of numbers."""

    text: str
    names: frozenset[str]
    """The columns it uses."""
    tree: ast.expr

    def holds(self, columns: Columns, count: int) -> NumpyArray:
        """Return where the condition holds, ``(count,)`` booleans."""
        mask = _Evaluation(self.text, columns).value(self.tree, "truth")
        return np.broadcast_to(np.asarray(mask, bool), count)

    def value(self, columns: Columns, shape: tuple[int, ...]) -> NumpyArray:
        """Return the numbers that a formula gives, in float64."""
        numbers = _Evaluation(self.text, columns, truths_count=True).value(self.tree, "number")
        return np.broadcast_to(np.asarray(numbers, float), shape)


def parse(
    text: str,
    names: Mapping[str, Kind],
    hints: Mapping[str, str] | None = None,
    percentiles: bool = True,
    kind: Kind = "truth",
) -> Expression:
    """Parse a condition over columns; ``hints`` are for names that are columns elsewhere.

    Of the kind "number", it is a formula such as ``reward / 10``; conditions in it count as 0 or 1.
    """
    samples = _Samples(names, hints or {})
    if not isinstance(text, str):
        raise ExpressionError(f"{text!r:.60} is not text: add a column by `map`, and filter by it.")
    if len(text) > _LONGEST:
        raise ExpressionError(f"the expression is longer than {_LONGEST} characters.")
    text = text.replace("\n", " ").strip()
    tree = _tree(text)
    _Evaluation(text, samples, kind == "number", percentiles).value(tree, kind)
    return Expression(text, frozenset(samples.used), tree)


def _tree(text: str) -> ast.expr:
    """Return a syntax tree of bounded depth; keywords that are names get a capital letter in it."""
    outside = re.sub(_QUOTED, "", text)
    if re.search(r"[^\x20-\x7e]|#", outside) or re.search(r"[\x00-\x1f\\]", text):
        raise ExpressionError(f"{text!r:.200} has a character that means nothing here.")
    if re.search("(?<![<>=!])=(?!=)", outside):
        raise ExpressionError(f"{text!r:.200} has a single =: equality is `==`.")
    too_deep = ExpressionError(f"{text!r:.200} has more than {_DEEPEST} levels.")
    try:
        tree = ast.parse(_WORD.sub(_hide, text), mode="eval").body
    except (ValueError, RecursionError, MemoryError):
        raise too_deep from None
    except SyntaxError as error:
        raise ExpressionError(f"{text!r:.200} cannot be parsed: {error.msg}.") from None
    nodes: list[ast.AST] = [tree]
    for _ in range(_DEEPEST):
        nodes = [below for node in nodes for below in ast.iter_child_nodes(node)]
    if nodes:
        raise too_deep
    return tree


def _hide(word: re.Match[str]) -> str:
    """Return a word in the form of a name of Python; text in quotes stays as it is."""
    if word[0][0] in "\"'":
        return word[0]
    if iskeyword(word[0]) and word[0] not in ("and", "or", "not", "in"):
        return word[0].capitalize()
    return word[0].replace(".", "_")  # of percentiles


class _Policy(NamedTuple):
    """Policies, by their ids and by their names."""

    number: NumpyArray
    text: NumpyArray


class _Percentile(float):
    """A percentile of the values that it is compared with."""


def _kind(value: Any) -> Kind:
    if isinstance(value, _Policy | _Percentile):
        return "policy" if isinstance(value, _Policy) else "percentile"
    return {"b": "truth", "U": "text"}.get(value.dtype.kind, "number")  # type: ignore


class _Samples(dict[str, NumpyArray]):
    """One value for each column, to find out which columns an expression uses, and of what kind."""

    def __init__(self, names: Mapping[str, Kind], hints: Mapping[str, str]):
        self.names, self.hints, self.used = names, hints, set[str]()

    def __missing__(self, name: str) -> NumpyArray:
        if name == COMPLETE or name.endswith(POLICY_NAME):  # not used by their names
            return np.array([True] if name == COMPLETE else ["a"])
        family = next((kind for start, kind in _FAMILIES.items() if name.startswith(start)), name)
        if family not in self.names:
            near = difflib.get_close_matches(name, self.names, n=1)
            hint = f"did you mean {near[0]}? Known" if near else "known"
            hint = f"{hint}: {', '.join(self.names)}. Text is written in quotes."
            hint = self.hints.get(family, hint)
            raise ExpressionError(f"there is no {name!r:.40}: {hint}")
        self.used.add(name)
        samples: dict[str, Any] = {"text": ["a"], "truth": [True]}
        return np.array(samples.get(self.names[family], [1.0]))


class _Evaluation:
    """Computes the nodes of a syntax tree from columns; refuses nodes of every other type."""

    def __init__(
        self, text: str, columns: Columns, truths_count: bool = False, percentiles: bool = True
    ):
        self.text, self.columns = text, columns
        self.truths_count, self.percentiles = truths_count, percentiles

    def value(self, node: ast.expr, kind: Kind) -> Any:
        """Return the value of a node, which must be of a kind."""
        with np.errstate(all="ignore"):
            value = self.any_value(node)
        actual = _kind(value)
        if actual == kind:
            return value
        if kind == "number" and actual == "policy":
            return value.number
        if kind == "number" and actual == "truth" and self.truths_count:
            return np.asarray(value, float)
        expected = "a condition" if kind == "truth" else "a number"
        raise self.error(node, f"{expected} is needed, and this is a {actual}")

    def any_value(self, node: ast.expr) -> Any:
        match node:
            case ast.BoolOp(op, values):
                return reduce(_OPERATORS[type(op)], [self.value(term, "truth") for term in values])
            case ast.UnaryOp(ast.Not(), operand):
                return np.logical_not(self.value(operand, "truth"))
            case ast.UnaryOp(ast.USub(), operand):
                return -self.value(operand, "number")
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self.value(left, "number"), self.value(right, "number"))
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr()):
                raise self.error(node, "join conditions by `and` and `or`")
            case ast.Compare(left, signs, operands):
                return self.compared(left, signs, operands)
        return self.leaf(node)

    def leaf(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(bool() | str() as literal):
                return np.asarray(literal)
            case ast.Constant(int() | float() as literal):
                return np.float64(literal if abs(literal) < 1e308 else np.inf)
            case ast.Name(id="true" | "false" as name):
                return np.asarray(name == "true")
            case ast.Name(id=name) if _PERCENTILE.fullmatch(name):
                return self.percentile(float(name[1:].replace("_", ".")), node)
            case ast.Name(id=name) if name == "policy" or name.startswith("policy_"):
                return _Policy(self.columns[name], self.columns[name + POLICY_NAME])
            case ast.Name(id=name) | ast.Attribute(ast.Name("extras"), name):
                name = name.lower() if iskeyword(name.lower()) else name
                return self.columns[EXTRA * isinstance(node, ast.Attribute) + name]
        raise self.error(node, "this is not supported")

    def percentile(self, at: float, node: ast.expr) -> _Percentile:
        if not self.percentiles:
            raise self.error(node, "percentiles are of episodes, not of steps")
        if at > 100:
            raise self.error(node, "percentiles are from p0 to p100")
        return _Percentile(at)

    def compared(self, left: ast.expr, signs: list[ast.cmpop], operands: list[ast.expr]) -> Any:
        before, parts = self.any_value(left), []
        for sign, other in zip(signs, operands, strict=True):
            if isinstance(sign, ast.In | ast.NotIn):
                options = other.elts if isinstance(other, ast.Tuple) else [other]
                if not options:
                    raise self.error(other, "`in` needs values, such as (1, 2)")
                equal = [self.pair(before, ast.Eq, self.any_value(x), x) for x in options]
                is_in = reduce(np.logical_or, equal)
                parts.append(is_in if isinstance(sign, ast.In) else ~is_in)
            else:
                after = self.any_value(other)
                parts.append(self.pair(before, type(sign), after, other))
                before = after
        return reduce(np.logical_and, parts)

    def pair(self, left: Any, sign: type[ast.AST], right: Any, node: ast.expr) -> Any:
        """Compare two values; the right one is that of the node."""
        a, b = self.beside(left, right), self.beside(right, left)
        if _kind(a) != _kind(b) or _kind(a) == "percentile" or sign not in _OPERATORS:
            raise self.error(node, f"a {_kind(left)} and a {_kind(right)} cannot be compared")
        if _kind(a) != "number" and sign not in (ast.Eq, ast.NotEq):
            raise self.error(node, f"a {_kind(a)} can be compared by == and != only")
        return _OPERATORS[sign](a, b)

    def beside(self, value: Any, other: Any) -> Any:
        """Return a value, with policies and percentiles as values comparable with ``other``."""
        if isinstance(value, _Policy):
            return value.text if _kind(other) == "text" else value.number
        if not isinstance(value, _Percentile) or _kind(other) not in ("number", "policy"):
            return value
        complete = self.columns[COMPLETE]
        numbers = other.number if isinstance(other, _Policy) else other
        values = np.broadcast_to(numbers, complete.shape)[complete]
        values = values[np.isfinite(values)]
        if not len(values):
            raise ExpressionError(
                f"p{value:g} is a percentile of complete episodes, those that the environment "
                "ended, and the data has none with a value to compare: compare with a number."
            )
        return np.percentile(values, value)

    def error(self, node: ast.expr, fault: str) -> ExpressionError:
        segment = ast.get_source_segment(self.text, node)
        return ExpressionError(f"{fault}: {segment!r:.60} in {self.text!r:.200}.")
