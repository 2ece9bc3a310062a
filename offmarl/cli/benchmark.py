"""``offmarl benchmark``: datasets x baselines x seeds, from one file."""

import gc
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Group
from tyro.conf import Positional, arg

from offmarl import tracking
from offmarl.cli import tasks
from offmarl.cli.output import Report, as_is
from offmarl.cli.parse import parse
from offmarl.errors import OffmarlError, OptionError, VaultError
from offmarl.launch import Launched, Work

if TYPE_CHECKING:
    from offmarl.benchmark import Plan


_ABOUT = """\
Train baselines on datasets, and make tables, curves and a page. The same command continues after \
a stop, and tries cells again that have failed. --dry-run runs nothing: it makes the tables, the \
curves and the page of the cells that are finished, and lists the others.

Example: offmarl benchmark plan.toml --jobs 2"""


def benchmark(arguments: list[str]) -> Report:
    """Train baselines on datasets, and make tables, curves and a page."""
    options, rest = tasks.split(arguments)
    options = options or tasks.TaskOptions()
    if options.task is not None or options.join:
        return tasks.run("benchmark", rest, options, report_benchmark)
    found = parse(Options, "benchmark", _ABOUT, rest, tasks.TaskOptions)
    import jax

    from offmarl import benchmark as benchmarks  # takes a while to import

    config: Any = jax.config
    config.update("jax_platforms", "cpu")  # an accelerator's memory is for the cells' processes
    plan = benchmarks.read_plan(found.file, found.out)
    checks = benchmarks.require_vaults, benchmarks.require_environments, benchmarks.require_fit
    for check in checks:
        try:
            check(plan)
        except OffmarlError as error:
            # A vault that fails concerns its own cells only.
            if not (options.dry_run or isinstance(error, VaultError)):
                raise
            tracking.notice(f"warning: {error}")
    if options.dry_run:
        return _results(plan, {})
    return tasks.run("benchmark", rest, options, report_benchmark, found.take_over)


@dataclass(frozen=True)
class Options:
    """Options of a benchmark."""

    file: Annotated[str, Positional, arg(metavar="FILE.toml|NAME")]
    """The plan: datasets, baselines and options of their training; see the guide on benchmarks.
    first-hour, six and full are plans that come with offmarl."""
    out: Path | None = None
    """Directory of the results; by default what the plan says, or runs/NAME."""
    take_over: bool = False
    """Go on although a process of another machine has not released the benchmark. Do so only if
    that process has ended."""


def report_benchmark(work: Work, launched: Launched) -> Report:
    """Make the tables, curves and the page of a benchmark that tasks ran."""
    from offmarl.benchmark import CellsWork

    assert isinstance(work, CellsWork)
    return _results(work.benchmark_plan, launched.failed)


def _results(plan: "Plan", failed: Mapping[str, Path]) -> Report:
    """Make the tables of the cells that are finished; ``failed`` has the logs of others."""
    from offmarl import benchmark as benchmarks

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


def benchmark_work(verb: str, arguments: list[str], block_steps: int | None) -> Work:
    """Return the work of a benchmark, from its arguments."""
    from offmarl import benchmark as benchmarks
    from offmarl.programs.runs.compiling import use_cores

    if block_steps is not None:
        raise OptionError("--block-steps divides data: a benchmark is divided by its cells.")
    found = parse(Options, verb, "", arguments)
    plan = benchmarks.read_plan(found.file, found.out)
    use_cores(_devices_of(plan), "map")
    return benchmarks.CellsWork(plan, _call)


def _devices_of(plan: "Plan") -> int:
    """Return how many devices a CPU is split into, once for all cells of a process.

    The bits of seeds under `jax.vmap` depend on that number, so only ``--devices`` splits then.
    """
    options = [cell.options for cell in plan.cells]
    by_seed = all(one.get("batching") != "vmap" for one in options)
    wanted = [one.get("devices") or (one.get("seeds", 1) if by_seed else 1) for one in options]
    return max(wanted, default=1)


def _call(command: Sequence[str]) -> Mapping[str, Any]:
    """Run a command in this process, which may run others after it."""
    from offmarl.cli import run_verb

    verb, *arguments = (one for one in command if one != "--json")
    sys.stdout.write(f"$ offmarl {shlex.join([verb, *arguments])}\n")
    with _alone():
        report = run_verb(verb, arguments)
    found: Mapping[str, Any] = json.loads(tracking.to_json(report.data))
    return found


@contextmanager
def _alone() -> Iterator[None]:
    """Restore the environment variables after a command, and release JAX's memory."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        if "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
        gc.collect()
