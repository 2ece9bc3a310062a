"""The commands of a plan: recordings and downloads of its datasets, and trainings of its cells.

Every command resumes: ``offmarl record``, ``pull`` or ``train``. So a stopped benchmark continues
where it stopped, and a cell that failed is tried again by the same command.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from offmarl import tracking
from offmarl.benchmark.cells import checksum
from offmarl.benchmark.plan import Cell, Data, Plan, slug
from offmarl.errors import RunError
from offmarl.paths import local
from offmarl.programs.registry import load


class Job(NamedTuple):
    """A command."""

    name: str
    command: Sequence[str]
    """Arguments of ``offmarl``."""
    log: Path
    answer: Path | None = None
    """File for its standard output; None for the log."""
    cell: Cell | None = None


def cell_file(plan: Plan, cell: Cell) -> Path:
    """Return the file of a cell's result."""
    return plan.out / "cells" / f"{cell.slug}.json"


def preparation(plan: Plan, data: Data) -> Job | None:
    """Return the recording or download that a dataset needs; None for a vault that exists."""
    if data.vault is None:
        return _recording(plan, data)
    if _exists(data.vault):
        return None
    place = plan.out / "datasets" / slug(data.label)
    return Job(data.label, ["pull", data.vault, "--json"], _log(place), place / "answer.json")


def _recording(plan: Plan, data: Data) -> Job:
    recipe = plan.recipes[data.recipe]
    place = plan.out / "datasets" / slug(recipe.name)
    tiers = [one.tier for one in plan.datasets.values() if one.recipe == recipe.name]
    options = dict(recipe.options)
    if any(field.name == "tiers" for field in fields(load("recorder", recipe.program).Args)):
        options.setdefault("tiers", ",".join(dict.fromkeys(tiers)))
    config = _write_config(place, recipe.program, options)
    command = ["record", recipe.program, "--config", str(config)]
    command += ["--out", str(plan.out / "vaults"), "--json"]
    return Job(f"record {recipe.name}", command, _log(place), place / "answer.json")


def training(plan: Plan, cell: Cell, vault: str) -> Job:
    """Return the training of a cell on the vault of its dataset."""
    place = run_of(plan, cell).parent
    options = {**cell.options, "vault": vault}
    config = _write_config(place, cell.baseline.program, options)
    command = ["train", cell.baseline.program, "--config", str(config)]
    return Job(cell.label, [*command, "--out", str(place / "run")], _log(place), None, cell)


def run_of(plan: Plan, cell: Cell) -> Path:
    """Return the directory of a cell's run; with other options, it has another one."""
    return plan.out / "runs" / f"{cell.slug}-{checksum(cell)}" / "run"


def vaults_of(plan: Plan, job: Job, answer: Mapping[str, Any]) -> dict[str, str]:
    """Return the paths of the datasets that a preparation made, by label.

    Parameters
    ----------
    plan, job
        The plan, and one of its preparations.
    answer
        What its command printed with ``--json``.

    Raises
    ------
    RunError
        A dataset is not one vault.
    """
    vaults = {}
    for data in plan.datasets.values():
        if data.vault is None and job.name == f"record {data.recipe}":
            paths = [row["path"] for row in answer["vaults"] if row["tier"] == data.tier]
        elif data.label == job.name:
            paths = list(answer["paths"].values())
        else:
            continue
        if len(paths) != 1:
            raise RunError(f"{data.label} is {len(paths)} vaults, and must be one: {paths}")
        vaults[data.label] = str(paths[0])
    return vaults


def _exists(vault: str) -> bool:
    """Whether a dataset is a path here, and not the name of one to pull."""
    place = local(vault)
    return (
        place.exists() or "://" in vault or place.suffix == ".vlt" or vault.startswith((".", "/"))
    )


def _write_config(place: Path, program: str, options: dict[str, Any]) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    path = place / "config.toml"
    named = {} if "/" in program or program.endswith(".py") else {"program": program}
    tracking.replace_file(path, tomli_w.dumps({**named, **options}))
    return path


def _log(place: Path) -> Path:
    return place / "log.txt"
