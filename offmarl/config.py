"""Arguments of programs, whose types say which values are valid.

A program's arguments are a dataclass that derives from `Validated`. A field of one of the types
below, or a `Literal`, is checked when the dataclass is made::

    @dataclass(frozen=True)
    class Args(Validated):
        updates: PositiveInt = 1000
        gamma: Fraction = 0.99
"""

import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from offmarl.errors import OptionError

T = TypeVar("T")


class Rule(NamedTuple):
    """A condition on a value."""

    words: str
    holds: Callable[[Any], bool]


PositiveInt = Annotated[int, Rule("at least 1", lambda x: x >= 1)]
NonNegativeInt = Annotated[int, Rule("at least 0", lambda x: x >= 0)]
SeedCount = Annotated[PositiveInt, Rule("at most 10,000", lambda x: x <= 10_000)]
Seed = Annotated[int, Rule("from 0 to 2,147,483,647", lambda x: 0 <= x < 2**31)]

Fraction = Annotated[float, Rule("from 0 to 1", lambda x: 0 <= x <= 1)]
Positive = Annotated[float, Rule("above 0 and finite", lambda x: 0 < x < math.inf)]
NonNegative = Annotated[float, Rule("at least 0 and finite", lambda x: 0 <= x < math.inf)]


def check_seed(seed: int, name: str = "seed") -> int:
    """Return a seed of 32 bits; `OptionError` for others, which would draw what one of these does.

    Programs count up from theirs, which is a `Seed`.
    """
    if not 0 <= seed < 2**32:
        raise OptionError(f"{name} must be from 0 to 4,294,967,295, not {seed}.")
    return seed


REPEATED = "repeated"
"""Marks the type of an option that is given once for each value: ``--track A --track B``."""

Vaults = str | Path | Mapping[str, float] | tuple[str, ...]
"""A vault by its path or name; or several, as a mapping to their shares or as texts PATH=SHARE."""


class Validated:
    """Base of arguments: raises `OptionError` for the first invalid value."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for field in fields(self):  # type: ignore[arg-type]
            check_rules(field.name, hints[field.name], getattr(self, field.name))


def changed(args: T, **values: Any) -> T:
    """Return arguments with other values, which keep where the others came from."""
    found = copy(args)
    for name, value in values.items():
        object.__setattr__(found, name, value)
    return found


def check_rules(name: str, hint: Any, value: Any) -> None:
    """Raise `OptionError` if the value of a field breaks one of the rules in its type."""
    for rule in _rules(hint):
        if value is not None and not rule.holds(value):
            raise OptionError(f"{name} must be {rule.words}, not {value}.")


def _rules(hint: Any) -> Iterator[Rule]:
    """Yield the rules anywhere in a type, such as in ``PositiveInt | None``, and its choices."""
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        yield Rule(f"one of {', '.join(choices)}", lambda x: x in choices)
    elif get_origin(hint) is not tuple:
        yield from _inner_rules(hint)


def _inner_rules(hint: Any) -> Iterator[Rule]:
    for part in get_args(hint):
        yield from [part] if isinstance(part, Rule) else _rules(part)


def float_fields(kind: type) -> list[str]:
    """Return the names of a dataclass's fields that are numbers with a fraction, in order."""
    hints = get_type_hints(kind)
    return [field.name for field in fields(kind) if hints[field.name] is float]


def from_json(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return a dataclass of arguments, read from a JSON object.

    Strings become paths in fields that hold paths, and lists become tuples. Fields that the object
    lacks get their defaults, as do those of null, by which JSON replaces infinity.

    Raises
    ------
    OptionError
        A value has another type or breaks a rule, or one without a default is missing.
    """
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in fields(kind) if field.name in values]  # type: ignore[arg-type]
    given = {
        name: converted(name, hints[name], values[name])
        for name in names
        if values[name] is not None or NoneType in get_args(hints[name])
    }
    try:
        return kind(**given)
    except TypeError as error:
        raise OptionError(f"{error}.") from None


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "text",
}


def converted(name: str, hint: Any, value: Any) -> Any:
    """Return a value that was read from a file as a field of this type holds it.

    Whole numbers become floats, strings paths and lists tuples where the type asks for them.

    Raises
    ------
    OptionError
        The value has another type, or breaks a rule in the type.
    """

    def path(kind: Any, text: Any) -> Any:
        return Path(text) if kind is Path and isinstance(text, str) else text

    try:
        found = msgspec.convert(value, hint, dec_hook=path, str_keys=True)
    except msgspec.ValidationError:
        raise OptionError(f"{name} must be {_words(hint)}, not {value!r:.80}.") from None
    except TypeError:  # msgspec reads no such type
        found = tuple(value) if isinstance(value, list) else value
    check_rules(name, hint, found)
    return found


def _words(hint: Any) -> str:
    """Return what values of a type are, for an error message."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _words(inside[0])
    if origin in (Union, UnionType):
        return " or ".join(_words(part) for part in inside if part is not NoneType)
    if origin is Literal:
        return " or ".join(repr(value) for value in inside)
    if origin is tuple:
        return f"a list in which each entry is {_words(inside[0])}"
    return _WORDS.get(hint, "of another type")
