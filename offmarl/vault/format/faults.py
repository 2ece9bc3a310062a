"""Faults: descriptions of damage in a vault."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from offmarl.errors import OffmarlError
from offmarl.vault.format.tables import Episodes

ERRORS = (OffmarlError, ValueError, OSError)
"""Errors that reading a damaged vault may raise."""


class Fault(NamedTuple):
    """Damage in a vault; leaf, rows and steps are None if it does not belong to any."""

    what: str
    key: str | None = None
    """The first key it was found at."""
    leaf: str | None = None
    """The array's name on disk."""
    rows: tuple[int, int] | None = None
    """The first row, and the one after the last."""
    steps: tuple[int, int] | None = None
    """The first step of time, and the one after the last."""
    episodes: tuple[int, ...] = ()
    """Numbers in `Dataset.episodes`, if they are known."""

    def __str__(self) -> str:
        if self.leaf is None or self.rows is None or self.steps is None:
            named = self.key is None or self.key in self.what
            return self.what if named else f"{self.key}: {self.what}"
        place = f"{self.leaf}, rows {_span(self.rows)}, steps {_span(self.steps)}"
        return f"{place}: {self.what}{_numbered(self.episodes)}"


@contextmanager
def noting(faults: list[Fault], key: str | None = None) -> Iterator[None]:
    """Append an error that the block raises to the faults, and suppress it."""
    try:
        yield
    except ERRORS as error:
        faults.append(Fault(reason(error), key))


def reason(error: Exception) -> str:
    """Return the message of an error, without the details for TensorStore's developers."""
    return str(error).partition(" [tensorstore_spec")[0]


def merge_faults(faults: Iterable[Fault]) -> list[Fault]:
    """Join equal faults of consecutive steps."""
    result: list[Fault] = []
    for fault in sorted(faults, key=_place):
        last = result[-1] if result else Fault("")
        same = (last.what, last.leaf, last.rows) == (fault.what, fault.leaf, fault.rows)
        if same and last.steps and fault.steps and last.steps[1] >= fault.steps[0]:
            stop = max(last.steps[1], fault.steps[1])
            result[-1] = last._replace(steps=(last.steps[0], stop))
        else:
            result.append(fault)
    return result


def _place(fault: Fault) -> tuple[object, ...]:
    return fault.leaf or "", fault.what if fault.leaf else "", fault.rows or (), fault.steps or ()


def with_episodes(fault: Fault, episodes: Episodes) -> Fault:
    """Return a fault with the episodes that its steps belong to."""
    if fault.rows is None or fault.steps is None:
        return fault
    hit = (episodes.row >= fault.rows[0]) & (episodes.row < fault.rows[1])
    hit &= episodes.start < fault.steps[1]
    hit &= episodes.start + episodes.length > fault.steps[0]
    return fault._replace(episodes=tuple(np.flatnonzero(hit).tolist()))


def _span(span: tuple[int, int]) -> str:
    first, stop = span
    return str(first) if stop == first + 1 else f"{first} to {stop - 1}"


def _numbered(episodes: tuple[int, ...]) -> str:
    if not episodes:
        return ""
    if len(episodes) == 1:
        return f" (episode {episodes[0]})"
    if episodes[-1] - episodes[0] + 1 == len(episodes):
        return f" (episodes {episodes[0]} to {episodes[-1]})"
    numbers = ", ".join(map(str, episodes[:8])) + (", ..." if len(episodes) > 8 else "")
    return f" ({len(episodes)} episodes: {numbers})"
