"""Settings of programs from TOML files: those in this package, or a user's own.

The package has a file for each family of environments, and `REFERENCE` with published updates.

A file has one table for each program. Tables in it hold for some environments only; their names are
patterns of `fnmatch`, and later ones take precedence::

    [mappo]
    learning_rate = 0.0007
    num_steps = 128

    [mappo."simple_tag*"]
    num_steps = 25

The order of precedence is: arguments that are given, the user's file, the file of the environment's
family in this package, the defaults of the program's arguments. What was used is kept with the
arguments (see `origins_of`), so that a run can record it, and keep it when it is resumed.
"""

from collections.abc import Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from offmarl import records
from offmarl.config import Role, Validated, converted, read_values, with_role
from offmarl.errors import OptionError
from offmarl.paths import local

T = TypeVar("T", bound=Validated)

SEARCH = "search"
"""Name of the table that is no program's: the ranges for ``offmarl tune``."""

REFERENCE = "reference"
"""Name of the package's file with the published updates of offline programs."""

_ATTRIBUTE = "_settings"


class Setting(NamedTuple):
    """A value from a file."""

    value: Any
    source: str
    """The file and the table, such as ``offmarl/settings/mpe.toml [mappo]``."""
    packaged: bool
    """Whether the file is one of offmarl's."""


class Used(NamedTuple):
    """Where the values of a program's arguments came from."""

    settings: Mapping[str, Setting]
    """Values from files, by argument; an argument that was also given has another value."""
    given: frozenset[str]
    """The arguments that were given."""

    def sources(self) -> dict[str, str]:
        """Return the source of each argument that has a value from a file."""
        return {
            name: setting.source
            for name, setting in self.settings.items()
            if name not in self.given
        }

    def record(self) -> dict[str, Any]:
        """Return the sources of the arguments for a run's record, which `keep_packaged` reads."""
        return {"settings": self.sources(), "given": sorted({*self.given} - {"take_over"})}

    def lines(self, args: Validated) -> list[str]:
        """Describe where the values of arguments came from; empty if none is from a file."""
        by_source: dict[str, list[str]] = {}
        for name, source in self.sources().items():
            by_source.setdefault(source, []).append(f"{name} {getattr(args, name)}")
        lines = [f"{', '.join(values)} (from {source})" for source, values in by_source.items()]
        replaced = [
            f"{name} {getattr(args, name)} in place of {setting.value}"
            for name, setting in self.settings.items()
            if name in self.given and setting.value != getattr(args, name)
        ]
        return lines + ([f"{', '.join(replaced)} (given)"] if replaced else [])


def origins_of(args: Validated) -> Used:
    """Return where the values of arguments came from; nothing for those made by ``Args(...)``."""
    attached: Used = vars(args).get(_ATTRIBUTE, Used({}, frozenset()))
    return attached


def fill(
    kind: type[T],
    program: str,
    env: str,
    given: Mapping[str, Any],
    file: str | Path | None = None,
    packaged: bool = True,
) -> T:
    """Return a program's ``Args``, with values from files for those that are not given.

    ``env`` may be empty; the user's ``file``, in whose place may be `REFERENCE`, must have a table
    for the program. The package's file is not for programs in a user's own file. `OptionError` if a
    file or an argument is invalid.
    """
    settings: dict[str, Setting] = {}
    path = package_file(env)
    if packaged and path is not None:
        settings |= _read(path, f"offmarl/settings/{path.name}", True, kind, program, env)
    if str(file) == REFERENCE:
        if "vault" not in get_type_hints(kind):
            raise OptionError(
                f"--settings {REFERENCE} is for baselines, and {program} is none: leave it out."
            )
        path = Path(__file__).with_name(f"{REFERENCE}.toml")
        settings |= _read(path, f"offmarl/settings/{path.name}", True, kind, program, env)
    elif file is not None:
        settings |= _read(local(file), str(file), False, kind, program, env)
    values = {name: setting.value for name, setting in settings.items()}
    return _with(kind(**{**values, **given}), Used(settings, frozenset(given)))


def package_file(env: str) -> Path | None:
    """Return the package's file for an environment's family; None if it has none.

    The file is named after a part of the environment's name: ``jaxmarl/mpe/simple_spread_v3`` has
    ``mpe.toml``, and ``jumanji/lbf`` has ``lbf.toml``.
    """
    base = env.partition(":")[0]
    if "/" not in base or base.endswith(".py"):  # code of the user's own
        return None
    paths = (Path(__file__).with_name(f"{part}.toml") for part in base.split("/"))
    return next((path for path in paths if path.is_file()), None)


def keep_packaged(args: T, recorded: Mapping[str, Any]) -> T:
    """Return arguments in which the package's settings are those that a run was started with.

    The package's files may have changed since. Values that are given, or that are from the user's
    own file, are not changed. Neither are those of arguments that were given to the run and are
    missing now: they differ from the run's, so that it is not resumed with other arguments.
    ``recorded`` is the ``run.json`` of the run that they resume; empty if there is none.
    """
    before = recorded.get("settings")
    if before is None or _ATTRIBUTE not in vars(args):
        return args
    now = origins_of(args)
    fixed = now.given | {name for name, setting in now.settings.items() if not setting.packaged}
    hints, values = get_type_hints(type(args), include_extras=True), recorded["args"]
    fixed |= {*recorded.get("given", ())}
    names = {name for name in (*before, *now.settings) if name not in fixed}
    originals = {
        name: None if values[name] is None else converted(name, hints[name], values[name])
        for name in names
        if name in hints and name in values
    }
    settings = {name: setting for name, setting in now.settings.items() if name in fixed} | {
        name: Setting(x, before[name], True) for name, x in originals.items() if name in before
    }
    all_values = {field.name: getattr(args, field.name) for field in fields(args)}
    return _with(type(args)(**{**all_values, **originals}), Used(settings, now.given))


def _with(args: T, used: Used) -> T:
    """Attach their sources to arguments, in no field, because fields shape the program."""
    object.__setattr__(args, _ATTRIBUTE, used)
    return args


# ---------------------------------------------------------------------------------- files


def _read(
    path: Path, label: str, packaged: bool, kind: type[Validated], program: str, env: str
) -> dict[str, Setting]:
    """Return a file's values for a program and an environment; others are checked, too."""
    all_tables = tables(path, label, f", or {REFERENCE!r}")
    if program not in all_tables and not packaged:
        raise OptionError(f"{label} has no table [{program}]: add one with the program's settings.")
    table = all_tables.get(program, {})
    settings: dict[str, Setting] = {}
    general = {name: value for name, value in table.items() if not isinstance(value, dict)}
    patterns = [(name, value) for name, value in table.items() if isinstance(value, dict)]
    for pattern, values in [("", general), *patterns]:
        where = f'[{program}."{pattern}"]' if pattern else f"[{program}]"
        source = f"{label} {where}"
        checked = read_values(kind, values, source, with_role(kind, Role.CASE))
        if not pattern or _matches(env, pattern):
            settings |= {name: Setting(x, source, packaged) for name, x in checked.items()}
    return settings


def tables(path: Path, label: str = "", other: str = "") -> dict[str, dict[str, Any]]:
    """Return the tables of a file, which messages call ``label``; `OptionError` if that fails.

    ``other`` names what may be given in place of a file.
    """
    label = label or str(path)
    missing = f"there is no file {label}: give the path of a TOML file{other}."
    content = records.user_toml(local(path), label, missing)
    for name, table in content.items():
        if not isinstance(table, dict):
            raise OptionError(
                f"{label}: {name} is in no table: put it below that of a program, such as [mappo]."
            )
    return content


def _matches(env: str, pattern: str) -> bool:
    """Whether an environment's name, or the end of it after a slash, matches a pattern.

    The name is taken with its options, and without.
    """
    names = {env, env.partition(":")[0]}
    return any(fnmatchcase(name, glob) for name in names for glob in (pattern, f"*/{pattern}"))
