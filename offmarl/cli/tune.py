"""``offmarl tune``: search settings with which a program learns."""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from rich.console import Group

from offmarl.cli.output import Report, as_is, records
from offmarl.cli.parse import (
    HELP,
    SettingsFile,
    options_among,
    read_args,
    settings_environment,
    take_fields,
    use_cores_for,
)
from offmarl.cli.programs import overview
from offmarl.cli.tasks import Divided, TaskOptions
from offmarl.config import Role, with_role
from offmarl.errors import OptionError
from offmarl.paths import path_text
from offmarl.programs.registry import Kind, find, load, origin_of
from offmarl.terminal import number
from offmarl.tracking import replace_file

if TYPE_CHECKING:
    from offmarl.programs.tuning import SearchSpace, TrialsWork, Tuned

_USAGE = """\
offmarl tune NAME --env ENV ...       tune a recorder
offmarl tune NAME --vault PATH ...    tune a baseline
"""

_SHOWN = 10

_UNTUNED = ("psro", "random")  # they have no settings, which `_load` would import


def tune(arguments: list[str]) -> Report:
    """Search settings with which a program learns."""
    if not arguments or arguments[0] in HELP:
        return _overview()
    work, search = _search(arguments)
    use_cores_for(search, getattr(work.args, "batching", "auto"))
    return _report(work, work.search())


def tune_work(_verb: str, arguments: list[str], _block_steps: None) -> Divided:
    """Return the work of a search: a block is a trial."""
    work, _ = _search(arguments)
    return Divided(work, lambda _: _report(work, work.tuned()))


def _search(arguments: list[str]) -> "tuple[TrialsWork, SearchSpace]":
    """Return the work of a search, and its options."""
    from offmarl.programs.runs.run import print_sources  # imports JAX, as the next does
    from offmarl.programs.tuning import (
        SearchSpace,
        TrialsWork,
        choose_ranges,
        derive_space,
        read_space,
    )

    name, *rest = arguments
    program = _load(name, arguments)
    about = f"Search settings of a program.\n\n{program.__doc__ or ''}"
    targets = [_Options, SearchSpace, SettingsFile, program.Args]
    untuned = with_role(program.Args, Role.UNTUNED)
    left_out = untuned - {field.name for field in fields(SearchSpace)}
    command = f"offmarl tune {name}"
    values = read_args(targets, command, about, rest, TaskOptions, left_out=left_out)
    options, search = take_fields(_Options, values), take_fields(SearchSpace, values)
    settings, env = values.pop("settings", None), settings_environment(program.Args, values)
    args = program.Args.for_env(env, settings=settings, **values)
    print_sources(args)
    place = re.sub(r"[^\w-]", "-", env) or "unknown"
    out = options.out or Path("tuned") / f"{origin_of(program.make).name}-{place}.toml"
    file = options.search
    space = derive_space(args) if file is None else read_space(file, program.Args)
    if untuned.intersection(space):
        raise OptionError(
            f"{min(untuned.intersection(space))} cannot be searched: leave it out of [search]."
        )
    return TrialsWork(program, args, choose_ranges(space, options.only), out, search), search


@dataclass(frozen=True)
class _Options:
    """Options of the command itself."""

    out: Path | None = None
    """TOML file to write; by default tuned/PROGRAM-ENVIRONMENT.toml. The trials are stored beside
    it, and the same command continues them."""
    search: Path | None = None
    """TOML file with a table [search] of ranges: lists of values, or {low = ..., high = ..., log =
    true}. By default ranges follow from the types and values of the program's arguments."""
    only: tuple[str, ...] = ()
    """Names of the arguments to search, of those that have a range; by default all."""


def _load(name: str, arguments: list[str]) -> ModuleType:
    """Import a program of either kind: a recorder, unless a vault is given."""
    kinds: list[Kind] = ["recorder", "baseline"]
    if options_among(arguments, vault=tuple[str, ...]):
        kinds.reverse()
    kind = next((kind for kind in kinds if name in find(kind)), kinds[0])
    program = load(kind, name)
    if not hasattr(program.Args, "for_env"):
        raise OptionError(f"{name} has no settings to search: tune a program that learns, as ippo.")
    return program


def _overview() -> Report:
    more = "tune", _UNTUNED
    parts = overview("recorder", _USAGE, *more), overview("baseline", "", *more)
    data = {key: value for part in parts for key, value in part.data.items()}
    return Report(data, Group(*(part.text for part in parts)))


def _report(work: "TrialsWork", tuned: "Tuned") -> Report:
    from offmarl.report.pages import render

    best = sorted(
        (row for row in tuned.trials if row["score"] is not None),
        key=lambda row: row["score"],
        reverse=True,
    )
    trials = "1 trial" if len(tuned.trials) == 1 else f"{len(tuned.trials)} trials"
    states = [row["state"] for row in tuned.trials if row["score"] is None]
    unscored = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    unscored = f" ({unscored})" if unscored else ""
    title = f"{path_text(tuned.file)}: the best of {trials}{unscored}, score {tuned.score:.6g}"
    ranges = {name: span.words() for name, span in work.space.items()}
    rows = [
        row | ({"state": f"{row['state']}, default"} if row["trial"] == tuned.default else {})
        for row in best[:_SHOWN]
    ]
    page = tuned.file.with_suffix(".html")
    table = {"columns": [*rows[0]], "rows": [[*row.values()] for row in rows]}
    replace_file(page, render("search.html", title=title, **table, figures=work.figures()))
    view = Group(records(rows, title), _about_default(tuned), as_is(f"wrote {path_text(page)}"))
    facts = tuned._asdict() | {"page": page, "ranges": ranges}
    return Report(facts, view)


def _about_default(tuned: "Tuned") -> str:
    """Say whether the search beat the default settings; empty if it never tried them."""
    score = tuned.trials[tuned.default - 1]["score"] if tuned.default else tuned.score
    about = "The best of many scores is too high: runs with the settings have other seeds. "
    if score == tuned.score:
        return "No trial beat the default settings." if tuned.default else about
    return (
        f"{about}The default settings scored {number(score) or 'nothing: they could not be run'}."
    )
