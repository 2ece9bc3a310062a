"""The results of a benchmark: tables for a paper, curves, profiles and a page.

A method is bold on a dataset if it may be the best one there: the 95% interval of the probability
that one of its runs beats a run of the best method (the one with the highest interquartile mean)
is not entirely below one half. With fewer seeds than an interval needs, only the best method is
bold.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from offmarl import __version__, statistics, tracking
from offmarl import report as reports
from offmarl.benchmark.cells import is_current
from offmarl.benchmark.plan import Plan, slug
from offmarl.benchmark.tasks import cell_file
from offmarl.errors import RunError
from offmarl.hub.card import references
from offmarl.report import page
from offmarl.report.comparison import Comparison, about_best, few_seeds
from offmarl.report.curves import Curves
from offmarl.report.run_scores import UNITS, Entry, RunScores
from offmarl.report.tables import Section, comparison_tables
from offmarl.statistics import ENOUGH_RUNS, MIN_RUNS, Estimate, Reference
from offmarl.terminal import interval, number
from offmarl.tracking import RETURN, Acting

Kind = Literal["md", "tex", "csv"]

_SEED = 0  # of all bootstrap draws
_WRITTEN = "written.json"


class Score(NamedTuple):
    """A method on a dataset."""

    estimate: Estimate
    """Interquartile mean over the seeds."""
    runs: RunScores
    bold: bool
    """Whether it may be the best of the dataset."""
    best: Estimate | None = None
    """The same of the best checkpoint of each seed, which is online tuning; see
    `offmarl.report.best_scores`. None where it is unknown."""


class ScoreTable(NamedTuple):
    """Methods by datasets, of policies that acted in one way."""

    acting: Acting | None
    columns: list[str]
    """The datasets."""
    rows: dict[str, list[Score | None]]
    """Scores by method; None for a cell that was not run."""

    @property
    def title(self) -> str:
        """How the policies acted."""
        how = {"greedy": "best actions", "sampled": "sampled actions", None: "no environment"}
        return f"IQM over seeds [95% interval], {how[self.acting]}"


class Results(NamedTuple):
    """The finished cells of a benchmark."""

    plan: Plan
    files: dict[str, dict[str, Path]]
    """File of each finished cell, by the labels of dataset and method."""
    scores: dict[str, dict[Entry, RunScores]]
    """By dataset, and by method and way of acting."""
    best: dict[str, dict[Entry, RunScores]]
    """Scores of the best checkpoints, for the cells that were evaluated more than once."""
    metrics: dict[str, str]
    """The metric of each dataset's scores."""
    environments: dict[str, str]
    """The environment of each dataset's evaluations."""
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
    metrics, incomparable = {}, {}
    for label, found in files.items():
        try:
            metrics[label] = reports.metric_of(found.values())
        except RunError as error:
            incomparable[label] = str(error).removesuffix(".")
    for label, why in incomparable.items():
        done = files.pop(label)
        cells = (cell for cell in plan.cells if cell.data.label == label)
        broken |= {cell.label: why for cell in cells if cell.baseline.label in done}
    scores, best = (
        {
            label: {
                entry._replace(algorithm=method): runs
                for method, path in found.items()
                for entry, runs in of_run(path, metrics[label]).items()
            }
            for label, found in files.items()
        }
        for of_run in (reports.scores_of, reports.best_of_run)
    )
    environments = {
        label: _environment(next(iter(found.values()))) for label, found in files.items()
    }
    return Results(plan, files, scores, best, metrics, environments, broken)


def _environment(path: Path) -> str:
    run = tracking.read_run(path)
    return str(run["args"].get("env") or run["spec"]["name"])


# ---------------------------------------------------------------------------------- tables


def score_tables(results: Results) -> list[ScoreTable]:
    """Return the tables, that of the best actions first."""
    entries = [entry for found in results.scores.values() for entry in found]
    ways = [how for how in ("greedy", "sampled", None) if any(e.acting == how for e in entries)]
    return [_score_table(results, how) for how in ways]  # type: ignore[arg-type]


def _score_table(results: Results, acting: Acting | None) -> ScoreTable:
    columns = [
        label
        for label in results.plan.datasets
        if any(entry.acting == acting for entry in results.scores.get(label, {}))
        or label not in results.scores
    ]
    by_column = [
        _column(results.scores.get(label, {}), results.best.get(label, {}), acting)
        for label in columns
    ]
    rows = {method: [found.get(method) for found in by_column] for method in results.plan.baselines}
    return ScoreTable(acting, columns, rows)


def _column(
    scores: Mapping[Entry, RunScores], of_best: Mapping[Entry, RunScores], acting: Acting | None
) -> dict[str, Score]:
    """Return the scores of a dataset, by method."""
    runs, best_runs = (
        {entry.algorithm: own for entry, own in found.items() if entry.acting == acting}
        for found in (scores, of_best)
    )
    estimates = {method: reports.estimate(own) for method, own in runs.items()}
    if not runs:
        return {}
    best = max(estimates, key=lambda method: estimates[method].value)
    top = estimates[best].value
    return {
        method: Score(
            own,
            runs[method],
            own.value == top or _may_beat(runs[method], runs[best]),
            reports.estimate(best_runs[method]) if method in best_runs else None,
        )
        for method, own in estimates.items()
    }


def _may_beat(runs: RunScores, best: RunScores) -> bool:
    """Whether the probability of improvement over the best may be one half."""
    if min(len(runs), len(best)) < MIN_RUNS:
        return False
    _, high = statistics.bootstrap_interval(
        statistics.probability_of_improvement, runs[:, None], best[:, None], seed=_SEED
    )
    return bool(high >= 0.5)  # a probability above one half is no reason against it


def to_text(table: ScoreTable, kind: Kind) -> str:
    """Return a table in Markdown, LaTeX or CSV; cells that were not run are empty."""
    return {"md": _markdown, "tex": _latex, "csv": _csv}[kind](table)


def _markdown(table: ScoreTable) -> str:
    def cell(score: Score | None) -> str:
        if score is None:
            return ""
        return f"**{_words(score)}**" if score.bold else _words(score)

    lines = [["method", *table.columns], ["---"] + ["---:"] * len(table.columns)]
    lines += [[method, *map(cell, row)] for method, row in table.rows.items()]
    escaped = [[text.replace("|", "\\|") for text in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def rows_of(table: ScoreTable) -> list[list[str]]:
    """Return the rows as text, in which * stands for bold."""

    def cell(score: Score | None) -> str:
        return "" if score is None else _words(score) + (" *" if score.bold else "")

    return [[method, *map(cell, row)] for method, row in table.rows.items()]


def rows_of_best(table: ScoreTable) -> list[list[str]]:
    """Return the rows of the best checkpoints as text; empty if none is known."""
    known = [score.best for row in table.rows.values() for score in row if score is not None]
    if not any(known):
        return []
    return [
        [method, *(interval(*score.best) if score and score.best else "" for score in row)]
        for method, row in table.rows.items()
    ]


def _words(score: Score) -> str:
    return interval(*score.estimate)


def _latex(table: ScoreTable) -> str:
    """Return a table for the package booktabs."""

    def cell(score: Score | None) -> str:
        if score is None:
            return ""
        value, space, ends = _words(score).partition(" ")
        value = f"\\textbf{{{value}}}" if score.bold else value
        return f"{value} {{\\scriptsize {ends}}}" if space else value

    head = " & ".join(["", *map(_escaped, table.columns)])
    body = "".join(
        " & ".join([_escaped(method), *map(cell, row)]) + " \\\\\n"
        for method, row in table.rows.items()
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
    writer.writerow([*head, *(f"best_checkpoint_{name}" for name in ("iqm", "low", "high"))])
    for method, row in table.rows.items():
        for dataset, score in zip(table.columns, row, strict=True):
            start = [dataset, method, table.acting or ""]
            if score is None:
                writer.writerow([*start, *[""] * 9])
                continue
            known, best = (
                ["" if one is None else repr(float(one)) for one in estimate or [None] * 3]
                for estimate in (score.estimate, score.best)
            )
            runs = " ".join(repr(float(one)) for one in score.runs)
            writer.writerow([*start, len(score.runs), *known, int(score.bold), runs, *best])
    return file.getvalue()


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
    tables, (comparison, curves) = score_tables(results), (compared(results), read_curves(results))
    for table in tables:
        for kind in ("md", "tex", "csv"):
            path = out / "tables" / f"{table.acting or 'agreement'}.{kind}"
            written.append(_write(path, to_text(table, kind)))
    if comparison is not None:
        reports.save(reports.figure_comparison(comparison), out / "scores.svg")
        written.append(out / "scores.svg")
    for dataset, found in curves.items():
        path = out / "curves" / f"{slug(dataset)}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        reports.save(reports.figure_curves({dataset: found}, _unit(results, dataset)), path)
        written.append(path)
    written.append(_write(out / tracking.MARL_EVAL_FILE, tracking.to_json(_marl_eval(results))))
    body = _page(results, tables, comparison, curves, failed or {})
    written.append(_write(out / "page.html", page.document(results.plan.name, body)))
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


def _unit(results: Results, dataset: str) -> str:
    return UNITS[results.metrics[dataset]]


def compared(results: Results) -> Comparison | None:
    """Compare the methods by their returns on the datasets that have them; None if none has."""
    scores = {
        label: found for label, found in results.scores.items() if results.metrics[label] == RETURN
    }
    known = references()
    scales: dict[str, Reference] = {
        label: known[env] for label, env in results.environments.items() if env in known
    }
    return reports.compare(scores, scales) if scores else None


def read_curves(results: Results) -> Curves:
    """Return the learning curves, by dataset and method."""
    found: dict[str, Mapping[Entry, reports.Curve]] = {}
    for dataset, files in results.files.items():
        metric = results.metrics[dataset]
        entries = {}
        for method, path in files.items():
            acting = tracking.acting_of(tracking.read_run(path)) if metric == RETURN else None
            entries[Entry(method, acting)] = path
        found |= reports.read_curves({dataset: entries}, metric)
    return found


def _marl_eval(results: Results) -> dict[str, Any]:
    """Return marl-eval's document of all cells: environment, dataset, method, seed, step."""
    whole: dict[str, Any] = {}
    for dataset, files in results.files.items():
        for method, path in files.items():
            document = json.loads(path.read_text()).get(tracking.MARL_EVAL_FILE, {})
            program = tracking.read_run(path)["program"]
            for env, tasks in document.items():
                for algorithms in tasks.values():
                    for name, runs in algorithms.items():
                        named = name.replace(program, method, 1)
                        whole.setdefault(env, {}).setdefault(dataset, {})[named] = runs
    return whole


# ---------------------------------------------------------------------------------- page


def _page(
    results: Results,
    tables: Sequence[ScoreTable],
    comparison: Comparison | None,
    curves: Curves,
    failed: Mapping[str, Path],
) -> Iterator[str]:
    done = sum(map(len, results.files.values()))
    yield page.paragraph(f"{done} of {len(results.plan.cells)} cells are finished.")
    yield page.notes(("", note) for note in notes(results, failed))
    for table in tables:
        yield page.heading(table.title)
        yield page.table(["method", *table.columns], rows_of(table))
        if rows := rows_of_best(table):
            yield page.heading(f"{table.title}, of the best checkpoint of each seed")
            yield page.table(["method", *table.columns], rows)
    if comparison is not None:
        caption = "Scores, performance profiles and probabilities of improvement."
        yield page.image(reports.figure_comparison(comparison), caption)
        yield from map(page.section, _summaries(comparison))
    for dataset, found in curves.items():
        figure = reports.figure_curves({dataset: found}, _unit(results, dataset))
        yield page.image(figure, "Learning curves: mean over seeds. Bands: 95% intervals.")
    yield page.heading("Cells")
    columns = ["cell", "program", "seeds", "data digest", "seconds", "device", "jax"]
    yield page.table(columns, list(_cells(results)))
    yield page.paragraph(f"offmarl {__version__}.")


def _summaries(comparison: Comparison) -> Iterator[Section]:
    """Return the tables over all datasets: normalised scores, and who beats whom."""
    sections = list(comparison_tables(comparison))
    yield from sections[len(comparison.datasets) :]


def _cells(results: Results) -> Iterator[list[str]]:
    for dataset, files in results.files.items():
        for method, path in files.items():
            found = json.loads(path.read_text())
            yield [
                f"{method} on {dataset}",
                found[tracking.RUN_FILE]["program"],
                str(len(found["seeds"])),
                str(found["digest"] or "")[:12],
                number(found["seconds"]),
                str((found["hardware"] or {}).get("device", "")),
                str((found["versions"] or {}).get("jax", "")),
            ]


def notes(results: Results, failed: Mapping[str, Path]) -> Iterator[str]:
    """Say what bold means, and name what is missing, failed or not comparable."""
    seeds = {len(runs) for found in results.scores.values() for runs in found.values()}
    if seeds and max(seeds) >= MIN_RUNS:
        yield (
            "Bold (* on the page): the best method of a dataset, and every method whose "
            "probability of improvement over it has a 95% interval that is not entirely below one "
            "half."
        )
    if seeds and min(seeds) < MIN_RUNS:
        yield (
            f"Intervals need at least {MIN_RUNS} seeds: a method with fewer is bold (* on the page)"
            " only if it has the highest score, and so are the others if that method has fewer."
        )
    if seeds and min(seeds) < ENOUGH_RUNS:
        yield few_seeds("some cells", min(seeds))
    if any(results.best.values()):
        explained = about_best(RETURN in results.metrics.values())
        yield f"The best checkpoints are on the page and in the CSV. {explained}"
    for name, why in results.broken.items():
        yield f"{name} is empty in the tables: {why}."
    for name, log in failed.items():
        yield f"{name} failed: see {log}."
    if missing := [name for name in results.missing if name not in failed]:
        yield f"Not run, and empty in the tables: {', '.join(missing)}."
    yield from _differences(results.files)


def _differences(files: Mapping[str, Mapping[str, Path]]) -> Iterator[str]:
    """Name what the cells differ in beside their data and methods."""
    for label, found in files.items():
        for what, of in (("data", _digest), ("environments", _environment)):
            if len({of(path) for path in found.values()}) > 1:
                named = ", ".join(f"{method} {of(path)}" for method, path in found.items())
                yield f"Do not compare the methods on {label}, whose {what} differ: {named}."
    for what, of_cell in (("code of offmarl", _code), ("versions of JAX", _jax)):
        cells = [of_cell(path) for found in files.values() for path in found.values()]
        if len(counts := Counter(cells)) > 1:
            named = ", ".join(f"{name} ({n} cells)" for name, n in counts.most_common())
            yield f"The cells were made with different {what}: {named}."
    machines = {_machine(path) for found in files.values() for path in found.values()}
    if len(machines) > 1:
        yield f"The cells ran on different machines: {'; '.join(sorted(machines))}."


def _digest(path: Path) -> str:
    return str(json.loads(path.read_text())["digest"])[:8]


def _code(path: Path) -> str:
    return str(json.loads(path.read_text()).get("code") or "unknown")[:8]


def _jax(path: Path) -> str:
    return str((json.loads(path.read_text())["versions"] or {}).get("jax"))


def _machine(path: Path) -> str:
    found = json.loads(path.read_text())["hardware"] or {}
    return f"{found.get('device')}, {found.get('processor')}"
