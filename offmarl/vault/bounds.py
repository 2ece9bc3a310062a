"""Checks that requested steps, rows, agents and episodes exist, and that a length is possible."""

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from offmarl.errors import OptionError, VaultError, VaultFormatError
from offmarl.types import EnvSpec, flatten_tree
from offmarl.vault import layout
from offmarl.vault.layout import Leaf, NumpyArray, Schema
from offmarl.vault.manifest import Description
from offmarl.vault.store import Store

UNBACKED_STEPS = 2**20
"""Steps that may be read before a vault's length is compared with its chunks.

A vault of another program may have so many steps of zeros without a chunk.
"""
_UNCOUNTED_CHUNKS = 2**20
"""If a vault of offmarl has more chunks, its length is compared with its files or its keys."""
_NUMBER = re.compile(r"\d+[./](\d+)")


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


def check_chosen(chosen: NDArray[np.int64], count: int, path: PurePath) -> None:
    """Raise `OptionError` if these are not numbers of episodes, or one is named twice."""
    if not chosen.size or chosen.ndim != 1 or chosen.min() < 0 or chosen.max() >= count:
        raise OptionError(f"{path} has episodes 0 to {count - 1}: choose some of these.")
    if len(np.unique(chosen)) < len(chosen):
        raise OptionError("an episode is named twice: name each once.")


def interval(steps: slice, length: int) -> tuple[int, int]:
    """Return the first step of a slice and the one after the last."""
    start, stop, stride = steps.indices(length)
    if stride != 1:
        raise VaultError(f"a slice of steps must have a stride of 1: got {stride}.")
    return start, max(start, stop)


def percentiles(length: int, low: float, high: float) -> tuple[int, int]:
    """Return the interval of steps between two percentiles of time."""
    if not 0 <= low <= high <= 100:
        raise VaultError(
            f"percentiles {low} to {high} were requested: give two in order from 0 to 100."
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
    """Return the indices that a slice picks; `VaultError` if they are descending."""
    if not isinstance(part, slice):
        raise VaultError(f"{axis} are given by a slice, such as slice(0, 2): got {part!r}.")
    span = range(*part.indices(size))
    if span.step < 0:
        raise VaultError(f"{axis} are read in ascending order, not by a step of {span.step}.")
    return span if span else range(span.start, span.start)


def agents(leaves: Mapping[str, Leaf], spec: EnvSpec, part: slice) -> dict[str, slice]:
    """Return the slice of agents for each array whose third axis is that of agents."""
    span = indices(part, spec.num_agents, "agents")
    having = (name for name, leaf in leaves.items() if _has_agents(name, leaf, spec))
    some = dict.fromkeys(having, slice(span.start, span.stop, span.step))
    for name, leaf in flatten_tree(spec.observation_spec, layout.OBSERVATIONS).items():
        if leaf.agents:
            some[name] = _among(name, leaf.agents, span)
    return some


def _has_agents(name: str, leaf: Leaf, spec: EnvSpec) -> bool:
    """Whether the first axis of an array's steps is that of agents.

    That of a vector state may be, too, if another program wrote it. Extras count as having the axis
    if its size agrees.
    """
    if name.startswith(layout.STATE) and (spec.global_state or len(leaf.shape) == 1):
        return False
    return leaf.shape[:1] == (spec.num_agents,)


def _among(name: str, having: tuple[int, ...], wanted: range) -> slice:
    """Return where the wanted agents are among those that have a leaf."""
    found = [place for place, agent in enumerate(having) if agent in wanted]
    step = found[1] - found[0] if len(found) > 1 else 1
    first = found[0] if found else 0
    some = range(first, first + step * len(found), step)
    if found != [*some]:
        raise VaultError(
            f"{name} is of agents {having}, and those of {wanted} among them are not evenly "
            "spaced: read it without `agents`, and select."
        )
    return slice(some.start, some.stop, step)


def windows(
    vault: Description, rows: NumpyArray, starts: NumpyArray, length: int
) -> tuple[NumpyArray, NumpyArray]:
    """Return the rows and starts of windows; `VaultError` if a vault does not have them."""
    rows, starts = _whole("rows", rows), _whole("starts", starts)
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


def _whole(what: str, numbers: NumpyArray) -> NumpyArray:
    found = np.asarray(numbers)
    if found.size and found.dtype.kind not in "iu":
        raise VaultError(f"the {what} of windows are whole numbers: got {found.dtype}.")
    return found.astype(np.int64, copy=False)


def check_finals(numbers: NumpyArray, count: int, path: PurePath) -> None:
    """Raise `VaultError` if a vault does not have these final views."""
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < count:
        raise VaultError(
            f"final views {numbers.min()} to {numbers.max()} were requested, and {path} has "
            f"{count}, from 0: an episode whose `final` is -1 has none."
        )


def check_length(vault: Description, chunk_steps: Callable[[str], int]) -> None:
    """Raise `VaultFormatError` if a vault has less data than its length needs.

    ``chunk_steps`` returns the steps of an array's chunks.
    """
    if vault.manifest:
        check_own_length(vault, vault.manifest.schema)
    else:
        _check_foreign_length(vault, chunk_steps)


def _check_foreign_length(vault: Description, chunk_steps: Callable[[str], int]) -> None:
    """Raise `VaultFormatError` if there are far fewer chunks than the length needs.

    Chunks that other programs left out are read as zeros, so a forged index of a few bytes could
    stand for billions of steps. The chunks that exist bound the work.
    """
    backed = 0
    for name in vault.leaves:
        numbers = (match[1] for match in _chunks_of(vault.store, name))
        backed = max(backed, len(set(numbers)) * chunk_steps(name))
        if vault.length <= 2 * backed + UNBACKED_STEPS:
            return
    raise VaultFormatError(
        f"{vault.path} says that each row has {vault.length:,} steps, and there is data for "
        f"{backed:,} at most: its index is damaged or forged. Copy the vault again from its "
        "source."
    )


def check_own_length(vault: Description, schema: Schema) -> None:
    """Raise `VaultFormatError` if the files, or the chunks, are too few for the length.

    The state that is kept for each chunk takes memory, so a forged length of a few bytes could take
    all memory.
    """
    blocks, numbers = schema.rows // schema.chunk_rows, -(-vault.length // schema.chunk_steps)
    if blocks * numbers * len(vault.leaves) <= _UNCOUNTED_CHUNKS:
        return
    files = vault.store.driver.num_bytes if schema.codec == "raw" else None
    if files is not None:
        needed = blocks * numbers * schema.chunk_bytes
        if files >= needed:
            return
        found = f"that takes {needed:,} bytes, and its files have {files:,}"
    else:
        count = sum(1 for _ in _chunks_of(vault.store, next(iter(vault.leaves))))
        if count >= blocks * numbers:
            return
        found = f"that takes {blocks * numbers:,} chunks of each array, and there are {count:,}"
    raise VaultFormatError(
        f"{vault.path} says that it has {schema.rows:,} rows of {vault.length:,} steps: {found}. "
        "It has lost data, or its length is damaged or forged. Copy the vault again from "
        "its source, or copy its intact episodes with `offmarl salvage`."
    )


def _chunks_of(store: Store, name: str) -> Iterator[re.Match[str]]:
    """Yield the keys of an array's chunks, matched for the number of the chunk of time."""
    prefix = layout.prefix_of(name)
    keys = (_NUMBER.match(key.removeprefix(prefix)) for key in store.keys(prefix))
    return (match for match in keys if match)
