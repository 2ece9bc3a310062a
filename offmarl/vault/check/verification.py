"""Verifies vaults: finds damage, and the arrays, steps and episodes that it affects.

OCDBT has a CRC32C for its manifest and for each node, which protects keys and short values. Vaults
of offmarl have a CRC32C for each of offmarl's keys. Their chunks are protected by a CRC32C ("raw")
or by the checksum in each zstd frame. ``metadata.json`` and the ``.zarray`` documents are compared
with the schema.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from offmarl._ahead import ahead, depth_of, in_pool
from offmarl.errors import VaultFormatError, VaultLayoutError
from offmarl.teams import teams_of
from offmarl.terminal import Advance, Progress, quiet
from offmarl.vault.format import compat, encoding, layout, tables, values
from offmarl.vault.format.faults import (
    ERRORS,
    Fault,
    merged,
    noting,
    of_chunk,
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
from offmarl.vault.read.arrays import check_foreign_length
from offmarl.vault.read.chunks import agrees
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
"""Maximum episodes that are told to differ from the steps."""
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
    """Descriptions of what only ``deep`` checks."""
    other_layout: str = ""
    """Why the arrays are not multi-agent experience, if they are not."""
    notes: tuple[str, ...] = ()
    """Values that no environment can produce, and what importing changed; these are no damage."""

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
    return examine(find(path), deep=deep, progress=progress)


def find(path: str | os.PathLike[str]) -> Store:
    """Return the place of the vault that a path means, even without its manifest or metadata."""
    try:
        return locate(path)
    except VaultFormatError:
        given = Path(place_of(path).path)
        if not given.is_dir():
            raise
        below = (place for place in given.iterdir() if not place.is_symlink())
        places = (given, *below)
        near = [x for x in places if (x / DATA).is_dir() or (x / MANIFEST).exists()]
        if given in near:
            return store_of(given)  # ignore what a killed rebuild left below it
        if len(near) != 1:
            raise
        return store_of(near[0])


@dataclass
class _Found:
    """What is known of a vault that is verified."""

    faults: list[Fault]
    native: bool
    grids: list[Grid] = field(default_factory=list)
    length: int = 0
    parts: Parts | None = None
    """Offmarl's keys."""
    unchecked: list[str] = field(default_factory=list)
    other_layout: str = ""
    chunks: int = 0
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
    found = _Found(faults, native=bool(contents.keys(OWN_PREFIX)))
    with noting(faults):
        if found.native:
            _describe_native(contents, found)
        else:
            _describe_foreign(store, contents, found)
    placed = _check_places(contents, found)
    size, notes = sum(chunk.size for chunk in placed), list[str]()
    if deep:
        with progress("verify", size) as advance:
            _check_content(contents, placed, found, advance)
        notes = _check_steps(store, found)
    return Verification(
        path=path,
        deep=deep,
        native=found.native,
        length=found.length,
        chunks=found.chunks,
        read_bytes=found.read_bytes,
        faults=tuple(_told(merged(faults), found.parts)),
        unchecked=tuple(dict.fromkeys(found.unchecked)),
        skipped=() if deep else _skipped(found, size),
        other_layout=found.other_layout,
        notes=tuple(notes),
    )


def _skipped(found: _Found, size: int) -> tuple[str, ...]:
    """Describe what only a deep verification checks."""
    if not found.chunks:
        return ()
    content = f"the content of {found.chunks} chunks ({size} bytes)"
    table = "whether the episode table agrees with the steps"
    return (content, table) if found.parts else (content,)


def _check_steps(store: Store, found: _Found) -> list[str]:
    """Compare the episode table with the steps, and describe values that no environment has."""
    if not found.parts or any(fault.steps or fault.key == METADATA for fault in found.faults):
        return []
    with noting(found.faults):
        vault = Reader(store, checked=False)
        found.faults += differences(vault, found.parts)
    return [] if found.faults else [*_notes(vault)]


def _notes(vault: Reader) -> Iterator[str]:
    """Yield the recorded quirks, and the first value of each kind of a vault that records none."""
    told = set(vault.quirks)
    yield from (compat.MEANINGS[quirk] for quirk in vault.quirks)
    yield from compat.sentences(vault.provenance.get("faults"))
    for start, stop in vault.blocks():
        place = values.RecordPosition(start, "of the vault")
        for one in values.find(vault.read(start, stop), vault.spec, place=place):
            if one.quirk not in told:
                told.add(one.quirk)
                yield one.message.rstrip(".")


def _describe_native(contents: Contents, found: _Found) -> None:
    metadata: dict[str, Any] = {}
    with noting(found.faults, METADATA):
        metadata = read_metadata(contents.store)
    schema = read_schema(contents, metadata, found.faults)
    if metadata:
        with noting(found.faults, METADATA):
            check_metadata(metadata, schema)
    own = read_parts(contents, schema, found.faults)
    with noting(found.faults):
        check_parts(own)
    if own.length > own.own_length:
        first = own.own_length - own.own_length % schema.chunk_steps
        found.unchecked.append(
            f"steps {first} to {own.length - 1}: a stock program appended to them, without "
            "checksums."
        )
    for key, expected in zarrays(schema).items():
        with noting(found.faults, key):
            document = contents.get(key)
            if document != expected and load_json(document, key) != json.loads(expected):
                raise VaultFormatError("it is not what the vault's schema says.")
    found.parts, found.length = own, own.length
    found.grids = [*own_grids(schema).values()]


def _describe_foreign(store: Store, contents: Contents, found: _Found) -> None:
    with noting(found.faults, METADATA):
        metadata = read_metadata(contents.store)
        found.grids = foreign_grids(contents, metadata, found.faults)
        try:
            encoding.spec_of(parse_metadata(metadata)[0])
        except VaultLayoutError as error:  # the arrays are not multi-agent experience
            found.other_layout = str(error)
    with noting(found.faults, layout.INDEX_KEY):
        length, grids = stock_length(store), {grid.name: grid for grid in found.grids}
        rows = max((grid.shape[0] for grid in found.grids), default=0)
        check_foreign_length(Description(store, None, {}, rows, length, {}, grids=grids))
        found.length = length
    found.unchecked.append(f"{METADATA}: programs other than offmarl keep no digest of it.")
    found.unchecked += [
        f"{grid.name}: {grid.compressor or 'no'} compression keeps no checksum of its content."
        for grid in found.grids
        if grid.compressor in _WITHOUT_CHECKSUM
    ]


class _Placed(NamedTuple):
    """A chunk that exists and has the right size."""

    chunk: Chunk
    grid: Grid
    position: int
    """Number of its checksum among those of its interval of time."""
    size: int
    """Bytes stored."""


def _check_places(contents: Contents, found: _Found) -> list[_Placed]:
    """Check that every chunk exists and has the right size, and return those that do."""
    placed = []
    for number, grid in enumerate(found.grids):
        size, blocks, faults = grid.chunk_bytes, -(-grid.shape[0] // grid.chunks[0]), 0
        for chunk in grid.within(found.length):
            found.chunks += 1
            stored, what = contents.stored(chunk.key)
            if stored is None and grid.fill is not None:
                continue  # the fill value stands for it
            if stored is not None and grid.compressor is None and stored != size:
                what = f"it has {stored} bytes instead of {size}"
            if stored is not None and not what:
                position = number * blocks + chunk.rows[0] // grid.chunks[0]
                placed.append(_Placed(chunk, grid, position, stored))
                continue
            found.faults.append(of_chunk(chunk, what))
            faults += 1
            if faults == _MAX_FAULTS:  # a forged index may claim more chunks than exist
                rest = chunk._replace(steps=(chunk.steps[0], found.length))
                found.faults.append(of_chunk(rest, "further chunks were not looked at"))
                break
    return placed


def _check_content(
    contents: Contents, placed: list[_Placed], found: _Found, advance: Advance
) -> None:
    """Read every chunk that exists: compare its checksum, or decode it, which checks the codec's.

    Chunks that a stock program appended to have no checksum until they are adopted.
    """
    own, difference = found.parts, None
    if own and own.schema.codec == "raw":
        difference, covered = _comparing(contents, own.schema), own.own_length
        if covered < own.length:
            covered -= covered % own.schema.chunk_steps
        placed = [one for one in placed if one.chunk.steps[0] < covered]
        placed.sort(key=lambda one: (one.chunk.steps[0], one.position))

    def start(one: _Placed) -> Callable[[], Any]:
        read = contents.start(one.chunk.key)
        return read if difference else in_pool(lambda: one.grid.decode(read(), "it")).result

    depth = depth_of(max((one.grid.chunk_bytes for one in placed), default=0))
    for one, result in ahead(placed, start, depth):
        what, size = "", one.size
        try:
            value = result()
            what = difference(one, value) if difference else ""
        except ERRORS as error:
            what = reason(error) if difference else reason(error).rstrip(".")
            size = 0 if difference else size
        if what:
            found.faults.append(of_chunk(one.chunk, what))
        found.read_bytes += size
        advance(size)


def _comparing(contents: Contents, schema: Schema) -> Callable[[_Placed, bytes], str]:
    """Return what tells how a chunk of a ``raw`` vault differs from its CRC32C; empty if not."""

    @lru_cache(maxsize=1)  # chunks come in the order of time
    def stored(number: int) -> tuple[NumpyArray, str]:
        problems, value = list[Fault](), b""
        with noting(problems):
            value = contents.get(layout.checksums_key(number))
        return layout.decode_checksums(value), problems[0].what if problems else "too few"

    def difference(one: _Placed, value: bytes) -> str:
        begin, stop = one.chunk.steps
        expected, problem = stored(begin // schema.chunk_steps)
        if one.position >= len(expected):
            return f"its checksum cannot be read: {problem}"
        steps = np.frombuffer(value, np.uint8).reshape(schema.chunk_rows, schema.chunk_steps, -1)
        same = agrees(steps, int(expected[one.position]), stop - begin)
        return "" if same else "its checksum is wrong"

    return difference


def _told(faults: list[Fault], own: Parts | None) -> list[Fault]:
    """Add the episodes that faults affect, if the vault has an episode table."""
    table = own.table if own and faults else None
    if table is None or not own or own.length > own.own_length:
        return faults
    episodes = tables.to_episodes(table, teams_of(own.schema.spec))
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
    _check_contiguous(table, head.length, parts.schema.rows)
    finals = table["final"][table["final"] >= 0]
    distinct = len(np.unique(finals)) == len(finals) and bool((finals < head.finals).all())
    if sum(parts.finals.values()) != head.finals or not distinct:
        raise VaultFormatError(
            f"the {head.finals} final views are not those that the episode table names."
        )


def _check_contiguous(table: tables.Table, length: int, rows: int) -> None:
    """Raise if the episodes of a row do not follow one another from its start to its end."""
    table = table[np.lexsort((table["start"], table["row"]))]
    ends = table["start"] + table["length"]
    first = np.diff(table["row"], prepend=-1) != 0
    before = np.where(first, 0, np.roll(ends, 1))
    last = np.roll(first, -1)
    is_whole = (
        (table["length"] > 0).all()
        and (table["start"] == before).all()
        and (ends[last] == length).all()
        and table["row"][first].tolist() == list(range(rows if length else 0))
    )
    if not is_whole:
        raise VaultFormatError(
            "the episodes of the episode table have gaps or overlaps, or stop before the vault's "
            "end."
        )


def check_metadata(metadata: Mapping[str, Any], schema: Schema) -> None:
    """Raise `VaultFormatError` if ``metadata.json`` differs from the schema."""
    expected = json.loads(layout.dump_json(to_metadata(schema)))
    if wrong := [key for key in expected if metadata.get(key) != expected[key]]:
        raise VaultFormatError(f"its {', '.join(wrong)} is not what the vault's schema says.")


# ---------------------------------------------------------------------------------- episodes


def reindex(vault: Reader, stop: int, known: tables.Table) -> tuple[tables.Table, tables.Table]:
    """Find the episodes in the first ``stop`` steps of each row."""
    given_up = known[(known["cause"] == tables.OPEN) & (_ends(known) < stop)]
    running = tables.none_running(vault.rows, known.dtype)
    found = [known[:0]]
    names = [name for name in (*layout.SIGNALS, layout.POLICY_IDS) if name in vault.leaves]
    for begin, end in vault.blocks(names):
        if begin < stop:
            arrays = vault.read(begin, min(end, stop), leaves=names)
            signals = _with_ends(encoding.signals_of(arrays), given_up, begin)
            ended, running = tables.scan(running, begin, signals)
            found.append(ended)
    ended = np.concatenate(found)
    ended["cause"] = np.where(_among(ended, given_up), tables.OPEN, ended["cause"])
    cut = known[known["cause"] == tables.CUT]
    by_limit = ended["cause"] == tables.TRUNCATED
    ended["cause"] = np.where(by_limit & _among(ended, cut), tables.CUT, ended["cause"])
    return ended, running


def differences(vault: Reader, own: Parts) -> Iterator[Fault]:
    """Yield the differences between the episode table and the steps."""
    table, head = own.table, own.head
    if table is None or head is None:
        return
    ended, running = reindex(vault, head.length, table[: head.episodes])
    found, kept = (
        x[np.lexsort((x["start"], x["row"]))] for x in (np.concatenate([ended, running]), table)
    )
    found = found[found["length"] > 0]
    if len(found) != len(kept):
        yield Fault(f"the steps have {len(found)} episodes, and the table has {len(kept)}")
        return
    names = [name for name in found.dtype.names or () if name != "final"]
    same = [_equal(found[name], kept[name]) for name in names]
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
    here = (time >= 0) & (time < signals.reward.shape[1])
    terminated = signals.terminated.copy()
    terminated[given_up["row"][here], time[here]] = True
    return signals._replace(terminated=terminated)


def _among(table: tables.Table, others: tables.Table) -> tables.Table:
    """Return the mask of the episodes of a table that are also in another."""
    known = set(zip(others["row"].tolist(), _ends(others).tolist(), strict=True))
    mine = zip(table["row"].tolist(), _ends(table).tolist(), strict=True)
    return np.fromiter((end in known for end in mine), bool, len(table))
