"""The report on the returns of a run, for the verbs that train and evaluate."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float
from rich.console import Group

from offmarl.cli.output import Report, records
from offmarl.report import estimate
from offmarl.statistics import MIN_RUNS, spread
from offmarl.terminal import interval


def returns_report(
    title: str,
    about: Mapping[str, Any],
    returns: Mapping[int, Float[np.ndarray, "episodes"]],
    more: Mapping[str, Mapping[int, Float[np.ndarray, "episodes"]]] | None = None,
) -> Report:
    """Report the returns of the policies of a run's training seeds.

    ``more`` holds other metrics, by the key of their mean.
    """
    rows = [
        {"seed": trained, "episodes": len(values), **spread(values)}
        | {name: float(found[trained].mean()) for name, found in (more or {}).items() if found}
        for trained, values in returns.items()
    ]
    iqm = estimate(np.array([values.mean() for values in returns.values()]))
    parts = [records(rows, title)]
    if len(rows) >= MIN_RUNS:
        parts.append(f"IQM over seeds [95% interval]: {interval(*iqm)}")
    elif len(rows) > 1:
        few = f"intervals need at least {MIN_RUNS} seeds"
        parts.append(f"IQM over seeds: {interval(*iqm)} ({few})")
    return Report({**about, "seeds": rows, "iqm": iqm._asdict()}, Group(*parts))
