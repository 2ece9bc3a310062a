"""Checks that requested steps, rows and episodes exist."""

import operator
from pathlib import PurePath
from typing import SupportsIndex

import numpy as np

from offmarl.errors import VaultError
from offmarl.vault.format.layout import NumpyArray
from offmarl.vault.read.manifest import Description


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


def interval(part: slice, size: int, axis: str) -> tuple[int, int]:
    """Return the first index of a slice and the one after the last."""
    if not isinstance(part, slice):
        raise VaultError(f"{axis} are given by a slice, such as slice(0, 2): got {part!r}.")
    start, stop, stride = part.indices(size)
    if stride != 1:
        raise VaultError(f"a slice of {axis} must have a stride of 1: got {stride}.")
    return start, max(start, stop)


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
