"""Configuration files: all arguments of one run, in TOML, or as a finished run recorded them.

A file names the program, and holds its arguments::

    program = "maicq"
    vault = "vaults/swarm/coverage-3.vlt/mappo-0-medium"
    updates = 20_000
    seeds = 5
    learning_rate = 1e-3

Options on the command line take precedence over the file, and the file over settings (see
`offmarl.settings`). Paths are relative to the working directory. In place of a TOML file, the
directory of a run or its ``run.json`` repeats the run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from offmarl import records, tracking
from offmarl.config import Role, Validated, read_values, with_role
from offmarl.errors import OptionError
from offmarl.paths import local

_PROGRAM = "program"

_REPEATED = {"seeds", "replay"}
"""Arguments that are free, and that a record holds nevertheless: repeating the run needs them."""


class Config(NamedTuple):
    """The content of a configuration file."""

    label: str
    """The file's name, for messages."""
    program: str | None
    """Name of a program of offmarl; None if the file does not name one."""
    values: Mapping[str, Any]
    """Arguments by name, as the file holds them."""
    is_record: bool = False
    """Whether a run's record holds them, which may have been downloaded."""

    def program_for(self, name: str | None) -> str:
        """Return the program to run, from the one that the user named, if any."""
        if name is None and self.program is None:
            raise OptionError(
                f"{self.label} names no program: give the path of its file before the options."
                if self.is_record
                else f'{self.label} names no program: add `program = "bc"` to it, or name one.'
            )
        is_file = name is not None and (name.endswith(".py") or "/" in name)
        if name is not None and self.program not in (None, name) and not is_file:
            raise OptionError(f"{self.label} is for {self.program}, not for {name}.")
        return name or self.program or ""  # str() would lose the mark of a `RecordedName`

    def arguments(self, kind: type[Validated]) -> dict[str, Any]:
        """Return the arguments as a program's ``Args`` holds them; `OptionError` for others.

        Where a run is written, and whom it reports to, are never taken from a record.
        """
        free = with_role(kind, Role.FREE) - _REPEATED if self.is_record else ()
        values = {name: value for name, value in self.values.items() if name not in free}
        for name in (name for name, value in values.items() if "***@" in str(value)):
            raise OptionError(
                f"{self.label} lacks the password of {name}, as all records do: give the arguments "
                "themselves."
            )
        return read_values(kind, values, self.label)


def read_config(path: str | Path) -> Config:
    """Read a configuration file, or what a run recorded."""
    place = local(path)
    if place.is_dir() or place.suffix == ".json":
        return _config_of_run(place if place.is_dir() else place.parent, str(path))
    missing = f"there is no configuration file {path}: give the path of one, or of a run."
    values = records.user_toml(place, str(path), missing)
    program = values.pop(_PROGRAM, None)
    # Files are run only if the user names them: a configuration file may have been downloaded.
    is_file = isinstance(program, str) and (program.endswith(".py") or "/" in program)
    if is_file or not isinstance(program, str | None):
        raise OptionError(
            f"{path}: program must be the name of a program of offmarl, not {program!r}: give the "
            "path of a program of your own on the command line, before the options."
        )
    return Config(str(path), program, values)


def _config_of_run(directory: Path, path: str) -> Config:
    record = tracking.read_run(directory)
    unset = record.get("resolved", ())
    values = {k: x for k, x in record["args"].items() if x is not None and k not in unset}
    if "shuffle_buffer" in record:  # by default only where the data was on another machine
        values["replay"] = "blocks"
    program = record["program"] if record.get("file") is None else None
    return Config(path, program, values, is_record=True)
