"""Generated experience for the tests of vaults; see `offmarl.testing`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offmarl import vault
from offmarl.testing import assert_same, concatenate, experience
from offmarl.testing import steps_of as steps
from offmarl.testing import views as view
from offmarl.types import (
    Continuous,
    Discrete,
    EnvSpec,
    FinalObservations,
    Transition,
)

__all__ = [
    "CONTINUOUS",
    "SPEC",
    "assert_same",
    "concatenate",
    "episodes_of",
    "make",
    "nan_at",
    "recorded",
    "save_hdf5",
    "steps",
    "table_of",
    "view",
    "whole_episodes",
    "written",
]

Episode = tuple[int, int, int, str, int, list[float]]
"""Row, start, length, cause, policy and returns."""


SPEC = EnvSpec("test/made-up", 2, 3, 5, Discrete(4), time_limit=9)
CONTINUOUS = EnvSpec("", 3, 2, 4, Continuous(2), reward="individual")


def make(
    spec: EnvSpec = SPEC, rows: int = 2, steps: int = 10, seed: int = 0, end_every: float = 5.0
) -> tuple[Transition, FinalObservations]:
    """Random steps; an episode ends about every ``end_every``, half of them truncated."""
    return experience(spec, rows, steps, seed, end_every)


def whole_episodes(
    spec: EnvSpec = SPEC, rows: int = 2, steps: int = 10, seed: int = 0, end_every: float = 5.0
) -> tuple[Transition, FinalObservations]:
    """Like `make`, and every row's last step ends an episode."""
    transition, finals = make(spec, rows, steps, seed, end_every)
    transition.last[:, -1] = True
    ends = transition.terminated | transition.truncated
    terminated = transition.terminated.copy()
    terminated[:, -1] |= ~ends[:, -1]
    rng = np.random.default_rng(seed)
    row, time = np.nonzero(transition.last)
    finals = FinalObservations(row, time, view(spec, (len(row),), rng))
    return transition._replace(terminated=terminated), finals


def written(
    path: Path,
    *parts: tuple[Transition, FinalObservations | None],
    spec: EnvSpec = SPEC,
    **options: Any,
) -> vault.Dataset:
    """Write records to a new vault, and open it."""
    with vault.create(path, spec, rows=len(parts[0][0].last), **options) as writer:
        for part in parts:
            writer.append(*part)
    return vault.open_vault(path)


def recorded(
    path: Path,
    spec: EnvSpec = SPEC,
    rows: int = 2,
    steps: int = 40,
    seed: int = 0,
    end_every: float = 5.0,
    **options: Any,
) -> vault.Dataset:
    """Write random steps to a new vault, and open it."""
    options = {"chunk_steps": 16} | options
    return written(path, make(spec, rows, steps, seed, end_every), spec=spec, **options)


def assert_each_step_equally_often(
    dataset: vault.Dataset, source: vault.Dataset | None = None, epochs: int = 1, **options: Any
) -> None:
    """Check that windows of 5 steps hold each step of the source this many times."""
    steps, table = (source or dataset)[:], dataset.episodes
    count = np.zeros((dataset.rows, dataset.length), int)
    with dataset.stream(8, 5, to="numpy", epochs=epochs, **options) as stream:
        for batch in stream:
            episode, time = batch.episode[:, :-1][batch.mask], batch.time[:, :-1][batch.mask]
            place = table.row[episode], table.start[episode] + time
            np.add.at(count, place, 1)
            np.testing.assert_array_equal(batch.reward[batch.mask], steps.reward[place])
            np.testing.assert_array_equal(batch.action[batch.mask], steps.action[place])
    assert (count == epochs * 5).all()


def save_hdf5(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    with pytest.importorskip("h5py").File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
    return path


def nan_at(array: np.ndarray, *place: Any, value: float = np.nan) -> np.ndarray:
    """Return a copy with another value at a place."""
    array = np.array(array, float)
    array[place] = value
    return array


def episodes_of(transition: Transition) -> list[Episode]:
    """Find every episode, step by step."""
    episodes = []
    rows, length = transition.last.shape
    for row in range(rows):
        start = 0
        while start < length:
            end = start
            while end < length - 1 and not transition.last[row, end]:
                end += 1
            episodes.append(_episode(transition, row, start, end))
            start = end + 1
    return episodes


def _episode(transition: Transition, row: int, start: int, end: int) -> Episode:
    cause = "open"
    if transition.last[row, end]:
        cause = "truncated" if transition.truncated[row, end].any() else "terminated"
    returns = np.zeros(transition.reward.shape[-1])
    for step in range(start, end + 1):
        returns = returns + np.asarray(transition.reward[row, step], np.float64)
    policy = int(transition.policy_id[row, start, 0])
    return row, start, end + 1 - start, cause, policy, returns.tolist()


def table_of(episodes: vault.Episodes) -> list[Episode]:
    """Return an episode table as `episodes_of` does."""
    names = ("row", "start", "length", "cause", "policy_id", "returns")
    return list(zip(*(getattr(episodes, name).tolist() for name in names), strict=True))
