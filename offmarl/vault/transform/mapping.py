"""Writes a vault with changed columns, a chunk at a time.

A function is called for one part of the data after the other. The chunks of the columns that it
returns are encoded; those of all other columns are copied as they are stored, if offmarl's present
format holds them. Rows, chunks and episodes stay the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from offmarl.errors import OptionError, VaultChecksumError, VaultError
from offmarl.terminal import Advance, Progress
from offmarl.types import flatten_view
from offmarl.vault import encoding, layout, tables
from offmarl.vault.chunks import compress
from offmarl.vault.creation import create_store
from offmarl.vault.faults import damaged
from offmarl.vault.files import errors_of
from offmarl.vault.layout import METADATA, Head, NumpyArray, Schema, column_of
from offmarl.vault.metadata import to_metadata, without_episodes
from offmarl.vault.reader import Reader
from offmarl.vault.store import Store
from offmarl.vault.tables import Table
from offmarl.vault.transform import lineage, pipeline, selection
from offmarl.vault.transform.columns import Part, Result, check, new_extras
from offmarl.vault.transform.function import (
    Apply,
    Function,
    MapFunction,
    load,
    parse_reward,
    results,
    reward_formula,
)
from offmarl.vault.transform.pipeline import AnyVault, StrPath, opened
from offmarl.vault.transform.selection import Unit

_COMMIT_BYTES = 2**25
"""Approximate size of a commit, and of the steps of a part."""
_BLOCK_RECORDS = 2**16
"""Episodes in a block of the episode table."""


def map_columns(
    source: AnyVault,
    path: StrPath,
    function: MapFunction | None,
    reward: str | None,
    by: Unit,
    seed: int,
    processes: int,
    progress: Progress,
) -> None:
    """Write a vault with changed columns; see `offmarl.vault.map`."""
    if (function is None) == (reward is None):
        raise OptionError("give a function (--with) or a formula of rewards (--reward).")
    if processes < 1:
        raise OptionError(f"the number of processes must be at least 1, not {processes}.")
    if reward is not None:
        parse_reward(reward)  # before anything slow
    loaded = None if function is None else load(function, seed)
    vault = opened(source)
    with create_store(path) as store:
        (examined,) = pipeline.examine_all([vault], progress)
        if loaded is None:
            assert reward is not None
            by, loaded = "steps", reward_formula(reward, selection.columns_of(examined))
        mapped = start(vault, loaded, by, processes)
        arguments = {**loaded.described, "columns": mapped.columns, "by": by}
        taken = examined, selection.everything(vault)
        provenance = lineage.provenance_of("map", arguments, [taken], examined.named)
        with progress("map", vault.num_steps) as advance:
            write(mapped, store, provenance, advance)


def parts_of(vault: Reader, schema: Schema, by: Unit) -> Iterator[Part]:
    """Yield the parts that a function is called for, by block of rows and then by time.

    Parts by steps are whole chunks of all rows that share them, so they do not depend on the
    memory or on the program that calls.
    """
    yield from _episodes(vault, schema) if by == "episodes" else _chunks(vault, schema)


def _episodes(vault: Reader, schema: Schema) -> Iterator[Part]:
    found = vault.episodes
    # Rows that share chunks advance together, so that few chunks are unfinished at a time.
    for number in np.lexsort((found.row, found.start, found.row // schema.chunk_rows)).tolist():
        row, start = int(found.row[number]), int(found.start[number])
        yield Part(slice(row, row + 1), start, start + int(found.length[number]), number)


def _chunks(vault: Reader, schema: Schema) -> Iterator[Part]:
    chunks = max(1, _COMMIT_BYTES // schema.chunk_bytes)
    size, number = chunks * schema.chunk_steps, 0
    for first in range(0, vault.rows, schema.chunk_rows):
        for start in range(0, vault.length, size):
            rows = slice(first, first + schema.chunk_rows)
            yield Part(rows, start, min(start + size, vault.length), number)
            number += 1


def is_current(vault: Reader) -> bool:
    """Whether all of a vault is stored in the present format, so that its chunks can be copied."""
    own = vault.manifest
    return own is not None and not own.unverified


def schema_of(vault: Reader) -> Schema:
    """Return the schema of a vault with the same rows: the vault's own if it is current."""
    if vault.manifest and is_current(vault):
        return vault.manifest.schema
    steps = layout.default_chunk_steps(vault.spec, vault.rows, vault.length)
    rows = layout.default_chunk_rows(vault.rows, steps)
    return Schema(vault.spec, vault.rows, rows, steps, "raw")


class Mapped(NamedTuple):
    """A function that is being applied to a vault."""

    vault: Reader
    schema: Schema
    """Of the new vault."""
    changed: frozenset[str]
    """Disk names of the arrays that the function returns."""
    results: Iterator[tuple[Part, Result]]
    """The results for all parts."""

    @property
    def columns(self) -> list[str]:
        """The columns that the function returns."""
        return sorted(map(column_of, self.changed))


def start(vault: Reader, function: Function, by: Unit, processes: int) -> Mapped:
    """Apply a function to the first part of a vault, to find out what it changes and adds."""
    schema, apply = schema_of(vault), Apply(vault, function)
    parts = parts_of(vault, schema, by)
    part = next(parts, None)
    if part is None:
        raise VaultError(f"{vault.path} has no steps: an empty vault is not written.")
    returned, steps = apply(part)
    extras = {**schema.spec.extras, **new_extras(returned, steps)}
    schema = replace(schema, spec=replace(schema.spec, extras=extras))
    layout.check_leaves(schema.spec)
    first = check(returned, steps, part, schema.leaves)
    rest = results(apply, parts, schema.leaves, processes)
    return Mapped(vault, schema, frozenset(first.arrays), chain([(part, first)], rest))


def write(mapped: Mapped, store: Store, provenance: Mapping[str, Any], advance: Advance) -> None:
    """Fill a new store with the vault whose columns are changed."""
    vault, schema, changed, results = mapped
    copied = is_current(vault)
    encoded = changed if copied else frozenset(schema.leaves)
    chunks = _Chunks(schema, store, vault.length, encoded)
    views = {column_of(name) for name in changed} & {*flatten_view(vault.spec.view_spec)}
    finals = None if copied and not views else _Finals(vault, store)
    table = _EpisodeTable(vault)
    for part, result in results:
        _check_columns(result, changed, part)
        arrays = result.arrays if copied else _stored(vault, part) | result.arrays
        chunks.put(part, arrays)
        if finals:
            finals.put(result)
        table.put(part, arrays)
        advance(part.lead[0] * part.lead[1])
    chunks.finish()
    for name in schema.leaves.keys() - encoded:
        chunks.copy(vault, name)
    if schema.codec == "raw":
        _commit(store, chunks.checksums())
    if finals:
        table.finals, table.num_finals = finals.finish()
    else:
        _copy_finals(vault.store, store)
    _write_tables(table, schema, store, provenance)
    store.driver.write(METADATA, layout.dump_json(to_metadata(schema)))


def _commit(store: Store, values: Mapping[str, bytes]) -> None:
    with errors_of(store.path):
        store.commit(values, fence={}).result()


def _check_columns(result: Result, changed: frozenset[str], part: Part) -> None:
    if result.arrays.keys() != changed:
        now, before = (
            ", ".join(sorted(map(column_of, names))) or "nothing"
            for names in (result.arrays, changed)
        )
        raise OptionError(
            f"the function returned {now} for steps {part.start} to {part.stop - 1}, and {before} "
            "before: return the same columns in every call."
        )


def _stored(vault: Reader, part: Part) -> dict[str, NumpyArray]:
    """Return the arrays of a part as offmarl's present format stores them."""
    return encoding.to_disk(vault.transitions(part.start, part.stop, part.rows))


class _Chunks:
    """Gathers parts of the arrays ``names`` into chunks, and writes those that are complete.

    `copy` copies the others; a row has ``length`` steps.
    """

    def __init__(self, schema: Schema, store: Store, length: int, names: frozenset[str]):
        self._schema, self._store, self._length = schema, store, length
        self._leaves = {name: leaf for name, leaf in schema.leaves.items() if name in names}
        self._block = 0
        self._filled: NumpyArray = np.zeros(schema.chunk_rows, np.int64)
        self._open: dict[int, dict[str, NumpyArray]] = {}
        self._staged: dict[str, bytes] = {}
        self._staged_bytes = 0
        self._blocks = schema.rows // schema.chunk_rows
        self._count = -(-length // schema.chunk_steps)
        shape = self._count, len(schema.leaves), self._blocks
        self._checksums: NumpyArray = np.zeros(shape, ">u4")

    def put(self, part: Part, arrays: Mapping[str, NumpyArray]) -> None:
        """Add the arrays ``(rows, T, ...)`` of a part."""
        block, first = divmod(part.rows.start, self._schema.chunk_rows)
        if block != self._block:
            self._close(self._length)
            self._block, self._filled[:] = block, 0
        rows, size = slice(first, first + part.lead[0]), self._schema.chunk_steps
        for number in range(part.start // size, -(-part.stop // size)):
            begin, stop = max(part.start, number * size), min(part.stop, (number + 1) * size)
            inside = slice(begin - number * size, stop - number * size)
            for name, chunk in self._opened(number).items():
                chunk[rows, inside] = arrays[name][:, begin - part.start : stop - part.start]
        self._filled[rows] = part.stop
        self._close(int(self._filled.min()))

    def _opened(self, number: int) -> dict[str, NumpyArray]:
        if number not in self._open:
            lead = self._schema.chunk_rows, self._schema.chunk_steps
            self._open[number] = {
                name: np.zeros((*lead, *leaf.shape), leaf.dtype)
                for name, leaf in self._leaves.items()
            }
        return self._open[number]

    def _close(self, filled: int) -> None:
        """Write the chunks that are complete when all rows are filled up to a step."""
        size = self._schema.chunk_steps
        done = [n for n in self._open if min((n + 1) * size, self._length) <= filled]
        for number in done:
            for name, chunk in self._open.pop(number).items():
                value = compress(chunk.tobytes()) if self._zstd else chunk.tobytes()
                self._stage(name, self._block, number, value)

    def _stage(self, name: str, block: int, number: int, value: bytes) -> None:
        self._staged[self._schema.chunk_key(name, block, number)] = value
        if not self._zstd:  # whose frames have one each
            checksum = layout.decode_checksums(layout.encode_checksums([value]))[0]
            self._checksums[number, list(self._schema.leaves).index(name), block] = checksum
        self._staged_bytes += len(value)
        if self._staged_bytes >= _COMMIT_BYTES:
            self._commit()

    def _commit(self) -> None:
        if self._staged:
            _commit(self._store, self._staged)
        self._staged, self._staged_bytes = {}, 0

    def finish(self) -> None:
        """Write everything that is left."""
        self._close(self._length)
        self._commit()

    def copy(self, source: Reader, name: str) -> None:
        """Copy an array's chunks as stored; `VaultChecksumError` if a checksum does not fit."""
        blocks = range(self._blocks)
        for number in range(self._count):
            keys = [self._schema.chunk_key(name, block, number) for block in blocks]
            values = source.store.get_all(keys)
            for block, value in zip(blocks, values, strict=True):
                self._stage(name, block, number, value)
            if not self._zstd:
                self._compare(source, name, number, keys)
        self._commit()

    def _compare(self, source: Reader, name: str, number: int, keys: list[str]) -> None:
        (stored,) = source.store.get_all([layout.checksums_key(number)])
        expected = layout.decode_checksums(stored).reshape(-1, self._blocks)
        found = self._checksums[number, list(self._schema.leaves).index(name)]
        wrong = np.flatnonzero(expected[list(source.leaves).index(name)] != found)
        if len(wrong):
            what = f"its checksum is wrong, of {keys[wrong[0]]}"
            raise damaged(source.path, what, VaultChecksumError)

    def checksums(self) -> dict[str, bytes]:
        """Return the keys and values of the checksums of all chunks."""
        return {
            layout.checksums_key(number): self._checksums[number].tobytes()
            for number in range(self._count)
        }

    @property
    def _zstd(self) -> bool:
        return self._schema.codec == "zstd"


class _Finals:
    """Writes the final views of episodes in the order in which their ends come."""

    def __init__(self, vault: Reader, store: Store):
        self._vault, self._store = vault, store
        self._numbers: NumpyArray = np.full(len(vault.episodes.final), -1)
        self._waiting: list[NumpyArray] = []
        self._written = self._count = 0

    def put(self, result: Result) -> None:
        """Add the final views of the episodes that end in a part."""
        episodes = result.ends
        if not len(episodes):
            return
        view = self._vault.final_views(self._vault.episodes.final[episodes])
        flat = flatten_view(view) | result.finals
        self._waiting.append(encoding.pack_view(encoding.unflatten_view(flat), self._vault.spec))
        self._numbers[episodes] = self._count + np.arange(len(episodes))
        self._count += len(episodes)
        if sum(packed.nbytes for packed in self._waiting) >= _COMMIT_BYTES:
            self._commit()

    def _commit(self) -> None:
        if self._waiting:
            block = np.concatenate(self._waiting).tobytes()
            _commit(self._store, {layout.finals_key(self._written): block})
        self._waiting, self._written = [], self._count

    def finish(self) -> tuple[NumpyArray, int]:
        """Write what is left; return each episode's final view, or -1, and the number of views."""
        self._commit()
        return self._numbers, self._count


def _copy_finals(source: Store, store: Store) -> None:
    for key in source.keys(layout.FINALS_PREFIX):
        _commit(store, dict(zip([key], source.get_all([key]), strict=True)))


# ---------------------------------------------------------------------------------- tables


class _EpisodeTable:
    """The episodes of the new vault: the source's, with what follows from the new columns."""

    def __init__(self, vault: Reader):
        self.vault, found = vault, vault.episodes
        self._begins: NumpyArray = found.row * vault.length + found.start
        self.returns: NumpyArray | None = None
        self.policy_id: NumpyArray = found.policy_id.copy()
        self.finals: NumpyArray = found.final
        self.num_finals = vault.manifest.head.finals if vault.manifest else 0

    def put(self, part: Part, arrays: Mapping[str, NumpyArray]) -> None:
        """Add the arrays of a part."""
        row = np.arange(part.rows.start, part.rows.stop)[:, None]
        step = row * self.vault.length + np.arange(part.start, part.stop)
        episode = (np.searchsorted(self._begins, step, side="right") - 1).ravel()
        if (reward := arrays.get("rewards")) is not None:
            if self.returns is None:
                self.returns = np.zeros_like(self.vault.episodes.returns)
            # In the order of time, as `tables.scan` adds them, so that the bits are the same.
            for agent in range(self.returns.shape[1]):
                values = reward[..., agent].ravel().astype(float)
                np.add.at(self.returns[:, agent], episode, values)
        if (ids := arrays.get(layout.POLICY_IDS)) is not None:
            is_first = step.ravel() == self._begins[episode]
            first = encoding.first_agents(ids).ravel()[is_first]
            self.policy_id[episode[is_first]] = first

    def split(self) -> tuple[Table, Table]:
        """Return the episodes that ended, and the unfinished episode of each row."""
        vault, found, agents = self.vault, self.vault.episodes, self.vault.spec.num_agents
        table = np.zeros(len(found.row), tables.dtype(agents))
        for name in ("row", "start", "length"):
            table[name] = getattr(found, name)
        table["returns"] = found.returns if self.returns is None else self.returns
        table["policy_id"], table["final"] = self.policy_id, self.finals
        table["cause"] = np.argmax(found.cause[:, None] == tables.CAUSES, axis=1)
        is_open = table["cause"] == tables.OPEN
        is_open &= table["start"] + table["length"] == vault.length
        running = tables.none_running(vault.rows, agents, vault.length)
        running[table["row"][is_open]] = table[is_open]
        return table[~is_open], running


def _write_tables(
    table: _EpisodeTable, schema: Schema, store: Store, provenance: Mapping[str, Any]
) -> None:
    """Write the documents, the episode table and the head."""
    ended, running = table.split()
    length = table.vault.length
    head = Head(
        length=length,
        episodes=len(ended),
        finals=table.num_finals,
        total_return=float(ended["returns"].mean(-1).sum()),
    )
    documents = without_episodes(schema, provenance, head, length)
    blocks = {
        layout.episodes_key(first): ended[first : first + _BLOCK_RECORDS].tobytes()
        for first in range(0, len(ended), _BLOCK_RECORDS)
    }
    _commit(store, documents | blocks | {layout.RUNNING_KEY: running.tobytes()})
