"""What commands do, for Python and notebooks: the same arguments, and objects as results."""

from collections.abc import Mapping
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from offmarl import errors, hub, report
from offmarl.cli.parse import run_program
from offmarl.config import Vaults
from offmarl.hub.card import references as recorded
from offmarl.report.comparison import ComparedRuns
from offmarl.report.pages import RunReport, describe_run
from offmarl.statistics import Reference
from offmarl.vault import Dataset, Mixture, list_vaults
from offmarl.vault.transform.episode_set import Subset


def list_datasets(
    directory: str | PathLike[str] = ".",
    *,
    remote: bool = False,
    env: str | None = None,
    agents: int | None = None,
) -> list[dict[str, Any]]:
    """Return the vaults below a directory, as ``offmarl ls`` lists them.

    With ``remote`` it returns the catalogue's cards whose names begin with ``directory``, and whose
    data `offmarl.load_dataset` downloads. ``env`` and ``agents`` select by the environment's name
    and the number of agents.

    Examples
    --------
    >>> [one["path"] for one in offmarl.list_datasets("vaults", agents=3)]
    """
    if remote:
        start = str(directory)
        return [asdict(card) for card in hub.cards("" if start == "." else start, env, agents)]
    vaults = list_vaults(directory, env, agents)
    return [{"path": path, **summary._asdict()} for path, summary in vaults]


def train(program: str, vault: Vaults | Dataset | Subset | Mixture, **options: Any) -> RunReport:
    """Train a baseline as ``offmarl train`` does, and return its run.

    The same call continues a run that was stopped. ``program`` is a name, or the path of a Python
    file; ``vault`` a path, the name of a pulled dataset, an open one, which is opened again, or a
    mapping of several to their shares; ``options`` are fields of the program's ``Args``.
    `OptionError` for an option that does not exist or is invalid; the other errors are those of
    `offmarl.programs.train`.

    Examples
    --------
    >>> run = offmarl.train("bc", "vaults/swarm/coverage-3.vlt/mappo-0-medium", seeds=5)
    >>> run.curves["policy_loss"].mean
    """
    if isinstance(vault, Subset | Mixture):
        raise errors.OptionError(
            f"vaults are read by their paths, and {vault!r} has none: give those of a mixture, and "
            "write parts to vaults of their own, as offmarl.vault.filter and split do."
        )
    values = {"vault": vault, **options}
    if isinstance(vault, Dataset):
        values = {"vault": str(vault.path), "time_limit": vault.time_limit, **options}
    return describe_run(run_program("baseline", program, values, f"train({program!r})"))


def compare(
    *runs: str | PathLike[str] | RunReport,
    references: Mapping[str, tuple[float, float]] | None = None,
    pool_settings: bool = False,
    baseline: str | None = None,
) -> ComparedRuns:
    """Compare runs as ``offmarl compare`` does; see `offmarl.report.compare_runs`.

    ``runs`` are directories, or what `train` returned; ``references`` the mean returns of random
    play and of an expert, by environment.

    Examples
    --------
    >>> print(offmarl.compare("runs/bc", "runs/maicq").latex())
    """
    paths = [run.directory if isinstance(run, RunReport) else Path(run) for run in runs]
    scales = {env: Reference(*ends) for env, ends in (references or {}).items()}
    return report.compare_runs(paths, recorded(), scales, pool_settings, baseline)
