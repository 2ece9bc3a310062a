"""Creates environments by name: built-in, registered, those of plug-ins, and code of your own.

A full name is the name of a family with its numbers filled in. Options that differ from their
defaults follow a colon: ``swarm/coverage-8:time_limit=20``. The full name is ``spec.name``, so the
environment of a dataset can be created again from its spec.

Code that is not registered is named ``package.module:factory`` or ``path/to/file.py:factory``, with
options after a second colon. `make` imports such code only if the user names it, and never for a
name that was read from a dataset, because the author of the dataset chose that name.

Importing this module and listing the names import neither JAX nor any plug-in.
"""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offmarl import records
from offmarl._imports import code_digest, summarize
from offmarl.envs.catalogue import BUILT_IN, LEFT_OUT, EnvInfo, Family, Option
from offmarl.errors import (
    OffmarlError,
    OptionError,
    PluginError,
    UnknownNameError,
    unknown_name,
)

if TYPE_CHECKING:
    from offmarl.envs.base import Environment

_NAME = re.compile(r"\w+([-./|]\w+)*", re.ASCII)

_IDENTIFIER = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_FILE = re.compile(rf"(?P<file>.+\.py):(?P<factory>{_IDENTIFIER})(?::(?P<options>.*))?", re.DOTALL)
_MODULE = re.compile(rf"(?P<module>{_IDENTIFIER}):(?P<factory>{_IDENTIFIER})(?::(?P<options>.*))?")

_GROUP = "offmarl.envs"
"""Entry points of installed packages. Reading them imports nothing; a plug-in is imported when one
of its environments is created, so a broken one does not affect the others."""

_REGISTERED = "offmarl.envs.register"
_REQUIRED = object()
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

_registered: dict[str, Family] = {}

_sources: dict[str, dict[str, str]] = {}
"""Where the code of an environment came from, by ``spec.name``; see `source`."""


def register(name: str, factory: "Callable[..., Environment]", info: EnvInfo | None = None) -> None:
    """Make an environment available by name, in this process.

    Installed packages do it for all processes with an entry point in the group ``offmarl.envs``:
    the name of the entry point is the environment's name, its object the factory.

    Parameters
    ----------
    name
        Such as ``"mine/chase"``. Each capital letter after a dash stands for a number, as in
        ``"mine/chase-N"``.
    factory
        Returns the environment. Numbers in the name set its arguments without a default, in their
        order; arguments with a default are the options that users may set after a colon. An
        argument ``name`` receives the full name.
    info
        Properties that `describe` and ``offmarl envs`` show.

    Raises
    ------
    OptionError
        The name is taken, or has characters other than letters, digits and ``_ - . / |``.
    """
    if not _NAME.fullmatch(name):
        raise OptionError(
            f"{name!r} cannot name an environment: use letters, digits, _ and - in parts divided "
            "by slashes, such as 'mine/chase'."
        )
    family = Family(name, factory, info or _info_of(factory), None, _REGISTERED)
    for other in _families():
        replaces = other.source == _REGISTERED and other.name == name
        if _overlap(family, other) and not (replaces and _is_same(other.factory, factory)):
            raise OptionError(
                f"the name {name!r} is taken: {other.source} defines {other.name!r}. Choose "
                "another name."
            )
    _registered[name] = family


def describe() -> dict[str, EnvInfo]:
    """Return the known properties of all environments by name, without creating them.

    In a name, a single capital letter stands for any number, and a word in capitals for one of
    ``EnvInfo.choices``. Plug-ins are listed without importing them.
    """
    infos: dict[str, EnvInfo] = {}
    for family in _families():
        infos.setdefault(family.name, family.about)
    return infos


def names() -> list[str]:
    """Return the names of all environments, as in `describe`."""
    return list(describe())


def family_of(name: str) -> str:
    """Return the entry of `names` that an environment's name belongs to.

    The name may have options.

    Raises
    ------
    UnknownNameError
        There is no such environment.
    """
    base = name.partition(":")[0]
    return base if base in describe() else _find(base)[0].name


def info(name: str) -> EnvInfo:
    """Return the known properties of an environment; arguments and errors are those of `make`."""
    entry = _resolve(name)
    about = entry.family.about
    known = about.summary and not isinstance(entry.family.factory, EntryPoint)
    return about if known else _info_of(entry.load())


def options_of(name: str) -> dict[str, Any]:
    """Return the options of an environment and their defaults; see `make`."""
    entry = _resolve(name)
    _, defaults = _arguments(entry, entry.load())
    return {key: None if value is _REQUIRED else value for key, value in defaults.items()}


def make(name: str, **options: Option) -> "Environment":
    """Create an environment.

    Parameters
    ----------
    name
        One of `names`, with numbers in place of capital letters. Options may follow a colon:
        ``"swarm/coverage-8"``, ``"swarm/coverage-8:time_limit=20"``. Or code to import:
        ``"package.module:factory"`` or ``"path/to/file.py:factory"``; options may follow a second
        colon. Do not pass a string from a dataset that you do not trust. ``spec.name`` of an open
        vault is safe, because `make` imports no code for it.
    options
        The same options as keywords; they take precedence over those in the name.

    Raises
    ------
    UnknownNameError
        The environment or one of the options does not exist, or the name is from a dataset and
        names code.
    OptionError
        An option or a number in the name is invalid, or the code cannot be imported or does not
        return an environment.
    MissingExtraError
        The environment needs a package that is not installed; the message says how to install it.
    PluginError
        The environment is from an installed package that cannot be imported.
    """
    entry, full, result = _create(name, options)
    if entry.family.source != "offmarl":
        from offmarl.envs.outside import admit

        module = getattr(entry.load(), "__module__", "")
        package = entry.source.get("package") or release_of(module)
        result = admit(result, full, package)
    if entry.source:
        _sources[full] = entry.source
    env: Environment = result
    return env


def make_parallel(name: str) -> tuple[str, Any] | None:
    """Return the PettingZoo environment that code of the user makes, after its full name.

    None for any other name. The name and the errors are those of `make`.
    """
    if not (_FILE.fullmatch(name) or _MODULE.fullmatch(name)):
        return None
    entry, full, result = _create(name, {})
    if not hasattr(result, "possible_agents"):
        return None
    _sources[full] = entry.source
    return full, result


def _create(name: str, options: Mapping[str, Option]) -> "tuple[_Entry, str, Any]":
    """Return the result of an environment's factory, and its full name."""
    entry = _resolve(name)
    factory = entry.load()
    sizes, defaults = _arguments(entry, factory)
    parsed = _parse(name, entry.suffix)
    records.refuse_large(name, [*entry.numbers, *parsed.values()])
    values = _check(entry.family.name, defaults, parsed | {**options})
    if missing := [key for key in defaults if defaults[key] is _REQUIRED and key not in values]:
        raise OptionError(
            f"{entry.base} needs {missing[0]}: write {entry.base}:{missing[0]}=VALUE."
        )
    canonical = ",".join(f"{key}={_write(values[key])}" for key in sorted(values))
    full = f"{entry.base}:{canonical}".rstrip(":")
    return entry, full, _call(entry, factory, full, {**entry.family.fixed, **sizes, **values})


def source(name: str) -> dict[str, str]:
    """Return where the code of an environment made in this process came from.

    Parameters
    ----------
    name
        The ``spec.name`` of the environment.

    Returns
    -------
    dict
        For example ``{"file": "../chase.py", "sha256": ...}`` or ``{"package": "my-envs 1.0"}``;
        empty for the environments of offmarl.
    """
    return _sources.get(name, {})


def code_of(name: str) -> str | None:
    """Return the checksum of the user's code that a name stands for; None for other names."""
    code = _FILE.fullmatch(name) or _MODULE.fullmatch(name)
    with suppress(OffmarlError):  # making the environment says what is wrong
        return None if code is None else _import(code).source.get("sha256")
    return None


@lru_cache(maxsize=16)
def release(package: str) -> str:
    """Return an installed package with its version, as "jaxmarl 0.2.0"; empty if there is none."""
    with suppress(metadata.PackageNotFoundError):
        return f"{package} {metadata.version(package)}"
    return ""


@lru_cache(maxsize=16)
def release_of(module: str) -> str:
    """Return the `release` of a module's package; empty for none, for several, and for offmarl."""
    top = module.partition(".")[0]
    if top.startswith("_") or top in ("offmarl", "builtins"):
        return ""  # listing all packages takes a quarter of a second
    packages = {*metadata.packages_distributions().get(top, ())}
    return release(*packages) if len(packages) == 1 else ""


def short_name(name: str) -> str:
    """Return an environment's name without a file's directories, for use as a directory name."""
    code = _FILE.fullmatch(name)
    return name if code is None else name[code["file"].rfind("/") + 1 :]


# ------------------------------------------------------------------ names


class _Entry(NamedTuple):
    """The parsed name of an environment, and its family."""

    family: Family
    base: str
    """The name without options."""
    numbers: tuple[Option, ...]
    """The numbers or the word in the name."""
    suffix: str
    """The options and their values as text."""
    source: dict[str, str]

    def load(self) -> Any:
        """Import the factory: a callable, or a class of offmarl with ``options`` and ``build``."""
        factory = self.family.factory
        if isinstance(factory, EntryPoint):
            try:
                return factory.load()
            except (Exception, SystemExit) as error:
                raise PluginError(
                    f"the package {_package(factory)} provides the environment "
                    f"{self.family.name!r} as {factory.value}, which cannot be imported "
                    f"({summarize(error)}): update or uninstall the package."
                ) from error
        if not isinstance(factory, str) or self.family.source != "offmarl":
            return factory
        module, _, name = factory.partition(":")
        return getattr(importlib.import_module(module), name)


def _families() -> tuple[Family, ...]:
    return (*BUILT_IN, *_registered.values(), *_plugins(tuple(sys.path)))


def _resolve(name: str) -> _Entry:
    base, _, suffix = name.partition(":")
    code = _FILE.fullmatch(name) or _MODULE.fullmatch(name)
    if code is None or any(family.match(base) is not None for family in _families()):
        family, numbers = _find(base)
        package = {} if family.source in ("offmarl", _REGISTERED) else {"package": family.source}
        return _Entry(family, base, numbers, suffix, package)
    return _import(code)


def _import(code: re.Match[str]) -> _Entry:
    """Import the code that a user named; `UnknownNameError` for a name from a record."""
    records.refuse_recorded(
        code.string, "as path/to/file.py:FACTORY or package.module:FACTORY where --env is an option"
    )
    location, name, suffix = code[1], code["factory"], code["options"] or ""
    factory, file = records.import_code(f"{location}:{name}", "--env")
    is_file = location.endswith(".py")
    base = f"{Path(location).name if is_file else location}:{name}"
    source = {"factory": name, "file" if is_file else "module": location}
    source |= {"sha256": code_digest(Path(file))} if file else {}
    return _Entry(Family(base, factory, EnvInfo(""), None, location), base, (), suffix, source)


def _find(base: str) -> tuple[Family, tuple[Option, ...]]:
    """Return the family of a name without options, and the numbers in the name."""
    matches = [(f, numbers) for f in _families() if (numbers := f.match(base)) is not None]
    if not matches:
        raise _not_found(base)
    if len(matches) > 1:
        candidates = " and ".join(
            sorted(f"{family.name!r} of {family.source}" for family, _ in matches)
        )
        raise OptionError(
            f"the environment name {base!r} is ambiguous: it matches {candidates}. Uninstall or "
            "rename one of them."
        )
    return matches[0]


def _not_found(base: str) -> UnknownNameError:
    if base in LEFT_OUT:
        return UnknownNameError(f"there is no environment {base!r}: {LEFT_OUT[base]}.")
    if full := [name for family in _families() for name in _longer(family, base)]:
        hint = f"did you mean {' or '.join(full[:3])}?"
        return UnknownNameError(f"no environment named {base!r}: {hint} See `offmarl envs`.")
    for family in _families():
        if re.sub(r"(-[A-Z])+$", "", family.name) == re.sub(r"-[^/]*$", "", base):
            return UnknownNameError(
                f"there is no environment named {base!r}: write {family.name} with a whole number "
                f"in place of each capital letter, such as {re.sub('-[A-Z]+', '-3', family.name)}."
            )
        if family.about.choices and family.stem == base.rpartition("/")[0]:
            kind = f"{family.stem} environment"
            return unknown_name(kind, base.rpartition("/")[2], family.about.choices)
    if base.endswith(".py"):
        return UnknownNameError(
            f"{base!r} names a file but no environment in it: write {base}:FACTORY, where FACTORY "
            "is the class or function that returns the environment."
        )
    return unknown_name("environment", base, names(), see="offmarl envs")


def _longer(family: Family, base: str) -> list[str]:
    """Return the names of a family's environment that end in a name, such as ``coverage-3``."""
    parts = family.stem.split("/")
    full = ["/".join([*parts[:end], base]) for end in range(1, len(parts) + 1)]
    return [name for name in full if family.match(name) is not None]


def _overlap(family: Family, other: Family) -> bool:
    """Whether a name can belong to both families."""
    pairs = ((family, other.name), (other, family.name))
    return any(entry.match(re.sub(r"-[A-Z]\b", "-1", name)) is not None for entry, name in pairs)


def _is_same(factory: Any, other: Any) -> bool:
    """Whether two factories have the same definition, as when a notebook cell runs again."""
    names = [(getattr(f, "__module__", f), getattr(f, "__qualname__", f)) for f in (factory, other)]
    return names[0] == names[1]


def _info_of(factory: Any) -> EnvInfo:
    """Return a factory's attribute ``info``, or the first line of its docstring."""
    about = getattr(factory, "info", None)
    if isinstance(about, EnvInfo):
        return about
    return EnvInfo((inspect.getdoc(factory) or "").partition("\n")[0].rstrip("."))


# ------------------------------------------------------------------ plug-ins


@lru_cache(maxsize=8)
def _plugins(path: tuple[str, ...]) -> tuple[Family, ...]:
    """Return the environments of installed packages, read once for each import path."""
    del path
    families = []
    for point in entry_points(group=_GROUP):
        about = EnvInfo(f"from the package {_package(point)}")
        families.append(Family(point.name, point, about, None, _package(point)))
    return tuple(families)


def _package(point: EntryPoint) -> str:
    """Return the name and version of the package that an entry point belongs to."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unnamed package"


# ------------------------------------------------------------------ arguments


def _arguments(entry: _Entry, factory: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments that the numbers in the name set, and all options with defaults."""
    family = entry.family
    if hasattr(factory, "options") and family.source == "offmarl":
        return dict(zip(family.sizes or (), entry.numbers, strict=True)), factory.options(
            **family.fixed
        )
    hidden = {"name", *family.fixed}
    parameters = {
        key: parameter.default
        for key, parameter in _parameters(entry.base, factory).items()
        if key not in hidden and parameter.kind not in _VARIABLE
    }
    required = [key for key, default in parameters.items() if default is inspect.Parameter.empty]
    sizes = required if family.sizes is None else family.sizes
    if len(entry.numbers) > len(sizes):
        raise OptionError(
            f"{entry.base}: the name has {len(entry.numbers)} numbers, and {family.source} has "
            f"{len(sizes)} arguments without a default for them."
        )
    set_by_name = dict(zip(sizes, entry.numbers, strict=False))
    return set_by_name, {
        key: _REQUIRED if default is inspect.Parameter.empty else default
        for key, default in parameters.items()
        if key not in set_by_name
    }


def _parameters(name: str, factory: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"{name} is {factory!r}, which cannot be called: name a class or function that returns "
            "an environment."
        ) from error


def _call(entry: _Entry, factory: Any, name: str, arguments: dict[str, Any]) -> Any:
    """Return the result of a factory."""
    if entry.family.source == "offmarl":
        return getattr(factory, "build", factory)(name=name, **arguments)
    if "name" in _parameters(entry.base, factory):
        arguments["name"] = name
    return call(name, factory, **arguments)


def call(name: str, function: Any, /, *arguments: Any, **options: Any) -> Any:
    """Return the result of a user's function; `OptionError` if it fails."""
    try:
        return function(*arguments, **options)
    except OffmarlError:
        raise
    except Exception as error:
        raise OptionError(f"{name} cannot be created: {summarize(error)}") from error


def _parse(name: str, suffix: str) -> dict[str, Option]:
    """Parse ``key=value,key=value``; a value is JSON, or a string if it is not valid JSON."""
    options: dict[str, Option] = {}
    for pair in filter(None, suffix.split(",")):
        key, equals, text = pair.partition("=")
        if not equals:
            raise OptionError(f"{name!r}: {pair!r} is not an option: write option=value.")
        options[key] = _read(text)
    return options


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a ValueError also for a number of too many digits
        return text


def _write(value: Option) -> str:
    """Format a value for `_read`, without quotes if possible, since names become file names."""
    if not isinstance(value, str):
        return json.dumps(value)
    plain = "," not in value and _read(value) == value
    return value if plain else json.dumps(value).replace(",", r"\u002c")  # which ends options


def _check(
    name: str, defaults: Mapping[str, Any], options: Mapping[str, Option]
) -> dict[str, Option]:
    """Return the options that differ from their defaults, each in the type of its default."""
    checked = {}
    for key, value in options.items():
        if key not in defaults:
            raise unknown_name(f"option of {name}", key, defaults)
        checked[key] = _convert(name, key, value, defaults[key])
    return {key: value for key, value in checked.items() if value != defaults[key]}


def _convert(name: str, key: str, value: Option, default: Any) -> Option:
    kind = type(default)
    if kind is float and type(value) is int:
        with suppress(OverflowError):
            return float(value)
    if kind in (bool, int, float, str) and type(value) is not kind:
        raise OptionError(f"{name}: {key} must be of type {kind.__name__}, not {value!r}.")
    return value
