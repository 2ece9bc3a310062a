"""Writing PyMARL's episode batches."""

import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from offmarl.types import Episode
from offmarl.vault.convert import common
from offmarl.vault.convert.common import require, with_final
from offmarl.vault.convert.pymarl import HDF5
from offmarl.vault.layout import NumpyArray
from offmarl.vault.progress import Progress, quiet
from offmarl.vault.reading.reader import Vault


def export_pymarl(vault: Vault, path: str | os.PathLike[str], progress: Progress = quiet) -> Path:
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
    path = Path(path)
    spec = vault.spec
    spec.num_actions  # noqa: B018 - raises where actions are continuous
    lengths = vault.episodes.length
    lead = (len(lengths), int(lengths.max(initial=0)) + 1)
    agents = spec.num_agents
    rewards = 1 if spec.reward == "team" else agents
    columns = {
        "obs": ((*lead, agents, spec.observation_size), "f4"),
        "state": ((*lead, spec.state_size), "f4"),
        "actions": ((*lead, agents, 1), "i8"),
        "avail_actions": ((*lead, agents, spec.num_actions), "i4"),
        "reward": ((*lead, rewards), "f4"),
        "terminated": ((*lead, 1), "u1"),
        "filled": ((*lead, 1), "i8"),
    }
    with common.whole(path) as part, _columns(part, path.suffix, columns) as arrays:
        episodes = common.counted(vault.each_episode(), len(lengths), progress)
        for number, episode in enumerate(episodes):
            for name, values in _slots(episode, rewards).items():
                arrays[name][number, : len(values)] = values
    return path


@contextmanager
def _columns(
    path: Path, suffix: str, columns: Mapping[str, tuple[tuple[int, ...], str]]
) -> Iterator[dict[str, Any]]:
    """Make a file of arrays of zeros, on disk, to be filled a piece at a time."""
    if suffix in HDF5:
        with require("h5py").File(path, "w") as file:
            yield {name: file.create_dataset(name, *of) for name, of in columns.items()}
        return
    with common.scratch(path) as scratch:
        files = {name: scratch / f"{name}.npy" for name in columns}
        yield {
            name: np.lib.format.open_memmap(files[name], "w+", dtype=kind, shape=shape)
            for name, (shape, kind) in columns.items()
        }
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in files.values():
                archive.write(file, file.name)


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
