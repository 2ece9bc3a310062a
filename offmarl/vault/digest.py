"""A fingerprint of what a vault says, not of how it is stored."""

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from offmarl.types import Transition
from offmarl.vault import layout
from offmarl.vault.layout import NumpyArray
from offmarl.vault.reader import Vault


def digest(vault: Vault) -> str:
    """Return the SHA-256 of a vault's logical content, in hexadecimal.

    It is over every episode's steps, way of ending and final view, in no particular order: the same
    for the same experience whatever the codec, the chunks, the rows, the order of the episodes and
    the program that wrote them.
    """
    shapes = [[name, *leaf.shape] for name, leaf in layout.leaves(vault.spec).items()]
    total = hashlib.sha256(layout.dump_json(shapes))
    for one in sorted(_of_episodes(vault)):
        total.update(one)
    return total.hexdigest()


def _of_episodes(vault: Vault) -> Iterator[bytes]:
    found = vault.episodes
    ends = found.start + found.length
    finals = _pack([*vault.finals], 1)
    running: dict[int, Any] = {}
    for begin, stop in vault.blocks():
        steps = _pack_steps(vault.transitions(begin, stop))
        for episode in np.flatnonzero((found.start < stop) & (ends > begin)):
            row, start, end = found.row[episode], found.start[episode], ends[episode]
            hasher = running.setdefault(row, hashlib.sha256())
            hasher.update(steps[row, max(start, begin) - begin : min(end, stop) - begin])
            if end <= stop:
                hasher.update(found.cause[episode].encode())
                final = found.final[episode]
                hasher.update(finals[final] if final >= 0 else b"")
                yield running.pop(row).digest()


def _pack_steps(transition: Transition) -> NumpyArray:
    return _pack(list(layout.to_disk(transition).values()), 2)


def _pack(arrays: list[NumpyArray], lead: int) -> NumpyArray:
    """Put the bytes of each record side by side: ``(*lead, ...)`` arrays to ``(*lead, bytes)``."""
    flat = (x.reshape(*x.shape[:lead], math.prod(x.shape[lead:])) for x in arrays)
    return np.concatenate([np.ascontiguousarray(x).view(np.uint8) for x in flat], axis=-1)
