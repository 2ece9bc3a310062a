"""``offmarl train``."""

from pathlib import Path

from offmarl.cli import programs
from offmarl.cli.output import Report
from offmarl.cli.returns import returns_report
from offmarl.report import UNITS, final_returns, metric_of
from offmarl.tracking import GREEDY_RETURN, MARL_EVAL_FILE


def train(arguments: list[str]) -> Report:
    """Train an offline baseline by name."""
    if not arguments or arguments[0] in ("-h", "--help"):
        return programs.overview("baseline", "offmarl train NAME --vault PATH ...")
    name, *rest = arguments
    run: Path = programs.run("baseline", name, rest)
    if not (run / MARL_EVAL_FILE).exists():
        return Report({"run": run}, f"{name} is trained, and was not evaluated: {run}")
    metric = metric_of([run])
    title = f"{name}, trained and evaluated in {run}: {UNITS[metric]}"
    greedy = final_returns(run, GREEDY_RETURN)
    return returns_report(title, {"run": run}, final_returns(run, metric), greedy)
