"""The recorders and baselines by name, and programs in files of the user's own.

In a checkout they are at the top level, beside the package; in a wheel, inside it. Any other file
is as good: it is named by its path.
"""

import ast
import hashlib
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast

from offmarl.errors import OptionError, RunError, unknown_name
from offmarl.paths import local

Kind = Literal["recorder", "baseline"]
VERBS: dict[Kind, str] = {"recorder": "record", "baseline": "train"}

_PARTS = ("Args", "make", "main")


class Origin(NamedTuple):
    """Where a program is from, as its runs record it."""

    name: str
    file: str | None
    """Absolute path of a file of the user's own; None for a recorder or baseline of offmarl."""
    sha256: str | None
    """Of that file."""


def find(kind: Kind) -> dict[str, Path]:
    """Return the files of offmarl's own programs, by name."""
    package = Path(__file__).parents[1]
    folder = next(
        (place for place in (package / f"{kind}s", package.parent / f"{kind}s") if place.is_dir()),
        package,
    )
    return {path.stem: path for path in sorted(folder.glob("[!_]*.py"))}


def summary(path: Path) -> str:
    """Return the first line of a program's docstring, without running the program."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.partition("\n")[0].rstrip(".")


def load(kind: Kind, name: str) -> ModuleType:
    """Import a program.

    Parameters
    ----------
    kind
        What it is.
    name
        The name of one of offmarl's own, or the path of a Python file.

    Raises
    ------
    UnknownNameError
        There is no program of that name.
    OptionError
        There is no such file, or it is not a program.
    """
    if name.endswith(".py") or "/" in name:
        return _load_file(local(name))
    paths = find(kind)
    if name not in paths:
        raise unknown_name(kind, name, paths, see=f"offmarl {VERBS[kind]} --help")
    return _import(f"offmarl.{kind}s.{name}", paths[name])


def origin_of(make: Callable[..., Any]) -> Origin:
    """Return where a program is from, by the function that builds it."""
    path = Path(inspect.getsourcefile(make) or "").resolve()
    ours = (file for kind in VERBS for file in find(kind).values())
    if any(path == file.resolve() for file in ours):
        return Origin(path.stem, None, None)
    return Origin(path.stem, str(path), _sha256(path))


def load_origin(kind: Kind, origin: Origin, run: Path) -> ModuleType:
    """Import the program that a run was made by.

    Raises
    ------
    RunError
        Its file was moved or has changed.
    """
    if origin.file is None:
        return load(kind, origin.name)
    path = Path(origin.file)
    if not path.is_file():
        raise RunError(
            f"{run} was made by {path}, which is not there any more: put the file back, or train "
            "again."
        )
    if _sha256(path) != origin.sha256:
        raise RunError(
            f"{run} was made by {path}, which has changed since: restore the file as it was, or "
            "train again."
        )
    return _load_file(path)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise OptionError(f"there is no file {path}: give the path of a program's Python file.")
    if path.suffix != ".py":
        raise OptionError(f"{path} is not a Python file: its name must end in .py.")
    module = _import(f"offmarl_program_{_sha256(path)[:16]}_{path.stem}", path.resolve())
    missing = [part for part in _PARTS if not hasattr(module, part)]
    if missing:
        raise OptionError(
            f"{path} is not a program: it has no {' and no '.join(missing)}. "
            "`offmarl new baseline NAME` writes one to start from."
        )
    return module


def _import(module_name: str, path: Path) -> ModuleType:
    if module_name in sys.modules:
        return sys.modules[module_name]
    loader = SourceFileLoader(module_name, str(path))
    module = module_from_spec(cast(ModuleSpec, spec_from_loader(module_name, loader)))
    sys.modules[module_name] = module  # dataclasses look their module up by name
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
