"""Recorders and baselines on the command line: listed, and run with their own arguments."""

from typing import Any

from rich.console import Group

from offmarl.cli.output import Report, table
from offmarl.cli.parse import parse
from offmarl.programs.registry import VERBS, Kind, find, load, summary


def overview(kind: Kind, usage: str) -> Report:
    """Return the list of programs, as help."""
    summaries = {name: summary(path) for name, path in find(kind).items()}
    rows = table([kind, ""], summaries.items())
    more = (
        f"`offmarl {VERBS[kind]} NAME --help` lists a {kind}'s options. In place of NAME, give the "
        f"path of a Python file to run a {kind} of your own. With --json the result is printed as "
        "one JSON object."
    )
    return Report({f"{kind}s": summaries}, Group(usage, rows, more))


def run(kind: Kind, name: str, arguments: list[str]) -> Any:
    """Parse a program's own arguments and run it."""
    program = load(kind, name)
    args = parse(program.Args, f"{VERBS[kind]} {name}", program.__doc__ or "", arguments)
    return program.main(args)
