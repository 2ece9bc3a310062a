"""``offmarl report``: describe datasets, or a run."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Group
from rich.text import Text
from tyro.conf import Positional, arg

from offmarl.cli.output import Report, as_is, check_file
from offmarl.cli.parse import AT_LEAST_ONE, refuse_unused
from offmarl.errors import OptionError, ShapeError
from offmarl.report import pages, tables
from offmarl.report.contents import Survey, Surveys, survey, warnings_by_dataset
from offmarl.tracking import is_run, progress, refuse_benchmark, write_output
from offmarl.vault import Dataset
from offmarl.vault.dataset import open_vault
from offmarl.vault.read.open import place_of
from offmarl.vault.storage.files import errors_of


def report(
    vaults: Annotated[tuple[str, ...], Positional, arg(metavar="VAULT..."), AT_LEAST_ONE] = (),
    html: Path | None = None,
    env: str | None = None,
    time_limit: int | None = None,
) -> Report:
    """Describe datasets (figures, coverage, episodes) or a run.

    Parameters
    ----------
    vaults
        Vaults of any program, in directories, archives or buckets; a path that ends in .vlt stands
        for all the vaults in it. Or the directory of one run, or one cell of a benchmark, whose
        learning curves are shown.
    html
        Write a self-contained page here, with figures, and with animated episodes if the
        environment can play them again.
    env
        Environment that plays the episodes again; by default the one that each dataset was recorded
        in. Code of your own is given as path/to/file.py:FACTORY or package.module:FACTORY.
    time_limit
        For vaults of other programs that flag the time limit as a termination: the limit.
    """
    check_file(html, "--html", "page.html")
    if env and not html:
        raise OptionError("--env plays episodes again for a page: give --html, too.")
    if runs := [Path(path) for path in vaults if is_run(Path(path))]:
        refuse_unused("a run plays no episodes again", env=env, time_limit=time_limit is not None)
        return _run_report(runs, vaults, html)
    for vault in vaults:
        refuse_benchmark(Path(vault))
    datasets = [open_vault(path, time_limit=time_limit) for path in dict.fromkeys(_paths(vaults))]
    played_in = _environment(env, datasets) if env else None
    surveys = {name: survey(dataset, progress) for name, dataset in _by_name(datasets).items()}
    if len(vaults) == 1:  # one path may stand for several vaults: sort them by return
        surveys = dict(sorted(surveys.items(), key=lambda item: _mean_return(item[1])))
    if html:
        write_output(html, pages.dataset_page(surveys, played_in))
    return Report(
        {"vaults": {name: entry.data() for name, entry in surveys.items()}, "page": html},
        Group(*_view(surveys), *([f"wrote {html}"] if html else [])),
    )


def _run_report(runs: Sequence[Path], paths: Sequence[str], html: Path | None) -> Report:
    """Describe a run: where its arguments came from, and its learning curves."""
    if len(paths) > 1:
        raise OptionError(
            f"report describes vaults or a single run: give {runs[0]} alone, or compare runs with "
            "`offmarl compare`."
        )
    described = pages.describe_run(runs[0])
    if html:
        write_output(html, pages.run_page(described))
    parts = [*described.sections(), *map(as_is, described.notes())]
    data = {"run": runs[0], "record": described.record, "page": html, "notes": described.notes()}
    data |= {"curves": {name: curve.data() for name, curve in described.curves.items()}}
    return Report(data, Group(*parts, *([f"wrote {html}"] if html else [])))


def _paths(paths: Iterable[str]) -> Iterator[Any]:
    """Yield the paths of vaults; a path that contains vaults stands for them."""
    for path in paths:
        location = place_of(path)
        with errors_of(location.path):
            inside = [] if location.is_vault() else location.vaults()
        yield from inside or [location.path]


def _by_name(vaults: Sequence[Dataset]) -> dict[str, Dataset]:
    """Give each vault its shortest distinguishing name."""
    if len(vaults) > 1 and len({vault.name for vault in vaults}) == 1:
        names = [vault.uid for vault in vaults]
    else:
        names = [f"{vault.name}/{vault.uid}" for vault in vaults]
    if len(set(names)) < len(vaults):
        names = [str(vault.path) for vault in vaults]
    return dict(zip(names, vaults, strict=True))


def _environment(name: str, vaults: Iterable[Dataset]) -> Any:
    """Make the environment that the user named, for all vaults."""
    from offmarl import envs  # imports JAX

    env = envs.make(name)
    for vault in vaults:
        if difference := vault.spec.difference(env.spec, extras=False):
            raise ShapeError(
                f"{vault.path} and {name} differ in {difference}: give the environment that the "
                "dataset was recorded in."
            )
    return env


def _mean_return(entry: Survey) -> float:
    """Return the mean return of the first team, by which datasets are sorted."""
    mean = next(iter(entry.episodes.mean_returns.values()))
    return -np.inf if mean is None else mean


def _view(surveys: Surveys) -> Iterator[Any]:
    yield tables.glance(surveys)
    yield tables.rewards(surveys)
    yield from tables.actions(surveys)
    yield tables.coverage(surveys)
    if warnings := warnings_by_dataset(surveys):
        yield Text("Warnings", style="bold")
        yield from (Text(f"  {name}: {text}" if name else f"  {text}") for name, text in warnings)
