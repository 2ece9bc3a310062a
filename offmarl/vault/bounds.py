"""What can be asked of a vault, and errors that say what it has."""

from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np

from offmarl.errors import VaultError
from offmarl.vault.layout import Leaf, NumpyArray

if TYPE_CHECKING:
    from offmarl.vault.dataset import Dataset


def check_steps(vault: "Dataset", start: int, stop: int) -> None:
    """Raise `VaultError` where a vault does not have these steps."""
    if not 0 <= start <= stop <= vault.length:
        raise VaultError(
            f"steps {start} to {stop} were asked for, and {vault.path} has steps 0 to "
            f"{vault.length}."
        )


def check_episode(number: int, count: int, path: PurePath) -> None:
    """Raise `VaultError` if a vault has no episode of this number; negative ones count back."""
    if not -count <= number < count:
        raise VaultError(f"episode {number} was asked for, and {path} has {count}.")


def interval(steps: slice, length: int) -> tuple[int, int]:
    """Return the first step of a slice and the one after the last."""
    if not isinstance(steps, slice):
        raise VaultError(f"steps are taken by slices: ask for [{steps}:{steps} + 1], say.")
    start, stop, stride = steps.indices(length)
    if stride != 1:
        raise VaultError(f"steps are read one after the other, not every {stride}th.")
    return start, max(start, stop)


def percentiles(length: int, low: float, high: float) -> tuple[int, int]:
    """Return the interval of steps between two percentiles of time."""
    if not 0 <= low <= high <= 100:
        raise VaultError(
            f"percentiles {low} to {high} were asked for: give two in order from 0 to 100."
        )
    return round(length * low / 100), round(length * high / 100)


def blocks(
    start: int, length: int, chunk: int, step_bytes: int, most: int
) -> Iterator[tuple[int, int]]:
    """Cut time into intervals of about ``most`` bytes that end where chunks do."""
    size = chunk * max(1, most // (step_bytes * chunk))
    while start < length:
        stop = min(length, (start // size + 1) * size)
        yield start, stop
        start = stop


def indices(part: slice, size: int, axis: str) -> range:
    """Return the indices that a slice picks; `VaultError` where they do not go up."""
    if not isinstance(part, slice):
        raise VaultError(f"{axis} are given by a slice, such as slice(0, 2): got {part!r}.")
    span = range(*part.indices(size))
    if span.step < 0:
        raise VaultError(f"{axis} are read in ascending order, not by a step of {span.step}.")
    return span if span else range(span.start, span.start)


def agents(vault: "Dataset", part: slice) -> dict[str, slice]:
    """Return what to read of the third axis of the arrays in which it is that of agents."""
    count = vault.spec.num_agents
    span = indices(part, count, "agents")
    having = (name for name, leaf in vault.leaves.items() if _has_agents(name, leaf, count))
    return dict.fromkeys(having, slice(span.start, span.stop, span.step))


def _has_agents(name: str, leaf: Leaf, num_agents: int) -> bool:
    """Whether the first axis of an array's steps is that of agents; a state's may be, too."""
    of_everybody = name == "infos.state" and len(leaf.shape) == 1
    return leaf.shape[:1] == (num_agents,) and not of_everybody


def windows(
    vault: "Dataset", rows: NumpyArray, starts: NumpyArray, length: int
) -> tuple[NumpyArray, NumpyArray]:
    """Return the rows and starts of windows; `VaultError` where a vault does not have them."""
    rows, starts = _whole("rows", rows), _whole("starts", starts)
    if rows.ndim != 1 or rows.shape != starts.shape or length < 1:
        raise VaultError(
            f"windows of {length} steps were asked for with rows {rows.shape} and starts "
            f"{starts.shape}: give one of each for every window, and at least 1 step."
        )
    if len(rows):
        check_steps(vault, int(starts.min()), int(starts.max()) + length)
        if rows.min() < 0 or rows.max() >= vault.rows:
            raise VaultError(
                f"rows {rows.min()} to {rows.max()} were asked for, and {vault.path} has rows 0 to "
                f"{vault.rows - 1}."
            )
    return rows, starts


def _whole(what: str, numbers: NumpyArray) -> NumpyArray:
    found = np.asarray(numbers)
    if found.size and found.dtype.kind not in "iu":
        raise VaultError(f"the {what} of windows are whole numbers: got {found.dtype}.")
    return found.astype(np.int64, copy=False)


def check_finals(numbers: NumpyArray, count: int, path: PurePath) -> None:
    """Raise `VaultError` where a vault does not have these final views."""
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < count:
        raise VaultError(
            f"final views {numbers.min()} to {numbers.max()} were asked for, and {path} has "
            f"{count}, from 0: an episode whose `final` is -1 has none."
        )
