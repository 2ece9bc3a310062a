"""Comparisons of runs and surveys of datasets, with tables, figures and HTML pages.

matplotlib is imported when the first figure is drawn.

>>> found = report.survey(vault.open_vault("coverage-3.vlt/expert"))
>>> found.returns.mean(), found.saco, found.windows(20)
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_getattr
from offmarl.report.comparison import Comparison, Row, compare, estimate
from offmarl.report.curves import Curve, Curves, curves_of, read_curves
from offmarl.report.figures import figure_comparison, figure_curves, figure_demo, save
from offmarl.report.run_scores import (
    UNITS,
    Data,
    Entry,
    Runs,
    best_of_run,
    best_scores,
    fault_of,
    final_metrics,
    final_returns,
    last_metrics,
    metric_of,
    read_runs,
    scores_of,
)

if TYPE_CHECKING:
    from offmarl.report.contents import Survey, survey

__all__ = [
    "UNITS",
    "Comparison",
    "Curve",
    "Curves",
    "Data",
    "Entry",
    "Row",
    "Runs",
    "Survey",
    "best_of_run",
    "best_scores",
    "compare",
    "curves_of",
    "estimate",
    "fault_of",
    "figure_comparison",
    "figure_curves",
    "figure_demo",
    "final_metrics",
    "final_returns",
    "last_metrics",
    "metric_of",
    "read_curves",
    "read_runs",
    "save",
    "scores_of",
    "survey",
]

if not TYPE_CHECKING:  # comparing runs does not need vaults, which take a while to import
    __getattr__ = lazy_getattr(
        __name__, {name: f"offmarl.report.contents:{name}" for name in ("Survey", "survey")}
    )


def __dir__() -> list[str]:
    return sorted(__all__)
