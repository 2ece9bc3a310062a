"""What a vault's steps tell that its tables do not."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from offmarl.errors import VaultFormatError
from offmarl.types import Discrete, EnvSpec
from offmarl.vault import compat, encoding, layout, tables
from offmarl.vault.layout import NumpyArray, Schema
from offmarl.vault.store import Store

if TYPE_CHECKING:
    from offmarl.vault.dataset import Dataset

UNBACKED_STEPS = 2**20
"""Steps that may be read before a vault's length is compared with its chunks.

A vault of another program may have so many steps of zeros without a chunk.
"""
_UNCOUNTED_CHUNKS = 2**20
"""A vault of offmarl with more chunks has its length compared with its files, or with its keys."""
_NUMBER = re.compile(r"\d+[./](\d+)")


def episodes(vault: "Dataset", start: int = 0) -> Iterator[tables.Table]:
    """Find the episodes of the steps from one on, at which new ones begin."""
    running = tables.none_running(vault.rows, vault.spec.num_agents, start)
    names = [name for name in layout.SIGNALS if name in vault.leaves]
    for begin, stop in vault.blocks(names, start):
        signals = encoding.signals_of(vault.read(begin, stop, leaves=names))
        ended, running = tables.scan(running, begin, signals)
        yield ended
    yield running[running["length"] > 0]


def spec(vault: "Dataset") -> EnvSpec:
    """Return the sizes that the arrays of a vault of another program tell."""
    found = encoding.spec_of(vault.leaves)
    if found.action == Discrete(0):
        found = dataclasses.replace(found, action=Discrete(highest_action(vault) + 1))
    return dataclasses.replace(found, time_limit=vault.time_limit)


def quirks(vault: "Dataset", table: tables.Table) -> tuple[str, ...]:
    """Return what a vault of another program does differently; ``table`` is as on disk."""
    return (
        *compat.of_shapes(vault.leaves, vault.rows),
        *(["padded observations"] if is_padded(vault) else []),
        *compat.of_ends(table, vault.time_limit),
        *compat.of_returns(table),
    )


def check_length(vault: "Dataset", chunk_steps: Callable[[str], int]) -> None:
    """Raise `VaultFormatError` if a vault has less data than its length needs.

    ``chunk_steps`` returns the steps of an array's chunks.
    """
    if vault.manifest:
        _check_own_length(vault, vault.store, vault.manifest.schema)
    else:
        _check_foreign_length(vault, vault.store, {x: chunk_steps(x) for x in vault.leaves})


def _check_foreign_length(vault: "Dataset", store: Store, chunk_steps: Mapping[str, int]) -> None:
    """Raise `VaultFormatError` if a vault has far fewer chunks than its length needs.

    Chunks that other programs left out are read as zeros, so a forged index of a few bytes could
    stand for billions of steps. What is really there bounds the work.

    Parameters
    ----------
    vault, store
        One that others wrote.
    chunk_steps
        Array name to the steps of its chunks.
    """
    backed = 0
    for name, steps in chunk_steps.items():
        prefix = layout.prefix_of(name)
        found = (_NUMBER.match(key.removeprefix(prefix)) for key in store.keys(prefix))
        count = len({match[1] for match in found if match})
        backed = max(backed, count * steps)
        if vault.length <= 2 * backed + UNBACKED_STEPS:
            return
    raise VaultFormatError(
        f"{vault.path} says that each row has {vault.length:,} steps, and there is data for "
        f"{backed:,} at most: its index is damaged or forged. `offmarl repair` keeps what is "
        "sound; or copy the vault again from where it came from."
    )


def _check_own_length(vault: "Dataset", store: Store, schema: Schema) -> None:
    """Raise `VaultFormatError` where a vault of offmarl has less data than its length needs.

    What is remembered of each chunk takes memory, so a forged length of a few bytes could take all
    memory.

    Parameters
    ----------
    vault, store
        One of ours.
    schema
        Its schema.
    """
    blocks, numbers = schema.rows // schema.chunk_rows, -(-vault.length // schema.chunk_steps)
    if blocks * numbers * len(vault.leaves) <= _UNCOUNTED_CHUNKS:
        return
    files = vault.num_bytes if schema.codec == "raw" else None
    if files is not None:
        step_bytes = sum(leaf.step_bytes for leaf in vault.leaves.values())
        needed = schema.rows * numbers * schema.chunk_steps * step_bytes
        if files >= needed:
            return
        there = f"that takes {needed:,} bytes, and its files have {files:,}"
    else:
        prefix = layout.prefix_of(next(iter(vault.leaves)))
        count = sum(
            _NUMBER.match(key.removeprefix(prefix)) is not None for key in store.keys(prefix)
        )
        if count >= blocks * numbers:
            return
        there = f"that takes {blocks * numbers:,} chunks of each array, and there are {count:,}"
    raise VaultFormatError(
        f"{vault.path} says that it has {schema.rows:,} rows of {vault.length:,} steps: {there}. "
        "It has lost data, or its length is damaged or forged. `offmarl repair` keeps what is "
        "sound; or copy the vault again from where it came from."
    )


def highest_action(vault: "Dataset") -> int:
    """Return the highest of a vault's discrete actions; 0 if there are none."""
    names = ["actions"]
    blocks = (vault.read(*block, leaves=names)["actions"] for block in vault.blocks(names))
    return max((int(actions.max()) for actions in blocks), default=0)


def is_padded(vault: "Dataset") -> bool:
    """Whether observations are, as far as the first of them tell."""
    names = ["observations"]
    _, stop = next(vault.blocks(names), (0, 0))
    return compat.is_padded(vault.read(0, stop, leaves=names)["observations"])


def limited(vault: "Dataset", table: tables.Table) -> NumpyArray:
    """Return the steps, ``(B, T)``, at which a time limit is flagged as termination.

    ``table`` has the vault's episodes as they are on disk.
    """
    if vault.time_limit is None:
        return np.broadcast_to(False, (vault.rows, vault.length))
    steps: NumpyArray = np.zeros((vault.rows, vault.length), bool)
    ended = table[compat.by_limit(table, vault.time_limit)]
    steps[ended["row"], ended["start"] + ended["length"] - 1] = True
    return steps
