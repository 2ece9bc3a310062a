"""The datasets and cells of a plan as blocks, which tasks share.

A block is a command: a recording or download of a dataset, or the training of a cell. Every command
resumes, so that a stopped benchmark continues where it stopped, and a cell that failed is tried
again by the same command.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from offmarl import records, tracking
from offmarl import report as reports
from offmarl.benchmark.cells import checksum, fingerprint, identity, is_current, pack, sources
from offmarl.benchmark.plan import Cell, Data, Plan, Recipe, is_users, records_tiers, slug
from offmarl.errors import RunError
from offmarl.launch import Work
from offmarl.paths import local
from offmarl.programs import load_policy
from offmarl.terminal import number
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
    place, vaults = job.place, {}
    for label, path in _vaults_of(plan, job, answer).items():
        full = local(path)  # relative to the job's directory, which may be moved, if it is below it
        vaults[label] = str(full.relative_to(place) if full.is_relative_to(place) else full)
    place.mkdir(parents=True, exist_ok=True)
    tracking.write_json(_note(job), tracking.plain({"config": job.config, "vaults": vaults}))


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


# ---------------------------------------------------------------------------------- blocks

Call = Callable[[Sequence[str]], Mapping[str, Any]]
"""Runs a command of offmarl in this process, and returns what it prints with ``--json``."""


class CellsWork(Work):
    """A benchmark: blocks that record or download datasets, and then one for each cell.

    A dataset is prepared if a cell without a result needs it.
    """

    goes_on = True

    def __init__(self, plan: Plan, call: Call):
        self.benchmark_plan, self._call = plan, call
        self._cells = plan.cells
        self._jobs: list[Job] = []
        self._job_of: dict[str, int] = {}
        """The job that prepares a dataset, by the dataset's label."""
        for data in {cell.data.label: cell.data for cell in self._cells}.values():
            if (job := preparation(plan, data)) is not None:
                if job not in self._jobs:
                    self._jobs.append(job)
                self._job_of[data.label] = self._jobs.index(job)
        super().__init__(f"benchmark {plan.name}", plan.out, {})

    @property
    def num_blocks(self) -> int:
        """Number of preparations and cells."""
        return len(self._jobs) + len(self._cells)

    def label(self, block: int) -> str:
        """Return the name of a dataset, or of a cell."""
        cell = self._cell(block)
        return self._jobs[block].name if cell is None else cell.label

    def result(self, block: int) -> str:
        """Return the mean score of a cell over its seeds."""
        if (cell := self._cell(block)) is None:
            return ""
        path = cell_file(self.benchmark_plan, cell)
        try:
            metric = reports.metric_of([path])
        except RunError as error:
            return str(error)
        found = reports.final_evaluation(path)[metric]
        scores = [float(own.mean()) for own in found.values()]
        return f"{reports.UNITS[metric]} {number(sum(scores) / len(scores))}"

    def needs(self, block: int) -> list[int]:
        """Return the block that prepares the dataset of a cell."""
        cell = self._cell(block)
        found = None if cell is None else self._job_of.get(cell.data.label)
        return [] if found is None else [found]

    def run(self, block: int) -> None:
        """Prepare a dataset, or train a cell and pack its result."""
        cell = self._cell(block)
        if cell is None:
            note_vaults(self.benchmark_plan, job := self._jobs[block], self._run(job))
            return
        begun = time.monotonic()
        self._run(training(self.benchmark_plan, cell, self._vault(cell)))
        seconds = time.monotonic() - begun
        if cell.data.partners:
            self._play_with_partners(cell, run_of(self.benchmark_plan, cell))
        pack(cell, run_of(self.benchmark_plan, cell), cell_file(self.benchmark_plan, cell), seconds)

    def _play_with_partners(self, cell: Cell, run: Path) -> None:
        """Write the returns of a run's policies beside the partners of its dataset."""
        program = cell.baseline.program
        given = ["--program", program] if is_users(program) else []
        found: dict[str, Any]
        if load_policy(run, program=program if given else None).policy.joint:
            found = {"refused": "its agents choose after one another, so none has a seat alone"}
        else:
            if (env := cell.options.get("env")) not in (None, "", "none"):
                given += ["--env", str(env)]  # where its other returns are from
            command = ["cross-play", str(run), "--partners", *cell.data.partners, *given, "--json"]
            table = self._call(command)
            ways = [way for way in tracking.OTHER_RETURN if way in table]
            found = {way: [one["cross_play"] for one in table[way]["policies"]] for way in ways}
        tracking.write_json(run / tracking.PARTNERS_FILE, found)

    def _run(self, job: Job) -> Mapping[str, Any]:
        if job.config:
            job.place.mkdir(parents=True, exist_ok=True)
            tracking.replace_file(_config_file(job.place), job.config)
        try:
            return self._call(job.command)
        except SystemExit as error:  # of a program, which must not end the other cells
            raise RunError(f"its program ended the process with exit code {error.code}.") from error

    def is_done(self, block: int) -> bool:
        """Whether a dataset is there, or a cell has its result."""
        cell = self._cell(block)
        if cell is None:
            return noted_vaults(self._jobs[block]) is not None
        return is_current(cell, cell_file(self.benchmark_plan, cell))

    def missing(self) -> list[int]:
        """Return the cells without results, after the preparations that they need."""
        cells = [one for one in range(len(self._jobs), self.num_blocks) if not self.is_done(one)]
        needed = sorted({need for cell in cells for need in self.needs(cell)})
        return [block for block in needed if not self.is_done(block)] + cells

    def plan(self, tasks: int | None) -> dict[str, Any]:
        """Return the numbers of cells and datasets."""
        return super().plan(tasks) | {
            "cells": len(self._cells),
            "datasets": len(self.benchmark_plan.datasets),
            "missing cells": sum(block >= len(self._jobs) for block in self.missing()),
        }

    def _cell(self, block: int) -> Cell | None:
        """Return the cell of a block; None for a preparation."""
        return None if block < len(self._jobs) else self._cells[block - len(self._jobs)]

    def _vault(self, cell: Cell) -> str:
        number = self._job_of.get(cell.data.label)
        if number is None:
            require_vault(cell)
            assert cell.data.vault is not None
            return cell.data.vault
        found = noted_vaults(self._jobs[number])
        assert found is not None, "the block's needs are complete"
        return found[cell.data.label]
