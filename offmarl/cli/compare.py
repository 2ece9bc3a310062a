"""``offmarl compare``: compare the results of runs."""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from rich.console import Group
from tyro.conf import Positional, arg

from offmarl import report as reports
from offmarl.cli.files import check_file, write_page
from offmarl.cli.output import Report
from offmarl.errors import OffmarlError, RunError
from offmarl.paths import distinct
from offmarl.programs.registry import file_of_run
from offmarl.report import figures, tables
from offmarl.report.comparison import comparison_data
from offmarl.report.comparison import notes as comparison_notes
from offmarl.report.pages import comparison_page, episodes_section
from offmarl.report.run_scores import Runs, is_foreign, with_foreign
from offmarl.report.tables import Section
from offmarl.statistics import Reference
from offmarl.terminal import number
from offmarl.tracking import (
    MARL_EVAL_FILE,
    RETURN,
    RUN_FILE,
    acting_of,
    is_run,
    labelled,
    read_run,
)


def compare(
    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN...")] = (),
    html: Path | None = None,
    figure: Path | None = None,
    references: Annotated[
        tuple[tuple[str, float, float], ...], arg(metavar="[ENV RANDOM EXPERT ...]")
    ] = (),
    program: Annotated[tuple[Path, ...], arg(metavar="[PATH ...]")] = (),
    pool_settings: bool = False,
) -> Report:
    """Compare runs: IQM with intervals, profiles, a figure, a page.

    The last policies are compared, by their final evaluations: greedy policies with greedy ones,
    sampled policies with sampled ones. The best checkpoints stand beside them. Runs that are not
    finished are left out, and named.

    Parameters
    ----------
    runs
        Directories of runs, as `offmarl train` writes them; or the directory of a benchmark, which
        stands for all of its finished cells. Also JSON files of marl-eval's layout, as Mava,
        OG-MARL and BenchMARL write them.
    html
        Write a self-contained page here, with an episode of each run whose environment can be
        drawn.
    figure
        Write the figure here, as PNG, PDF or SVG.
    references
        Mean returns of random play and of an expert in an environment; returns are normalised so
        that these are 0 and 1. By default those of the datasets that offmarl can record again.
    program
        Python files of the programs that trained the runs, for programs that are not offmarl's. A
        page shows episodes of these runs only if their files are given; the files' code is run.
    pool_settings
        Summarise a program over datasets although it was trained with other settings on one than on
        another, for example because they were tuned for each.
    """
    if not runs:
        raise RunError("no runs to compare: give the directory of at least one run.")
    check_file(html, "--html", "comparison.html")
    check_file(figure, "--figure", "comparison.png", figures.KINDS)
    runs = tuple(distinct(one for run in runs for one in _each(run)))
    foreign = [run for run in runs if is_foreign(run)]
    runs = tuple(run for run in runs if run not in foreign)
    unfinished = [run for run in runs if _is_unfinished(run)]
    if len(unfinished) < len(runs):  # or the error says what to do
        runs = tuple(run for run in runs if run not in unfinished)
    metric = reports.metric_of(runs)
    found = reports.read_runs(runs, metric, pool_settings)
    if foreign and metric != RETURN:
        raise RunError(f"{foreign[0]} holds returns, and the runs have none: compare it alone.")
    found = with_foreign(found, foreign)
    scales = _references(found, references) if metric == RETURN else {}
    comparison = reports.compare(found.scores, scales, metric, found.best)
    curves = reports.read_curves(found.directories, metric)
    sections = [*tables.comparison_tables(comparison)]
    notes = [*comparison_notes(comparison, found, metric, pool_settings)]
    notes += [f"{run} is not finished, and left out: repeat its command." for run in unfinished]
    if curves:
        sections.append(tables.learning_curves(curves))
    if metric != RETURN:
        sections.append(_losses(runs))
    if figure:
        reports.save(reports.figure_comparison(comparison), figure)
    if html:
        films = _run_films(runs, program)
        write_page(html, comparison_page(comparison, curves, sections, notes, runs, films))
    written = [f"wrote {path}" for path in (html, figure) if path]
    data = {
        **comparison_data(comparison, found),
        "notes": notes,
        "curves": {
            dataset: {entry.label: curve.data() for entry, curve in found.items()}
            for dataset, found in curves.items()
        },
        "unfinished": unfinished,
    }
    return Report(data, Group(*sections, *notes, *written))


def _each(path: Path) -> list[Path]:
    """Return a run, or the packed runs of a benchmark's directory, or of its cells."""
    if is_run(path):
        return [path]
    cells = sorted((path / "cells").glob("*.json")) or sorted(path.glob("*--*.json"))
    return cells or [path]


def _is_unfinished(run: Path) -> bool:
    """Whether a run has begun, and has no final evaluation yet."""
    begun = run.is_dir() and (run / RUN_FILE).is_file() and not (run / MARL_EVAL_FILE).exists()
    return begun and not read_run(run).get("complete", False)


def _references(found: Runs, given: Iterable[tuple[str, float, float]]) -> dict[str, Reference]:
    """Return the reference returns of datasets; ``given`` ones, by environment, override others.

    Results of other projects are normalised by given ones only.
    """
    from offmarl.hub.card import references  # takes a while to import

    own = {env: Reference(random, expert) for env, random, expert in given}
    known = references() | own
    return {
        name: known[data.environment]
        for name, data in found.data.items()
        if data.environment in (own if name in found.outside else known)
    }


def _losses(runs: Iterable[Path]) -> Section:
    """Return the final training metrics of runs that were not evaluated in an environment."""
    rows = [
        [str(path), ", ".join(f"{name} {number(value)}" for name, value in last.items())]
        for path, last in ((path, reports.last_metrics(path)) for path in runs)
    ]
    return Section("Final training metrics, mean over seeds", ["run", "metrics"], rows)


def _run_films(runs: Sequence[Path], programs: Sequence[Path]) -> list[str]:
    """Return an episode of each run's first seed, if its environment can be drawn.

    Warns of each run whose program is in a file that the user did not give.
    """
    from offmarl.cli import policies
    from offmarl.programs import load_policy
    from offmarl.report import render

    shown, unseen = [], []
    for directory in runs:
        file = file_of_run(directory, programs)  # an error if one of them does not exist
        try:
            loaded = load_policy(directory, greedy=None, program=file)
        except OffmarlError as error:
            unseen.append((str(directory), str(error)))
            if read_run(directory).get("file"):
                warnings.warn(f"the page shows no episode of {directory}: {error}", stacklevel=1)
            continue
        try:
            watched = policies.watch(policies.make_environment(loaded), loaded, seed=0)
        except OffmarlError as error:  # the environment is not installed, or cannot be drawn
            unseen.append((str(directory), str(error)))
            continue
        name = labelled(loaded.name, acting_of(read_run(directory)))
        shown.append((render.to_gif(watched), f"{name}: {directory}"))
    return episodes_section(shown, unseen)
