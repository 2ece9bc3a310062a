"""One run from runs of single seeds, which tasks trained: their checkpoints, metrics and scores.

The run has the bits of one process that trains the seeds one after the other with as many threads.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from offmarl import tracking
from offmarl.checkpoint import Checkpoints
from offmarl.config import changed
from offmarl.errors import RunError
from offmarl.launch import Work
from offmarl.programs.program import Args, Keep, recorded_args
from offmarl.programs.runs.identity import MAY_DIFFER, differences
from offmarl.programs.runs.run import Run, best_of
from offmarl.programs.runs.training import Training

PARTS: ContextVar[Sequence[Path] | None] = ContextVar("parts", default=None)
"""Finished runs of one seed each, in order, which `offmarl.programs.train` gathers."""


def gather(training: Training, run: Run, runs: Sequence[Path]) -> None:
    """Write finished runs of one seed each into one run."""
    parts = [_Part.read(directory, run.record) for directory in runs]
    like = training.shapes()
    shapes = jax.eval_shape(lambda tree: jax.tree.map(lambda leaf: leaf[:1], tree), like)
    checkpoints = run.checkpoints()
    steps = {*_common_steps(parts, training.keep), parts[0].last}
    for step in sorted(steps - {*checkpoints.steps()}):
        trees, infos = zip(*(part.checkpoints.restore(shapes, step) for part in parts), strict=True)
        tree = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)
        sums = {  # of metrics that are not logged yet, one for each seed
            name: [value for info in infos for value in info["sums"][name]]
            for name in infos[0]["sums"]
        }
        checkpoints.save(step, tree, {**infos[0], "sums": sums, "evaluations": []})
    _write_metrics(run.metrics, [row for part in parts for row in part.rows])


class _Part(NamedTuple):
    """A finished run of one seed."""

    seed: int
    checkpoints: Checkpoints
    last: int
    rows: list[dict[str, Any]]

    @classmethod
    def read(cls, directory: Path, expected: Mapping[str, Any]) -> "_Part":
        record = tracking.read_run(directory)
        checkpoints = Checkpoints(directory / tracking.CHECKPOINTS)
        last = checkpoints.latest()
        if not record.get("complete") or last is None:
            raise RunError(f"the run in {directory} is not finished: run its task again.")
        for path, theirs, ours in differences(record, tracking.plain(expected), _OF_A_SEED):
            raise RunError(
                f"{directory} was trained with {path} {theirs!r}, which is {ours!r} now: remove it "
                "and run its task again."
            )
        rows = tracking.read(directory / tracking.METRICS_FILE)
        return cls(record["seeds"][0], checkpoints, last, rows)


_OF_A_SEED = (*MAY_DIFFER, "args.seed", "args.seeds", "complete", "seeds", "seeds_at_once")
"""Entries of a record in which the run of a seed differs from that of all."""


def _common_steps(parts: Sequence[_Part], keep: Keep) -> set[int]:
    """Return the steps whose checkpoints the run of all seeds keeps, beside the last one."""
    if keep == "best":
        best = (best_of(part.rows, part.seed) for part in parts)
        return {step for step in best if step is not None}
    return set.intersection(*({*part.checkpoints.steps()} for part in parts))


def _write_metrics(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the lines of all seeds in the order in which one process writes them.

    The evaluation of the initial policies, step 0, follows the line of the first update.
    """

    def place(row: Mapping[str, Any]) -> tuple[int, bool, int, int]:
        return max(row["step"], 1), tracking.WALL_TIME not in row, row["step"], row["seed"]

    rows = sorted(rows, key=place)
    tracking.replace_file(path, "".join(f"{tracking.to_json(row)}\n" for row in rows))


# ---------------------------------------------------------------------------------- tasks


class SeedsWork(Work):
    """The training of several seeds, of which each is a block."""

    def __init__(self, main: Callable[[Any], Path], args: Args, path: Path):
        self._main, self._args = main, changed(args, batching="map", out=path)
        super().__init__(f"train {path.name}", path, {"arguments": recorded_args(args)}, args.seeds)

    def run(self, block: int) -> None:
        """Train a seed, or continue its training."""
        seed = self._args.seed + block
        # Each seed has another best step, at which the run has the states of all of them.
        keep = "all" if self._args.keep == "best" else self._args.keep
        changes = {"seeds": 1, "seed": seed, "out": self._run(block), "track": (), "keep": keep}
        self._main(changed(self._args, **changes))

    def is_done(self, block: int) -> bool:
        """Whether a seed is trained, and its run has not been removed to train it again."""
        return super().is_done(block) and (self._run(block) / tracking.RUN_FILE).exists()

    def is_complete(self) -> bool:
        """Whether a run of all seeds exists; `train` compares its arguments."""
        record = tracking.read_run_if_any(self.path)
        seeds = [self._args.seed + block for block in range(self.num_blocks)]
        return bool(record.get("complete")) and record.get("seeds") == seeds

    def join(self) -> None:
        """Gather the runs of all seeds."""
        token = PARTS.set([self._run(block) for block in range(self.num_blocks)])
        try:
            self._main(self._args)
        finally:
            PARTS.reset(token)

    def _run(self, block: int) -> Path:
        return self.directory / "blocks" / f"seed-{self._args.seed + block}"
