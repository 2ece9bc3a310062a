"""Steps end to end in the arrays of other projects: of OMAR, of OMIGA and ComaDICE, and of D4RL.

A folder of OMAR has ``.npy`` files ``obs_i``, ``acs_i``, ``rews_i``, ``next_obs_i`` and ``dones_i``
for each agent i from 0, and optionally ``states_i`` and ``next_states_i``. Shorter observations and
states are padded with zeros. Episodes end at the time limit whether ``dones`` says so or not, which
is 25 steps in OMAR's particle environments.

An HDF5 file of OMIGA has arrays ``o (T, N, O)``, ``s (T, N, S)``, ``a (T, N, A)``, and ``r`` and
``d``, ``(T, 1)`` or one for each agent: rewards, and 1 at the last step of an episode. The outcome
of an episode's last action is not recorded there. The states of the agents are joined to the global
state.

An ``.npz`` or HDF5 file of D4RL has the steps of one agent: ``observations (T, ...)``, ``actions
(T, A)`` in [-1, 1], ``rewards`` and ``terminals (T,)``, and optionally ``timeouts (T,)`` and
``next_observations (T, ...)``. Other arrays and groups, such as ``infos``, are left out.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from offmarl.errors import VaultError
from offmarl.paths import local
from offmarl.types import Discrete, EnvSpec
from offmarl.vault.convert import common
from offmarl.vault.convert.admission import ImportedRow, to_steps
from offmarl.vault.convert.common import Imported
from offmarl.vault.convert.containers import StrPath, open_arrays
from offmarl.vault.format import encoding
from offmarl.vault.format.layout import Leaf, NumpyArray

_NEXT = {"observations": "next_obs", "infos.state": "next_states"}
"""Names of the arrays after each step, by the names on disk of those before it."""

_Arrays = dict[str, NumpyArray]


@contextmanager
def _end_to_end(
    source: StrPath,
    layout: str,
    select: Callable[[set[str]], Iterable[str]],
    convert: Callable[[_Arrays], _Arrays],
    check: Callable[[Path, Mapping[str, Any]], None],
    env_spec: EnvSpec | None,
    time_limit: int | None,
) -> Iterator[Imported]:
    """Open arrays ``(T, ...)`` whose steps are end to end; see `open_arrays`.

    ``check`` refuses arrays of other shapes. ``convert`` names steps as they are on disk, with an
    axis of agents, and the arrays after each step as in `_NEXT`.
    """
    source = local(source)
    with open_arrays(source, f"{layout}'s", select) as arrays:
        lengths = {name: array.shape[0] if array.shape else 0 for name, array in arrays.items()}
        check(source, arrays)
        if len({*lengths.values()}) > 1:
            listing = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise VaultError(f"{source} is damaged: its arrays have different lengths ({listing}).")
        length = next(iter(lengths.values()))
        if not length:
            raise VaultError(f"{source} has no steps.")
        ((_, first),) = common.read_blocks(source, arrays, [(0, 1)], convert)
        leaves = {name: Leaf(x.dtype, x.shape[1:]) for name, x in first.items()}
        before = {name: leaf for name, leaf in leaves.items() if name not in _NEXT.values()}
        inferred = encoding.spec_of(before)
        if inferred.action == Discrete(0):
            raise VaultError(
                "the data has discrete actions of an unknown number: its layout is for continuous "
                "ones."
            )
        spec = common.check_spec(inferred, env_spec)
        spec = dataclasses.replace(spec, time_limit=time_limit or spec.time_limit)
        spans = common.blocks(length, sum(leaf.step_bytes for leaf in leaves.values()))
        records = _records(common.read_blocks(source, arrays, spans, convert), spec)
        yield Imported(spec, common.origin_of(layout.lower(), source), records, len(spans))


def _records(blocks: Iterable[tuple[int, _Arrays]], spec: EnvSpec) -> Iterator[ImportedRow]:
    since = 0
    for start, block in blocks:
        arrays = {name: x[None] for name, x in block.items()}
        after = {name: arrays.pop(_NEXT[name]) for name in _NEXT if _NEXT[name] in arrays}
        steps = to_steps(arrays, spec, start)
        limits, since = find_limits(steps.last[0], since, spec.time_limit)
        limit = limits[None, :, None]
        steps = steps._replace(
            terminated=steps.terminated & ~limit,
            truncated=steps.truncated | limit,
            last=steps.last | limits,
        )
        if not after or (spec.state == "native" and "infos.state" not in after):
            yield ImportedRow(steps)
        else:
            after["rewards"] = arrays["rewards"]
            yield ImportedRow(steps, after=to_steps(after, spec, start).view)


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


# ---------------------------------------------------------------------------------- OMAR

_OMAR = ("obs", "acs", "rews", "next_obs", "dones")
_OMAR_STATES = ("states", "next_states")


def read_omar(
    source: StrPath, env_spec: EnvSpec | None = None, time_limit: int | None = None
) -> AbstractContextManager[Imported]:
    """Read folders of .npy files of particle environments and MuJoCo, as OMAR ships them."""
    if not local(source).is_dir():
        raise VaultError(f"{source} is not a folder: OMAR's datasets are folders of .npy files.")
    check = partial(_check_steps, "OMAR", ("rews_", "dones_"))
    return _end_to_end(source, "OMAR", _omar_names, _convert_omar, check, env_spec, time_limit)


def _omar_names(names: set[str]) -> list[str]:
    agents = range(max(sum(bool(re.fullmatch(r"obs_\d+", name)) for name in names), 1))
    kinds = (*_OMAR, *(_OMAR_STATES if "states_0" in names else ()))
    return [f"{kind}_{agent}" for kind in kinds for agent in agents]


def _check_steps(
    layout: str, numbers: tuple[str, ...], source: Path, arrays: Mapping[str, Any]
) -> None:
    """Raise `VaultError` if steps of an array are empty; ``numbers`` have one number a step."""
    for name, array in arrays.items():
        sizes = array.shape[1:] if array.shape else (0,)
        if 0 in sizes or (name.startswith(numbers) and sizes not in ((), (1,))):
            raise VaultError(
                f"{source} is not of {layout}'s layout: {name} has shape {array.shape}, and must "
                "have an entry for each step of one agent."
            )


def _convert_omar(arrays: _Arrays) -> _Arrays:
    of_kind: dict[str, list[NumpyArray]] = {}
    for name, array in arrays.items():
        of_kind.setdefault(name.rpartition("_")[0], []).append(array)
    stacked = {kind: _stack(agents) for kind, agents in of_kind.items()}
    renamed = {
        "observations": stacked["obs"],
        "actions": stacked["acs"],
        "rewards": stacked["rews"][..., 0],
        "terminals": stacked["dones"][..., 0],
        "next_obs": stacked["next_obs"],
    }
    if "states" in stacked:
        states = {"infos.state": stacked["states"], "next_states": stacked["next_states"]}
        renamed |= {name: x.reshape(len(x), -1) for name, x in states.items()}
    return renamed


def _stack(arrays: list[NumpyArray]) -> NumpyArray:
    """Stack the agents' arrays ``(T, ...)`` to ``(T, N, D)``, padded with zeros."""
    flat = [array.reshape(len(array), -1) for array in arrays]
    width = max(array.shape[1] for array in flat)
    return np.stack([np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in flat], axis=1)


# ---------------------------------------------------------------------------------- OMIGA

_OMIGA = ("s", "o", "a", "r", "d")


def read_omiga(
    source: StrPath, env_spec: EnvSpec | None = None, time_limit: int | None = None
) -> AbstractContextManager[Imported]:
    """Read HDF5 files of multi-agent MuJoCo, as OMIGA and ComaDICE ship them."""
    return _end_to_end(
        source, "OMIGA", lambda _: _OMIGA, _convert_omiga, _check_omiga, env_spec, time_limit
    )


def _check_omiga(source: Path, arrays: Mapping[str, Any]) -> None:
    shape = arrays["o"].shape
    if len(shape) != 3 or not shape[1]:
        raise VaultError(f"{source} is not of OMIGA's layout: o has shape {shape}.")


def _convert_omiga(arrays: _Arrays) -> _Arrays:
    s, o, a, r, d = (arrays[name] for name in _OMIGA)
    lead = o.shape[:2]
    return {
        "observations": o,
        "infos.state": s.reshape(len(o), -1),
        "actions": a,
        "rewards": np.broadcast_to(r.reshape(len(o), -1), lead),
        "terminals": np.broadcast_to(d.reshape(len(o), -1), lead),
    }


# ---------------------------------------------------------------------------------- D4RL

_D4RL = ("observations", "actions", "rewards", "terminals")
_OPTIONAL = {"timeouts": "truncations", "next_observations": "next_obs"}
"""Optional arrays, and their names in `_end_to_end`."""
_NUMBERS = ("rewards", "terminals", "timeouts")


def read_d4rl(
    source: StrPath, env_spec: EnvSpec | None = None, time_limit: int | None = None
) -> AbstractContextManager[Imported]:
    """Read the steps of a single agent in .npz or HDF5, as D4RL ships them."""
    check = partial(_check_steps, "D4RL", _NUMBERS)
    return _end_to_end(source, "D4RL", _d4rl_names, _convert_d4rl, check, env_spec, time_limit)


def _d4rl_names(names: set[str]) -> list[str]:
    return [*_D4RL, *(name for name in _OPTIONAL if name in names)]


def _convert_d4rl(arrays: _Arrays) -> _Arrays:
    axes = {name: () if name in _NUMBERS else x.shape[1:] or (1,) for name, x in arrays.items()}
    return {
        _OPTIONAL.get(name, name): x.reshape(len(x), 1, *axes[name]) for name, x in arrays.items()
    }
