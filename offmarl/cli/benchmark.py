"""``offmarl benchmark``: datasets x baselines x seeds, from one file."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.console import Group
from tyro.conf import Positional, arg

from offmarl import benchmark as benchmarks
from offmarl import tracking
from offmarl.cli.output import Report, as_is
from offmarl.cli.parse import run_program
from offmarl.cli.tasks import Divided
from offmarl.errors import OffmarlError


def benchmark(
    file: Annotated[str, Positional, arg(metavar="FILE.toml|NAME")],
    out: Path | None = None,
    take_over: bool = False,
) -> Divided:
    """Train baselines on datasets, and make tables, curves and a page.

    The same command continues after a stop, and tries cells again that have failed. --dry-run runs
    nothing: it makes the tables, the curves and the page of the cells that are finished, and lists
    the others.

    Parameters
    ----------
    file
        The plan: datasets, baselines and options of their training; see the guide on benchmarks.
        first-hour, six and full are plans that come with offmarl.
    out
        Directory of the results; by default what the plan says, or runs/NAME.
    take_over
        Go on although a process of another machine has not released the benchmark. Do so only if
        that process has ended.
    """
    from offmarl.programs.runs.compiling import use_cores

    plan = benchmarks.read_plan(file, out)
    use_cores(_devices_of(plan), "map")
    work = benchmarks.CellsWork(plan, run_program)
    before = partial(_checked, plan)
    return Divided(work, lambda launched: _results(plan, launched.failed), before, take_over)


def _checked(plan: "benchmarks.Plan", dry_run: bool) -> Report | None:
    """Check a plan before it is launched; for ``--dry-run``, report the finished cells."""
    import jax

    config: Any = jax.config
    config.update("jax_platforms", "cpu")  # an accelerator's memory is for the cells' processes
    try:
        benchmarks.require_fit(plan)
    except OffmarlError as error:
        if not dry_run:
            raise
        tracking.notice(f"warning: {error}")
    return _results(plan, {}) if dry_run else None


def _results(plan: "benchmarks.Plan", failed: Mapping[str, Path]) -> Report:
    """Make the tables of the finished cells; ``failed`` has the logs of cells that failed."""
    results = benchmarks.read_results(plan)
    written = benchmarks.write_results(results, failed) if results.files else []
    notes = list(benchmarks.notes(results, failed))
    data = {
        "out": plan.out,
        "cells": len(plan.cells),
        "finished": sum(map(len, results.files.values())),
        "missing": results.missing,
        "failed": failed,
        "written": written,
        "notes": notes,
    }
    text = Group(
        *benchmarks.score_tables(results),
        *notes,
        as_is(f"\n{plan.out}: {data['finished']} of {data['cells']} cells"),
    )
    return Report(data, text, sound=not failed)


def _devices_of(plan: "benchmarks.Plan") -> int:
    """Return how many devices a CPU is split into, once for all cells of a process.

    The bits of seeds under `jax.vmap` depend on that number, so only ``--devices`` splits then.
    """
    options = [cell.options for cell in plan.cells]
    by_seed = all(args.get("batching") != "vmap" for args in options)
    counts = [args.get("devices") or (args.get("seeds", 1) if by_seed else 1) for args in options]
    return max(counts, default=1)
