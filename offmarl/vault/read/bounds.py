"""Checks that requested steps, rows, agents and episodes exist."""

import operator
from collections.abc import Mapping
from pathlib import PurePath
from typing import SupportsIndex

import numpy as np

from offmarl.errors import VaultError
from offmarl.types import EnvSpec, flatten_tree
from offmarl.vault.format import layout
from offmarl.vault.format.layout import Leaf, NumpyArray
from offmarl.vault.read.manifest import Description

Index = slice | list[int]
"""A selection from an axis."""


def check_steps(vault: Description, start: int, stop: int) -> None:
    """Raise `VaultError` if a vault does not have these steps."""
    if not 0 <= start <= stop <= vault.length:
        raise VaultError(
            f"steps {start} to {stop} were requested, and {vault.path} has steps 0 to "
            f"{vault.length}."
        )


def check_episode(number: object, count: int, path: PurePath) -> None:
    """Raise `VaultError` if a vault has no episode of this number; negative ones count back."""
    if not isinstance(number, SupportsIndex):
        raise VaultError(
            f"{path} cannot be indexed by {number!r:.80}: give the number of an episode, or a "
            "slice of the time steps of a whole dataset."
        )
    if not -count <= operator.index(number) < count:
        raise VaultError(f"episode {number} was requested, and {path} has {count}.")


def interval(steps: slice, length: int) -> tuple[int, int]:
    """Return the first step of a slice and the one after the last."""
    start, stop, stride = steps.indices(length)
    if stride != 1:
        raise VaultError(f"a slice of steps must have a stride of 1: got {stride}.")
    return start, max(start, stop)


def indices(part: slice, size: int, axis: str) -> range:
    """Return the indices that a slice picks; `VaultError` if they are descending."""
    if not isinstance(part, slice):
        raise VaultError(f"{axis} are given by a slice, such as slice(0, 2): got {part!r}.")
    span = range(*part.indices(size))
    if span.step < 0:
        raise VaultError(f"{axis} are read in ascending order, not by a step of {span.step}.")
    return span if span else range(span.start, span.start)


def agents(leaves: Mapping[str, Leaf], spec: EnvSpec, part: slice) -> dict[str, Index]:
    """Return the selection from the third axis of each array that has an axis of agents."""
    span = indices(part, spec.num_agents, "agents")
    having = (name for name, leaf in leaves.items() if _has_agents(name, leaf, spec))
    selections: dict[str, Index] = dict.fromkeys(having, slice(span.start, span.stop, span.step))
    for name, leaf in flatten_tree(spec.observation_spec, layout.OBSERVATIONS).items():
        if leaf.agents:  # of some agents alone
            selections[name] = [place for place, agent in enumerate(leaf.agents) if agent in span]
    return selections


def _has_agents(name: str, leaf: Leaf, spec: EnvSpec) -> bool:
    """Whether the first axis of an array's steps is that of agents.

    That of a vector state may be, too, if another program wrote it. Extras count as having the axis
    if its size agrees.
    """
    if name.startswith(layout.STATE) and (spec.global_state or len(leaf.shape) == 1):
        return False
    return leaf.shape[:1] == (spec.num_agents,)


def windows(
    vault: Description, rows: NumpyArray, starts: NumpyArray, length: int
) -> tuple[NumpyArray, NumpyArray]:
    """Return the rows and starts of windows; `VaultError` if a vault does not have them."""
    rows, starts = _integers("rows", rows), _integers("starts", starts)
    if rows.ndim != 1 or rows.shape != starts.shape or length < 1:
        raise VaultError(
            f"windows of {length} steps were requested with rows {rows.shape} and starts "
            f"{starts.shape}: give one of each for every window, and at least 1 step."
        )
    if len(rows):
        check_steps(vault, int(starts.min()), int(starts.max()) + length)
        if rows.min() < 0 or rows.max() >= vault.rows:
            raise VaultError(
                f"rows {rows.min()} to {rows.max()} were requested, and {vault.path} has rows 0 to "
                f"{vault.rows - 1}."
            )
    return rows, starts


def _integers(name: str, numbers: NumpyArray) -> NumpyArray:
    array = np.asarray(numbers)
    if array.size and array.dtype.kind not in "iu":
        raise VaultError(f"the {name} of windows are whole numbers: got {array.dtype}.")
    return array.astype(np.int64, copy=False)
