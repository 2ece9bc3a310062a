"""Writing PyMARL's episode batches."""

import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from offmarl.paths import local
from offmarl.types import Episode
from offmarl.vault.convert import common
from offmarl.vault.convert.appending import Append, Column, npz, to_slices
from offmarl.vault.convert.common import require, with_final
from offmarl.vault.convert.contained import HDF5
from offmarl.vault.dataset import Dataset
from offmarl.vault.layout import NumpyArray
from offmarl.vault.progress import Progress, quiet


def export_pymarl(vault: Dataset, path: str | os.PathLike[str], progress: Progress = quiet) -> Path:
    """Write the episodes of a vault to an ``.npz`` or HDF5 file of PyMARL's episode batches.

    An episode of L steps fills L+1 slots. Where its final view is not known, its last slot is empty
    if it terminated, and else its last step gives way to be the final view. Rewards of a team are
    written once, others for each agent.

    Raises
    ------
    ShapeError
        Actions are continuous, which the layout does not know.
    VaultExistsError
        There is something at the path.
    """
    path = local(path)
    spec = vault.spec
    spec.num_actions  # noqa: B018 - raises where actions are continuous
    lengths = vault.episodes.length
    lead = (len(lengths), int(lengths.max(initial=0)) + 1)
    agents = spec.num_agents
    rewards = 1 if spec.reward == "team" else agents
    columns = {
        "obs": _column("f4", *lead, agents, spec.observation_size),
        "state": _column("f4", *lead, spec.state_size),
        "actions": _column("i8", *lead, agents, 1),
        "avail_actions": _column("i4", *lead, agents, spec.num_actions),
        "reward": _column("f4", *lead, rewards),
        "terminated": _column("u1", *lead, 1),
        "filled": _column("i8", *lead, 1),
    }
    with common.whole(path) as beside, _open(beside, columns) as arrays:
        for episode in common.counted(vault.each_episode(), len(lengths), progress):
            for name, values in _slots(episode, rewards).items():
                shape, dtype = columns[name]
                slots: NumpyArray = np.zeros((1, *shape[1:]), dtype)
                slots[0, : len(values)] = values
                arrays[name](slots)
    return path


def _column(dtype: str, *shape: int) -> Column:
    return Column(shape, np.dtype(dtype))


@contextmanager
def _open(path: Path, columns: Mapping[str, Column]) -> Iterator[Mapping[str, Append]]:
    """Make a file, to be filled an episode at a time."""
    if path.suffix not in HDF5:
        with npz(path, columns, zipfile.ZIP_DEFLATED) as arrays:
            yield arrays
        return
    with require("h5py").File(path, "w") as file:
        yield {name: to_slices(file.create_dataset(name, *of)) for name, of in columns.items()}


def _slots(episode: Episode, rewards: int) -> dict[str, NumpyArray]:
    """Return the slots that an episode fills, ``(L+1, ...)``."""
    steps, final = episode
    terminated = steps.terminated[-1].all()
    count = len(steps.last) if final or terminated else len(steps.last) - 1
    views = steps.view
    if final:
        views = with_final(views, final)

    def executed(values: NumpyArray) -> NumpyArray:
        return values[:count]

    filled = np.ones((count + 1, 1))
    ends = np.zeros((count, 1))
    ends[-1:] = terminated
    reward = steps.reward if rewards > 1 else steps.reward[:, :1]
    return {
        "obs": views.observation,
        "state": views.state,
        "actions": executed(steps.action)[..., None],
        "avail_actions": views.legal_actions,
        "reward": executed(reward),
        "terminated": ends,
        "filled": filled,
    }
