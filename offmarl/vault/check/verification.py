"""Verifies vaults: finds damage, and the arrays, steps and episodes that it affects.

OCDBT has a CRC32C for its manifest and for each node, which protects keys and short values. Vaults
of offmarl have a CRC32C for each of offmarl's keys. Their chunks are protected by a CRC32C ("raw")
or by the checksum in each zstd frame. ``metadata.json`` and the ``.zarray`` documents are compared
with the schema.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from offmarl._ahead import ahead, depth_of, in_pool
from offmarl.errors import OffmarlError, VaultFormatError, VaultLayoutError
from offmarl.teams import teams_of
from offmarl.terminal import Advance, Progress, quiet
from offmarl.vault.format import compat, encoding, layout, tables, values
from offmarl.vault.format.faults import (
    ERRORS,
    Fault,
    merge_faults,
    noting,
    reason,
    with_episodes,
)
from offmarl.vault.format.layout import (
    DATA,
    MANIFEST,
    METADATA,
    OWN_PREFIX,
    NumpyArray,
    Schema,
    load_json,
)
from offmarl.vault.format.metadata import (
    Chunk,
    Grid,
    own_grids,
    parse_metadata,
    to_metadata,
    zarrays,
)
from offmarl.vault.read.arrays import check_length
from offmarl.vault.read.chunks import matches_checksum
from offmarl.vault.read.manifest import (
    Description,
    Parts,
    foreign_grids,
    read_metadata,
    read_parts,
    read_schema,
    stock_length,
)
from offmarl.vault.read.open import locate, place_of
from offmarl.vault.read.reader import Reader
from offmarl.vault.storage.commit import Contents
from offmarl.vault.storage.store import Store, store_of

_MAX_FAULTS = 1000
"""Maximum faults of one kind; a forged index could make billions of chunks missing."""
_MAX_WRONG = 100
"""Maximum episodes that are reported to differ from the steps."""
_WITHOUT_CHECKSUM = (None, "blosc", "zstd")
"""Codecs whose output holds no checksum, or none as TensorStore writes it; None: uncompressed."""


class Verification(NamedTuple):
    """The result of a verification."""

    path: PurePath
    deep: bool
    """Whether the content of every chunk was read."""
    native: bool
    """Whether offmarl wrote it."""
    length: int
    """Steps of each row, according to its index."""
    chunks: int
    """Chunks that were checked."""
    read_bytes: int
    """Bytes of chunks that were read."""
    faults: tuple[Fault, ...]
    unchecked: tuple[str, ...]
    """Data without checksums, where damage may go unnoticed."""
    skipped: tuple[str, ...] = ()
    """Descriptions of the checks that only ``deep`` does."""
    other_layout: str = ""
    """Why the arrays are not multi-agent experience, if they are not."""
    notes: tuple[str, ...] = ()
    """Values that no environment can produce, and changes by an import; these are no damage."""

    @property
    def sound(self) -> bool:
        """Whether no fault was found."""
        return not self.faults


def verify(
    path: str | os.PathLike[str], *, deep: bool = False, progress: Progress = quiet
) -> Verification:
    """Check whether a vault of any program is as it was written.

    Parameters
    ----------
    path
        As `open_vault` takes it; files may be missing there.
    deep
        Whether to read every chunk, and to compare the episode table with the steps. Otherwise only
        the documents and tables are checked, and that every chunk exists.
    progress
        Shows the progress.

    Raises
    ------
    VaultNotFoundError, VaultError
        There is no vault at the path.
    """
    store = find(path)
    commit = _commit_of(store)
    verification = examine(store, deep=deep, progress=progress)
    if verification.faults and _commit_of(store) != commit:  # files were replaced meanwhile
        return examine(store, deep=deep, progress=progress)
    return verification


def _commit_of(store: Store) -> bytes | None:
    """Return what changes with each commit; None if it cannot be read."""
    with suppress(OffmarlError, OSError, ValueError):
        return store.read(MANIFEST)
    return None


def find(path: str | os.PathLike[str]) -> Store:
    """Return the store of the vault at a path, even without its manifest or metadata."""
    try:
        return locate(path)
    except VaultFormatError:
        directory = Path(place_of(path).path)
        if not directory.is_dir():
            raise
        below = (place for place in directory.iterdir() if not place.is_symlink())
        places = (directory, *below)
        candidates = [x for x in places if (x / DATA).is_dir() or (x / MANIFEST).exists()]
        if directory in candidates:
            return store_of(directory)  # ignore what a killed rebuild left below it
        if len(candidates) != 1:
            raise
        return store_of(candidates[0])


@dataclass
class _Findings:
    """Findings about a vault that is being verified."""

    faults: list[Fault]
    native: bool
    grids: list[Grid] = field(default_factory=list)
    length: int = 0
    parts: Parts | None = None
    """The keys of offmarl."""
    unchecked: list[str] = field(default_factory=list)
    other_layout: str = ""
    num_chunks: int = 0
    read_bytes: int = 0


def examine(store: Store, *, deep: bool, progress: Progress = quiet) -> Verification:
    """Do what `verify` does with a vault whose store is open."""
    path = store.path
    try:
        contents = Contents.of(store)
    except (VaultFormatError, ValueError, OSError) as error:
        fault = Fault(str(error))
        if not isinstance(error, VaultFormatError):
            fault = Fault(f"the manifest cannot be read: {reason(error)}", MANIFEST)
        return Verification(path, deep, False, 0, 0, 0, (fault,), ())
    faults = [Fault(f"a part of the tree cannot be read: {why}") for why in contents.tree.lost]
    findings = _Findings(faults, native=bool(contents.keys(OWN_PREFIX)))
    with noting(faults):
        if findings.native:
            _describe_native(contents, findings)
        else:
            _describe_foreign(store, contents, findings)
    chunks = _check_places(contents, findings)
    size, notes = sum(chunk.size for chunk in chunks), list[str]()
    if deep:
        with progress("verify", size) as advance:
            _check_content(contents, chunks, findings, advance)
        notes = _check_steps(store, findings)
    return Verification(
        path=path,
        deep=deep,
        native=findings.native,
        length=findings.length,
        chunks=findings.num_chunks,
        read_bytes=findings.read_bytes,
        faults=tuple(_with_known_episodes(merge_faults(faults), findings.parts)),
        unchecked=tuple(findings.unchecked),
        skipped=() if deep else _skipped(findings, size),
        other_layout=findings.other_layout,
        notes=tuple(notes),
    )


def _skipped(findings: _Findings, size: int) -> tuple[str, ...]:
    """Describe the checks that only a deep verification does."""
    if not findings.num_chunks:
        return ()
    content = f"the content of {findings.num_chunks} chunks ({size:,} bytes)"
    table = "whether the episode table agrees with the steps"
    return (content, table) if findings.parts else (content,)


def _check_steps(store: Store, findings: _Findings) -> list[str]:
    """Compare the episode table with the steps, and describe values that no environment has."""
    if not findings.parts or any(fault.steps or fault.key == METADATA for fault in findings.faults):
        return []
    with noting(findings.faults):
        vault = Reader(store, checked=False)
        findings.faults += differences(vault, findings.parts)
    return [] if findings.faults else [*_notes(vault)]


def _notes(vault: Reader) -> Iterator[str]:
    """Yield the recorded quirks, and the first value of each kind of a vault that records none."""
    quirks = set(vault.quirks)
    yield from (compat.MEANINGS[quirk] for quirk in vault.quirks)
    yield from compat.sentences(vault.provenance.get("faults"))
    for start, stop in vault.blocks():
        place = values.RecordPosition(start, "of the vault")
        for problem in values.find(vault.read(start, stop), vault.spec, place=place):
            if problem.quirk not in quirks:
                quirks.add(problem.quirk)
                yield problem.message.rstrip(".")


def _describe_native(contents: Contents, findings: _Findings) -> None:
    metadata: dict[str, Any] = {}
    with noting(findings.faults, METADATA):
        metadata = read_metadata(contents.store)
    schema = read_schema(contents, metadata, findings.faults)
    if metadata:
        with noting(findings.faults, METADATA):
            check_metadata(metadata, schema)
    parts = read_parts(contents, schema, findings.faults)
    with noting(findings.faults):
        check_parts(parts)
    if parts.length > parts.own_length:
        first = parts.own_length - parts.own_length % schema.chunk_steps
        findings.unchecked.append(
            f"steps {first} to {parts.length - 1}: a stock program appended to them, without "
            "checksums."
        )
    for key, expected in zarrays(schema).items():
        with noting(findings.faults, key):
            document = contents.get(key)
            if document != expected and load_json(document, key) != json.loads(expected):
                raise VaultFormatError("it is not what the vault's schema says.")
    findings.parts, findings.length = parts, parts.length
    findings.grids = [*own_grids(schema).values()]


def _describe_foreign(store: Store, contents: Contents, findings: _Findings) -> None:
    with noting(findings.faults, METADATA):
        metadata = read_metadata(contents.store)
        findings.grids = foreign_grids(contents, metadata, findings.faults)
        try:
            encoding.spec_of(parse_metadata(metadata)[0])
        except VaultLayoutError as error:  # the arrays are not multi-agent experience
            findings.other_layout = str(error)
    with noting(findings.faults, layout.INDEX_KEY):
        length, grids = stock_length(store), {grid.name: grid for grid in findings.grids}
        rows = max((grid.shape[0] for grid in findings.grids), default=0)
        check_length(Description(store, None, {}, rows, length, {}, grids=grids))
        findings.length = length
    findings.unchecked.append(f"{METADATA}: programs other than offmarl keep no digest of it.")
    findings.unchecked += [
        f"{grid.name}: {grid.compressor or 'no'} compression keeps no checksum of its content."
        for grid in findings.grids
        if grid.compressor in _WITHOUT_CHECKSUM
    ]


class _StoredChunk(NamedTuple):
    """A chunk that exists and has the right size."""

    chunk: Chunk
    grid: Grid
    position: int
    """Number of its checksum among those of its interval of time."""
    size: int
    """Bytes stored."""


def _check_places(contents: Contents, findings: _Findings) -> list[_StoredChunk]:
    """Check that every chunk exists and has the right size, and return the chunks that do."""
    chunks = []
    for number, grid in enumerate(findings.grids):
        size, blocks, faults = grid.chunk_bytes, -(-grid.shape[0] // grid.chunks[0]), 0
        for chunk in grid.within(findings.length):
            findings.num_chunks += 1
            stored_bytes, problem = contents.stored(chunk.key)
            if stored_bytes is None and grid.fill is not None:
                continue  # the fill value stands for it
            if stored_bytes is not None and grid.compressor is None and stored_bytes != size:
                problem = f"it has {stored_bytes} bytes instead of {size}"
            if stored_bytes is not None and not problem:
                position = number * blocks + chunk.rows[0] // grid.chunks[0]
                chunks.append(_StoredChunk(chunk, grid, position, stored_bytes))
                continue
            findings.faults.append(Fault(problem, *chunk))
            faults += 1
            if faults == _MAX_FAULTS:  # a forged index may claim more chunks than exist
                remainder = chunk._replace(steps=(chunk.steps[0], findings.length))
                findings.faults.append(Fault("further chunks were not looked at", *remainder))
                break
    return chunks


def _check_content(
    contents: Contents, chunks: list[_StoredChunk], findings: _Findings, advance: Advance
) -> None:
    """Read every chunk that exists: compare its checksum, or decode it, which checks the codec's.

    Chunks that a stock program appended to have no checksum until they are adopted.
    """
    parts, difference = findings.parts, None
    if parts and parts.schema.codec == "raw":
        difference, covered = _comparing(contents, parts.schema), parts.own_length
        if covered < parts.length:
            covered -= covered % parts.schema.chunk_steps
        chunks = [stored for stored in chunks if stored.chunk.steps[0] < covered]
        chunks.sort(key=lambda stored: (stored.chunk.steps[0], stored.position))

    def start(stored: _StoredChunk) -> Callable[[], Any]:
        read = contents.start(stored.chunk.key)
        return read if difference else in_pool(lambda: stored.grid.decode(read(), "it")).result

    depth = depth_of(max((stored.grid.chunk_bytes for stored in chunks), default=0))
    for stored, result in ahead(chunks, start, depth):
        problem, size = "", stored.size
        try:
            value = result()
            problem = difference(stored, value) if difference else ""
        except ERRORS as error:
            problem = reason(error) if difference else reason(error).rstrip(".")
            size = 0 if difference else size
        if problem:
            findings.faults.append(Fault(problem, *stored.chunk))
        findings.read_bytes += size
        advance(size)


def _comparing(contents: Contents, schema: Schema) -> Callable[[_StoredChunk, bytes], str]:
    """Return a function that describes how a chunk of a ``raw`` vault differs from its CRC32C."""

    @lru_cache(maxsize=1)  # chunks come in the order of time
    def checksums_of(number: int) -> tuple[NumpyArray, str]:
        try:
            return layout.decode_checksums(contents.get(layout.checksums_key(number))), "too few"
        except ERRORS as error:
            return np.zeros(0), reason(error)

    def difference(stored: _StoredChunk, value: bytes) -> str:
        begin, stop = stored.chunk.steps
        expected, fault = checksums_of(begin // schema.chunk_steps)
        if stored.position >= len(expected):
            return f"its checksum cannot be read: {fault}"
        steps = np.frombuffer(value, np.uint8).reshape(schema.chunk_rows, schema.chunk_steps, -1)
        same = matches_checksum(steps, int(expected[stored.position]), stop - begin)
        return "" if same else "its checksum is wrong"

    return difference


def _with_known_episodes(faults: list[Fault], parts: Parts | None) -> list[Fault]:
    """Add the episodes that faults affect, if the vault has an episode table."""
    table = parts.table if parts and faults else None
    if table is None or not parts or parts.length > parts.own_length:
        return faults
    episodes = tables.to_episodes(table, teams_of(parts.schema.spec))
    return [with_episodes(fault, episodes) for fault in faults]


def check_parts(parts: Parts) -> None:
    """Raise `VaultFormatError` if the parts contradict one another."""
    head, stock_length, table = parts.head, parts.stock_length, parts.table
    if head is None or stock_length is None or parts.running is None:
        return
    if head.whole_length(stock_length) < head.length:
        raise VaultFormatError(
            f"the vault has {head.length} steps a row, and its index was set back to "
            f"{stock_length}."
        )
    if table is None:
        raise VaultFormatError(f"some of {head.episodes} episodes are not in the episode table.")
    if not tables.are_contiguous(table, head.length, parts.schema.rows):
        raise VaultFormatError(
            "the episodes of the episode table have gaps or overlaps, or stop before the vault's "
            "end."
        )
    finals = table["final"][table["final"] >= 0]
    distinct = len(np.unique(finals)) == len(finals) and bool((finals < head.finals).all())
    if sum(parts.finals.values()) != head.finals or not distinct:
        raise VaultFormatError(
            f"the {head.finals} final views are not those that the episode table names."
        )


def check_metadata(metadata: Mapping[str, Any], schema: Schema) -> None:
    """Raise `VaultFormatError` if ``metadata.json`` differs from the schema."""
    expected = json.loads(layout.dump_json(to_metadata(schema)))
    if wrong := [key for key in expected if metadata.get(key) != expected[key]]:
        raise VaultFormatError(f"its {', '.join(wrong)} is not what the vault's schema says.")


# ---------------------------------------------------------------------------------- episodes


def reindex(vault: Reader, stop: int, table: tables.Table) -> tuple[tables.Table, tables.Table]:
    """Find the episodes in the first ``stop`` steps of each row."""
    given_up = table[(table["cause"] == tables.OPEN) & (_ends(table) < stop)]
    running = tables.none_running(vault.rows, table.dtype)
    blocks = [table[:0]]
    names = [name for name in (*layout.SIGNALS, layout.POLICY_IDS) if name in vault.leaves]
    for begin, end in vault.blocks(names):
        if begin < stop:
            arrays = vault.read(begin, min(end, stop), leaves=names)
            signals = _with_ends(encoding.signals_of(arrays), given_up, begin)
            episodes, running = tables.scan(running, begin, signals)
            blocks.append(episodes)
    episodes = np.concatenate(blocks)
    episodes["cause"] = np.where(_among(episodes, given_up), tables.OPEN, episodes["cause"])
    cut = table[table["cause"] == tables.CUT]
    by_limit = episodes["cause"] == tables.TRUNCATED
    episodes["cause"] = np.where(by_limit & _among(episodes, cut), tables.CUT, episodes["cause"])
    return episodes, running


def differences(vault: Reader, parts: Parts) -> Iterator[Fault]:
    """Yield the differences between the episode table and the steps."""
    table, head = parts.table, parts.head
    if table is None or head is None:
        return
    episodes, running = reindex(vault, head.length, table[: head.episodes])
    actual, recorded = (
        x[np.lexsort((x["start"], x["row"]))] for x in (np.concatenate([episodes, running]), table)
    )
    actual = actual[actual["length"] > 0]
    if len(actual) != len(recorded):
        yield Fault(f"the steps have {len(actual)} episodes, and the table has {len(recorded)}")
        return
    names = [name for name in actual.dtype.names or () if name != "final"]
    same = [_equal(actual[name], recorded[name]) for name in names]
    for episode in np.flatnonzero(~np.all(same, axis=0))[:_MAX_WRONG].tolist():
        wrong = ", ".join(
            name for name, equal in zip(names, same, strict=True) if not equal[episode]
        )
        yield Fault(
            f"the episode table and the steps differ in its {wrong}",
            episodes=(episode,),
        )


def _equal(a: tables.Table, b: tables.Table) -> tables.Table:
    equal = (a == b) | ((a != a) & (b != b))  # noqa: PLR0124 - NaN
    return equal.all(tuple(range(1, equal.ndim)))


def _ends(table: tables.Table) -> tables.Table:
    return table["start"] + table["length"] - 1


def _with_ends(signals: tables.Signals, given_up: tables.Table, begin: int) -> tables.Signals:
    """Return the signals with an end added where an episode was abandoned."""
    time = _ends(given_up) - begin
    inside = (time >= 0) & (time < signals.reward.shape[1])
    terminated = signals.terminated.copy()
    terminated[given_up["row"][inside], time[inside]] = True
    return signals._replace(terminated=terminated)


def _among(table: tables.Table, other: tables.Table) -> tables.Table:
    """Return the mask of the episodes of a table that are also in another."""
    other_ends = set(zip(other["row"].tolist(), _ends(other).tolist(), strict=True))
    ends = zip(table["row"].tolist(), _ends(table).tolist(), strict=True)
    return np.fromiter((end in other_ends for end in ends), bool, len(table))
