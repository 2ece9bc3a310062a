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
from dataclasses import fields
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from offmarl.errors import OptionError

T = TypeVar("T")


class Rule(NamedTuple):
    """A condition on a value."""

    words: str
    holds: Callable[[Any], bool]


PositiveInt = Annotated[int, Rule("at least 1", lambda x: x >= 1)]
NonNegativeInt = Annotated[int, Rule("at least 0", lambda x: x >= 0)]
Seed = Annotated[int, Rule("from 0 to 2,147,483,647", lambda x: 0 <= x < 2**31)]
Fraction = Annotated[float, Rule("from 0 to 1", lambda x: 0 <= x <= 1)]
Positive = Annotated[float, Rule("above 0 and finite", lambda x: 0 < x < math.inf)]
NonNegative = Annotated[float, Rule("at least 0 and finite", lambda x: 0 <= x < math.inf)]


Vaults = str | Path | Mapping[str, float] | tuple[str, ...]
"""A vault by its path or name; or several, as a mapping to their shares or as texts PATH=SHARE."""


class Validated:
    """Base of arguments: raises `OptionError` for the first invalid value."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            for rule in _rules(hints[field.name]):
                if value is not None and not rule.holds(value):
                    raise OptionError(f"{field.name} must be {rule.words}, not {value}.")


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
    lacks get their defaults.
    """
    hints = get_type_hints(kind)

    def value_of(name: str, value: Any) -> Any:
        if isinstance(value, str) and Path in (hints[name], *get_args(hints[name])):
            return Path(value)
        return tuple(value) if isinstance(value, list) else value

    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value_of(name, x) for name, x in values.items() if name in names})
