"""The results of a benchmark: tables for a paper, curves, profiles and a page.

A method is bold on a dataset if it may be the best one there; see `offmarl.report.Row`.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offmarl import report as reports
from offmarl import tracking
from offmarl.benchmark.cells import is_current
from offmarl.benchmark.plan import Plan, slug
from offmarl.benchmark.tasks import cell_file
from offmarl.errors import RunError
from offmarl.hub.card import references
from offmarl.report import pages
from offmarl.report.comparison import (
    Comparison,
    Row,
    about_scores,
    comparison_tables,
    dataset_tables,
    score_list,
)
from offmarl.report.curves import Curve, Curves
from offmarl.report.run_scores import UNITS, Entry, entry_of, gather
from offmarl.report.tables import Section, to_csv, to_latex, to_markdown
from offmarl.tracking import RETURN


class Results(NamedTuple):
    """The finished cells of a benchmark."""

    plan: Plan
    files: dict[str, dict[str, Path]]
    """File of each finished cell, by the labels of dataset and method."""
    cells: dict[str, dict[str, Mapping[str, Any]]]
    """The contents of these files."""
    comparisons: dict[str, Comparison]
    """By metric; the algorithms of the entries are the methods."""
    curves: Curves
    """Learning curves by dataset and method."""
    broken: dict[str, str]
    """Why finished cells have no score, by their names."""

    @property
    def missing(self) -> list[str]:
        """The names of the cells that are not finished."""
        return [
            cell.label
            for cell in self.plan.cells
            if cell.label not in self.broken
            and cell.baseline.label not in self.files.get(cell.data.label, {})
        ]

    @property
    def datasets(self) -> dict[str, list[Row]]:
        """The rows of each dataset that has scores."""
        return {k: v for x in self.comparisons.values() for k, v in x.datasets.items()}


def read_results(plan: Plan) -> Results:
    """Read the finished cells of a plan."""
    files: dict[str, dict[str, Path]] = {}
    broken: dict[str, str] = {}
    for cell in plan.cells:
        path = cell_file(plan, cell)
        if not is_current(cell, path):
            continue
        try:
            reports.metric_of([path])
            fault = reports.fault_of(path)
        except RunError as error:  # the file was changed
            fault = str(error).removesuffix(".")
        if fault:
            broken[cell.label] = fault
        else:
            files.setdefault(cell.data.label, {})[cell.baseline.label] = path
    metrics = {}
    for label, paths in [*files.items()]:
        try:
            metrics[label] = reports.metric_of(paths.values())
        except RunError as error:
            broken |= {f"{name} on {label}": str(error).removesuffix(".") for name in paths}
            del files[label]
    cells = {
        label: {method: json.loads(path.read_text()) for method, path in paths.items()}
        for label, paths in files.items()
    }
    by_env = references()
    environments = {
        label: _environment(next(iter(by_method.values()))) for label, by_method in cells.items()
    }
    scales = {label: by_env[env] for label, env in environments.items() if env in by_env}
    comparisons: dict[str, Comparison] = {}
    curves: dict[str, Mapping[Entry, Curve]] = {}
    for metric in UNITS:
        entries = {
            label: {entry_of(path, metric)._replace(algorithm=x): path for x, path in paths.items()}
            for label, paths in files.items()
            if metrics[label] == metric
        }
        if entries:
            scores = gather(entries, metric)
            comparisons[metric] = reports.compare(scores, scales, metric)
            curves |= reports.read_curves(scores)
    return Results(plan, files, cells, comparisons, curves, broken)


def _environment(cell: Mapping[str, Any]) -> str:
    run = cell[tracking.RUN_FILE]
    return str(run["args"].get("env") or run["spec"]["name"])


# ---------------------------------------------------------------------------------- tables


def score_tables(results: Results) -> list[Section]:
    """Return the scores by methods and datasets, and the differences to the baseline."""
    return [table for x in results.comparisons.values() for table in dataset_tables(x)]


def spread(rows: Sequence[Row]) -> float | None:
    """Return how far methods are apart on a dataset, or None without intervals.

    It is the best IQM minus the worst, in mean widths of the methods' intervals. Data with a small
    spread do not tell methods apart, whatever their order is.
    """
    iqms = [row.iqm for row in rows if row.iqm.finite]
    widths = [x.high - x.low for x in iqms if x.low is not None and x.high is not None]
    if len(iqms) < 2 or not any(widths):
        return None
    values = [iqm.value for iqm in iqms]
    return float((max(values) - min(values)) / np.mean(widths))


# ---------------------------------------------------------------------------------- files


def write_results(results: Results, failed: Mapping[str, Path] | None = None) -> list[Path]:
    """Write the tables, the figures, the page and marl-eval's JSON; return their paths.

    ``failed`` has the logs of what has failed, by name.
    """
    out = results.plan.out
    tables = score_tables(results)
    texts = {"md": to_markdown(tables), "tex": to_latex(tables)}
    texts["csv"] = to_csv(score_list(results.datasets))
    files = {out / "tables" / f"scores.{kind}": text for kind, text in texts.items()}
    returns = results.comparisons.get(RETURN)
    curves = {
        dataset: reports.figure_curves({dataset: results.curves[dataset]}, comparison.unit)
        for comparison in results.comparisons.values()
        for dataset in comparison.datasets
        if dataset in results.curves
    }
    return_curves = {k: v for k, v in results.curves.items() if returns and k in returns.datasets}
    overview = reports.figure_comparison(returns, return_curves) if returns else None
    if overview is None:
        (out / "scores.svg").unlink(missing_ok=True)
    figures = {out / "scores.svg": overview} if overview else {}
    figures |= {out / "curves" / f"{slug(x)}.svg": figure for x, figure in curves.items()}
    for path, figure in figures.items():
        reports.save(figure, path)
    files[out / tracking.MARL_EVAL_FILE] = _marl_eval(results)
    files[out / "page.html"] = _page(results, failed or {}, overview, [*curves.values()])
    for path, text in files.items():
        tracking.replace_file(path, text)
    return [*figures, *files]


def _marl_eval(results: Results) -> str:
    """Return marl-eval's document of all cells: environment, dataset, method, seed, step."""
    document: dict[str, Any] = {}
    for dataset, cells in results.cells.items():
        for method, cell in cells.items():
            for env, tasks in cell.get(tracking.MARL_EVAL_FILE, {}).items():
                for algorithms in tasks.values():
                    for name, runs in algorithms.items():
                        label = name.replace(cell[tracking.RUN_FILE]["program"], method, 1)
                        document.setdefault(env, {}).setdefault(dataset, {})[label] = runs
    return tracking.to_json(document)


def _page(results: Results, failed: Mapping[str, Path], scores: Any, curves: Sequence[Any]) -> str:
    return pages.render(
        "benchmark.html",
        name=results.plan.name,
        planned=len(results.plan.cells),
        notes=[*notes(results, failed)],
        tables=[table for x in results.comparisons.values() for table in comparison_tables(x)],
        scores=scores,
        curves=curves,
        cells=[
            [
                f"{method} on {dataset}",
                cell[tracking.RUN_FILE]["program"],
                len(cell["seeds"]),
                str(cell["digest"] or "")[:12],
                cell["seconds"],
                (cell["hardware"] or {}).get("device", ""),
                (cell["versions"] or {}).get("jax", ""),
            ]
            for dataset, cells in results.cells.items()
            for method, cell in cells.items()
        ],
    )


# ---------------------------------------------------------------------------------- notes


def notes(results: Results, failed: Mapping[str, Path]) -> Iterator[str]:
    """Say what * means, and name what is missing, failed or not comparable."""
    for comparison in results.comparisons.values():
        yield from about_scores(comparison, "some cells")
    yield from _spreads(results)
    for dataset, cells in results.cells.items():
        for method, cell in cells.items():
            if why := cell.get(tracking.PARTNERS_FILE, {}).get("refused"):
                yield f"{method} on {dataset} plays with no partner: {why}."
    for name, why in results.broken.items():
        yield f"{name} is not in the tables: {why}."
    for name, log in failed.items():
        yield f"{name} failed: see {log}."
    if missing := [name for name in results.missing if name not in failed]:
        yield f"Not run: {', '.join(missing)}."
    yield from _differences(results.cells)


def _spreads(results: Results) -> Iterator[str]:
    """Say for each dataset how far the methods are apart on it."""
    rows_of_all = [row for rows in results.datasets.values() for row in rows]
    for acting in dict.fromkeys(row.entry.acting for row in rows_of_all):
        spreads = {
            label: spread([row for row in rows if row.entry.acting == acting])
            for label, rows in results.datasets.items()
        }
        if texts := [f"{label} {x:.1f}" for label, x in spreads.items() if x is not None]:
            yield (
                f"Spread, {acting or 'no environment'}: {', '.join(texts)}. It is the best method "
                "minus the worst, in mean widths of the intervals; below 2, a dataset hardly "
                "tells methods apart."
            )


def _differences(cells: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Name the differences between cells besides their data and methods."""
    for label, by_method in cells.items():
        for aspect, fact in (
            ("data", lambda cell: str(cell["digest"])[:8]),
            ("environments", _environment),
        ):
            if len({fact(cell) for cell in by_method.values()}) > 1:
                values = ", ".join(f"{method} {fact(cell)}" for method, cell in by_method.items())
                yield f"Do not compare the methods on {label}, whose {aspect} differ: {values}."
    all_cells = [cell for by_method in cells.values() for cell in by_method.values()]
    code = Counter(str(cell.get("code") or "unknown")[:8] for cell in all_cells)
    versions = Counter(str((cell["versions"] or {}).get("jax")) for cell in all_cells)
    for aspect, counts in (("code of offmarl", code), ("versions of JAX", versions)):
        if len(counts) > 1:
            values = ", ".join(f"{name} ({n} cells)" for name, n in counts.most_common())
            yield f"The cells were made with different {aspect}: {values}."
    hardware = [cell["hardware"] or {} for cell in all_cells]
    machines = {f"{machine.get('device')}, {machine.get('processor')}" for machine in hardware}
    if len(machines) > 1:
        yield f"The cells ran on different machines: {'; '.join(sorted(machines))}."
