"""Settings of programs, which say by their types what they can be.

A program's settings are a dataclass that derives from `Checked`; a field of one of the types below
is held against what it says when the settings are made::

    @dataclass(frozen=True)
    class Args(Checked):
        updates: Count = 1000
        gamma: Fraction = 0.99
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from offmarl.errors import OptionError


class Rule(NamedTuple):
    """What a setting must be."""

    words: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Rule("at least 1", lambda x: x >= 1)]
Seed = Annotated[int, Rule("from 0 to 2,147,483,647", lambda x: 0 <= x < 2**31)]
Fraction = Annotated[float, Rule("from 0 to 1", lambda x: 0 <= x <= 1)]
Positive = Annotated[float, Rule("above 0 and finite", lambda x: 0 < x < math.inf)]
NonNegative = Annotated[float, Rule("at least 0 and finite", lambda x: 0 <= x < math.inf)]


class Checked:
    """Base of settings: raises `OptionError` for the first one that cannot be."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            for rule in _rules(hints[field.name]):
                if value is not None and not rule.holds(value):
                    raise OptionError(f"{field.name} must be {rule.words}, not {value}.")


def _rules(hint: Any) -> Iterator[Rule]:
    """Return the rules anywhere in a type, such as in ``Count | None``."""
    for part in get_args(hint):
        yield from [part] if isinstance(part, Rule) else _rules(part)
