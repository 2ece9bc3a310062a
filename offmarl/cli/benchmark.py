"""``offmarl benchmark``: datasets x baselines x seeds, from one file."""

from pathlib import Path
from typing import Annotated

from rich.console import Group
from tyro.conf import Positional, arg

from offmarl.cli.output import Report, as_is, table
from offmarl.errors import OptionError


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

    plan = benchmarks.read_plan(file, out)
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
