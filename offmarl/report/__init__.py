"""Comparisons of runs and surveys of datasets, with tables, figures and HTML pages.

matplotlib is imported when the first figure is drawn.

>>> contents = report.survey(vault.open_vault("coverage-3.vlt/expert"))
>>> contents.returns.mean(), contents.saco, contents.windows(20)
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names

if TYPE_CHECKING:
    from offmarl.report.comparison import (
        ComparedRuns as ComparedRuns,
        Comparison as Comparison,
        Row as Row,
        compare as compare,
        compare_runs as compare_runs,
        estimate as estimate,
    )
    from offmarl.report.contents import Survey as Survey, survey as survey
    from offmarl.report.curves import (
        Curve as Curve,
        Curves as Curves,
        curves_of as curves_of,
        read_curves as read_curves,
    )
    from offmarl.report.figures import (
        figure_comparison as figure_comparison,
        figure_curves as figure_curves,
        figure_demo as figure_demo,
        save as save,
    )
    from offmarl.report.run_scores import (
        UNITS as UNITS,
        ComparedData as ComparedData,
        Entry as Entry,
        DatasetResult as DatasetResult,
        Runs as Runs,
        best_scores as best_scores,
        fault_of as fault_of,
        final_evaluation as final_evaluation,
        metric_of as metric_of,
        read_runs as read_runs,
        require_scores as require_scores,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
