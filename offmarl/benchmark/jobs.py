"""The commands of a plan: recordings and downloads of its datasets, and trainings of its cells.

Every command resumes: ``offmarl record``, ``pull`` or ``train``. So a stopped benchmark continues
where it stopped, and a cell that failed is tried again by the same command.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from offmarl import records, tracking
from offmarl.benchmark.cells import checksum, fingerprint, identity, is_current, sources
from offmarl.benchmark.plan import Cell, Data, Plan, Recipe, records_tiers, slug
from offmarl.errors import RunError
from offmarl.paths import local
from offmarl.vault import open_vault


class Job(NamedTuple):
    """A command."""

    name: str
    command: Sequence[str]
    """Arguments of ``offmarl``."""
    place: Path
    """Directory of its files."""
    config: str = ""
    """Content of its configuration file, if it has one."""

    def write_config(self) -> None:
        """Write the configuration file that the command names."""
        if self.config:
            self.place.mkdir(parents=True, exist_ok=True)
            tracking.replace_file(_config_file(self.place), self.config)


def cell_file(plan: Plan, cell: Cell) -> Path:
    """Return the file of a cell's result."""
    return plan.out / "cells" / f"{cell.slug}.json"


def run_of(plan: Plan, cell: Cell) -> Path:
    """Return the directory of a cell's run; with other options or data, it has another one."""
    content = identity(cell)
    if (data := fingerprint(cell)) is not None:
        content["fingerprint"] = data
    return plan.out / "runs" / f"{cell.slug}-{checksum(content)}" / "run"


def training(plan: Plan, cell: Cell, vault: str) -> Job:
    """Return the training of a cell on the vault of its dataset."""
    run, program = run_of(plan, cell), cell.baseline.program
    command = ["train", program, "--config", str(_config_file(run.parent)), "--out", str(run)]
    config = _config(program, {**cell.options, "vault": vault})
    return Job(cell.label, command, run.parent, config)


# ---------------------------------------------------------------------------------- datasets


def preparation(plan: Plan, data: Data) -> Job | None:
    """Return the recording or download that a dataset needs; None for a vault that exists."""
    if data.recipe is not None:
        return _recording(plan, data.recipe)
    assert data.vault is not None
    if _exists(data.vault):
        return None
    place = _place(plan, data.label, data.vault)
    return Job(data.label, ["pull", data.vault, "--json"], place)


def _recording(plan: Plan, recipe: Recipe) -> Job:
    options = dict(recipe.options)
    tiers = [one.tier for one in plan.datasets.values() if one.recipe is recipe]
    if records_tiers(recipe):
        options.setdefault("tiers", ",".join(dict.fromkeys(tiers)))
    config = _config(recipe.program, options)
    for name, code in sources(recipe.program, options).items():
        config += f"# {name}: {code}\n"  # with other code it is another recording
    place = _place(plan, recipe.name, config)
    command = ["record", recipe.program, "--config", str(_config_file(place))]
    command += ["--out", str(place / "vaults"), "--json"]
    return Job(f"record {recipe.name}", command, place, config)


def _place(plan: Plan, label: str, content: str) -> Path:
    """Return the directory of a dataset; with another content, it has another one."""
    return plan.out / "datasets" / f"{slug(label)}-{checksum(content)}"


def note_vaults(plan: Plan, job: Job, answer: Mapping[str, Any]) -> None:
    """Write down the vaults that a preparation made; its command answered with ``--json``."""
    vaults = _vaults_of(plan, job, answer)
    job.place.mkdir(parents=True, exist_ok=True)
    found = {"config": job.config, "vaults": {x: _shortened(y, job) for x, y in vaults.items()}}
    tracking.write_json(_note(job), tracking.plain(found))


def noted_vaults(job: Job) -> dict[str, str] | None:
    """Return the paths of the datasets that a preparation made, by label.

    None if it has not been run with its present arguments, or a vault is gone.
    """
    try:
        found = records.parse(_note(job).read_bytes(), str(_note(job)), RunError)
    except (FileNotFoundError, RunError):
        return None
    if not found.get("vaults") or found.get("config") != job.config:
        return None
    vaults = {label: str(local(job.place / path)) for label, path in found["vaults"].items()}
    return vaults if all(Path(path).exists() for path in vaults.values()) else None


def _note(job: Job) -> Path:
    return job.place / "vaults.json"


def _shortened(path: str, job: Job) -> str:
    """Return a path relative to a job's directory, which may be moved, if it is below it."""
    place, full = job.place, local(path)
    return str(full.relative_to(place) if full.is_relative_to(place) else full)


def _vaults_of(plan: Plan, job: Job, answer: Mapping[str, Any]) -> dict[str, str]:
    vaults = {}
    for data in plan.datasets.values():
        if data.recipe is not None and job.name == f"record {data.recipe.name}":
            tier = data.tier.partition("=")[0].strip()  # of a mixture, its name
            paths = [row["path"] for row in answer["vaults"] if row["tier"] == tier]
        elif data.label == job.name:
            paths = list(answer["paths"].values())
        else:
            continue
        if len(paths) != 1:
            raise RunError(f"{data.label} is {len(paths)} vaults, and must be one: {paths}")
        vaults[data.label] = str(paths[0])
    return vaults


def require_vaults(plan: Plan) -> None:
    """Raise `VaultError` if an unfinished cell needs a vault at a path where there is none."""
    for cell in plan.cells:
        if not is_current(cell, cell_file(plan, cell)):
            require_vault(cell)


def require_vault(cell: Cell) -> None:
    """Raise `VaultError` if a cell needs a vault at a path where there is none."""
    vault = cell.data.vault
    if vault and "://" not in vault and _exists(vault) and not local(vault).exists():
        open_vault(local(vault))  # names what is near


def _exists(vault: str) -> bool:
    """Whether a dataset is a path here, and not the name of one to pull."""
    place = local(vault)
    in_vault = any(part.endswith(".vlt") for part in place.parts)
    return place.exists() or "://" in vault or in_vault or vault.startswith((".", "/"))


# ---------------------------------------------------------------------------------- configurations


def _config_file(place: Path) -> Path:
    return place / "config.toml"


def _config(program: str, options: Mapping[str, Any]) -> str:
    named = {} if "/" in program or program.endswith(".py") else {"program": program}
    return tomli_w.dumps({**named, **options})
