"""What ``offmarl tune`` searches: the range of each argument, derived or from a file."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from offmarl.config import (
    Fraction,
    NonNegative,
    Positive,
    PositiveInt,
    Role,
    Validated,
    check_names,
    converted,
    with_role,
)
from offmarl.errors import OptionError, UnknownNameError, unknown_name
from offmarl.programs.program import shared_names
from offmarl.settings import SEARCH, tables

_KEYS = ("low", "high", "log")

_NOT_SIZES = ("capacity", "seeds")
"""Whole numbers whose value does not trade off anything: more is better, or another question."""


class Range(NamedTuple):
    """Numbers from ``low`` to ``high``."""

    low: float
    high: float
    log: bool = False
    """Whether their logarithms are drawn uniformly."""
    complement: bool = False
    """Whether 1 minus the number is drawn instead: for those close to 1, such as discounts."""

    def words(self) -> str:
        """Describe the range."""
        scale = ", on a scale of log(1 - x)" if self.complement else ", log" if self.log else ""
        return f"{self.low:g} to {self.high:g}{scale}"

    def suggest(self, trial: Any, name: str) -> float:
        """Draw a value."""
        if not self.complement:
            value: float = trial.suggest_float(name, self.low, self.high, log=self.log)
            return value
        drawn: float = trial.suggest_float(f"1-{name}", 1 - self.high, 1 - self.low, log=True)
        return 1 - drawn


class IntRange(NamedTuple):
    """Whole numbers from ``low`` to ``high``."""

    low: int
    high: int
    log: bool = False

    def words(self) -> str:
        """Describe the range."""
        return f"{self.low} to {self.high}{', log' if self.log else ''}"

    def suggest(self, trial: Any, name: str) -> int:
        """Draw a value."""
        value: int = trial.suggest_int(name, self.low, self.high, log=self.log)
        return value


class Choices(NamedTuple):
    """Some values."""

    values: tuple[Any, ...]

    def words(self) -> str:
        """Describe the values."""
        return ", ".join(str(value) for value in self.values)

    @property
    def options(self) -> tuple[Any, ...]:
        """What Optuna stores: numbers, texts and truth values; of others their text."""
        plain = all(isinstance(value, bool | int | float | str) for value in self.values)
        return self.values if plain else tuple(map(str, self.values))

    def suggest(self, trial: Any, name: str) -> Any:
        """Draw a value."""
        chosen = trial.suggest_categorical(name, self.options)
        return self.values[self.options.index(chosen)]


Space = dict[str, Range | IntRange | Choices]
"""What is searched, by argument."""


def drawn(one: Range | IntRange | Choices, name: str, value: Any) -> dict[str, Any]:
    """Return what is drawn where a value is proposed; nothing for one outside the range."""
    if isinstance(one, Choices):
        return {name: one.options[one.values.index(value)]} if value in one.values else {}
    if not isinstance(value, int | float) or not one.low <= value <= one.high:
        return {}
    if isinstance(one, Range) and one.complement:
        return {f"1-{name}": min(max(1 - value, 1 - one.high), 1 - one.low)}
    return {name: value}


def derived(args: Validated) -> Space:
    """Return ranges for a program's own arguments, from their types and values.

    Positive numbers and small fractions: a tenth to ten times the value, on a logarithmic scale.
    Fractions above one half, such as discounts: the same of their difference to 1. Sizes: half the
    value, the value and twice the value. Numbers that are zero, and arguments of other types, are
    not searched.
    """
    hints = get_type_hints(type(args), include_extras=True)
    shared = shared_names(args) - with_role(type(args), Role.SEARCHED)
    own = [name for name in hints if name not in shared]
    found = {name: _range(name, hints[name], getattr(args, name)) for name in own}
    return {name: one for name, one in found.items() if one is not None}


def _range(name: str, hint: Any, value: Any) -> Range | Choices | None:
    if hint == Fraction and value is not None and 0.5 < value < 1:
        return Range(max(1 - 10 * (1 - value), 0), 1 - (1 - value) / 10, True, complement=True)
    if hint in (Positive, NonNegative, Fraction) and value and value < (hint == Fraction or 1e9):
        return Range(value / 10, min(10 * value, 1.0) if hint == Fraction else 10 * value, log=True)
    if hint == PositiveInt and name not in _NOT_SIZES:
        return Choices(tuple(sorted({max(value // 2, 1), value, 2 * value})))
    return None


def read_space(path: Path, kind: type[Validated]) -> Space:
    """Return the ranges in the table ``[search]`` of a file; `OptionError` for what is not valid.

    An entry is a list of values, or ``{low = ..., high = ..., log = true}``.
    """
    table = tables(path).get(SEARCH)
    if not table:
        raise OptionError(f"{path} has no table [{SEARCH}]: add one with the ranges to search.")
    hints = get_type_hints(kind, include_extras=True)
    where = f"{path} [{SEARCH}]"
    try:
        check_names(kind, table, with_role(kind, Role.CASE))
        return {name: _entry(name, hints[name], entry) for name, entry in table.items()}
    except (OptionError, UnknownNameError) as error:
        raise OptionError(f"{where}: {error}") from None


def _entry(name: str, hint: Any, entry: Any) -> Range | IntRange | Choices:
    if isinstance(entry, list) and entry:
        return Choices(tuple(converted(name, hint, value) for value in entry))
    if not isinstance(entry, Mapping) or not {"low", "high"} <= entry.keys() <= {*_KEYS}:
        raise OptionError(
            f"{name} must be a list of values, or {{low = ..., high = ..., log = true}}, "
            f"not {entry!r}."
        )
    low, high = (converted(name, hint, entry[key]) for key in ("low", "high"))
    log = entry.get("log", False)
    if not isinstance(low, int | float) or isinstance(low, bool):
        raise OptionError(f"{name} is not a number: give a list of values.")
    if low > high or (log and low <= 0):
        raise OptionError(f"{name}: low must be at most high, and with log above 0.")
    if isinstance(low, int) and isinstance(high, int):
        return IntRange(low, high, bool(log))
    return Range(low, high, bool(log))


def chosen(space: Space, names: Iterable[str]) -> Space:
    """Return the part of a space with some names; all of it if there are none."""
    for name in names:
        if name not in space:
            raise unknown_name("argument with a range", name, space)
    return {name: one for name, one in space.items() if name in names} if names else space
