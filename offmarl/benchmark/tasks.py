"""The datasets and cells of a plan as blocks, which tasks share.

A block records or downloads a dataset, or trains a cell. Each resumes, so that a stopped benchmark
continues where it stopped, and a cell that failed is tried again.
"""

import gc
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import jax
import tomli_w

from offmarl import records, tracking
from offmarl import report as reports
from offmarl.benchmark.cells import fingerprint, identity, is_current, pack, sources
from offmarl.benchmark.plan import Cell, Plan, PlanData, Recipe, is_users, records_tiers, slug
from offmarl.errors import NumericsError, RunError
from offmarl.hub import policies, pulling
from offmarl.launch import Share, Work, join_work, run_share
from offmarl.paths import local
from offmarl.programs import load_policy
from offmarl.programs.cross_play import CrossPlayWork, scores
from offmarl.programs.registry import Kind
from offmarl.terminal import number
from offmarl.vault import open_vault


class PlanJob(NamedTuple):
    """A recording or a download."""

    name: str
    place: Path
    """Directory of its files."""
    source: Recipe | str
    """A recipe with all of its options, or the name of a published dataset."""
    tiers: Mapping[str, str]
    """Tier of each of its datasets, by label; an empty text for a download."""
    config: str = ""
    """What a recording depends on."""


def cell_file(plan: Plan, cell: Cell) -> Path:
    """Return the file of a cell's result."""
    return plan.out / "cells" / f"{cell.slug}.json"


def run_of(plan: Plan, cell: Cell) -> Path:
    """Return the directory of a cell's run; with other options or data, it has another one."""
    content = identity(cell)
    if (data := fingerprint(cell.data.source)) is not None:
        content["fingerprint"] = data
    return plan.out / "runs" / f"{cell.slug}-{tracking.checksum(content)}" / "run"


# ---------------------------------------------------------------------------------- datasets


def preparation(plan: Plan, data: PlanData) -> PlanJob | None:
    """Return the recording or download that a dataset needs; None for a vault that exists."""
    if isinstance(data.source, Recipe):
        return _recording(plan, data.source)
    if _exists(data.source):
        return None
    place = _place(plan, data.label, data.source)
    return PlanJob(data.label, place, data.source, {data.label: ""})


def _recording(plan: Plan, recipe: Recipe) -> PlanJob:
    options = dict(recipe.options)
    tiers = {data.label: data.tier for data in plan.datasets.values() if data.source is recipe}
    if records_tiers(recipe):
        options.setdefault("tiers", ",".join(dict.fromkeys(tiers.values())))
    config = tomli_w.dumps({"program": recipe.program, **options})
    for name, code in sources(recipe.program, options).items():
        config += f"# {name}: {code}\n"  # with other code it is another recording
    place = _place(plan, recipe.name, config)
    complete = recipe._replace(options={**options, "out": str(place / "vaults")})
    return PlanJob(f"record {recipe.name}", place, complete, tiers, config)


def _place(plan: Plan, label: str, content: str) -> Path:
    """Return the directory of a dataset; with another content, it has another one."""
    return plan.out / "datasets" / f"{slug(label)}-{tracking.checksum(content)}"


def record_vaults(job: PlanJob, tier_paths: Sequence[tuple[str, str]]) -> None:
    """Record which dataset each vault of a preparation is, from the vaults' tiers and paths."""
    vaults = {}
    for label, tier in job.tiers.items():
        name = tier.partition("=")[0].strip()  # of a mixture, its name
        paths = [local(path) for other, path in tier_paths if other == name]
        if len(paths) != 1:
            found = ", ".join(map(str, paths))
            raise RunError(f"{label} is {len(paths)} vaults, and must be one: {found}")
        # Below the job's directory, which may be moved, a path is relative to it.
        inside = paths[0].is_relative_to(job.place)
        vaults[label] = paths[0].relative_to(job.place) if inside else paths[0]
    tracking.write_json(_vaults_file(job), {"config": job.config, "vaults": vaults})


def recorded_vaults(job: PlanJob) -> dict[str, str] | None:
    """Return the paths of the datasets that a preparation made, by label.

    None if it has not been run with its present arguments, or a vault is gone.
    """
    try:
        note = records.parse(_vaults_file(job).read_bytes(), str(_vaults_file(job)), RunError)
    except (FileNotFoundError, RunError):
        return None
    if not note.get("vaults") or note.get("config") != job.config:
        return None
    vaults = {label: str(local(job.place / path)) for label, path in note["vaults"].items()}
    return vaults if all(Path(path).exists() for path in vaults.values()) else None


def _vaults_file(job: PlanJob) -> Path:
    return job.place / "vaults.json"


def require_vault(vault: str) -> None:
    """Raise `VaultError` if a dataset is a vault at a path where there is none."""
    if "://" not in vault and _exists(vault) and not local(vault).exists():
        open_vault(local(vault))  # the error names similar paths


def _exists(vault: str) -> bool:
    """Whether a dataset is a path here, and not the name of one to pull."""
    if "://" in vault:
        return True
    place = local(vault)
    in_vault = any(part.endswith(".vlt") for part in place.parts)
    return place.exists() or in_vault or vault.startswith((".", "/"))


# ---------------------------------------------------------------------------------- blocks

Run = Callable[[Kind, str, Mapping[str, Any]], Any]
"""Runs a program with the options of a plan, and returns its result."""


class CellsWork(Work):
    """A benchmark: blocks that record or download datasets, and then one for each cell.

    A dataset is prepared if a cell without a result needs it.
    """

    goes_on = True
    hints: ClassVar[Mapping[str, str]] = {"plan": "datasets and methods in the plan"}

    def __init__(self, plan: Plan, run: Run):
        self.benchmark_plan, self._run = plan, run
        self._cells = plan.cells
        self._jobs: list[PlanJob] = []
        self._job_of: dict[str, int] = {}
        """The job that prepares a dataset, by the dataset's label."""
        for data in {cell.data.label: cell.data for cell in self._cells}.values():
            if (job := preparation(plan, data)) is not None:
                if job not in self._jobs:
                    self._jobs.append(job)
                self._job_of[data.label] = self._jobs.index(job)
        preparations_and_cells = len(self._jobs) + len(self._cells)
        super().__init__(f"benchmark {plan.name}", plan.out, {}, preparations_and_cells)
        # With another plan, a number is another cell.
        self.identity = {"plan": [self.label(block) for block in range(self.num_blocks)]}

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
        by_seed = reports.final_evaluation(path)[metric]
        means = [float(returns.mean()) for returns in by_seed.values()]
        return f"{reports.UNITS[metric]} {number(sum(means) / len(means))}"

    def needs(self, block: int) -> list[int]:
        """Return the block that prepares the dataset of a cell."""
        cell = self._cell(block)
        job = None if cell is None else self._job_of.get(cell.data.label)
        return [] if job is None else [job]

    def run(self, block: int) -> None:
        """Prepare a dataset, or train a cell and pack its result."""
        cell = self._cell(block)
        with _alone():
            if cell is None:
                job = self._jobs[block]
                record_vaults(job, self._made(job.source))
                return
            run, start = run_of(self.benchmark_plan, cell), time.monotonic()
            options = {**cell.options, "vault": self._vault(cell), "out": str(run)}
            self._run_in(run, "baseline", cell.baseline.program, options)
            seconds = time.monotonic() - start
            if cell.data.partners:
                tracking.write_json(run / tracking.PARTNERS_FILE, beside_partners(cell, run))
            pack(cell, run, cell_file(self.benchmark_plan, cell), seconds)

    def _run_in(self, place: Path, kind: Kind, program: str, options: Mapping[str, Any]) -> Any:
        """Run a program; start it anew if it was begun with another number of threads."""
        try:
            return self._run(kind, program, options)
        except NumericsError as error:
            tracking.notice(f"warning: {place} is removed and begun anew: {error}")
            shutil.rmtree(place)
            return self._run(kind, program, options)

    def _made(self, source: Recipe | str) -> list[tuple[str, str]]:
        """Record or download vaults; return their tiers, if they have some, and paths."""
        if isinstance(source, str):
            return [("", str(path)) for path in pulling.pull(source).paths.values()]
        out = Path(source.options["out"])
        recorded = self._run_in(out, "recorder", source.program, source.options).data
        return [(row["tier"], str(row["path"])) for row in recorded["vaults"]]

    def is_done(self, block: int) -> bool:
        """Whether a dataset is there, or a cell has its result."""
        cell = self._cell(block)
        if cell is None:
            return recorded_vaults(self._jobs[block]) is not None
        return is_current(cell, cell_file(self.benchmark_plan, cell))

    def missing(self) -> list[int]:
        """Return the cells without results, after the preparations that they need."""
        cells = [x for x in range(len(self._jobs), self.num_blocks) if not self.is_done(x)]
        preparations = sorted({need for cell in cells for need in self.needs(cell)})
        return [block for block in preparations if not self.is_done(block)] + cells

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
            vault = str(cell.data.source)
            require_vault(vault)
            return vault
        vaults = recorded_vaults(self._jobs[number])
        assert vaults is not None, "the block's needs are complete"
        return vaults[cell.data.label]


@contextmanager
def _alone() -> Iterator[None]:
    """Restore the environment variables after a program, and release JAX's memory.

    A program must not end the process, which may run others after it.
    """
    before, clear_caches = dict(os.environ), cast(Any, jax.clear_caches)  # which has no types
    try:
        yield
    except SystemExit as error:
        raise RunError(f"its program ended the process with exit code {error.code}.") from error
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        clear_caches()
        gc.collect()


def beside_partners(cell: Cell, run: Path) -> dict[str, Any]:
    """Return the mean returns of a run's policies beside the partners of its dataset.

    They are listed by way of acting. Policies that cannot have partners have the reason instead.
    """
    program = Path(cell.baseline.program) if is_users(cell.baseline.program) else None
    if load_policy(run, program=program).policy.joint:
        return {"refused": "its agents choose after one another, so none has a seat alone"}
    env = cell.options.get("env")  # where its other returns are from
    work = CrossPlayWork(
        [str(run)],
        [*map(policies.locate_players, cell.data.partners)],
        None if env in (None, "", "none") else str(env),
        programs=[program] if program else [],
    )
    run_share(work, Share(0, 1))
    join_work(work)
    names, of = [member.name for member in work.members], (work.scored, work.partners)
    return {
        way: [policy["cross_play"] for policy in scores(table[..., 0], names, *of)["policies"]]
        for way, table in work.tables().items()
    }
