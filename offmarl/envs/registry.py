"""The environments by name: a table that costs nothing to read, and `make`.

A name is a family with its sizes filled in, and, where options differ from their defaults, the
options behind a colon: ``swarm/coverage-8:time_limit=20``. That full name is what ``spec.name``
holds, so a dataset's environment can always be rebuilt from its spec.
"""

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from offmarl.envs.catalogue import BUILT_IN, EnvInfo, Family, Option
from offmarl.errors import OptionError, UnknownNameError, unknown_name

if TYPE_CHECKING:
    from offmarl.envs.base import Environment


def describe() -> dict[str, EnvInfo]:
    """Return what there is: names, and what is known of each without building it.

    In a name, single capital letters stand for numbers of your choice, and a word in capitals for
    one of ``EnvInfo.choices``.
    """
    return {family.name: family.about for family in BUILT_IN}


def names() -> list[str]:
    """Return the names of all environments, as in `describe`."""
    return list(describe())


def family_of(name: str) -> str:
    """Return the name in `names` that an environment's name, with options or not, comes under.

    Raises
    ------
    UnknownNameError
        There is no such environment.
    """
    base = name.partition(":")[0]
    return base if base in describe() else _find(base)[0].name


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
    MissingExtraError
        It comes from a package that is not installed; the message says how to get it.
    """
    base, _, suffix = name.partition(":")
    family, sizes = _find(base)
    factory = _load(family)
    given = _check(family, _defaults(family, factory), _parse(name, suffix) | options)
    canonical = ",".join(f"{key}={_write(given[key])}" for key in sorted(given))
    build = getattr(factory, "build", factory)
    env: Environment = build(
        name=f"{base}:{canonical}".rstrip(":"), **family.fixed, **sizes, **given
    )
    return env


def _load(family: Family) -> Any:
    """Import the factory: a class with the options as fields, or with ``options`` and ``build``."""
    if not isinstance(family.factory, str):
        return family.factory
    module, _, attribute = family.factory.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _defaults(family: Family, factory: Any) -> dict[str, Any]:
    if hasattr(factory, "options"):
        defaults: dict[str, Any] = factory.options(**family.fixed)
        return defaults
    hidden = {"name", *(family.sizes or ()), *family.fixed}
    return {field.name: field.default for field in fields(factory) if field.name not in hidden}


def _find(base: str) -> tuple[Family, dict[str, Option]]:
    for family in BUILT_IN:
        sizes = family.match(base)
        if sizes is not None:
            return family, dict(zip(family.sizes or (), sizes, strict=True))
    raise _not_found(base)


def _not_found(base: str) -> UnknownNameError:
    for family in BUILT_IN:
        if re.sub(r"(-[A-Z])+$", "", family.name) == re.sub(r"-[^/]*$", "", base):
            return UnknownNameError(
                f"there is no environment named {base!r}: write it {family.name}, with a whole "
                "number for each capital letter."
            )
        if family.about.choices and family.stem == base.rpartition("/")[0]:
            kind = f"{family.stem} environment"
            return unknown_name(kind, base.rpartition("/")[2], family.about.choices)
    return unknown_name("environment", base, names(), see="offmarl envs")


def _parse(name: str, suffix: str) -> dict[str, Option]:
    """Read ``key=value,key=value``; values are JSON, and strings where they are not."""
    options: dict[str, Option] = {}
    for pair in filter(None, suffix.split(",")):
        key, equals, text = pair.partition("=")
        if not equals:
            raise OptionError(f"{name!r}: {pair!r} is no option: write option=value after the ':'.")
        options[key] = _read(text)
    return options


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _write(value: Option) -> str:
    """Write a value as `_read` reads it, without quotes if it can be: names become file names."""
    return value if isinstance(value, str) and _read(value) == value else json.dumps(value)


def _check(
    family: Family, defaults: Mapping[str, Any], options: Mapping[str, Option]
) -> dict[str, Option]:
    """Return the options that differ from their defaults, each in the type of its default."""
    checked = {}
    for key, value in options.items():
        if key not in defaults:
            raise _no_such_option(family, key, defaults)
        checked[key] = _convert(family.name, key, value, type(defaults[key]))
    return {key: value for key, value in checked.items() if value != defaults[key]}


def _no_such_option(family: Family, key: str, defaults: Mapping[str, Any]) -> UnknownNameError:
    if not defaults:
        return UnknownNameError(f"{family.name} takes no options, and was given {key!r}: leave it.")
    return unknown_name(f"option of {family.name}", key, defaults)


def _convert(name: str, key: str, value: Option, kind: type[Any]) -> Option:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise OptionError(f"{name}: {key} must be of type {kind.__name__}, not {value!r}.")
    return value
