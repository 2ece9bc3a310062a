"""Transforms of vaults in blocks, which many tasks share.

A block is an interval of the episodes of one source. Its vault holds the steps that the transform
selects, with the policy ids of all sources joined. The blocks depend on the sources only. Joined in
order they are, to the bit, the vault that the transform makes in one process.
"""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from offmarl import tracking, vault
from offmarl.errors import RunError
from offmarl.launch.work import Work, make_once
from offmarl.terminal import quiet, silent
from offmarl.vault.check.digest import fingerprint
from offmarl.vault.read.reader import Reader, common_spec
from offmarl.vault.transform import execute, lineage
from offmarl.vault.transform.lineage import LineageSource, Named
from offmarl.vault.transform.plan import TransformPlan
from offmarl.vault.transform.selection import Pieces, whole_episodes
from offmarl.vault.write.creation import destination

_BLOCK_BYTES = 2**28
"""Approximate size of the steps of a block."""
_PROCESS_BYTES = 4e8
"""What a process takes that copies vaults, in addition to the data that it reads at once."""


class EpisodeBlock(NamedTuple):
    """An interval of the episodes of a source."""

    source: int
    start: int
    stop: int


class TransformWork(Work):
    """A transform in blocks of about 256 MB, or of ``block_steps``, that makes the vault at a path.

    A block has more steps only if an episode does. `VaultError` if other work made the vault.
    """

    hints: ClassVar[Mapping[str, str]] = {
        "sources": "sources (path, steps, episodes or checksum of a vault)",
        "blocks": "--block-steps or sources",
    }

    def __init__(self, plan: TransformPlan, path: str | Path, block_steps: int | None = None):
        self.transform = plan
        self.blocks = blocks_of(plan.vaults, block_steps)
        sources = [
            [str(source.path), source.num_steps, len(source), fingerprint(source)]
            for source in plan.vaults
        ]
        identity = {
            "operation": plan.operation,
            "sources": sources,
            "settings": plan.settings,
            "blocks": len(self.blocks),
        }
        directory = destination(path, may_exist=True).directory
        super().__init__(plan.operation, directory, identity, len(self.blocks))

    def run(self, block: int) -> None:
        """Write the vault of a block; none if nothing is selected."""
        pieces = self._pieces(block)
        file = self.directory / "blocks" / f"{block}.json"
        tracking.write_json(file, [column.tolist() for column in pieces])
        if not pieces.steps:
            return
        source, copied = self.sources[self.blocks[block].source], self._vault(block, "copied")
        if not self._vault(block).exists():  # a task that was killed may have just written it
            if self.transform.operation != "map":
                self._copy(source, pieces, self._vault(block))
                return
            if not copied.exists():
                self._copy(source, pieces, copied)
            self._map(copied, block)
        shutil.rmtree(copied, ignore_errors=True)

    def is_complete(self) -> bool:
        """Whether the vault exists, and this work made it."""
        if not (self.path / "metadata.json").exists():
            return False
        identity = vault.open_vault(self.path).provenance.get(_KEY)
        if identity != self.identity:
            raise RunError(
                f"{self.path} exists already, and other tasks or another command made it: choose "
                "another path."
            )
        return True

    def join(self) -> None:
        """Write the blocks one after the other into the new vault."""
        notes = [self._read_pieces(block) for block in range(self.num_blocks)]
        selections = [
            (
                source,
                _joined(notes[i] for i, block in enumerate(self.blocks) if block.source == number),
            )
            for number, source in enumerate(self.sources)
        ]
        execute.steps_of(selections)
        execute.warn_of_late(selections)
        origins = lineage.merge_origins(selections)
        written = [number for number, pieces in enumerate(notes) if pieces.steps]
        blocks = [vault.open_vault(self._vault(number)) for number in written]
        arguments = self.transform.described()
        if self.transform.operation == "map":
            arguments = blocks[0].provenance["lineage"]["arguments"]
        about = lineage.provenance_of(self.transform.operation, arguments, selections, origins)
        execute.join_rows(
            blocks,
            self.path,
            lambda _: {**about, _KEY: self.identity},
            tracking.progress,
            execute.codec_of(self.transform.vaults, self.transform.codec),
            self.transform.chunk_steps,
            partial(lineage.remap, source=self._origins, target=origins),
        )

    def plan(self, tasks: int | None) -> dict[str, Any]:
        """Return the sizes of the sources, of a task's memory, and on disk while joining."""
        vaults = self.transform.vaults
        steps = sum(source.num_steps for source in vaults)
        size = sum(source.num_steps * _step_bytes(source) for source in vaults)
        return super().plan(tasks) | {
            "sources": len(vaults),
            "episodes": sum(map(len, vaults)),
            "steps": steps,
            "bytes": size,
            "bytes while joining": 2 * size,
            "memory of a task": int(_PROCESS_BYTES + 4 * execute.BLOCK_BYTES),
        }

    # ------------------------------------------------------------------------ sources

    @cached_property
    def sources(self) -> list[LineageSource]:
        """The sources with their digests, which the first task that needs them computes."""
        directory = self.directory / "sources"
        return [
            LineageSource.from_json(
                reader, make_once(directory / f"{number}.json", partial(_examined, reader))
            )
            for number, reader in enumerate(self.transform.vaults)
        ]

    @cached_property
    def _origins(self) -> list[Named]:
        """The origins of all sources, which define the policy ids in blocks."""
        return lineage.merge(origin for source in self.sources for origin in source.named)

    @cached_property
    def _selections(self) -> list[Pieces] | None:
        """The selection of each source; None if it does not follow from the episode tables."""
        if self.transform.reads_steps:
            return None
        return list(self.transform.select(self.sources, None))

    # ------------------------------------------------------------------------ blocks

    def _pieces(self, block: int) -> Pieces:
        """Return the selection of a block."""
        number, start, stop = self.blocks[block]
        selections = self._selections
        if selections is None:
            within = [
                _clipped(whole_episodes(reader), *((start, stop) if i == number else (0, 0)))
                for i, reader in enumerate(self.transform.vaults)
            ]
            selections = list(self.transform.select(self.sources, within))
        return _clipped(selections[number], start, stop)

    def _copy(self, source: LineageSource, pieces: Pieces, path: Path) -> None:
        copied = TransformPlan(
            self.transform.operation,
            [source.vault],
            lambda *_: [pieces],
            codec="raw",
            spec=common_spec(self.transform.vaults),
        )
        execute.execute(copied, path, quiet, [source], named=self._origins)

    def _map(self, source: Path, block: int) -> None:
        """Change the columns of a block; random numbers depend on the seed and the block."""
        arguments = self.transform.arguments
        seed = arguments["seed"]
        if block:
            seed = int(np.random.SeedSequence([seed, block]).generate_state(1)[0])
        vault.map(
            source,
            self._vault(block),
            arguments.get("function"),
            reward=arguments["reward"],
            by=arguments["by"],
            seed=seed,
        )

    def _vault(self, block: int, kind: str = "blocks") -> Path:
        return self.directory / f"{kind}.vlt" / f"{block:06d}"

    def _read_pieces(self, block: int) -> Pieces:
        columns = json.loads((self.directory / "blocks" / f"{block}.json").read_text())
        return Pieces(*(np.array(column, np.int64) for column in columns))


_NONE = Pieces(*np.zeros((3, 0), np.int64))

_KEY = "tasks"
"""Key of the provenance of vaults that tasks made."""


def blocks_of(vaults: Sequence[Reader], block_steps: int | None = None) -> list[EpisodeBlock]:
    """Divide the episodes of vaults into blocks of at most so many steps."""
    blocks = []
    for number, source in enumerate(vaults):
        most = block_steps or max(_BLOCK_BYTES // _step_bytes(source), 1)
        total, start = np.cumsum(source.episodes.length), 0
        while start < len(total):
            before = total[start - 1] if start else 0
            stop = max(int(np.searchsorted(total, before + most, side="right")), start + 1)
            blocks.append(EpisodeBlock(number, start, stop))
            start = stop
    return blocks


def _step_bytes(source: Reader) -> int:
    return sum(leaf.step_bytes for leaf in source.leaves.values())


def _examined(source: Reader) -> dict[str, Any]:
    return lineage.examine(source, silent).to_json()


def _clipped(pieces: Pieces, start: int, stop: int) -> Pieces:
    inside = (pieces.episode >= start) & (pieces.episode < stop)
    return Pieces(*(column[inside] for column in pieces))


def _joined(pieces: Iterable[Pieces]) -> Pieces:
    return Pieces(*(np.concatenate(column) for column in zip(_NONE, *pieces, strict=True)))
