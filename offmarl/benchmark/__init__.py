"""Benchmarks: every combination of datasets, baselines and seeds, from one file.

A plan is read from a TOML file, its cells are the blocks of tasks (`offmarl.launch`), and the
tables, figures and the page are made from one JSON file for each cell. ``offmarl benchmark`` runs
all of it.
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names

if TYPE_CHECKING:
    from offmarl.benchmark.cells import pack as pack
    from offmarl.benchmark.fit import require_fit as require_fit
    from offmarl.benchmark.plan import Cell as Cell, Plan as Plan, read_plan as read_plan
    from offmarl.benchmark.results import (
        Results as Results,
        notes as notes,
        read_results as read_results,
        score_tables as score_tables,
        spread as spread,
        write_results as write_results,
    )
    from offmarl.benchmark.tasks import CellsWork as CellsWork
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
