"""``offmarl new``."""

import keyword
import os
import re
import shlex
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Group
from tyro.conf import Positional, arg

from offmarl.cli.output import Report
from offmarl.errors import OptionError
from offmarl.paths import local_output

_NEXT = {
    "env": (
        "offmarl envs {file}:{title}",
        "offmarl record mappo --env {file}:{title} --tiers random,expert",
    ),
    "baseline": ("offmarl train {file} --help", "offmarl train {file} --vault VAULT"),
}
"""Commands that use a new file."""

_TEMPLATES = {"env": "environment", "baseline": "baseline"}


def new(
    kind: Annotated[Literal["baseline", "env"], Positional],
    name: Annotated[str, Positional, arg(metavar="NAME")],
    out: Path = Path(),
) -> Report:
    """Create a working baseline or environment file to start from.

    Parameters
    ----------
    kind
        Kind of file.
    name
        Name of the file without .py: a Python identifier.
    out
        Directory for the file, which may be anywhere; it is created if it does not exist.
    """
    path = local_output(out) / f"{name}.py"
    _check(name, path)
    title = "".join(part.capitalize() for part in name.split("_"))
    template = files("offmarl.cli.templates") / f"{_TEMPLATES[kind]}.py"
    text = template.read_text(encoding="utf-8")
    original = f"My{kind.capitalize()}"
    if keyword.iskeyword(title) or re.search(rf"\b{title}\b", text.replace(original, "")):
        raise OptionError(
            f"{name!r} would be {title} in the file, which is a keyword of Python or the name of "
            f"something else in the file: choose another name, such as my_{name}."
        )
    text = text.replace(f"my_{kind}", name).replace(original, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    target = out / path.name
    quoted = shlex.quote(str(target))
    commands = [command.format(file=quoted, title=title) for command in _NEXT[kind]]
    view = Group(f"wrote {target}; to use it:", *(f"  {command}" for command in commands))
    return Report({"path": path, "commands": commands}, view)


def _check(name: str, path: Path) -> None:
    """Raise `OptionError` for a name that cannot be that of a new module and its class."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or keyword.iskeyword(name):
        raise OptionError(
            f"{name!r} cannot name a Python module: use letters, digits and _, beginning with a "
            "letter, such as my_env; --out names the file's directory."
        )
    if os.path.lexists(path):
        raise OptionError(f"{path} exists and is not overwritten: choose another name or --out.")
    if find_spec(name):
        raise OptionError(f"Python already has a module named {name}: choose another name.")
