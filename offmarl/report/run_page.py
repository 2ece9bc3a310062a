"""A run's own page: its arguments and where they came from, its learning curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offmarl._version import __version__
from offmarl.report import page, tables
from offmarl.report.curves import Curve, broken_of, curves_of
from offmarl.report.figures import COLOURS, draw_curve, make_figure
from offmarl.report.run_scores import UNITS, Entry
from offmarl.report.tables import Section
from offmarl.terminal import number
from offmarl.tracking import RETURN, WALL_TIME, acting_of, read_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MEAN = "Mean over seeds. Band: 95% interval; thin lines: seeds."


class RunReport(NamedTuple):
    """A run and its metrics."""

    directory: Path
    record: Mapping[str, Any]
    """Content of ``run.json``."""
    curves: Mapping[str, Curve]
    """By metric."""
    broken: Mapping[str, list[int]]
    """The seeds whose last number of a metric is not finite, by metric."""

    @property
    def title(self) -> str:
        """The program and what it learned in or from."""
        place = self.record.get("vault") or self.record["spec"]["name"]
        return f"{self.record['program']} on {place}"

    def evaluations(self) -> dict[str, Curve]:
        """Return the curves of the evaluations."""
        return {name: curve for name, curve in self.curves.items() if unit_of(name)}

    def notes(self) -> list[str]:
        """Say which curves end early because training diverged."""
        return [
            f"{name} has no finite value at the end of seed {', '.join(map(str, seeds))}: its "
            "curve lacks these steps."
            for name, seeds in self.broken.items()
        ]

    def sections(self) -> Iterator[Section]:
        """Yield the tables of the report."""
        yield self._facts()
        for name, curve in self.evaluations().items():
            acting = acting_of(self.record) if name == RETURN else None
            entry = Entry(self.record["program"], acting)
            table = tables.learning_curves({unit_of(name) or name: {entry: curve}})
            yield table._replace(columns=["metric", *table.columns[1:]])
        yield self._metrics()
        yield self._arguments()

    def _facts(self) -> Section:
        wall = self.curves.get(WALL_TIME)
        facts = {
            "directory": str(self.directory),
            "kind": self.record.get("kind", ""),
            "data": self.record.get("vault") or "",
            "digest": str(self.record.get("vault_digest") or "")[:12],
            "environment": self.record["spec"]["name"],
            "seeds": ", ".join(map(str, self.record["seeds"])),
            "complete": "yes" if self.record.get("complete") else "no",
            "wall time": f"{float(wall.mean[-1]):,.0f} s" if wall else "",
            "offmarl": self.record.get("offmarl", ""),
        }
        return Section(self.title, ["", ""], [[name, x] for name, x in facts.items() if x])

    def _metrics(self) -> Section:
        rows = [
            [name, float(curve.mean[0]), float(curve.mean[-1]), int(curve.steps[-1])]
            for name, curve in self.curves.items()
            if not unit_of(name)
        ]
        return Section("Metrics, mean over seeds", ["metric", "first", "last", "steps"], rows)

    def _arguments(self) -> Section:
        sources = self.record.get("settings", {})
        rows = [
            [name, "" if value is None else str(value), sources.get(name, "")]
            for name, value in self.record["args"].items()
        ]
        return Section("Arguments", ["argument", "value", "from the file"], rows)


def describe(directory: Path) -> RunReport:
    """Read a run.

    Raises
    ------
    RunError
        The directory is not a run.
    """
    return RunReport(directory, read_run(directory), curves_of(directory), broken_of(directory))


def unit_of(metric: str) -> str | None:
    """Return what an evaluation measures; None for a metric of the training."""
    if metric.startswith(f"{RETURN}_"):
        return f"{UNITS[RETURN]} of {metric.removeprefix(f'{RETURN}_')}"
    return UNITS.get(metric)


def run_page(run: RunReport) -> str:
    """Return the page of a run."""
    facts, *others = run.sections()
    figures = [page.image(_figure(name, curve), _MEAN) for name, curve in run.evaluations().items()]
    small = [
        page.image(_figure(name, curve, small=True), name)
        for name, curve in run.curves.items()
        if not unit_of(name)
    ]
    body = [
        page.table(*_cells(facts)),
        page.notes(("", note) for note in run.notes()),
        *([page.heading("Learning curves"), *figures] if figures else []),
        *([page.heading("Metrics"), page.charts(small)] if small else []),
    ]
    for section in others[len(figures) :]:
        body += [page.heading(section.title), page.table(*_cells(section))]
    return page.document(f"Run: {run.title}", [*body, page.paragraph(f"offmarl {__version__}.")])


def _cells(section: Section) -> tuple[list[str], list[list[str]]]:
    return list(section.columns), [[number(cell) for cell in row] for row in section.rows]


def _figure(name: str, curve: Curve, small: bool = False) -> Figure:
    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        draw_curve(axes, curve, COLOURS[0])
        axes.set_xlabel("steps")
        axes.set_ylabel(unit_of(name) or name)

    return make_figure(draw, (4.4, 3.0) if small else (8.0, 4.0))
