"""``offmarl compare``."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from rich.console import Group
from tyro.conf import Positional, arg

from offmarl import report
from offmarl.cli.output import Report, interval, number, table
from offmarl.errors import OffmarlError, RunError
from offmarl.report import page
from offmarl.report.comparison import Comparison, Data, Estimate, Row, Runs
from offmarl.statistics import MIN_RUNS, Reference
from offmarl.tracking import RETURN, acting_of, labelled, read_run


def compare(
    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN...")] = (),
    html: Path | None = None,
    figure: Path | None = None,
    references: Annotated[
        tuple[tuple[str, float, float], ...], arg(metavar="[ENV RANDOM EXPERT ...]")
    ] = (),
) -> Report:
    """Compare runs: IQM with intervals, profiles, a figure, a page.

    Final evaluations are compared, those of greedy policies with greedy ones and those of sampled
    policies with sampled ones.

    Parameters
    ----------
    runs
        Directories that `offmarl train` wrote.
    html
        Write a self-contained page here.
    figure
        Write the figure here, as PNG, PDF or SVG.
    references
        Mean returns of random play and of an expert in an environment, which returns are normalised
        by: to 0 and to 1. By default those of the datasets that offmarl can record again.
    """
    if not runs:
        raise RunError("there is nothing to compare: give the directories of one run or more.")
    metric = report.metric_of(runs)
    found = report.read_runs(runs, metric)
    known = _known(references) if metric == RETURN else {}
    by_dataset = {
        name: known[data.environment]
        for name, data in found.data.items()
        if data.environment in known
    }
    comparison = report.compare(found.scores, by_dataset, metric)
    sections, notes = list(_sections(comparison)), list(_notes(comparison, found, metric))
    if metric != RETURN:
        sections.append(_losses(runs))
    if figure:
        report.save(report.figure_comparison(comparison), figure)
    if html:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(_page(comparison, sections, notes, runs))
    written = [f"wrote {path}" for path in (html, figure) if path]
    tables = (table(columns, rows, title) for title, columns, rows in sections)
    return Report(_data(comparison, found, notes), Group(*tables, *notes, *written))


def _known(given: Iterable[tuple[str, float, float]]) -> dict[str, Reference]:
    """Return the reference returns by environment; ``given`` ones override known ones."""
    from offmarl.hub.catalogue import references  # takes a while to import

    return references() | {env: Reference(random, expert) for env, random, expert in given}


class _Section(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: list[list[Any]]


def _sections(comparison: Comparison) -> Iterator[_Section]:
    """Arrange the comparison as tables, for the terminal and the page alike."""
    for dataset, rows in comparison.datasets.items():
        yield _summary(f"{comparison.unit.capitalize()}: {dataset}", rows)
    if comparison.overall:
        scale = "normalised from random (0) to expert (1)"
        title = f"All datasets, {scale if comparison.normalised else comparison.unit}"
        yield _summary(title, comparison.overall)
    for acting in dict.fromkeys(entry.acting for entry in comparison.improvement):
        entries = [entry for entry in comparison.improvement if entry.acting == acting]
        estimates = [one for entry in entries for one in comparison.improvement[entry].values()]
        title = "Probability that a run of the row beats a run of the column"
        yield _Section(
            title + (" [95% interval]" if _any_interval(estimates) else ""),
            ["", *(entry.label for entry in entries)],
            [
                [
                    first.label,
                    *(
                        _probability(comparison.improvement[first].get(second))
                        for second in entries
                    ),
                ]
                for first in entries
            ],
        )


def _summary(title: str, rows: Sequence[Row]) -> _Section:
    """Arrange the rows of one dataset, or of all of them; normalised scores where there are any."""
    normalised = any(row.normalised for row in rows)
    iqm = "IQM [95% interval]" if _any_interval(row.iqm for row in rows) else "IQM"
    columns = ["algorithm", "seeds", iqm, *(["normalised IQM"] if normalised else [])]
    cells = [
        [
            row.entry.label,
            row.runs,
            interval(*row.iqm),
            # Its interval is that of the IQM on another scale: the JSON has it.
            *([row.normalised and row.normalised.value] if normalised else []),
            row.mean,
            row.median,
        ]
        for row in rows
    ]
    return _Section(title, [*columns, "mean", "median"], cells)


def _any_interval(estimates: Iterable[Estimate]) -> bool:
    return any(one.low is not None for one in estimates)


def _probability(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    if estimate.low is None:
        return f"{estimate.value:.2f}"
    return "{:.2f} [{:.2f}, {:.2f}]".format(*estimate)


def _notes(comparison: Comparison, found: Runs, metric: str) -> Iterator[str]:
    """Describe the normalisation and what is missing."""
    scales = {found.data[name].environment: one for name, one in comparison.references.items()}
    for env, reference in scales.items():
        yield (
            f"Normalised for {env}: 0 is random play ({number(reference.random)}), 1 the expert "
            f"({number(reference.expert)})."
        )
    raw = dict.fromkeys(
        data.environment for name, data in found.data.items() if name not in comparison.references
    )
    if metric == RETURN and raw:
        given = " ".join(f"{env} RANDOM EXPERT" for env in raw)
        yield (
            f"No reference returns are known for {', '.join(raw)}, so returns there are not "
            f"normalised: give them with --references {given}."
            + ("" if comparison.pooled else " Without them there is no summary of all datasets.")
        )
    yield from _doubts(comparison, found)


def _doubts(comparison: Comparison, found: Runs) -> Iterator[str]:
    """Point out equal names, missing greedy evaluations and too few seeds."""
    names = [data.name for data in found.data.values()]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"Several datasets or environments are named {name}: each is compared separately."
    entries = dict.fromkeys(entry for one in comparison.scores.values() for entry in one)
    for entry in entries:
        if entry.acting == "sampled" and entry._replace(acting="greedy") not in entries:
            yield (
                f"{entry.label}: its best actions were not evaluated, so it is compared only with "
                "other sampled policies."
            )
    if any(len(runs) < MIN_RUNS for one in comparison.scores.values() for runs in one.values()):
        yield f"There is no interval below {MIN_RUNS} seeds."


def _losses(runs: Iterable[Path]) -> _Section:
    """Return the final training metrics of runs that no environment evaluated."""
    rows = [
        [str(path), ", ".join(f"{name} {number(value)}" for name, value in last.items())]
        for path, last in ((path, report.last_metrics(path)) for path in runs)
    ]
    return _Section("Training at the end, mean over seeds", ["run", "metrics"], rows)


def _page(
    comparison: Comparison,
    sections: Iterable[_Section],
    notes: Iterable[str],
    runs: Sequence[Path],
) -> str:
    caption = (
        "Left: each seed's mean return, and their IQM; hollow markers and dashed lines where the "
        "policy's actions were sampled. Bands and bars are 95% intervals."
    )
    body = [page.image(report.figure_comparison(comparison), caption)]
    for title, columns, rows in sections:
        body += [page.heading(title), page.table(columns, [map(number, row) for row in rows])]
    body += [
        page.notes(("", note) for note in notes),
        *_films(runs),
        page.heading("Runs"),
        page.table(["run", "program", "data", "digest", "settings"], map(_run, runs)),
    ]
    return page.document("Comparison of runs", body)


def _films(runs: Sequence[Path]) -> list[str]:
    """Return an episode of each run's first seed, where its environment can be drawn."""
    from offmarl.cli import policies
    from offmarl.programs import load_policy
    from offmarl.report import animation

    shown = []
    for directory in runs:
        with suppress(OffmarlError):  # no such environment here, or none that can be drawn
            loaded = load_policy(directory)
            watched = policies.watch(policies.make_environment(None, loaded), loaded, seed=0)
            name = labelled(loaded.name, acting_of(read_run(directory)))
            shown.append((animation.to_gif(watched), f"{name}: {directory}"))
    return [page.heading("An episode of each"), page.films(shown)] if shown else []


def _run(directory: Path) -> list[str]:
    run = read_run(directory)
    settings = ", ".join(f"{key}={value}" for key, value in run["args"].items())
    data = [str(run.get("vault") or ""), str(run.get("vault_digest") or "")[:12]]
    return [str(directory), run["program"], *data, settings]


def _data(comparison: Comparison, found: Runs, notes: Sequence[str]) -> dict[str, Any]:
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
    }


def _source_data(data: Data, reference: Reference | None) -> dict[str, Any]:
    return {**data._asdict(), "references": reference._asdict() if reference else None}
