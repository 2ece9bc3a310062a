"""The cells of a plan as blocks, which tasks share."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offmarl import tracking
from offmarl.benchmark.cells import identity, is_current, pack
from offmarl.benchmark.jobs import cell_file, preparation, run_of, training, vaults_of
from offmarl.benchmark.plan import Data, Plan
from offmarl.launch import Work, once

Call = Callable[[Sequence[str]], Mapping[str, Any]]
"""Runs a command of offmarl in this process, and returns what it prints with ``--json``."""


class CellsWork(Work):
    """A benchmark whose cells are blocks.

    The first task that needs a dataset records or downloads it, and the others wait for it.

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
        found = {"cells": [identity(cell) for cell in self._cells]}
        super().__init__(f"benchmark {plan.name}", plan.out, tracking.plain(found))

    @property
    def num_blocks(self) -> int:
        """Number of cells."""
        return len(self._cells)

    def run(self, block: int) -> None:
        """Train a cell, and pack its result."""
        cell = self._cells[block]
        job = training(self.benchmark_plan, cell, self._vault(cell.data))
        begun = time.monotonic()
        self._call(job.command)
        seconds = time.monotonic() - begun
        pack(cell, run_of(self.benchmark_plan, cell), cell_file(self.benchmark_plan, cell), seconds)

    def is_done(self, block: int) -> bool:
        """Whether a cell has its result."""
        cell = self._cells[block]
        return is_current(cell, cell_file(self.benchmark_plan, cell))

    def missing(self) -> list[int]:
        """Return the cells without results."""
        return [block for block in range(self.num_blocks) if not self.is_done(block)]

    def is_complete(self) -> bool:
        """Whether all cells have results."""
        return not self.missing()

    def join(self) -> None:
        """Do nothing: the tables are made of the cells' files."""

    def plan(self, tasks: int) -> dict[str, Any]:
        """Return the numbers of cells and datasets."""
        return super().plan(tasks) | {
            "datasets": len(self.benchmark_plan.datasets),
            "missing cells": len(self.missing()),
        }

    def _vault(self, data: Data) -> str:
        job = preparation(self.benchmark_plan, data)
        if job is None:
            assert data.vault is not None
            return data.vault

        def prepare() -> dict[str, str]:
            answer = json.loads(tracking.to_json(self._call(job.command)))
            return vaults_of(self.benchmark_plan, job, answer)

        found: str = once(job.log.with_name("vaults.json"), prepare)[data.label]
        return found
