"""``offmarl train``."""

from pathlib import Path

from offmarl.cli import programs
from offmarl.cli.output import Report
from offmarl.cli.returns import returns_report
from offmarl.report import UNITS, final_returns, metric_of
from offmarl.tracking import (
    AGREEMENT,
    GREEDY_RETURN,
    LOG_LIKELIHOOD,
    MARL_EVAL_FILE,
    RETURN,
    acting_of,
    labelled,
    read_run,
)

_MORE = {
    GREEDY_RETURN: "greedy_mean",
    AGREEMENT: "agreement",
    LOG_LIKELIHOOD: "log_prob",
}
"""What is shown beside what a run is compared by: metric to heading."""


def train(arguments: list[str]) -> Report:
    """Train an offline baseline on a vault."""
    if not arguments or arguments[0] in ("-h", "--help"):
        return programs.overview("baseline", "offmarl train NAME --vault PATH ...")
    name, *rest = arguments
    run: Path = programs.run("baseline", name, rest)
    if not (run / MARL_EVAL_FILE).exists():
        view = f"{name} is trained but not evaluated (no environment, no held-out data): {run}"
        return Report({"run": run}, view)
    metric = metric_of([run])
    unit = UNITS[metric]
    if metric == RETURN:
        unit = labelled(unit, acting_of(read_run(run)))
    title = f"{name}, trained and evaluated in {run}: {unit}"
    more = {head: final_returns(run, other) for other, head in _MORE.items() if other != metric}
    return returns_report(title, {"run": run}, final_returns(run, metric), more)
