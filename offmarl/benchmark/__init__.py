"""Benchmarks: every combination of datasets, baselines and seeds, from one file.

A plan is read from a TOML file, its cells run in processes of their own, and the tables, figures
and the page are made from one JSON file for each cell. ``offmarl benchmark`` runs all of it.
"""

from offmarl.benchmark.cells import pack
from offmarl.benchmark.plan import Cell, Plan, read_plan
from offmarl.benchmark.results import (
    Results,
    notes,
    read_results,
    rows_of,
    score_tables,
    write_results,
)
from offmarl.benchmark.running import Outcome, run_plan
from offmarl.benchmark.tasks import CellsWork

__all__ = [
    "Cell",
    "CellsWork",
    "Outcome",
    "Plan",
    "Results",
    "notes",
    "pack",
    "read_plan",
    "read_results",
    "rows_of",
    "run_plan",
    "score_tables",
    "write_results",
]
