"""Comparisons of runs, the figures of them and of datasets, and self-contained HTML pages.

Drawing needs matplotlib, which is imported when a figure is drawn and not before.
"""

from offmarl.report.comparison import (
    UNITS,
    Comparison,
    Estimate,
    compare,
    estimate,
    final_returns,
    last_metrics,
    metric_of,
    read_runs,
)
from offmarl.report.figures import figure_comparison, figure_demo, save

__all__ = [
    "UNITS",
    "Comparison",
    "Estimate",
    "compare",
    "estimate",
    "figure_comparison",
    "figure_demo",
    "final_returns",
    "last_metrics",
    "metric_of",
    "read_runs",
    "save",
]
