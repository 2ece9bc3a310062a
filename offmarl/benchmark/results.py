"""The results of a benchmark: tables for a paper, curves, profiles and a page.

A method is bold on a dataset if it may be the best one there; see `offmarl.report.Row`.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
    BASELINE,
    Comparison,
    Row,
    about_best,
    about_pairs,
    comparison_tables,
    difference_text,
    few_seeds,
)
from offmarl.report.curves import Curve, Curves
from offmarl.report.run_scores import UNITS, Entry, entry_of, gather
from offmarl.report.tables import Section
from offmarl.statistics import (
    ENOUGH_RUNS,
    MIN_RUNS,
    Estimate,
    estimate,
    probability_of_improvement,
)
from offmarl.terminal import interval
from offmarl.tracking import RETURN, Acting

Kind = Literal["md", "tex", "csv"]

_WRITTEN = "written.json"
_WAYS: dict[Acting | None, str] = {
    "greedy": "best actions",
    "sampled": "sampled actions",
    None: "no environment",
}


class ScoreTable(NamedTuple):
    """Methods by datasets, of policies that acted in one way."""

    acting: Acting | None
    columns: list[str]
    """The datasets."""
    rows: dict[str, list[Row | None]]
    """Scores by method; None for a cell that was not run."""

    @property
    def title(self) -> str:
        """How the policies acted."""
        return f"IQM over seeds [95% interval], {_WAYS[self.acting]}"


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
        return {k: v for one in self.comparisons.values() for k, v in one.datasets.items()}

    def metric(self, dataset: str) -> str:
        """Return the metric of a dataset's scores."""
        return next(x for x, one in self.comparisons.items() if dataset in one.datasets)


def read_results(plan: Plan) -> Results:
    """Read the finished cells of a plan."""
    files: dict[str, dict[str, Path]] = {}
    broken: dict[str, str] = {}
    for cell in plan.cells:
        path = cell_file(plan, cell)
        if not is_current(cell, path):
            continue
        if fault := reports.fault_of(path):
            broken[cell.label] = fault
        else:
            files.setdefault(cell.data.label, {})[cell.baseline.label] = path
    metrics = {}
    for label, found in [*files.items()]:
        try:
            metrics[label] = reports.metric_of(found.values())
        except RunError as error:
            broken |= {f"{name} on {label}": str(error).removesuffix(".") for name in found}
            del files[label]
    cells = {
        label: {method: json.loads(path.read_text()) for method, path in found.items()}
        for label, found in files.items()
    }
    known = references()
    environments = {
        label: _environment(next(iter(found.values()))) for label, found in cells.items()
    }
    scales = {label: known[env] for label, env in environments.items() if env in known}
    comparisons: dict[str, Comparison] = {}
    curves: dict[str, Mapping[Entry, Curve]] = {}
    for metric in UNITS:
        entries = {
            label: {entry_of(path, metric)._replace(algorithm=x): path for x, path in found.items()}
            for label, found in files.items()
            if metrics[label] == metric
        }
        if entries:
            runs = gather(entries, metric)
            comparisons[metric] = reports.compare(
                runs.scores, scales, metric, runs.best, runs.evaluations, partners=runs.partners
            )
            curves |= reports.read_curves(entries, metric)
    return Results(plan, files, cells, comparisons, curves, broken)


def _environment(cell: Mapping[str, Any]) -> str:
    run = cell[tracking.RUN_FILE]
    return str(run["args"].get("env") or run["spec"]["name"])


# ---------------------------------------------------------------------------------- tables


def score_tables(results: Results) -> list[ScoreTable]:
    """Return the tables, that of the best actions first."""
    ways = {row.entry.acting for rows in results.datasets.values() for row in rows}
    return [_score_table(results, acting) for acting in _WAYS if acting in ways]


def _score_table(results: Results, acting: Acting | None) -> ScoreTable:
    found = {
        label: {row.entry.algorithm: row for row in _marked(rows, acting)}
        for label, rows in results.datasets.items()
    }
    columns = [label for label in results.plan.datasets if found.get(label, True)]
    return ScoreTable(
        acting,
        columns,
        {
            method: [found.get(label, {}).get(method) for label in columns]
            for method in results.plan.baselines
        },
    )


def _marked(rows: Sequence[Row], acting: Acting | None) -> list[Row]:
    """Return the rows of one way of acting, with those that may be the best in bold."""
    alike = [row for row in rows if row.entry.acting == acting]
    best = max(alike, key=lambda row: row.iqm.value, default=None)
    return [row._replace(bold=best is not None and _may_beat(row, best)) for row in alike]


def _may_beat(row: Row, best: Row) -> bool:
    if row.iqm.value == best.iqm.value:
        return True
    runs = (np.array(one.scores)[:, None] for one in (row, best))
    high = estimate(probability_of_improvement, *runs).high
    return high is not None and high >= 0.5  # a probability above one half is no reason against it


def spread(rows: Sequence[Row]) -> float | None:
    """Return how far methods are apart on a dataset, or None without intervals.

    It is the best IQM minus the worst, in mean widths of the methods' intervals. Data with a small
    spread do not tell methods apart, whatever their order is.
    """
    known = [row.iqm for row in rows if row.iqm.finite]
    widths = [x.high - x.low for x in known if x.low is not None and x.high is not None]
    if len(known) < 2 or not any(widths):
        return None
    values = [one.value for one in known]
    return float((max(values) - min(values)) / np.mean(widths))


def rows_of(
    table: ScoreTable,
    words: Callable[[Row], str] = lambda row: interval(*row.iqm) + " *" * row.bold,
) -> list[list[str]]:
    """Return the rows as text, in which * stands for bold; cells that were not run are empty."""
    return [
        [method, *("" if row is None else words(row) for row in rows)]
        for method, rows in table.rows.items()
    ]


def sections_of(table: ScoreTable, best: bool = True) -> list[Section]:
    """Return the scores as text, and differences to the baseline and best checkpoints if known."""
    minus = f"Minus {BASELINE}, in pairs of one seed [95% interval], {_WAYS[table.acting]}"
    found = {table.title: rows_of(table), minus: rows_of(table, difference_text)}
    title = f"{table.title}, beside the partners of each dataset"
    found[title] = rows_of(table, lambda row: interval(*row.partners) if row.partners else "")
    if best:
        title = f"{table.title}, of the best checkpoint of each seed"
        found[title] = rows_of(table, lambda row: interval(*row.best) if row.best else "")
    columns = ["method", *table.columns]
    known = {title: rows for title, rows in found.items() if any(any(x[1:]) for x in rows)}
    return [Section(title, columns, rows) for title, rows in known.items()]


def to_text(table: ScoreTable, kind: Kind) -> str:
    """Return a table in Markdown, LaTeX or CSV."""
    return {"md": _markdown, "tex": _latex, "csv": _csv}[kind](table)


def _markdown(table: ScoreTable) -> str:
    lines = [["method", *table.columns], ["---"] + ["---:"] * len(table.columns)]
    lines += rows_of(table, lambda row: ("**{}**" if row.bold else "{}").format(interval(*row.iqm)))
    escaped = [[text.replace("|", "\\|") for text in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def _latex(table: ScoreTable) -> str:
    """Return a table for the package booktabs."""

    def words(row: Row) -> str:
        value, space, ends = interval(*row.iqm).partition(" ")
        value = f"\\textbf{{{value}}}" if row.bold else value
        return f"{value} {{\\scriptsize {ends}}}" if space else value

    head = " & ".join(["", *map(_escaped, table.columns)])
    body = "".join(
        " & ".join([_escaped(method), *cells]) + " \\\\\n"
        for method, *cells in rows_of(table, words)
    )
    return (
        f"\\begin{{tabular}}{{l{'r' * len(table.columns)}}}\n\\toprule\n{head} \\\\\n\\midrule\n"
        f"{body}\\bottomrule\n\\end{{tabular}}\n"
    )


_SPECIAL = {**{one: f"\\{one}" for one in "&%$#_{}"}, "\\": r"\textbackslash{}"}
_SPECIAL |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi o pi rho"
_SPECIAL |= {  # pdflatex has no Greek letters in text
    chr(ord("α") + number): f"\\ensuremath{{\\{name}}}" if name != "o" else "o"
    for number, name in enumerate(
        [*_GREEK.split(), "varsigma", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"]
    )
}


def _escaped(text: str) -> str:
    return "".join(_SPECIAL.get(one, one) for one in text)


def _csv(table: ScoreTable) -> str:
    """Return a line for each cell, with the score of each seed."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    head = ["dataset", "method", "acting", "seeds", "iqm", "low", "high", "bold", "runs"]
    head += [f"best_checkpoint_{name}" for name in ("iqm", "low", "high")]
    head += [f"difference{name}" for name in ("", "_low", "_high")]
    writer.writerow([*head, *(f"with_partners{name}" for name in ("", "_low", "_high"))])
    for method, row in table.rows.items():
        for dataset, score in zip(table.columns, row, strict=True):
            cells = [""] * 15
            if score is not None:
                runs = " ".join(map(repr, score.scores))
                cells = [str(score.runs), *_ends(score.iqm), str(int(score.bold)), runs]
                cells += [*_ends(score.best), *_ends(score.difference), *_ends(score.partners)]
            writer.writerow([dataset, method, table.acting or "", *cells])
    return file.getvalue()


def _ends(estimate: Estimate | None) -> list[str]:
    return ["" if one is None else repr(one) for one in estimate or [None] * 3]


# ---------------------------------------------------------------------------------- files


def write_results(results: Results, failed: Mapping[str, Path] | None = None) -> list[Path]:
    """Write the tables, the figures, the page and marl-eval's JSON; return their paths.

    Parameters
    ----------
    results
        The finished cells.
    failed
        The logs of what has failed, by name.
    """
    out = results.plan.out
    written = []
    for table in score_tables(results):
        for kind in ("md", "tex", "csv"):
            path = out / "tables" / f"{table.acting or 'agreement'}.{kind}"
            written.append(_write(path, to_text(table, kind)))
    returns = results.comparisons.get(RETURN)
    curves = {
        dataset: reports.figure_curves({dataset: found}, UNITS[results.metric(dataset)])
        for dataset, found in results.curves.items()
    }
    scores = reports.figure_comparison(returns) if returns else None
    figures = {out / "scores.svg": scores} if scores else {}
    figures |= {out / "curves" / f"{slug(x)}.svg": one for x, one in curves.items()}
    for path, figure in figures.items():
        reports.save(figure, path)
    written += [*figures, _write(out / tracking.MARL_EVAL_FILE, _marl_eval(results))]
    page = _page(results, failed or {}, scores, [*curves.values()])
    written.append(_write(out / "page.html", page))
    _remove_others(out, written)
    return written


def _remove_others(out: Path, written: Sequence[Path]) -> None:
    """Remove tables and figures of earlier results, such as those of a recipe that was changed.

    A list of what was written is kept, so that the user's own files beside them are not removed.
    """
    listed = out / _WRITTEN
    with suppress(FileNotFoundError, ValueError):
        for path in {out / name for name in json.loads(listed.read_text())} - {*written}:
            path.unlink(missing_ok=True)
    names = [path.relative_to(out).as_posix() for path in written]
    tracking.replace_file(listed, json.dumps(names, indent=1) + "\n")


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tracking.replace_file(path, text)
    return path


def _marl_eval(results: Results) -> str:
    """Return marl-eval's document of all cells: environment, dataset, method, seed, step."""
    whole: dict[str, Any] = {}
    for dataset, cells in results.cells.items():
        for method, cell in cells.items():
            for env, tasks in cell.get(tracking.MARL_EVAL_FILE, {}).items():
                for algorithms in tasks.values():
                    for name, runs in algorithms.items():
                        named = name.replace(cell[tracking.RUN_FILE]["program"], method, 1)
                        whole.setdefault(env, {}).setdefault(dataset, {})[named] = runs
    return tracking.to_json(whole)


def _page(results: Results, failed: Mapping[str, Path], scores: Any, curves: Sequence[Any]) -> str:
    returns = results.comparisons.get(RETURN)
    return pages.render(
        "benchmark.html",
        name=results.plan.name,
        planned=len(results.plan.cells),
        notes=[*notes(results, failed)],
        tables=[one for table in score_tables(results) for one in sections_of(table)],
        scores=scores,
        # Those over all datasets: normalised scores, and who beats whom.
        summaries=[*comparison_tables(returns)][len(returns.datasets) :] if returns else [],
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
    """Say what bold means, and name what is missing, failed or not comparable."""
    rows = [row for found in results.datasets.values() for row in found]
    fewest = min((row.runs for row in rows), default=ENOUGH_RUNS)
    if any(row.runs >= MIN_RUNS for row in rows):
        yield (
            "Bold (* in the terminal and on the page): the best method of a dataset, and every "
            "method whose probability of improvement over it has a 95% interval that is not "
            "entirely below one half."
        )
    if fewest < MIN_RUNS:
        yield (
            f"Intervals need at least {MIN_RUNS} seeds: a method with fewer is bold (* in the "
            "terminal and on the page) only if it has the highest score; if that method has fewer, "
            "no other one is bold."
        )
    if fewest < ENOUGH_RUNS:
        yield few_seeds("some cells", fewest)
    yield from _spreads(results)
    for comparison in results.comparisons.values():
        yield from about_pairs(comparison)
    if any(row.best for row in rows):
        explained = about_best(RETURN in results.comparisons)
        yield f"The best checkpoints are on the page and in the CSV. {explained}"
    for dataset, cells in results.cells.items():
        for method, cell in cells.items():
            if why := cell.get(tracking.PARTNERS_FILE, {}).get("refused"):
                yield f"{method} on {dataset} plays with no partner: {why}."
    for name, why in results.broken.items():
        yield f"{name} is empty in the tables: {why}."
    for name, log in failed.items():
        yield f"{name} failed: see {log}."
    if missing := [name for name in results.missing if name not in failed]:
        yield f"Not run, and empty in the tables: {', '.join(missing)}."
    yield from _differences(results.cells)


def _spreads(results: Results) -> Iterator[str]:
    """Say for each dataset how far the methods are apart on it."""
    for table in score_tables(results):
        by_dataset = zip(table.columns, zip(*table.rows.values(), strict=True), strict=True)
        found = {label: spread([row for row in rows if row]) for label, rows in by_dataset}
        if known := [f"{label} {value:.1f}" for label, value in found.items() if value is not None]:
            yield (
                f"Spread, {_WAYS[table.acting]}: {', '.join(known)}. It is the best method minus "
                "the worst, in mean widths of the intervals; below 2, a dataset hardly tells "
                "methods apart."
            )


def _differences(cells: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Name what the cells differ in beside their data and methods."""
    for label, found in cells.items():
        for what, of in (("data", _digest), ("environments", _environment)):
            if len({of(cell) for cell in found.values()}) > 1:
                named = ", ".join(f"{method} {of(cell)}" for method, cell in found.items())
                yield f"Do not compare the methods on {label}, whose {what} differ: {named}."
    every = [cell for found in cells.values() for cell in found.values()]
    code = Counter(str(cell.get("code") or "unknown")[:8] for cell in every)
    versions = Counter(str((cell["versions"] or {}).get("jax")) for cell in every)
    for what, counts in (("code of offmarl", code), ("versions of JAX", versions)):
        if len(counts) > 1:
            named = ", ".join(f"{name} ({n} cells)" for name, n in counts.most_common())
            yield f"The cells were made with different {what}: {named}."
    hardware = [cell["hardware"] or {} for cell in every]
    machines = {f"{one.get('device')}, {one.get('processor')}" for one in hardware}
    if len(machines) > 1:
        yield f"The cells ran on different machines: {'; '.join(sorted(machines))}."


def _digest(cell: Mapping[str, Any]) -> str:
    return str(cell["digest"])[:8]
