"""``offmarl benchmark``: datasets x baselines x seeds, from one file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Group
from tyro.conf import Positional, arg

from offmarl.cli.output import Report, as_is, table
from offmarl.cli.parse import parse
from offmarl.errors import OptionError
from offmarl.launch import Work

if TYPE_CHECKING:
    from offmarl.benchmark import Plan


def benchmark(
    file: Annotated[str, Positional, arg(metavar="FILE.toml|NAME")],
    out: Path | None = None,
    jobs: int | None = None,
    dry_run: bool = False,
) -> Report:
    """Train baselines on datasets, and make tables, curves and a page.

    The same command continues after a stop, and tries cells again that have failed.

    Parameters
    ----------
    file
        The plan: datasets, baselines and options of their training; see the guide on benchmarks.
        first-hour, six and full are plans that come with offmarl.
    out
        Directory of the results; by default what the plan says, or runs/NAME.
    jobs
        Number of cells that run side by side; by default one for each core, or 1 on an accelerator.
    dry_run
        Run nothing: make the tables, the curves and the page of the cells that are finished, and
        list the others.
    """
    if jobs is not None and jobs < 1:
        raise OptionError(f"--jobs must be at least 1: got {jobs}.")
    from offmarl import benchmark as benchmarks  # takes a while to import

    return _results(benchmarks.read_plan(file, out), jobs, dry_run)


def _results(plan: "Plan", jobs: int | None, dry_run: bool) -> Report:
    """Run what is missing of a plan, unless it is a dry run, and make its tables."""
    from offmarl import benchmark as benchmarks

    outcome = benchmarks.Outcome(0, {}) if dry_run else benchmarks.run_plan(plan, jobs)
    results = benchmarks.read_results(plan)
    written = benchmarks.write_results(results, outcome.failed) if results.files else []
    found = benchmarks.score_tables(results)
    notes = list(benchmarks.notes(results, outcome.failed))
    shown = [table(["method", *one.columns], benchmarks.rows_of(one), one.title) for one in found]
    data = {
        "out": plan.out,
        "cells": len(plan.cells),
        "finished": sum(map(len, results.files.values())),
        "missing": results.missing,
        "failed": outcome.failed,
        "written": written,
        "notes": notes,
    }
    text = Group(
        *shown, *notes, as_is(f"\n{plan.out}: {data['finished']} of {data['cells']} cells")
    )
    return Report(data, text, sound=not outcome.failed)


def benchmark_work(verb: str, arguments: list[str], block_steps: int | None) -> Work:
    """Return the work of a benchmark, from its arguments."""
    from offmarl import benchmark as benchmarks

    if block_steps is not None:
        raise OptionError("--block-steps divides data: a benchmark is divided by its cells.")
    options = parse(_plan_of, verb, "", arguments)
    return benchmarks.CellsWork(options, _call)


def _plan_of(
    file: Annotated[Path, Positional, arg(metavar="FILE.toml")], out: Path | None = None
) -> Any:
    """Read a plan."""
    from offmarl import benchmark as benchmarks

    return benchmarks.read_plan(file, out)


def _call(command: Sequence[str]) -> Mapping[str, Any]:
    """Run a command in this process."""
    from offmarl.cli.hub import pull
    from offmarl.cli.programs import record, train

    verb, *arguments = (one for one in command if one != "--json")
    if verb == "pull":
        return parse(pull, verb, "", arguments).data
    return {"record": record, "train": train}[verb](arguments).data


def report_benchmark(work: Work, fresh: bool) -> Report:
    """Make the tables, curves and the page of a benchmark that tasks ran."""
    from offmarl.benchmark import CellsWork

    del fresh
    assert isinstance(work, CellsWork)
    return _results(work.benchmark_plan, None, dry_run=True)
