"""How the returns of a run are shown, by the verbs that train and evaluate."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float
from rich.console import Group

from offmarl.cli.output import Report, table
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

    ``more`` is what else was measured, by the heading for its mean.
    """
    rows = [
        {"seed": trained, "episodes": len(values), **spread(values)}
        | {name: float(found[trained].mean()) for name, found in (more or {}).items() if found}
        for trained, values in returns.items()
    ]
    iqm = estimate(np.array([values.mean() for values in returns.values()]))
    parts = [table(list(rows[0]), [row.values() for row in rows], title)]
    if len(rows) >= MIN_RUNS:
        parts.append(f"IQM over seeds [95% interval]: {interval(*iqm)}")
    elif len(rows) > 1:
        few = f"no interval below {MIN_RUNS} seeds"
        parts.append(f"IQM over seeds: {interval(*iqm)} ({few})")
    return Report({**about, "seeds": rows, "iqm": iqm._asdict()}, Group(*parts))
