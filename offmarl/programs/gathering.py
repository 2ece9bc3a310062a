"""One run from runs of single seeds, which tasks trained: their checkpoints, metrics and scores.

The run has the bits of one process that trains the seeds one after the other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from offmarl import tracking
from offmarl.checkpoint import Checkpoints
from offmarl.errors import RunError
from offmarl.launch import Work
from offmarl.programs.program import FREE, Args
from offmarl.programs.run import Run
from offmarl.types import ArrayTree

_parts: ContextVar[Sequence[Path] | None] = ContextVar("parts", default=None)


@contextmanager
def gathered(runs: Sequence[Path]) -> Iterator[None]:
    """Let `offmarl.programs.train` gather finished runs of one seed each instead of training.

    Parameters
    ----------
    runs
        Their directories, in the order of the seeds.
    """
    token = _parts.set(runs)
    try:
        yield
    finally:
        _parts.reset(token)


def parts() -> Sequence[Path] | None:
    """Return the runs to gather; None if seeds are to be trained."""
    return _parts.get()


def gather(run: Run, like: Mapping[str, ArrayTree], runs: Sequence[Path]) -> dict[str, int]:
    """Write the checkpoints and metrics of runs of one seed each into one run.

    Parameters
    ----------
    run
        The run of all seeds, which has nothing but its record.
    like
        The tree of a checkpoint of all seeds.
    runs
        The finished runs.

    Returns
    -------
    The step at which each seed stopped early, by its number; empty if none did.
    """
    found = [_Part.read(directory) for directory in runs]
    one = jax.tree.map(lambda leaf: leaf[:1], like)
    latest = max(part.last for part in found)
    shared = set.intersection(*({*part.checkpoints.steps()} for part in found)) | {latest}
    with_all = run.checkpoints()
    for step in sorted(shared - {*with_all.steps()}):
        restored = [part.checkpoints.restore(one, min(step, part.last)) for part in found]
        trees = [tree for tree, _ in restored]
        tree = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)
        with_all.save(step, tree, _joined([info for _, info in restored]))
    with_all.close()
    _write_metrics(run.metrics, found)
    return {seed: step for part in found for seed, step in part.stopped.items()}


class _Part(NamedTuple):
    """A finished run of one seed."""

    checkpoints: Checkpoints
    last: int
    rows: list[dict[str, Any]]
    stopped: Mapping[str, int]

    @classmethod
    def read(cls, directory: Path) -> "_Part":
        record, checkpoints = tracking.read_run(directory), Run(directory, {}, True).checkpoints()
        last = checkpoints.latest()
        if not record.get("complete") or last is None:
            raise RunError(f"the run in {directory} is not finished: run its task again.")
        rows = tracking.read(directory / tracking.METRICS_FILE)
        return cls(checkpoints, last, rows, record.get("stopped", {}))


def _joined(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the metrics that are not logged yet, of which each seed has one."""
    sums = {
        name: [one for info in infos for one in info["sums"][name]] for name in infos[0]["sums"]
    }
    return {**infos[0], "sums": sums}


def _write_metrics(path: Path, found: Sequence[_Part]) -> None:
    """Write the lines of all seeds in the order in which one process writes them."""
    rows = [row for rows in zip_longest(*(part.rows for part in found)) for row in rows if row]
    tracking.replace_file(path, "".join(f"{tracking.to_json(row)}\n" for row in rows))


# ---------------------------------------------------------------------------------- tasks


class SeedsWork(Work):
    """The training of several seeds, of which each is a block.

    Parameters
    ----------
    main
        The program's ``main``, which calls `offmarl.programs.train`.
    args
        Its arguments. The seeds are computed one after the other, whatever ``batching`` is.
    path
        Directory of the run.
    """

    def __init__(self, main: Callable[[Any], Path], args: Args, path: Path):
        self._main, self._args = main, _changed(args, batching="map", out=path)
        fixed = {key: value for key, value in asdict(args).items() if key not in FREE}
        super().__init__(f"train {path.name}", path, {"arguments": fixed})

    @property
    def num_blocks(self) -> int:
        """Number of seeds."""
        return self._args.seeds

    def run(self, block: int) -> None:
        """Train a seed, or continue its training."""
        seed = self._args.seed + block
        self._main(_changed(self._args, seeds=1, seed=seed, out=self._run(block), track=()))

    def is_complete(self) -> bool:
        """Whether the run of all seeds exists; if it is another one, `join` raises `RunError`."""
        record = tracking.recorded(self.path)
        seeds = [self._args.seed + block for block in range(self.num_blocks)]
        return bool(record.get("complete")) and record.get("seeds") == seeds

    def join(self) -> None:
        """Gather the runs of all seeds."""
        with gathered([self._run(block) for block in range(self.num_blocks)]):
            self._main(self._args)

    def _run(self, block: int) -> Path:
        return self.directory / "blocks" / f"seed-{self._args.seed + block}"


def _changed(args: Args, **values: Any) -> Args:
    """Return arguments with other values, which keep where the others came from."""
    found = copy(args)
    for name, value in values.items():
        object.__setattr__(found, name, value)
    return found
