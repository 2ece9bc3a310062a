"""Comparisons of runs and surveys of datasets, with tables, figures and HTML pages.

matplotlib is imported when the first figure is drawn.

>>> found = report.survey(vault.open_vault("coverage-3.vlt/expert"))
>>> found.returns.mean(), found.saco, found.windows(20)
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names

if TYPE_CHECKING:
    from offmarl.report.comparison import Comparison as Comparison
    from offmarl.report.comparison import Estimate as Estimate
    from offmarl.report.comparison import Row as Row
    from offmarl.report.comparison import compare as compare
    from offmarl.report.comparison import estimate as estimate
    from offmarl.report.contents import Survey as Survey
    from offmarl.report.contents import survey as survey
    from offmarl.report.curves import Curve as Curve
    from offmarl.report.curves import Curves as Curves
    from offmarl.report.curves import curves_of as curves_of
    from offmarl.report.curves import read_curves as read_curves
    from offmarl.report.figures import figure_comparison as figure_comparison
    from offmarl.report.figures import figure_curves as figure_curves
    from offmarl.report.figures import figure_demo as figure_demo
    from offmarl.report.figures import save as save
    from offmarl.report.run_scores import UNITS as UNITS
    from offmarl.report.run_scores import Data as Data
    from offmarl.report.run_scores import Entry as Entry
    from offmarl.report.run_scores import Runs as Runs
    from offmarl.report.run_scores import best_of_run as best_of_run
    from offmarl.report.run_scores import best_scores as best_scores
    from offmarl.report.run_scores import fault_of as fault_of
    from offmarl.report.run_scores import final_metrics as final_metrics
    from offmarl.report.run_scores import final_returns as final_returns
    from offmarl.report.run_scores import last_metrics as last_metrics
    from offmarl.report.run_scores import metric_of as metric_of
    from offmarl.report.run_scores import read_runs as read_runs
    from offmarl.report.run_scores import scores_of as scores_of
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
