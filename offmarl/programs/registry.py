"""The recorders and baselines by name, and programs in the user's own files.

In a checkout, recorders and baselines are at the top level, beside the package; in a wheel, inside
it. The path of a Python file names any other program.

The record of a run names the program that trained it. A downloaded run has such a record too, so a
record alone never makes offmarl import a file: the user names the file.
"""

import ast
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import Any, Literal, NamedTuple

from offmarl import records, tracking
from offmarl._imports import code_digest, import_file
from offmarl.errors import OptionError, RunError, unknown_name
from offmarl.paths import local

Kind = Literal["recorder", "baseline"]
VERBS: dict[Kind, str] = {"recorder": "record", "baseline": "train"}

_PARTS = ("Args", "make", "main")


class ProgramOrigin(NamedTuple):
    """The source of a program, as its runs record it."""

    name: str
    file: str | None
    """Absolute path of the user's own file; None for a recorder or baseline of offmarl."""
    sha256: str | None
    """Checksum of that file, in hexadecimal digits; None for a program of offmarl."""


_ran: dict[tuple[str, str | None], ModuleType] = {}
"""Programs in the user's own files that were trained in this process, by path and checksum."""


def find(kind: Kind) -> dict[str, Path]:
    """Return the files of offmarl's own programs, by name.

    A file that would hide a module of Python's, such as ``random_.py``, has a name that ends in an
    underscore; the program's name does not.
    """
    package = Path(__file__).parents[1]
    inside = package / f"{kind}s"
    folder = inside if inside.is_dir() else package.parent / f"{kind}s"
    return {path.stem.rstrip("_"): path for path in sorted(folder.glob("[!_]*.py"))}


def summary(path: Path) -> str:
    """Return the first line of a program's docstring, without running the program."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].rstrip(".")


def load(kind: Kind, name: str) -> ModuleType:
    """Import a program that the user named: one of offmarl, or the path of a Python file.

    `UnknownNameError` if offmarl has none of that name, `OptionError` if the file is no program.
    """
    if name.startswith("-"):
        raise OptionError(
            f"give the name of a {kind} before its options, such as "
            f"`offmarl {VERBS[kind]} NAME {name} ...`."
        )
    if name.endswith(".py") or "/" in name:
        records.refuse_recorded(name, f"as the program of `offmarl {VERBS[kind]}`")
        return _load_file(_checked(local(name)))
    return _load_named(kind, name)


def origin_of(part: Callable[..., Any]) -> ProgramOrigin:
    """Return the source of a program that is about to run, from its ``make`` or ``Args``."""
    path = Path(inspect.getsourcefile(part) or "").resolve()
    if any(path == file.resolve() for kind in VERBS for file in find(kind).values()):
        return ProgramOrigin(path.stem.rstrip("_"), None, None)
    file, sha256 = str(path), code_digest(path)
    if part.__module__ in sys.modules:
        _ran[file, sha256] = sys.modules[part.__module__]
    return ProgramOrigin(path.stem, file, sha256)


def load_origin(
    kind: Kind, origin: ProgramOrigin, run: Path, program: str | Path | None = None
) -> ModuleType:
    """Import the program that trained a run.

    A file is imported only if the user named it, as ``program``, and its checksum is the recorded
    one, or if it was trained in this process; otherwise `RunError`. ``program`` is None for a
    program of offmarl. Raises what `load` raises.
    """
    if origin.file is None:
        if program is not None:
            raise OptionError(
                f"{run} was trained by offmarl's own {kind} {origin.name}, not by {program}: do "
                "not give a program."
            )
        return _load_named(kind, origin.name)
    if program is None:
        if (origin.file, origin.sha256) in _ran:
            return _ran[origin.file, origin.sha256]
        raise RunError(
            f"{run} was trained by a program in the file {origin.file}, and offmarl does not run "
            "code because a run's record names it. If you trust the file, give it yourself: "
            f'load_policy(..., program="{origin.file}"), or on the command line '
            f"--program {quote(str(origin.file))}. --init and --opponents take only runs of "
            "offmarl's own programs."
        )
    path = _checked(local(program))
    if code_digest(path) != origin.sha256:
        raise RunError(
            f"{path} is not the program that trained {run}: that was {origin.file}, with other "
            "content. Give that file with its content at that time, or train again."
        )
    return _load_file(path)


def file_of_run(run: Path, files: Iterable[Path]) -> Path | None:
    """Return the file, among some that the user named, of the program that trained a run.

    None if it is none of them.
    """
    sha256 = tracking.read_run(run).get("sha256")
    return next(
        (file for file in files if sha256 and code_digest(_checked(local(file))) == sha256), None
    )


def _load_named(kind: Kind, name: str) -> ModuleType:
    paths = find(kind)
    if name not in paths and os.path.isfile(f"{name}.py"):  # noqa: PTH113 - names may be no paths
        raise OptionError(f"no {kind} named {name!r}: for the file, give {name}.py.")
    if name not in paths:
        raise unknown_name(kind, name, paths, see=f"offmarl {VERBS[kind]} --help")
    import jax  # noqa: F401 - here, as Python imports it twice as slowly below many other imports

    return import_file(paths[name], f"offmarl.{kind}s.{name}")


def _checked(path: Path) -> Path:
    """Return the path of a Python file that exists, without links."""
    if not path.is_file():
        raise OptionError(f"there is no file {path}: give the path of a program's Python file.")
    if path.suffix != ".py":
        raise OptionError(f"{path} is not a Python file: its name must end in .py.")
    return path.resolve()


def _load_file(path: Path) -> ModuleType:
    module = import_file(path)
    missing = [part for part in _PARTS if not hasattr(module, part)]
    if missing:
        raise OptionError(
            f"{path} is not a program: it has no {' and no '.join(missing)}. "
            "`offmarl new baseline NAME` writes one to start from."
        )
    return module
