"""How the returns of a run are shown, by the verbs that train and evaluate."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float
from rich.console import Group

from offmarl.cli.output import Report, interval, spread, table
from offmarl.report import estimate


def returns_report(
    title: str,
    about: Mapping[str, Any],
    returns: Mapping[int, Float[np.ndarray, "episodes"]],
    greedy: Mapping[int, Float[np.ndarray, "episodes"]] | None = None,
) -> Report:
    """Report the returns of the policies of a run's training seeds.

    ``greedy`` are the returns of their best actions, where they do not act by those anyway.
    """
    rows = [
        {"seed": trained, "episodes": len(values), **spread(values)}
        | ({"greedy mean": float(greedy[trained].mean())} if greedy else {})
        for trained, values in returns.items()
    ]
    iqm = estimate(np.array([values.mean() for values in returns.values()]))
    view = Group(
        table(list(rows[0]), [row.values() for row in rows], title),
        f"IQM over seeds [95% interval]: {interval(*iqm)}",
    )
    return Report({**about, "seeds": rows, "iqm": iqm._asdict()}, view)
