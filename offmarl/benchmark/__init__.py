"""Benchmarks: every combination of datasets, baselines and seeds, from one file.

A plan is read from a TOML file, its cells are the blocks of tasks (`offmarl.launch`), and the
tables, figures and the page are made from one JSON file for each cell. ``offmarl benchmark`` runs
all of it.
"""

from offmarl.benchmark.cells import pack
from offmarl.benchmark.fit import require_environments, require_fit
from offmarl.benchmark.plan import Cell, Plan, read_plan
from offmarl.benchmark.results import (
    Results,
    notes,
    read_results,
    rows_of,
    score_tables,
    write_results,
)
from offmarl.benchmark.tasks import CellsWork, require_vaults

__all__ = [
    "Cell",
    "CellsWork",
    "Plan",
    "Results",
    "notes",
    "pack",
    "read_plan",
    "read_results",
    "require_environments",
    "require_fit",
    "require_vaults",
    "rows_of",
    "score_tables",
    "write_results",
]
