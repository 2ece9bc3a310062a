"""Copies every undamaged episode of a damaged vault to a new one."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from offmarl.errors import VaultError, VaultFormatError
from offmarl.terminal import Advance, Progress, quiet, silent
from offmarl.vault.check.verification import Verification, verify
from offmarl.vault.format import layout, tables
from offmarl.vault.format.faults import Fault, with_episodes
from offmarl.vault.format.layout import POLICY_IDS, Codec, NumpyArray
from offmarl.vault.read.manifest import (
    Description,
    Manifest,
    read_metadata,
    read_parts,
    read_schema,
)
from offmarl.vault.read.open import locate
from offmarl.vault.read.reader import Reader
from offmarl.vault.storage.commit import Contents
from offmarl.vault.storage.files import errors_of
from offmarl.vault.storage.store import store_of
from offmarl.vault.transform import lineage
from offmarl.vault.transform.execute import Remap, copy_pieces, execute
from offmarl.vault.transform.plan import TransformPlan
from offmarl.vault.transform.selection import Pieces, whole_episodes
from offmarl.vault.write.creation import free_place
from offmarl.vault.write.writer import Writer

_MOST_NAMED = 1000
"""Lost episodes that the provenance lists."""


class Lost(NamedTuple):
    """A damaged episode, which was not copied."""

    row: int
    start: int
    length: int


class Salvage(NamedTuple):
    """The result of a salvage: the data recovered from a damaged vault, and the data lost."""

    path: PurePath
    """The new vault."""
    faults: tuple[Fault, ...]
    """The damage found in the old one."""
    episodes: int
    steps: int
    """Steps recovered, over all rows."""
    lost: tuple[Lost, ...]
    """The damaged episodes."""
    unknown_steps: int
    """Steps, over all rows, that can no longer be assigned to an episode."""


def salvage(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    codec: Codec | None = None,
    progress: Progress = quiet,
) -> Salvage:
    """Copy the undamaged episodes of a damaged vault to a new one.

    Whole episodes from before and after the damage are copied, and the damaged vault is left
    unchanged. The new vault has one row with the episodes end to end, in their order.

    Parameters
    ----------
    source
        A vault; its schema or its ``metadata.json`` may be damaged, as each is in the other.
    path, codec, progress
        As for `offmarl.vault.cat`.

    Raises
    ------
    VaultExistsError
        The path exists.
    VaultFormatError
        The vault's head or the tree of its keys is damaged, so its episodes are unknown.
    VaultError
        No episode is undamaged, or the new vault cannot be written.
    """
    free_place(path)  # before anything slow
    verification = verify(source, deep=True, progress=progress)
    reader = _open(verification)
    sound = _sound(reader, verification)
    pieces = whole_episodes(reader, sound)
    runs = partial(_runs, faults=verification.faults)
    if verification.sound:
        examined = lineage.examine(reader, silent)
    else:
        examined = lineage.examine_damaged(reader, _ids(reader, runs(reader, pieces)))
    table = reader.episodes
    places = zip(table.row[~sound], table.start[~sound], table.length[~sound], strict=True)
    lost = tuple(Lost(*map(int, place)) for place in places)
    unknown = reader.rows * verification.length - int(table.length.sum())
    arguments = {
        "lost": [list(episode) for episode in lost[:_MOST_NAMED]],
        "unknown_steps": unknown,
    }

    def copy(vault: Reader, pieces: Pieces, writer: Writer, remap: Remap, advance: Advance) -> None:
        for run in runs(vault, pieces):
            copy_pieces(vault, run, writer, remap, advance)

    planned = TransformPlan("salvage", [reader], lambda *_: [pieces], arguments, codec)
    execute(planned, path, progress, [examined], copy=copy)
    return Salvage(
        locate(path).path, verification.faults, pieces.episodes, pieces.steps, lost, unknown
    )


class _DamagedVault(Reader):
    """A damaged vault, which is read without a memory map, since a map would need all files."""

    _mapped = False
    _final_bytes = 0  # of damaged blocks, only the intact ones are read

    def __init__(self, verification: Verification):
        self._faults = verification.faults
        super().__init__(store_of(verification.path), checked=False)  # the verification was deep

    def _describe(self) -> Description:
        with errors_of(self.path):
            contents = Contents.of(self.store)
        if not contents.keys(layout.OWN_PREFIX):
            return self._describe_foreign()
        metadata: dict[str, Any] = {}
        with suppress(VaultFormatError):
            metadata = read_metadata(contents.store)
        self._parts = read_parts(contents, read_schema(contents, metadata, []), [])
        return self._parts.description(self.store)

    def _describe_foreign(self) -> Description:
        """Describe another program's vault up to where its episodes are unknown."""
        description = super()._describe()
        telling = (*layout.SIGNALS, POLICY_IDS)  # where episodes end
        ends = (fault.steps[0] for fault in self._faults if fault.steps and fault.leaf in telling)
        return description._replace(length=min([description.length, *ends]))

    def _recorded(self, manifest: Manifest) -> tables.Table:
        blocks = self._parts.blocks
        running = manifest.running[manifest.running["length"] > 0]
        return np.concatenate([*(blocks[first] for first in sorted(blocks)), running])


def _open(verification: Verification) -> Reader:
    """Open a verified vault, of which parts may be missing."""
    try:
        return _DamagedVault(verification)
    except VaultError as error:
        if verification.sound:
            raise
        raise VaultFormatError(
            f"{verification.path} has damaged tables ({verification.faults[0]}), so its episodes "
            "are unknown: copy the vault again from its source."
        ) from error


def _sound(vault: Reader, verification: Verification) -> Bool[np.ndarray, "M"]:
    """Return the mask of episodes without a fault."""
    sound = np.ones(len(vault.episodes.row), bool)
    for fault in verification.faults:
        sound[list(with_episodes(fault, vault.episodes).episodes)] = False
        if fault.key and fault.key.startswith(layout.FINALS_PREFIX):
            sound &= ~vault._finals.in_block(fault.key, vault.episodes.final)
    return sound


def _runs(vault: Reader, pieces: Pieces, faults: Iterable[Fault]) -> Iterator[Pieces]:
    """Divide pieces into groups without damage between them; a group is read at once."""
    damaged = np.zeros(vault.rows, bool)
    for fault in faults:
        damaged[slice(*(fault.rows or (0, vault.rows)))] = True
    row = vault.episodes.row[pieces.episode]
    num_damaged = np.concatenate([[0], np.cumsum(damaged)])  # damaged rows before each
    has_damage = num_damaged[row[1:] + 1] > num_damaged[row[:-1]]
    apart = (np.diff(row) > 0) | (pieces.start[1:] != pieces.stop[:-1])
    edges = np.flatnonzero(has_damage & apart) + 1
    columns = (np.split(column, edges) for column in pieces)
    yield from (Pieces(*run) for run in zip(*columns, strict=True) if len(run[0]))


def _ids(vault: Reader, runs: Iterable[Pieces]) -> Iterator[NumpyArray]:
    """Yield the policy ids of the copied steps; those of other steps may be damaged."""
    for run in runs if POLICY_IDS in vault.leaves else ():
        row = vault.episodes.row[run.episode]
        stop = int(run.stop.max())
        for begin, end in vault.blocks([POLICY_IDS], int(run.start.min())):
            if begin < stop:
                rows = slice(int(row[0]), int(row[-1]) + 1)
                yield vault.read(begin, min(end, stop), rows, [POLICY_IDS])[POLICY_IDS]
