"""The environments by name: a table that costs nothing to read, and `make`.

A name is a family with its sizes filled in, and, where options differ from their defaults, the
options behind a colon: ``swarm/coverage-8:time_limit=20``. That full name is what ``spec.name``
holds, so a dataset's environment can always be rebuilt from its spec.
"""

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from offmarl.errors import OptionError, UnknownNameError, unknown_name

if TYPE_CHECKING:
    from offmarl.envs.base import Environment

Option = bool | int | float | str


@dataclass(frozen=True)
class _Family:
    """Environments that share a class; each capital letter after a dash stands for a number."""

    name: str
    description: str
    factory: str
    sizes: tuple[str, ...] = ()
    """The fields that the numbers in the name set, in order."""

    def match(self, name: str) -> dict[str, Option] | None:
        """Return the sizes in a name of this family, None for any other name."""
        found = re.fullmatch(re.sub(r"-[A-Z]\b", r"-(\\d+)", self.name), name, re.ASCII)
        return found and dict(zip(self.sizes, map(int, found.groups()), strict=True))

    def load(self) -> type[Any]:
        """Import the class."""
        module, _, attribute = self.factory.partition(":")
        loaded: type[Any] = getattr(importlib.import_module(f"offmarl.envs.{module}"), attribute)
        return loaded


_FAMILIES = (
    _Family("classic/xor", "a matrix game: two agents must choose differently", "classic:Xor"),
    _Family("classic/bridge", "two agents cross a bridge wide enough for one", "classic:Bridge"),
    _Family("probe/one-step", "one action, one reward", "probes:OneStep"),
    _Family("probe/two-step", "a small reward now or a large one later", "probes:TwoStep"),
    _Family("probe/observation", "the right action is the one observed", "probes:Observation"),
    _Family("probe/match", "two agents must choose the same, the better of two", "probes:Match"),
    _Family("probe/memory", "the right action was observed steps ago", "probes:Memory"),
    _Family(
        "swarm/coverage-N",
        "N drones with short sight keep an area under survey",
        "swarm.coverage:Coverage",
        sizes=("num_agents",),
    ),
)


def describe() -> dict[str, str]:
    """Return what there is: name (capital letters stand for numbers of your choice) to one line."""
    return {family.name: family.description for family in _FAMILIES}


def names() -> list[str]:
    """Return the names of all environments; capital letters stand for numbers of your choice."""
    return list(describe())


def make(name: str, **options: Option) -> "Environment":
    """Build an environment.

    Parameters
    ----------
    name
        One of `names`, with numbers for the capital letters, with or without options behind a
        colon: ``"swarm/coverage-8"``, ``"swarm/coverage-8:time_limit=20"``.
    options
        The same options as keywords; they win over those in the name.

    Raises
    ------
    UnknownNameError
        There is no such environment, or it has no such option.
    OptionError
        An option, or a number in the name, has a value that it cannot have.
    """
    base, _, suffix = name.partition(":")
    family, sizes = _find(base)
    factory = family.load()
    given = _check(family, factory, _parse(name, suffix) | options)
    canonical = ",".join(f"{key}={json.dumps(given[key])}" for key in sorted(given))
    env: Environment = factory(name=f"{base}:{canonical}".rstrip(":"), **sizes, **given)
    return env


def _find(base: str) -> tuple[_Family, dict[str, Option]]:
    for family in _FAMILIES:
        sizes = family.match(base)
        if sizes is not None:
            return family, sizes
    raise _not_found(base)


def _not_found(base: str) -> UnknownNameError:
    for family in _FAMILIES:
        if re.sub(r"(-[A-Z])+$", "", family.name) == re.sub(r"-[^/]*$", "", base):
            return UnknownNameError(
                f"there is no environment named {base!r}: write it {family.name}, with a whole "
                "number for each capital letter."
            )
    return unknown_name("environment", base, names(), see="offmarl envs")


def _parse(name: str, suffix: str) -> dict[str, Option]:
    """Read ``key=value,key=value``; values are JSON, and strings where they are not."""
    options: dict[str, Option] = {}
    for pair in filter(None, suffix.split(",")):
        key, equals, text = pair.partition("=")
        if not equals:
            raise OptionError(f"{name!r}: {pair!r} is no option: write option=value after the ':'.")
        try:
            options[key] = json.loads(text)
        except json.JSONDecodeError:
            options[key] = text
    return options


def _check(family: _Family, factory: type[Any], options: Mapping[str, Option]) -> dict[str, Option]:
    """Return the options that differ from their defaults, each in the type of its default."""
    hidden = {"name", *family.sizes}
    defaults = {field.name: field.default for field in fields(factory) if field.name not in hidden}
    checked = {}
    for key, value in options.items():
        if key not in defaults:
            raise _no_such_option(family, key, defaults)
        checked[key] = _convert(family.name, key, value, type(defaults[key]))
    return {key: value for key, value in checked.items() if value != defaults[key]}


def _no_such_option(family: _Family, key: str, defaults: Mapping[str, Any]) -> UnknownNameError:
    if not defaults:
        return UnknownNameError(f"{family.name} takes no options, and was given {key!r}: leave it.")
    return unknown_name(f"option of {family.name}", key, defaults)


def _convert(name: str, key: str, value: Option, kind: type[Any]) -> Option:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise OptionError(f"{name}: {key} must be of type {kind.__name__}, not {value!r}.")
    return value
