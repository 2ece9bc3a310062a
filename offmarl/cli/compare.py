"""``offmarl compare``: compare the results of runs."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from rich.console import Group
from tyro.conf import Positional, arg

from offmarl import report as reports
from offmarl.cli.files import check_file, write_page
from offmarl.cli.output import Report, table
from offmarl.cli.report import episodes_section
from offmarl.errors import OffmarlError, RunError
from offmarl.paths import distinct
from offmarl.programs.registry import file_of_run
from offmarl.report import figures, page, tables
from offmarl.report.comparison import Comparison, Row
from offmarl.report.curves import Curves
from offmarl.report.marl_eval import is_foreign, with_foreign
from offmarl.report.run_scores import Data, Runs
from offmarl.report.tables import Section
from offmarl.statistics import ENOUGH_RUNS, MIN_RUNS, Reference
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
    known = _known(references) if metric == RETURN else {}
    given = {env for env, *_ in references}
    by_dataset = {
        name: known[data.environment]
        for name, data in found.data.items()
        if data.environment in (given if name in found.outside else known)
    }
    comparison = reports.compare(found.scores, by_dataset, metric, found.best)
    curves = reports.read_curves(found.directories, metric)
    sections, notes = (
        list(tables.comparison_tables(comparison)),
        list(_notes(comparison, found, metric, pool_settings)),
    )
    notes += [f"{run} is not finished, and left out: repeat its command." for run in unfinished]
    if curves:
        sections.append(tables.learning_curves(curves))
    if metric != RETURN:
        sections.append(_losses(runs))
    if figure:
        reports.save(reports.figure_comparison(comparison), figure)
    if html:
        drawn = _comparison_figures(comparison, curves)
        write_page(html, _comparison_page(drawn, sections, notes, runs, program))
    written = [f"wrote {path}" for path in (html, figure) if path]
    shown = (table(columns, rows, title) for title, columns, rows in sections)
    data = _comparison_data(comparison, found, notes) | {"curves": _curve_data(curves)}
    data["unfinished"] = unfinished
    return Report(data, Group(*shown, *notes, *written))


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


def _known(given: Iterable[tuple[str, float, float]]) -> dict[str, Reference]:
    """Return the reference returns by environment; ``given`` ones override known ones."""
    from offmarl.hub.card import references  # takes a while to import

    return references() | {env: Reference(random, expert) for env, random, expert in given}


def _notes(comparison: Comparison, found: Runs, metric: str, pool_settings: bool) -> Iterator[str]:
    """Describe the normalisation and what is missing."""
    scales = {found.data[name].environment: one for name, one in comparison.references.items()}
    for env, reference in scales.items():
        yield (
            f"Returns in {env} are normalised: 0 is random play ({number(reference.random)}), 1 is "
            f"the expert ({number(reference.expert)})."
        )
    if found.outside:
        yield (
            "Files of marl-eval's layout do not say how their policies acted, so these are "
            "compared only with one another. Unless --references are given, returns are raw on "
            f"{', '.join(sorted(found.outside))}."
        )
    raw = dict.fromkeys(
        data.environment
        for name, data in found.data.items()
        if name not in comparison.references and name not in found.outside
    )
    if metric == RETURN and raw:
        given = " ".join(f"{quote(env)} RANDOM EXPERT" for env in raw)
        yield (
            f"The reference returns of {', '.join(raw)} are unknown, so returns there are not "
            f"normalised: give them with --references {given}."
            + ("" if comparison.pooled else " Without them the datasets are not summarised.")
        )
    yield from _caveats(comparison, found, metric, pool_settings)


def _caveats(
    comparison: Comparison, found: Runs, metric: str, pool_settings: bool
) -> Iterator[str]:
    """Point out equal names, other settings, how policies acted, and too few seeds."""
    names = [data.name for data in found.data.values()]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"Several datasets or environments are named {name}: each is compared separately."
    for program, settings in found.settings.items():
        yield (
            f"{program} was trained with other settings on one dataset than on another "
            f"({', '.join(settings)}): "
            + (
                "its runs are summarised together, because --pool-settings was given."
                if pool_settings
                else "such runs are not summarised together, unless --pool-settings is given."
            )
        )
    yield from _left_out(comparison)
    yield from _about_acting(comparison)
    if any(row.best for rows in comparison.datasets.values() for row in rows):
        yield tables.about_best(metric == RETURN)
    few = min(len(runs) for one in comparison.scores.values() for runs in one.values())
    if few < MIN_RUNS:
        yield f"Intervals need at least {MIN_RUNS} seeds."
    if few < ENOUGH_RUNS:
        yield tables.few_seeds("some runs", few)


def _left_out(comparison: Comparison) -> Iterator[str]:
    """Name the entries that cannot be summarised over the datasets, and why."""
    counts: dict[str, dict[str, int]] = {}
    for dataset, found in comparison.scores.items():
        for entry, runs in found.items():
            if entry not in comparison.common:
                counts.setdefault(entry.label, {})[dataset] = len(runs)
    for label, seeds in counts.items():
        absent = [name for name in comparison.scores if name not in seeds]
        why = (
            f"it was not run on {', '.join(absent)}"
            if absent
            else f"its numbers of seeds differ ({', '.join(map(str, seeds.values()))})"
        )
        yield f"{label} is in no summary over the datasets and no probability: {why}."


def _about_acting(comparison: Comparison) -> Iterator[str]:
    """Say which rows are the headline, and which policies have no greedy evaluation."""
    rows = [row for found in comparison.datasets.values() for row in found]
    if any(not row.headline for row in rows):
        yield (
            "Headline: the last policy's best actions (greedy). Sampled actions are compared with "
            "sampled ones."
        )
    entries = dict.fromkeys(row.entry for row in rows)
    for entry in entries:
        if entry.acting == "sampled" and entry._replace(acting="greedy") not in entries:
            yield (
                f"{entry.label} was not evaluated greedily, so it is compared only with other "
                "sampled policies."
            )


def _losses(runs: Iterable[Path]) -> Section:
    """Return the final training metrics of runs that were not evaluated in an environment."""
    rows = [
        [str(path), ", ".join(f"{name} {number(value)}" for name, value in last.items())]
        for path, last in ((path, reports.last_metrics(path)) for path in runs)
    ]
    return Section("Final training metrics, mean over seeds", ["run", "metrics"], rows)


def _comparison_figures(comparison: Comparison, curves: Curves) -> list[str]:
    scores = (
        "Left: the mean return of each seed, and the IQM over seeds. Hollow markers and dashed "
        "lines: sampled actions. Bands and bars: 95% intervals."
    )
    learning = "Learning curves: mean over seeds. Bands: 95% intervals; thin lines: seeds."
    drawn = [page.image(reports.figure_comparison(comparison), scores)]
    if curves:
        drawn.append(page.image(reports.figure_curves(curves, comparison.unit), learning))
    return drawn


def _curve_data(curves: Curves) -> dict[str, Any]:
    return {
        dataset: {entry.label: curve.data() for entry, curve in found.items()}
        for dataset, found in curves.items()
    }


def _comparison_page(
    figures: Sequence[str],
    sections: Iterable[Section],
    notes: Iterable[str],
    runs: Sequence[Path],
    programs: Sequence[Path],
) -> str:
    body = [*figures]
    for title, columns, rows in sections:
        body += [page.heading(title), page.table(columns, [map(number, row) for row in rows])]
    body += [
        page.notes(("", note) for note in notes),
        *_run_films(runs, programs),
        page.heading("Runs"),
        page.table(["run", "program", "data", "digest", "settings"], map(_run, runs)),
    ]
    return page.document("Comparison of runs", body)


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
            loaded = load_policy(directory, program=file)
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


def _run(directory: Path) -> list[str]:
    run = read_run(directory)
    settings = ", ".join(f"{key}={value}" for key, value in run["args"].items())
    data = [str(run.get("vault") or ""), str(run.get("vault_digest") or "")[:12]]
    return [str(directory), run["program"], *data, settings]


def _comparison_data(comparison: Comparison, found: Runs, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "datasets": {
            dataset: {row.entry.label: _row_data(row) for row in rows}
            for dataset, rows in comparison.datasets.items()
        },
        "data": {
            name: _source_data(data, comparison.references.get(name))
            for name, data in found.data.items()
        },
        "overall": {row.entry.label: _row_data(row) for row in comparison.overall},
        "probability_of_improvement": {
            first.label: {second.label: value._asdict() for second, value in row.items()}
            for first, row in comparison.improvement.items()
        },
        "notes": notes,
    }


def _row_data(row: Row) -> Mapping[str, Any]:
    return {
        "algorithm": row.entry.algorithm,
        "acting": row.entry.acting,
        "runs": row.runs,
        "iqm": row.iqm._asdict(),
        "normalised": row.normalised._asdict() if row.normalised else None,
        "mean": row.mean,
        "median": row.median,
        "headline": row.headline,
        "best_checkpoint": row.best._asdict() if row.best else None,
    }


def _source_data(data: Data, reference: Reference | None) -> dict[str, Any]:
    return {**data._asdict(), "references": reference._asdict() if reference else None}
