"""The recorders and baselines: programs of one file each, found and run by name.

In a checkout they stand at the top level, beside the package; in a wheel, inside it.
"""

import ast
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

from rich.console import Group

from offmarl.cli.output import Report, table
from offmarl.cli.parse import parse
from offmarl.errors import unknown_name

Kind = Literal["recorder", "baseline"]
VERBS: dict[Kind, str] = {"recorder": "record", "baseline": "train"}


def find(kind: Kind) -> dict[str, Path]:
    """Return the programs there are, by name."""
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


def overview(kind: Kind, usage: str) -> Report:
    """Return the list of programs, as help."""
    summaries = {name: summary(path) for name, path in find(kind).items()}
    rows = table([kind, ""], summaries.items())
    more = (
        f"`offmarl {VERBS[kind]} NAME --help` lists a {kind}'s options. With --json the outcome is "
        "printed as one JSON object."
    )
    return Report({f"{kind}s": summaries}, Group(usage, rows, more))


def load(kind: Kind, name: str) -> ModuleType:
    """Import a program; `UnknownNameError` where there is none of that name."""
    paths = find(kind)
    if name not in paths:
        raise unknown_name(kind, name, paths, see=f"offmarl {VERBS[kind]} --help")
    module_name = f"offmarl.{kind}s.{name}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    loader = SourceFileLoader(module_name, str(paths[name]))
    module = module_from_spec(cast(ModuleSpec, spec_from_loader(module_name, loader)))
    sys.modules[module_name] = module  # dataclasses look their module up by name
    loader.exec_module(module)
    return module


def run(kind: Kind, name: str, arguments: list[str]) -> Any:
    """Parse a program's own arguments and run it."""
    program = load(kind, name)
    args = parse(program.Args, f"{VERBS[kind]} {name}", program.__doc__ or "", arguments)
    return program.main(args)
