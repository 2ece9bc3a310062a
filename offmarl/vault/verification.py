"""Verifies vaults: finds damage, and the arrays, steps and episodes that it affects.

OCDBT has a CRC32C for its manifest and for each node, which protects keys and short values. Vaults
of offmarl have a CRC32C for each of offmarl's keys. Their chunks are protected by a CRC32C ("raw")
or by the checksum in each zstd frame. ``metadata.json`` and the ``.zarray`` documents are compared
with the schema.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from offmarl._ahead import ahead, depth_of, in_pool
from offmarl.errors import VaultFormatError, VaultLayoutError
from offmarl.teams import teams_of
from offmarl.terminal import Progress, quiet
from offmarl.vault import compat, encoding, layout, tables, values
from offmarl.vault.chunk_reader import agrees
from offmarl.vault.commit import Contents
from offmarl.vault.drivers import Driver, driver_of
from offmarl.vault.faults import Fault, expect, merged, noting, of_chunk, with_episodes
from offmarl.vault.layout import DATA, MANIFEST, METADATA, OWN_PREFIX, NumpyArray, Schema
from offmarl.vault.manifest import (
    Parts,
    foreign_grids,
    read_metadata,
    read_parts,
    read_schema,
    stock_length,
)
from offmarl.vault.metadata import (
    STOCK_KEYS,
    Chunk,
    Grid,
    own_grids,
    parse_metadata,
    to_metadata,
    zarrays,
)
from offmarl.vault.open import locate, place_of
from offmarl.vault.reader import Reader
from offmarl.vault.store import Store, store_of

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
    store = store_of(find(path))
    found = examine(store, deep=deep, progress=progress)
    if not (deep and found.native and found.sound):
        return found
    return found._replace(notes=tuple(_notes(Reader(store, checked=False))))


def find(path: str | os.PathLike[str]) -> Driver:
    """Return the place of the vault that a path means, even without its manifest or metadata."""
    try:
        return locate(path)
    except VaultFormatError:
        given = Path(place_of(path).path)
        if not given.is_dir():
            raise
        below = (place for place in given.iterdir() if not place.is_symlink())
        near = [place for place in (given, *below) if _was_vault(place)]
        if given in near:
            return driver_of(given)  # ignore what a killed rebuild left below it
        if len(near) != 1:
            raise
        return driver_of(near[0])


def _was_vault(path: Path) -> bool:
    return (path / DATA).is_dir() or (path / MANIFEST).exists()


def examine(store: Store, *, deep: bool, progress: Progress = quiet) -> Verification:
    """Do what `verify` does with a vault whose store is open."""
    path = store.path
    try:
        contents = Contents.of(store)
    except VaultFormatError as error:
        return Verification(path, deep, False, 0, 0, 0, (Fault(str(error)),), ())
    except (ValueError, OSError) as error:
        what = f"the manifest cannot be read: {str(error).partition(' [tensorstore_spec')[0]}"
        return Verification(path, deep, False, 0, 0, 0, (Fault(what, MANIFEST),), ())
    found = _Found(
        [Fault(f"a part of the tree cannot be read: {why}") for why in contents.tree.lost]
    )
    native = bool(contents.keys(OWN_PREFIX))
    layers = _Layers([], 0)
    with noting(found.faults):
        layers = _native(contents, found) if native else _foreign(store, contents, found)
    _check_places(contents, layers, found)
    if deep:
        _check_content(contents, layers, found, progress)
    if deep and layers.parts and not any(f.steps or f.key == METADATA for f in found.faults):
        with noting(found.faults):
            found.faults += differences(Reader(store, checked=False), layers.parts)
    faults = tuple(_told(fault, layers.parts) for fault in merged(found.faults))
    unchecked = tuple(dict.fromkeys(found.unchecked))
    return Verification(
        path=path,
        deep=deep,
        native=native,
        length=layers.length,
        chunks=found.chunks,
        read_bytes=found.read_bytes,
        faults=faults,
        unchecked=unchecked,
        skipped=() if deep else _skipped(contents, layers, found),
        other_layout=found.other_layout,
    )


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


@dataclass
class _Found:
    """Collects the result of a verification."""

    faults: list[Fault]
    unchecked: list[str] = field(default_factory=list)
    other_layout: str = ""
    chunks: int = 0
    read_bytes: int = 0


class _Layers(NamedTuple):
    """A vault's description: its arrays, their length, and offmarl's keys."""

    grids: list[Grid]
    length: int
    parts: Parts | None = None


def _native(contents: Contents, found: _Found) -> _Layers:
    metadata: dict[str, Any] = {}
    with noting(found.faults, METADATA):
        metadata = read_metadata(contents.driver)
    schema = read_schema(contents, metadata, found.faults)
    if metadata:
        with noting(found.faults, METADATA):
            check_metadata(metadata, schema)
    own = read_parts(contents, schema, found.faults)
    with noting(found.faults):
        check_parts(own)
    with noting(found.faults):
        if own.length > own.own_length:
            first = own.own_length - own.own_length % own.schema.chunk_steps
            found.unchecked.append(
                f"steps {first} to {own.length - 1}: a stock program appended to them, without "
                "checksums."
            )
    _check_documents(contents, schema, found.faults)
    return _Layers([*own_grids(schema).values()], own.length, own)


def _check_documents(contents: Contents, schema: Schema, faults: list[Fault]) -> None:
    """Append a fault for each ``.zarray`` document that contradicts the schema."""
    for key, expected in zarrays(schema).items():
        with noting(faults, key):
            if contents.get_json(key) != json.loads(expected):
                raise VaultFormatError("it is not what the vault's schema says.")


def _foreign(store: Store, contents: Contents, found: _Found) -> _Layers:
    grids: list[Grid] = []
    length = 0
    with noting(found.faults, METADATA):
        metadata = read_metadata(contents.driver)
        grids = foreign_grids(contents, metadata, found.faults)
        found.other_layout = _other_layout(metadata)
    with noting(found.faults, layout.INDEX_KEY):
        length = stock_length(store)
    found.unchecked.append(f"{METADATA}: programs other than offmarl keep no digest of it.")
    found.unchecked += [
        f"{grid.name}: {grid.compressor or 'no'} compression keeps no checksum of its content."
        for grid in grids
        if grid.compressor in _WITHOUT_CHECKSUM
    ]
    return _Layers(grids, length)


def _other_layout(metadata: Mapping[str, Any]) -> str:
    """Describe why the arrays of another program's vault are not multi-agent experience, if so."""
    leaves, _ = parse_metadata(metadata)
    try:
        encoding.spec_of(leaves)
    except VaultLayoutError as error:
        return str(error)
    return ""


def _check_places(contents: Contents, layers: _Layers, found: _Found) -> None:
    """Check that every chunk exists and has the right size."""
    for grid in layers.grids:
        faults = 0
        for chunk in grid.within(layers.length):
            if what := misplaced(contents, grid, chunk):
                found.faults.append(of_chunk(chunk, what))
                faults += 1
            found.chunks += 1
            if faults == _MAX_FAULTS:
                rest = chunk._replace(steps=(chunk.steps[0], layers.length))
                found.faults.append(of_chunk(rest, "further chunks were not looked at"))
                break


def _check_content(contents: Contents, layers: _Layers, found: _Found, progress: Progress) -> None:
    """Read every chunk that exists."""
    own = layers.parts
    sizes = [(grid, stored_bytes(contents, grid, layers.length)) for grid in layers.grids]
    with progress("verify", sum(size for _, size in sizes)) as advance:
        if own and own.schema.codec == "raw":
            faults = checksums_of(contents, layers.grids, own)
        else:
            faults = decoded(contents, layers.grids, layers.length)
        for fault, size in faults:
            found.faults += [fault] if fault else []
            found.read_bytes += size
            advance(size)


def _told(fault: Fault, own: Parts | None) -> Fault:
    """Add the episodes that a fault affects, if the vault has an episode table."""
    table = own.table if own else None
    if table is None or not own or own.length > own.own_length:
        return fault
    return with_episodes(fault, tables.to_episodes(table, teams_of(own.schema.spec)))


def _skipped(contents: Contents, layers: _Layers, found: _Found) -> tuple[str, ...]:
    """Describe what only a deep verification checks."""
    if not found.chunks:
        return ()
    sizes = (stored_bytes(contents, grid, layers.length) for grid in layers.grids)
    content = f"the content of {found.chunks} chunks ({sum(sizes)} bytes)"
    return (
        (content, "whether the episode table agrees with the steps") if layers.parts else (content,)
    )


def check_parts(parts: Parts) -> None:
    """Raise `VaultFormatError` if the parts contradict one another."""
    head, stock_length, table = parts.head, parts.stock_length, parts.table
    if head is None or stock_length is None or parts.running is None:
        return
    expect(
        head.whole_length(stock_length) >= head.length,
        f"the vault has {head.length} steps a row, and its index was set back to {stock_length}.",
    )
    if table is None:
        raise VaultFormatError(f"some of {head.episodes} episodes are not in the episode table.")
    _check_contiguous(table, head.length, parts.schema.rows)
    finals = table["final"][table["final"] >= 0]
    expect(
        sum(parts.finals.values()) == head.finals and _distinct_below(finals, head.finals),
        f"the {head.finals} final views are not those that the episode table names.",
    )


def _check_contiguous(table: tables.Table, length: int, rows: int) -> None:
    """Raise if the episodes of a row do not follow one another from its start to its end."""
    table = table[np.lexsort((table["start"], table["row"]))]
    ends = table["start"] + table["length"]
    first = np.diff(table["row"], prepend=-1) != 0
    before = np.where(first, 0, np.roll(ends, 1))
    last = np.roll(first, -1)
    expect(
        (table["length"] > 0).all()
        and (table["start"] == before).all()
        and (ends[last] == length).all()
        and table["row"][first].tolist() == list(range(rows if length else 0)),
        "the episodes of the episode table have gaps or overlaps, or stop before the vault's end.",
    )


def _distinct_below(numbers: NumpyArray, stop: int) -> bool:
    return len(np.unique(numbers)) == len(numbers) and bool((numbers < stop).all())


def check_metadata(metadata: Mapping[str, Any], schema: Schema) -> None:
    """Raise `VaultFormatError` if ``metadata.json`` differs from the schema."""
    expected = json.loads(layout.dump_json(to_metadata(schema)))
    keys = STOCK_KEYS if metadata.get("offmarl") == {"version": 1} else expected
    wrong = [key for key in keys if metadata.get(key) != expected[key]]
    expect(not wrong, f"its {', '.join(wrong)} is not what the vault's schema says.")


_Reads = list[tuple[Chunk, int, Callable[[], bytes]]]
"""Chunks of one interval of time, each with its number and a function that returns its bytes."""
Checked = tuple[Fault | None, int]
"""A chunk's fault, or None, and the number of bytes read."""


def misplaced(contents: Contents, grid: Grid, chunk: Chunk) -> str:
    """Describe what is wrong with a chunk, without reading it; empty if nothing is."""
    if chunk.key not in contents:
        return "" if grid.sparse else "it is missing"
    size = contents.size(chunk.key)
    if grid.compressor is None and size != grid.chunk_bytes:
        return f"it has {size} bytes instead of {grid.chunk_bytes}"
    return "its data file is missing or truncated" if contents.is_cut_off(chunk.key) else ""


def stored_bytes(contents: Contents, grid: Grid, length: int) -> int:
    """Return the bytes of an array's existing chunks."""
    return sum(contents.size(chunk.key) for chunk in _placed(contents, grid, length))


def _placed(contents: Contents, grid: Grid, length: int) -> Iterator[Chunk]:
    limit = len(contents.tree.values)  # a forged index may claim more chunks than exist
    for chunk in grid.within(min(length, limit * grid.chunks[1])):
        if chunk.key in contents and not misplaced(contents, grid, chunk):
            yield chunk


def decoded(contents: Contents, grids: Iterable[Grid], length: int) -> Iterator[Checked]:
    """Decode every chunk, which checks its codec's checksums."""
    for grid in grids:

        def decode(chunk: Chunk, grid: Grid = grid) -> Callable[[], NumpyArray]:
            read = contents.fetch(chunk.key)
            return in_pool(lambda: grid.decode(read(), "it")).result

        placed, depth = _placed(contents, grid, length), depth_of(grid.chunk_bytes)
        for chunk, result in ahead(placed, decode, depth):
            faults: list[Fault] = []
            with noting(faults):
                result()
            fault = of_chunk(chunk, faults[0].what.rstrip(".")) if faults else None
            yield fault, contents.size(chunk.key)


def checksums_of(contents: Contents, grids: list[Grid], own: Parts) -> Iterator[Checked]:
    """Compare every chunk of a ``raw`` vault with its stored CRC32C.

    Chunks that a stock program appended to have none until they are adopted.
    """
    steps = own.schema.chunk_steps
    count = own.own_length // steps if own.length > own.own_length else -(-own.length // steps)
    numbers = range(min(count, len(contents.tree.values)))

    def start(number: int) -> _Reads:
        chunks = chain.from_iterable(grid.at(number, own.length) for grid in grids)
        grid_of = {grid.name: grid for grid in grids}
        return [
            (chunk, position, contents.fetch(chunk.key))
            for position, chunk in enumerate(chunks)
            if not misplaced(contents, grid_of[chunk.leaf], chunk)
        ]

    size = sum(grid.chunk_bytes * own.schema.rows // own.schema.chunk_rows for grid in grids)
    for number, reads in ahead(numbers, start, depth_of(size)):
        yield from _compare(contents, number, reads, own)


def _compare(contents: Contents, number: int, reads: _Reads, own: Parts) -> Iterator[Checked]:
    problem: list[Fault] = []
    expected = layout.decode_checksums(b"")
    with noting(problem):
        expected = layout.decode_checksums(contents.get(layout.checksums_key(number)))
    for chunk, position, read in reads:
        faults: list[Fault] = []
        value = b""
        with noting(faults):
            value = read()
        if faults:
            yield of_chunk(chunk, faults[0].what), 0
        elif position >= len(expected):
            what = f"its checksum cannot be read: {problem[0].what if problem else 'too few'}"
            yield of_chunk(chunk, what), len(value)
        elif _agrees(value, int(expected[position]), chunk, own):
            yield None, len(value)
        else:
            yield of_chunk(chunk, "its checksum is wrong"), len(value)


def _agrees(value: bytes, expected: int, chunk: Chunk, own: Parts) -> bool:
    shape = own.schema.chunk_rows, own.schema.chunk_steps, -1
    steps = np.frombuffer(value, np.uint8).reshape(shape)
    return agrees(steps, expected, chunk.steps[1] - chunk.steps[0])


# ---------------------------------------------------------------------------------- episodes


def reindex(vault: Reader, stop: int, known: tables.Table) -> tuple[tables.Table, tables.Table]:
    """Find the episodes in the first ``stop`` steps of each row."""
    given_up = known[(known["cause"] == tables.OPEN) & (_ends(known) < stop)]
    running = tables.none_running(vault.rows, vault.spec.num_agents)
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
    found, kept = (_sorted(x) for x in (np.concatenate([ended, running]), table))
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


def _sorted(table: tables.Table) -> tables.Table:
    return table[np.lexsort((table["start"], table["row"]))]


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
