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
from offmarl.report.comparison import Comparison, Estimate, Row
from offmarl.tracking import RETURN, read_run


def compare(
    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN...")] = (),
    html: Path | None = None,
    figure: Path | None = None,
) -> Report:
    """Compare the final evaluations of runs.

    Parameters
    ----------
    runs
        Directories that `offmarl train` wrote.
    html
        Write a self-contained page here.
    figure
        Write the figure here, as PNG, PDF or SVG.
    """
    if not runs:
        raise RunError("there is nothing to compare: give the directories of one run or more.")
    metric = report.metric_of(runs)
    comparison = report.compare(report.read_runs(runs, metric), report.UNITS[metric])
    sections = list(_sections(comparison))
    if metric != RETURN:
        sections.append(_losses(runs))
    if figure:
        report.save(report.figure_comparison(comparison), figure)
    if html:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(_page(comparison, sections, runs))
    written = [f"wrote {path}" for path in (html, figure) if path]
    view = Group(*(table(columns, rows, title) for title, columns, rows in sections), *written)
    return Report(_data(comparison), view)


class _Section(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: list[list[Any]]


def _sections(comparison: Comparison) -> Iterator[_Section]:
    """Arrange the comparison as tables, for the terminal and the page alike."""
    columns = ["algorithm", "seeds", "IQM [95% interval]", "mean", "median"]
    for dataset, rows in comparison.datasets.items():
        yield _Section(
            f"{comparison.unit.capitalize()}: {dataset}", columns, [_cells(row) for row in rows]
        )
    if comparison.overall:
        title = "All datasets, normalised (0: the worst run compared on each, 1: the best)"
        yield _Section(title, columns, [_cells(row) for row in comparison.overall])
    if len(comparison.improvement) > 1:
        names = list(comparison.improvement)
        title = "Probability that a run of the row beats a run of the column [95% interval]"
        yield _Section(
            title,
            ["", *names],
            [
                [first, *(_probability(row.get(second)) for second in names)]
                for first, row in comparison.improvement.items()
            ],
        )


def _losses(runs: Iterable[Path]) -> _Section:
    """Say what was trained to, where no environment tells what it is good for."""
    rows = [
        [str(path), ", ".join(f"{name} {number(value)}" for name, value in last.items())]
        for path, last in ((path, report.last_metrics(path)) for path in runs)
    ]
    return _Section("Training at the end, mean over seeds", ["run", "metrics"], rows)


def _cells(row: Row) -> list[Any]:
    return [row.algorithm, row.runs, interval(*row.iqm), row.mean, row.median]


def _probability(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    return "{:.2f} [{:.2f}, {:.2f}]".format(*estimate)


def _page(comparison: Comparison, sections: Iterable[_Section], runs: Sequence[Path]) -> str:
    caption = "Left: each seed's mean return, and their IQM. Bands and bars are 95% intervals."
    body = [page.image(report.figure_comparison(comparison), caption)]
    for title, columns, rows in sections:
        body += [page.heading(title), page.table(columns, [map(number, row) for row in rows])]
    body += [
        *_films(runs),
        page.heading("Runs"),
        page.table(["run", "program", "data", "settings"], map(_run, runs)),
    ]
    return page.document("Comparison of runs", body)


def _films(runs: Sequence[Path]) -> list[str]:
    """Return an episode of each run's first seed, where its environment can be drawn."""
    from offmarl.cli import policies
    from offmarl.evaluation import load_policy
    from offmarl.report import animation

    shown = []
    for directory in runs:
        with suppress(OffmarlError):  # no such environment here, or none that can be drawn
            loaded = load_policy(directory)
            watched = policies.watch(policies.make_environment(None, loaded), loaded, seed=0)
            shown.append((animation.to_gif(watched), f"{loaded.name} ({directory})"))
    return [page.heading("An episode of each"), page.films(shown)] if shown else []


def _run(directory: Path) -> list[str]:
    run = read_run(directory)
    settings = ", ".join(f"{key}={value}" for key, value in run["args"].items())
    return [str(directory), run["program"], str(run.get("vault") or ""), settings]


def _data(comparison: Comparison) -> dict[str, Any]:
    return {
        "datasets": {
            dataset: {row.algorithm: _row_data(row) for row in rows}
            for dataset, rows in comparison.datasets.items()
        },
        "overall": {row.algorithm: _row_data(row) for row in comparison.overall},
        "probability_of_improvement": {
            first: {second: value._asdict() for second, value in row.items()}
            for first, row in comparison.improvement.items()
        },
    }


def _row_data(row: Row) -> Mapping[str, Any]:
    return {**row._asdict(), "iqm": row.iqm._asdict()}
