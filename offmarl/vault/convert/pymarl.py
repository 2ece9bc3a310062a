"""Episode batches of PyMARL and its descendants: ``.npz``, HDF5, and folders of ``.npy`` files.

Arrays ``obs (E, T+1, N, O)``, ``actions (E, T+1, N, 1)``, ``reward`` and ``terminated (E, T+1, 1)``
(or one for each agent, whose flags must be equal), ``filled (E, T+1, 1)``, and optionally ``state
(E, T+1, S)`` and ``avail_actions (E, T+1, N, A)``. An episode of L steps fills L+1 slots: the last
one holds the episode's final view. Files that fill L slots are told by ``terminated`` in the last
one; their final views are unknown. An episode that reached the time limit was truncated, and so was
one that is not flagged ``terminated`` at its end; the others terminated.
"""

import dataclasses
import math
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from offmarl.errors import ShapeError, VaultError
from offmarl.paths import local, local_output
from offmarl.terminal import Progress
from offmarl.types import (
    DTYPES,
    ArraySpec,
    Discrete,
    EnvSpec,
    Episode,
    FinalObservations,
    flatten_tree,
    map_tree,
)
from offmarl.vault.convert import common
from offmarl.vault.convert.admission import ImportedRow, to_steps
from offmarl.vault.convert.common import Imported, with_final
from offmarl.vault.convert.containers import (
    HDF5,
    Append,
    SteadyFile,
    StrPath,
    npz,
    open_arrays,
    plain_dtype,
    readable,
    require,
    to_slices,
    written_whole,
)
from offmarl.vault.dataset import Dataset
from offmarl.vault.format import encoding, layout
from offmarl.vault.format.layout import Leaf, NumpyArray

_REQUIRED = ("obs", "actions", "reward", "terminated", "filled")
_OPTIONAL = ("state", "avail_actions")
_EXTRAS = "extras."
"""Prefix of the names of extra arrays ``(E, T+1, ...)``."""


@contextmanager
def read_pymarl(
    source: StrPath, env_spec: EnvSpec | None = None, time_limit: int | None = None
) -> Iterator[Imported]:
    """Read PyMARL's episode batches in .npz, HDF5 or a folder of .npy, as AlberDICE has them."""
    source = local(source)
    with open_arrays(source, "PyMARL's", _array_names) as arrays:
        _check_shapes(source, arrays)
        spec = _spec(arrays, env_spec, time_limit)
        episodes = arrays["obs"].shape[0]
        bytes_each = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in arrays.values())
        spans = common.blocks(episodes, bytes_each)
        with readable(source):
            ends = {name: arrays[name][:] for name in ("filled", "terminated")}
        blocks = common.read_blocks(source, arrays, spans)
        records = _records(blocks, spec, _is_last_a_step(source, ends))
        yield Imported(spec, common.origin_of("pymarl", source), records, len(spans))


def _array_names(names: set[str]) -> list[str]:
    """Return the arrays to read: those of the layout, and extras."""
    optional = (name for name in sorted(names) if name in _OPTIONAL or name.startswith(_EXTRAS))
    return [*_REQUIRED, *optional]


def _check_shapes(source: Path, arrays: Mapping[str, Any]) -> None:
    obs = arrays["obs"].shape
    axes = {"obs": max(4, len(obs)), "actions": 4, "avail_actions": 4}
    lead, per_agent = obs[:2], (1, *obs[2:3])
    for name, array in arrays.items():
        shape = array.shape
        ndim = max(2, len(shape)) if name.startswith(_EXTRAS) else axes.get(name, 3)
        columns = {"actions": (1,), "filled": (1,), "reward": per_agent, "terminated": per_agent}
        last = columns.get(name, shape[-1:])
        if len(shape) != ndim or shape[:2] != lead or not lead[1] or shape[-1] not in last:
            raise VaultError(
                f"{source} is not of PyMARL's layout: {name!r} has shape {shape}, and obs has "
                f"{obs}; the last axis of actions and filled is 1, and of "
                "reward and terminated 1 or the number of agents."
            )


def _spec(members: Mapping[str, Any], env_spec: EnvSpec | None, limit: int | None) -> EnvSpec:
    """Return the spec of the data; `ShapeError` if it is not as wanted."""
    agents, legal = members["obs"].shape[2:3], members.get("avail_actions")
    if legal is None and env_spec is None:
        raise VaultError(
            "the data has no avail_actions, so the number of actions is unknown: name its "
            "environment."
        )
    names = {"obs": layout.OBSERVATIONS, "state": layout.STATE, "avail_actions": "infos.legals"}
    names |= {name: name for name in members if name.startswith(_EXTRAS)}
    leaves = {names[name]: _leaf(array) for name, array in members.items() if name in names}
    leaves |= {"actions": Leaf(np.dtype("i4"), agents), "rewards": Leaf(np.dtype("f4"), agents)}
    spec = encoding.spec_of(leaves)
    if env_spec:
        _check_one_array(env_spec)
        action = env_spec.action if legal is None else spec.action
        spec = dataclasses.replace(spec, action=action, extras=env_spec.extras)
        common.check_spec(spec, env_spec)
        return dataclasses.replace(env_spec, time_limit=limit or env_spec.time_limit)
    if members["reward"].shape[-1] == 1:
        spec = dataclasses.replace(spec, reward="team")
    return dataclasses.replace(spec, time_limit=limit)


def _leaf(array: Any) -> Leaf:
    """Return the type and shape of a slot; types that vaults do not have become float32."""
    kept = array.dtype.name in DTYPES
    return Leaf(np.dtype(array.dtype.name if kept else "float32"), array.shape[2:])


def _check_one_array(spec: EnvSpec) -> None:
    """Raise `ShapeError` if observations or the state are trees."""
    for name, tree in (("observations", spec.observation), ("states", spec.global_state)):
        if tree and (not isinstance(tree, ArraySpec) or name == "states"):
            raise ShapeError(
                f"PyMARL's layout has one array of observations and one vector of the state, and "
                f"the {name} are {', '.join(map(str, flatten_tree(tree, name)))}: use the layout "
                "numpy, zarr or minari."
            )


def _records(
    blocks: Iterable[tuple[int, dict[str, NumpyArray]]], spec: EnvSpec, last_is_step: bool
) -> Iterator[ImportedRow]:
    steps = 0
    for _, batch in blocks:
        record = _record(batch, spec, last_is_step, steps)
        steps += record.steps.last.size
        yield record


def _record(
    batch: Mapping[str, NumpyArray], spec: EnvSpec, last_is_step: bool, start: int
) -> ImportedRow:
    """Put the steps of a batch of episodes end to end, in one row."""
    lengths, executed, last = _extent(batch, last_is_step)
    at_limit = (lengths >= (spec.time_limit or np.inf))[:, None, None]
    terminated = last[..., None] & (batch["terminated"][..., :1] != 0) & ~at_limit
    count = int(lengths.sum())

    def of_agents(x: NumpyArray) -> NumpyArray:
        return np.broadcast_to(x[executed], (count, spec.num_agents))[None]

    arrays = {
        **_view(batch, spec, np.nonzero(executed)),
        "actions": batch["actions"][executed][None, ..., 0],
        "rewards": of_agents(batch["reward"]),
        "terminals": of_agents(terminated),
        "truncations": of_agents(last[..., None] & ~terminated),
        **{x: batch[x][executed][None] for x in batch if x.startswith(_EXTRAS)},
    }
    episodes = np.flatnonzero(lengths) if not last_is_step else np.zeros(0, np.int64)
    views = _view(batch, spec, (episodes, lengths[episodes]))
    views["rewards"] = np.zeros((1, len(episodes), spec.num_agents))
    time: NumpyArray = np.cumsum(lengths)[episodes] - 1
    final = map_tree(lambda x: x[0], to_steps(views, spec).view)
    return ImportedRow(
        to_steps(arrays, spec, start), FinalObservations(np.zeros_like(time), time, final)
    )


def _extent(
    batch: Mapping[str, NumpyArray], last_is_step: bool
) -> tuple[NumpyArray, NumpyArray, NumpyArray]:
    """Return the lengths of episodes ``(E,)``, and masks ``(E, T+1)`` of all and of last steps.

    Empty slots of a batch have length 0.
    """
    filled = batch["filled"][..., 0] != 0
    count = filled.sum(1)
    slots = np.arange(filled.shape[1])
    lengths = np.maximum(count - (not last_is_step), 0)
    executed = slots < lengths[:, None]
    last = slots == lengths[:, None] - 1
    ends_early = (batch["terminated"][..., 0] != 0) & executed & ~last
    if (filled != (slots < count[:, None])).any() or ends_early.any():
        raise VaultError(
            "an episode has gaps, or continues after its end: `filled` must be 1 from the first "
            "slot to the one after the last step, and `terminated` must not be 1 before that step."
        )
    return lengths, executed, last


def _is_last_a_step(source: Path, ends: Mapping[str, NumpyArray]) -> bool:
    """Whether ``filled`` has as many slots as steps, and not one more for the final view.

    Then the last filled slot of an episode that terminated has the flag, and the one before has
    none. Raises `VaultError` if episodes differ.
    """
    filled = ends["filled"][..., 0] != 0
    count = filled.sum(1)
    has_gaps = (filled != (np.arange(filled.shape[1]) < count[:, None])).any(1)
    episodes = np.flatnonzero((count > 0) & ~has_gaps)
    flags = ends["terminated"][..., 0] != 0
    if ((ends["terminated"] != ends["terminated"][..., :1]) & filled[..., None]).any():
        raise VaultError(
            f"{source} has a column of `terminated` for each agent, and they differ: the flag is "
            "that of the team, so reduce them to one, by .any(-1) or .all(-1)."
        )
    at_last = flags[episodes, count[episodes] - 1]
    before = flags[episodes, np.maximum(count[episodes] - 2, 0)] & (count[episodes] > 1)
    if (at_last & ~before).any() and (before & ~at_last).any():
        raise VaultError(
            f"{source} marks in some episodes the slot after the last step as filled, and in "
            "others not: fill L+1 slots of each episode of L steps, or L of each."
        )
    return bool((at_last & ~before).any())


def _view(
    batch: Mapping[str, NumpyArray], spec: EnvSpec, index: tuple[NumpyArray, ...]
) -> dict[str, NumpyArray]:
    """Return the columns of views, ``(1, T, ...)`` by their names on disk."""
    leaf, count = spec.observation_leaves[""], len(index[0])
    columns = {"observations": batch["obs"][index].reshape(1, count, spec.num_agents, *leaf.shape)}
    if "state" in batch:
        columns["infos.state"] = batch["state"][index][None]
    elif spec.state_size:
        flat = columns["observations"].reshape(1, count, spec.num_agents * leaf.size)
        columns["infos.state"] = flat[..., : spec.state_size]
    if "avail_actions" in batch:
        columns["infos.legals"] = batch["avail_actions"][index][None]
    return columns


def write_pymarl(vault: Dataset, path: StrPath, progress: Progress) -> Path:
    """Write an ``.npz`` or HDF5 file of PyMARL's episode batches.

    An episode of L steps fills L+1 slots. If its final view is unknown, the last slot is empty
    after a termination; otherwise the last step is dropped, and its view becomes the final one.
    Rewards are written once if all agents have the same, else for each agent. Images keep their
    shape and type, and extras are arrays ``extras.NAME``; bfloat16 becomes float32.
    """
    path = local_output(path)
    spec = vault.spec
    if not isinstance(spec.action, Discrete):
        raise ShapeError("PyMARL's layout is for discrete actions: use numpy, zarr or minari.")
    if incomplete := vault.episodes.incomplete:
        warnings.warn(
            f"{incomplete:,} episodes were cut off by their recording, which PyMARL's layout does "
            "not tell: there they are truncated.",
            stacklevel=2,
        )
    _check_one_array(spec)
    leaf = spec.observation_leaves[""].with_agents(spec.num_agents)
    lengths = vault.episodes.length
    lead = (len(lengths), int(lengths.max(initial=0)) + 1)
    agents = spec.num_agents
    returns = vault.episodes.returns
    rewards = 1 if spec.reward == "team" and (returns == returns[:, :1]).all() else agents
    columns = {
        "obs": Leaf(plain_dtype(leaf.numpy_dtype), (*lead, *leaf.shape)),
        **({"state": Leaf(np.dtype("f4"), (*lead, spec.state_size))} if spec.state_size else {}),
        "actions": Leaf(np.dtype("i8"), (*lead, agents, 1)),
        "avail_actions": Leaf(np.dtype("i4"), (*lead, agents, spec.num_actions)),
        "reward": Leaf(np.dtype("f4"), (*lead, rewards)),
        "terminated": Leaf(np.dtype("u1"), (*lead, 1)),
        "filled": Leaf(np.dtype("i8"), (*lead, 1)),
        **{
            _EXTRAS + name: Leaf(plain_dtype(extra.numpy_dtype), (*lead, *extra.shape))
            for name, extra in spec.extras.items()
        },
    }
    written = 0
    with written_whole(path) as part, _create(part, columns) as arrays:
        for episode in common.count_items(vault, len(lengths), progress):
            values_of = _slots(episode, rewards)
            written += len(values_of["actions"])
            for name, (dtype, shape) in columns.items():
                values = values_of[name]
                slots: NumpyArray = np.zeros((1, *shape[1:]), dtype)
                slots[0, : len(values)] = values
                arrays[name](slots)
    if dropped := vault.num_steps - written:
        warnings.warn(
            f"{path.name} lacks the last step, with its reward, of {dropped:,} episodes that did "
            "not terminate and whose final view is unknown: PyMARL's layout has no place for it.",
            stacklevel=2,
        )
    return path


@contextmanager
def _create(path: Path, columns: Mapping[str, Leaf]) -> Iterator[Mapping[str, Append]]:
    """Create the file, to be filled an episode at a time."""
    if path.suffix not in HDF5:
        with npz(path, columns, zipfile.ZIP_DEFLATED) as arrays:
            yield arrays
        return
    with SteadyFile(path, "w+") as file, require("h5py").File(file, "w") as arrays:
        yield {
            name: to_slices(arrays.create_dataset(name, shape, dtype), file)
            for name, (dtype, shape) in columns.items()
        }


def _slots(episode: Episode, rewards: int) -> dict[str, NumpyArray]:
    """Return an episode as slots ``(L+1, ...)``."""
    steps, final = episode
    terminated = steps.terminated[-1].all()
    count = len(steps.last) if final or terminated else len(steps.last) - 1
    views = steps.view
    if final:
        views = with_final(views, final)

    filled = np.ones((count + 1, 1))
    ends = np.zeros((count, 1))
    ends[-1:] = terminated
    reward = steps.reward[:, :rewards]
    if (steps.reward != reward).any():
        raise VaultError(
            "rewards differ between agents although each return is the same: use numpy or minari."
        )
    return {
        "obs": views.observation,
        "state": views.state,
        "actions": steps.action[:count][..., None],
        "avail_actions": views.legal_actions,
        "reward": reward[:count],
        "terminated": ends,
        "filled": filled,
        **{_EXTRAS + name: values[:count] for name, values in (steps.extras or {}).items()},
    }
