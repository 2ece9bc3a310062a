"""Datasets with the steps end to end: folders of ``.npy`` files (OMAR), HDF5 files (OMIGA)."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offmarl.errors import VaultError
from offmarl.paths import local
from offmarl.types import Discrete, EnvSpec, Transition
from offmarl.vault import encoding
from offmarl.vault.convert import common
from offmarl.vault.convert.admission import Record, to_steps
from offmarl.vault.convert.common import (
    Imported,
    StrPath,
    check_links_stay_inside,
    open_datasets,
    readable,
)
from offmarl.vault.layout import Leaf, NumpyArray

_OMIGA = ("s", "o", "a", "r", "d")
_OMAR = ("obs", "acs", "rews", "next_obs", "dones")
_NEXT = {"observations": "next_obs", "infos.state": "next_states"}
"""Names of what follows each step, by the names on disk of what is before it."""


class _Steps(NamedTuple):
    """A dataset whose steps can be read a block at a time."""

    length: int
    read: Callable[[int, int], dict[str, NumpyArray]]
    """Arrays ``(T, ...)`` of an interval, by their names on disk and those of `_NEXT`."""


@contextmanager
def read_omiga(
    source: StrPath, env_spec: EnvSpec | None = None, time_limit: int | None = None
) -> Iterator[Imported]:
    """Read HDF5 files of multi-agent MuJoCo, as OMIGA and ComaDICE ship them.

    The outcome of an episode's last action is not recorded there. The states of the agents are
    joined to the global state.

    Parameters
    ----------
    source
        Arrays ``o (T, N, O)``, ``s (T, N, S)``, ``a (T, N, A)``, and ``r`` and ``d``, ``(T, 1)`` or
        one for each agent: rewards, and 1 at the last step of an episode.
    env_spec, time_limit
        As for `offmarl.vault.convert.import_dataset`.

    Raises
    ------
    VaultError
        The file does not exist or is not of this layout.
    ShapeError
        Its sizes are not those of ``env_spec``.
    """
    source = local(source)
    with open_datasets(source) as found:
        common.check_layout(source, "OMIGA's", found, _OMIGA)
        arrays = {name: common.plain(found[name], name) for name in _OMIGA}
        _check_lengths(source, {name: array.shape[0] for name, array in arrays.items()})
        num_agents = arrays["o"].shape[1] if arrays["o"].ndim == 3 else 0
        if not num_agents:
            raise VaultError(f"{source} is not of OMIGA's layout: o has shape {arrays['o'].shape}.")

        def read(start: int, stop: int) -> dict[str, NumpyArray]:
            with readable(source):
                s, o, a, r, d = (arrays[name][start:stop] for name in _OMIGA)
            each = (len(o), num_agents)
            return {
                "observations": o,
                "infos.state": s.reshape(len(o), -1),
                "actions": a,
                "rewards": np.broadcast_to(r.reshape(len(o), -1), each),
                "terminals": np.broadcast_to(d.reshape(len(o), -1), each),
            }

        origin = {"format": "omiga", "file": source.name, "sha256": common.sha256(source)}
        yield _imported(_Steps(len(arrays["o"]), read), origin, env_spec, time_limit)


@contextmanager
def read_omar(
    source: StrPath, env_spec: EnvSpec | None = None, time_limit: int | None = None
) -> Iterator[Imported]:
    """Read folders of .npy files of particle environments and MuJoCo, as OMAR ships them.

    Parameters
    ----------
    source
        A folder with files ``obs_i``, ``acs_i``, ``rews_i``, ``next_obs_i`` and ``dones_i`` for
        each agent i from 0, and optionally ``states_i`` and ``next_states_i``. Shorter observations
        and states are padded with zeros.
    env_spec
        As for `offmarl.vault.convert.import_dataset`.
    time_limit
        Steps after which the environment truncates: episodes end there whether ``dones`` says so or
        not; that of ``env_spec`` if None. OMAR's particle environments have 25.

    Raises
    ------
    VaultError
        The folder does not exist or is not of this layout.
    ShapeError
        Its sizes are not those of ``env_spec``.
    """
    source = local(source)
    if not source.is_dir():
        raise VaultError(f"{source} is not a folder: OMAR's datasets are folders of .npy files.")
    check_links_stay_inside(source)
    arrays = _omar_arrays(source)

    def read(start: int, stop: int) -> dict[str, NumpyArray]:
        found = {kind: _stack([x[start:stop] for x in group]) for kind, group in arrays.items()}
        renamed = {
            "observations": found["obs"],
            "actions": found["acs"],
            "rewards": found["rews"][..., 0],
            "terminals": found["dones"][..., 0],
            "next_obs": found["next_obs"],
        }
        if "states" in found:
            states = {"infos.state": found["states"], "next_states": found["next_states"]}
            renamed |= {name: x.reshape(len(x), -1) for name, x in states.items()}
        return renamed

    origin = {"format": "omar", "file": source.name, "sha256": common.sha256(source)}
    yield _imported(_Steps(len(arrays["obs"][0]), read), origin, env_spec, time_limit)


def _omar_arrays(source: Path) -> dict[str, list[NumpyArray]]:
    """Return the arrays of every agent, by their kind."""
    names = {file.name for file in source.glob("*.npy")}
    num_agents = sum(bool(re.fullmatch(r"obs_\d+\.npy", name)) for name in names)
    kinds = (*_OMAR, *(("states", "next_states") if "states_0.npy" in names else ()))
    files = {kind: [f"{kind}_{i}.npy" for i in range(max(num_agents, 1))] for kind in kinds}
    needed = [name for group in files.values() for name in group]
    common.check_layout(source, "OMAR's", names, needed)
    arrays = {
        kind: [common.load_npy(source / name) for name in group] for kind, group in files.items()
    }
    every = {f"{k}_{i}": x for k, group in arrays.items() for i, x in enumerate(group)}
    if empty := [name for name, x in every.items() if not x.size]:
        raise VaultError(f"{source}: {empty[0]} has shape {every[empty[0]].shape}, and no steps.")
    _check_lengths(source, {name: x.shape[0] for name, x in every.items()})
    return arrays


def _stack(arrays: list[NumpyArray]) -> NumpyArray:
    """Stack the agents' arrays ``(T, ...)`` to ``(T, N, D)``, padded with zeros."""
    flat = [array.reshape(len(array), -1) for array in arrays]
    width = max(array.shape[1] for array in flat)
    return np.stack([np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in flat], axis=1)


def _check_lengths(source: Path, lengths: Mapping[str, int]) -> None:
    if len({*lengths.values()}) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise VaultError(f"{source} is damaged: its arrays have different lengths ({listed}).")


def _imported(
    steps: _Steps, origin: dict[str, Any], wanted: EnvSpec | None, time_limit: int | None
) -> Imported:
    first = steps.read(0, min(steps.length, 1))
    leaves = {name: Leaf(x.dtype, x.shape[1:]) for name, x in first.items()}
    found = encoding.spec_of(
        {name: leaf for name, leaf in leaves.items() if name not in _NEXT.values()}
    )
    if found.action == Discrete(0):
        raise VaultError(
            "the data has discrete actions of an unknown number: its layout is for continuous ones."
        )
    spec = common.check_spec(found, wanted)
    spec = dataclasses.replace(spec, time_limit=time_limit or spec.time_limit)
    blocks = common.blocks(steps.length, sum(leaf.step_bytes for leaf in leaves.values()))
    return Imported(spec, origin, _records(steps, spec, blocks), len(blocks))


def _records(steps: _Steps, spec: EnvSpec, blocks: list[tuple[int, int]]) -> Iterator[Record]:
    since = 0
    for start, stop in blocks:
        arrays = {name: x[None] for name, x in steps.read(start, stop).items()}
        after = {name: arrays.pop(_NEXT[name]) for name in _NEXT if _NEXT[name] in arrays}
        found = to_steps(arrays, spec, start)
        limits, since = find_limits(found.last[0], since, spec.time_limit)
        found = _truncate(found, limits)
        if not after or (spec.state == "native" and "infos.state" not in after):
            yield Record(found)
        else:
            after["rewards"] = arrays["rewards"]
            yield Record(found, after=to_steps(after, spec, start).view)


def find_limits(done: NumpyArray, since: int, time_limit: int | None) -> tuple[NumpyArray, int]:
    """Find the steps at which a time limit ended an episode, flagged or not."""
    limits: NumpyArray = np.zeros(len(done), bool)
    begin = -since
    for end in [*np.flatnonzero(done).tolist(), len(done)]:
        if time_limit is not None:
            inside = np.arange(begin + time_limit - 1, min(end + 1, len(done)), time_limit)
            limits[inside[inside >= 0]] = True
            begin = int(inside[-1]) + 1 if len(inside) else begin
        if end < len(done):
            begin = end + 1
    return limits, len(done) - begin


def _truncate(steps: Transition, limits: NumpyArray) -> Transition:
    limit = limits[None, :, None]
    return steps._replace(
        terminated=steps.terminated & ~limit,
        truncated=steps.truncated | limit,
        last=steps.last | limits,
    )
