"""The datasets and cells of a plan as blocks, which tasks share."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offmarl.benchmark.cells import is_current, pack
from offmarl.benchmark.jobs import (
    Job,
    cell_file,
    note_vaults,
    noted_vaults,
    preparation,
    require_vault,
    run_of,
    training,
)
from offmarl.benchmark.plan import Cell, Plan
from offmarl.errors import RunError
from offmarl.launch import Work

Call = Callable[[Sequence[str]], Mapping[str, Any]]
"""Runs a command of offmarl in this process, and returns what it prints with ``--json``."""


class CellsWork(Work):
    """A benchmark: blocks that record or download datasets, and then one for each cell.

    A dataset is prepared if a cell without a result needs it.

    Parameters
    ----------
    plan
        The plan.
    call
        Runs commands.
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

    def needs(self, block: int) -> list[int]:
        """Return the block that prepares the dataset of a cell."""
        cell = self._cell(block)
        found = None if cell is None else self._job_of.get(cell.data.label)
        return [] if found is None else [found]

    def check(self) -> None:
        """Make the directory: cells and datasets are compared one by one, so a plan may change."""
        self.directory.mkdir(parents=True, exist_ok=True)

    def run(self, block: int) -> None:
        """Prepare a dataset, or train a cell and pack its result."""
        cell = self._cell(block)
        if cell is None:
            note_vaults(self.benchmark_plan, job := self._jobs[block], self._run(job))
            return
        begun = time.monotonic()
        self._run(training(self.benchmark_plan, cell, self._vault(cell)))
        seconds = time.monotonic() - begun
        pack(cell, run_of(self.benchmark_plan, cell), cell_file(self.benchmark_plan, cell), seconds)

    def _run(self, job: Job) -> Mapping[str, Any]:
        job.write_config()
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

    def finish(self, block: int) -> None:
        """Do nothing: the files of datasets and cells show that they are complete."""

    def missing(self) -> list[int]:
        """Return the cells without results, after the preparations that they need."""
        cells = self._missing_cells()
        needed = sorted({need for cell in cells for need in self.needs(cell)})
        return [block for block in needed if not self.is_done(block)] + cells

    def is_complete(self) -> bool:
        """Whether all cells have results."""
        return not self._missing_cells()

    def join(self) -> None:
        """Do nothing: the tables are made of the cells' files."""

    def plan(self, tasks: int | None) -> dict[str, Any]:
        """Return the numbers of cells and datasets."""
        return super().plan(tasks) | {
            "cells": len(self._cells),
            "datasets": len(self.benchmark_plan.datasets),
            "missing cells": len(self._missing_cells()),
        }

    def _missing_cells(self) -> list[int]:
        return [one for one in range(len(self._jobs), self.num_blocks) if not self.is_done(one)]

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
