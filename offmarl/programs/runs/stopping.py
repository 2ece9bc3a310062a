"""Early stopping of a run's seeds, and the best evaluation of each.

A seed stops when its evaluations have not improved for a while. The others go on with the same
updates, and so have the same bits as without it: the state of a stopped seed is kept aside, and
takes the place of its entry wherever states are evaluated or saved.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from offmarl import tracking
from offmarl.errors import OptionError, RunError
from offmarl.programs.program import Args
from offmarl.programs.runs.evaluate import Evaluator
from offmarl.types import ArrayTree

_PATIENCE = 5


class Stopping:
    """Which seeds have stopped, and their states.

    Evaluations up to ``start``, the updates before the program's last stage, do not count: what the
    policy acts by may not have been learned yet.
    """

    def __init__(self, args: Args, evaluator: Evaluator, start: int = 0):
        self._start = start
        self._metric = _metric(args, evaluator)
        self._patience = args.patience or _PATIENCE
        self._values: list[list[float]] = [[] for _ in range(args.seeds)]
        self._kept: dict[int, ArrayTree] = {}
        self.steps: dict[int, int] = {}
        """The step at which each stopped seed stopped, by its place."""

    def by_seed(self, seeds: Sequence[int]) -> dict[str, int]:
        """Return the step at which each seed that has stopped did."""
        return {str(seeds[place]): step for place, step in self.steps.items()}

    @property
    def info(self) -> dict[str, Any]:
        """What a checkpoint holds beside the states, for `resume`; JSON."""
        return {"values": self._values, "steps": {str(x): step for x, step in self.steps.items()}}

    def resume(self, info: Mapping[str, Any], states: ArrayTree) -> None:
        """Go on from a checkpoint, with its `info` and its states."""
        self._values = [[*values] for values in info["values"]]
        self.steps = {int(seed): step for seed, step in info["steps"].items()}
        self._kept = {seed: self._of(states, seed) for seed in self.steps}

    def observe(self, step: int, found: Mapping[str, NDArray[Any]], states: ArrayTree) -> None:
        """Take an evaluation, ``(seeds, episodes)`` by metric; keep the states that stop.

        Evaluations before the first update of the last stage do not count.
        """
        if self._metric is None or step <= self._start:  # the untrained policy is no step back
            return
        names = [name for name in found if name.startswith(self._metric)]
        if not names:
            return
        means = np.mean([found[name].mean(-1) for name in names], axis=0)  # over the teams
        for seed, (values, mean) in enumerate(zip(self._values, means, strict=True)):
            if seed in self.steps:
                continue
            values.append(float(mean))
            if (
                len(values) - 1 - int(np.argmax(np.nan_to_num(values, nan=-np.inf)))
                >= self._patience
            ):
                self.steps[seed] = step
                self._kept[seed] = self._of(states, seed)

    @staticmethod
    def _of(states: ArrayTree, seed: int) -> ArrayTree:
        return jax.tree.map(lambda leaf: leaf[seed], states)

    def apply(self, states: ArrayTree) -> ArrayTree:
        """Return states, ``(seeds, ...)``, in which those of stopped seeds are the kept ones."""
        for seed, kept in self._kept.items():
            states = jax.tree.map(lambda leaf, own, seed=seed: leaf.at[seed].set(own), states, kept)
        return states


def _metric(args: Args, evaluator: Evaluator) -> str | None:
    """Return the metric that training stops on, or None."""
    if args.stop_on is None:
        if args.patience is not None:
            raise OptionError("--patience needs --stop-on agreement or return: give both.")
        return None
    if args.stop_on == "agreement" and evaluator.held_out is None:
        raise OptionError(
            "--stop-on agreement needs held-out episodes: give --held-out or --validation."
        )
    if args.stop_on == "return" and evaluator.env is None:
        raise OptionError("--stop-on return needs an environment: give --env.")
    return {"agreement": tracking.AGREEMENT, "return": tracking.RETURN}[args.stop_on]


def best_step(directory: Path, seed: int) -> int:
    """Return the step of a seed's evaluation with the highest mean; the first of equal ones.

    The evaluation before the first update does not count. The metric is the return, of all teams
    together, or the agreement with held-out actions in a run without an environment.
    """
    step = best_of(tracking.read(directory / tracking.METRICS_FILE), seed)
    if step is None:
        raise RunError(
            f"{directory} has no evaluation of seed {seed}, so none of its checkpoints is the "
            "best: give the number of one."
        )
    return step


def best_of(rows: Sequence[Mapping[str, Any]], seed: int) -> int | None:
    """Return the step of a seed's best evaluation among the lines of a run; None without one."""
    own = [row for row in rows if row["seed"] == seed and row["step"]]
    for metric in tracking.EVALUATED:
        found = {row["step"]: mean for row in own if (mean := _mean(row, metric)) is not None}
        if found:
            return max(found, key=lambda step: found[step])
    return None


def _mean(row: Mapping[str, Any], metric: str) -> float | None:
    values = [value for name, value in row.items() if name.startswith(metric)]
    finite = not any(None in value for value in values)  # a null stands for what is not
    return float(np.mean([np.mean(value) for value in values])) if values and finite else None
