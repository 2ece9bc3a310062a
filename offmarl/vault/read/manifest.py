"""The manifest: the content of offmarl's keys and of ``metadata.json``.

Each key is decoded in one place. `read_manifest` is strict, for reading and writing. `read_parts`
keeps what it can read and collects faults, for verifying and salvaging.
"""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from offmarl.errors import VaultError, VaultFormatError
from offmarl.records import PULLED
from offmarl.vault.format import encoding, layout, tables
from offmarl.vault.format.faults import Fault, noting
from offmarl.vault.format.layout import METADATA, Head, Leaf, NumpyArray, Schema, load_json
from offmarl.vault.format.metadata import (
    STOCK_KEYS,
    Grid,
    own_grids,
    parse_metadata,
    schema_in,
    stock_metadata,
)
from offmarl.vault.storage.commit import Contents
from offmarl.vault.storage.store import Directory, Store


class Manifest(NamedTuple):
    """The keys of offmarl, all of one commit."""

    schema: Schema
    head: Head
    running: tables.Table
    provenance: dict[str, Any]
    stock_length: int
    """The length that stock programs see."""

    @property
    def length(self) -> int:
        """Steps of each row, including those that a stock program appended."""
        return self.head.whole_length(self.stock_length)

    @property
    def counts(self) -> bytes:
        """The JSON of all counts: another one after every append."""
        return layout.dump_json([self.head._asdict(), self.stock_length])

    @property
    def unverified(self) -> tuple[tuple[int, int], ...]:
        """Intervals of steps that a stock program appended, adopted or not."""
        begin = self.head.length
        return self.head.unverified + (((begin, self.length),) if begin < self.length else ())


def stock_length(store: Store) -> int:
    """Return the steps of each row of another program's vault."""
    document = store.get_json(f"{layout.INDEX_PREFIX}.zarray")
    if document is None:
        raise VaultFormatError(f"{store.path} has lost its index.")
    grid = Grid.of(layout.INDEX_PREFIX, document, axes=1)
    if grid.shape != (1,) or grid.dtype.kind != "i":
        raise VaultFormatError(f"{store.path}: the index is not one number.")
    value = store.get(layout.INDEX_KEY)
    index = grid.missing_chunk() if value is None else grid.decode(value, layout.INDEX_KEY)
    if (length := int(index[0])) < 0:
        raise VaultFormatError(f"{store.path}: the index has the impossible length {length}.")
    return length


def read_metadata(store: Store) -> dict[str, Any]:
    """Return the content of ``metadata.json``."""
    file = store.path / METADATA
    try:
        data = store.read(METADATA)
    except (OSError, ValueError) as error:
        raise VaultFormatError(f"{file} cannot be read: {error}.") from error
    if data is None:
        raise VaultFormatError(f"{file} is missing.")
    return load_json(data, str(file))


def read_manifest(store: Store) -> Manifest | None:
    """Return offmarl's keys, or None if another program wrote the vault."""
    first = store.get_some([layout.SCHEMA_KEY, layout.HEAD_KEY])
    if layout.SCHEMA_KEY not in first:
        return None
    if layout.HEAD_KEY not in first:
        raise layout.damage_error(store.path, f"it has lost {layout.HEAD_KEY}")
    schema, head = Schema.decode(first[layout.SCHEMA_KEY]), first[layout.HEAD_KEY]
    # A writer may commit between two reads. Every commit changes the head, so it is compared.
    while True:
        values = [head, *store.get_all([*_KEYS.values()][1:])]
        fields = zip(_KEYS, values, strict=True)
        manifest = Manifest(schema, **{name: _decode(name, schema, data) for name, data in fields})
        if manifest.length < manifest.head.length:
            raise VaultFormatError(
                f"{store.path} had {manifest.head.length} steps a row, and its index was set back "
                f"to {manifest.stock_length}: a program that does not use offmarl's lock overwrote "
                "it during the recording. Copy the vault again from its source."
            )
        before, (head,) = head, store.get_all([layout.HEAD_KEY])
        if head == before:
            return manifest


_KEYS = {
    "head": layout.HEAD_KEY,
    "stock_length": layout.INDEX_KEY,
    "running": layout.RUNNING_KEY,
    "provenance": layout.PROVENANCE_KEY,
}
"""The key of each field of a manifest but the schema."""


def _decode(field: str, schema: Schema, data: bytes) -> Any:
    """Return a field of a manifest."""
    match field:
        case "head":
            return Head.decode(data)
        case "stock_length":
            return layout.decode_index(data)
        case "provenance":
            return load_json(data, layout.PROVENANCE_KEY)
    if len(data) != schema.rows * schema.record.itemsize:
        raise VaultFormatError(f"{field} has {len(data)} bytes for {schema.rows} rows.")
    return tables.with_known_causes(np.frombuffer(data, schema.record))


def first_of(key: str, prefix: str) -> int:
    """Return the number of the first record in a block of a table."""
    number = key.removeprefix(prefix)
    if not number.isdecimal() or len(number) > 18:
        raise VaultFormatError(f"{key} is not the key of a block.")
    return int(number)


def _records(data: bytes, dtype: np.dtype[Any]) -> NumpyArray:
    """Decode a block of a table."""
    if len(data) % dtype.itemsize:
        raise VaultFormatError(f"{len(data)} bytes are no whole records.")
    return np.frombuffer(data, dtype)


def read_table(
    values: Store | Contents, prefix: str, count: int, dtype: np.dtype[Any]
) -> NumpyArray:
    """Return the first ``count`` records of a table that is stored in blocks."""
    keys = [key for key in values.keys(prefix) if first_of(key, prefix) < count]
    data = b"".join(values.get_all(keys))
    size = count * dtype.itemsize
    if len(data) != size:
        raise layout.damage_error(values.path, f"of {prefix} it has {len(data)} of {size} bytes")
    return np.frombuffer(data, dtype)


def read_episodes(store: Store, manifest: Manifest) -> tables.Table:
    """Return the episodes that offmarl wrote: those that ended, and the unfinished ones."""
    schema, head, running = manifest.schema, manifest.head, manifest.running
    table = read_table(store, layout.EPISODES_PREFIX, head.episodes, schema.record)
    running = running[running["length"] > 0]
    table = tables.with_known_causes(np.concatenate([table, running]) if len(running) else table)
    has_finals = table["final"].max(initial=-1) < head.finals
    if not (has_finals and tables.are_contiguous(table, head.length, schema.rows)):
        raise layout.damage_error(store.path, "its episode table does not fit its steps and views")
    return table


def map_contents(store: Store, manifest: Manifest | None) -> Contents | None:
    """Map a vault's files; None if that is impossible."""
    if not isinstance(store, Directory):
        return None
    try:
        try:
            contents = Contents.mapped(store)
        except (OSError, ValueError):
            contents = Contents.mapped(store)  # a compaction replaced the files by others
    except MemoryError:
        return None
    except (OSError, ValueError) as error:
        raise VaultError(
            f"{store.path} was changed, moved or damaged after it was opened ({error}): open it "
            "again; if that does not help, run `offmarl verify`."
        ) from error
    if manifest:
        schema, head = contents.get_all([layout.SCHEMA_KEY, layout.HEAD_KEY])
        is_other = Schema.decode(schema) != manifest.schema
        if is_other or Head.decode(head).length < manifest.head.length:
            raise VaultError(
                f"{store.path} was replaced or shortened after it was opened: open it again."
            )
    return contents


class Parts(NamedTuple):
    """The parts of a manifest; None for those that could not be read."""

    schema: Schema
    head: Head | None
    stock_length: int | None
    """The length that stock programs see."""
    blocks: dict[int, tables.Table]
    """The undamaged blocks of the episode table, by the number of their first record."""
    running: tables.Table | None
    provenance: dict[str, object] | None
    finals: dict[int, int]
    """Number of final views in each existing block, by the number of its first view."""

    @property
    def own_length(self) -> int:
        """Steps of each row that offmarl wrote, or adopted."""
        return self.head.length if self.head else self.stock_length or 0

    @property
    def length(self) -> int:
        """Steps of each row."""
        if self.head is None or self.stock_length is None:
            return self.own_length
        return max(self.head.length, self.head.whole_length(self.stock_length))

    @property
    def table(self) -> tables.Table | None:
        """The whole episode table with the unfinished episodes; None if a part is missing."""
        if self.running is None or self.head is None:
            return None
        ended = [self.blocks[first] for first in sorted(self.blocks)]
        table = np.concatenate([*ended, self.running[self.running["length"] > 0]])
        starts = np.cumsum([0, *map(len, ended)])
        is_whole = sorted(self.blocks) == starts[:-1].tolist() and starts[-1] == self.head.episodes
        return table if is_whole else None

    def description(self, store: Store) -> "Description":
        """Describe the vault by its readable parts; `VaultFormatError` without a head."""
        schema, head, running = self.schema, self.head, self.running
        if head is None:
            raise VaultFormatError(f"the head of {store.path} is damaged.")
        if running is None:
            running = tables.none_running(schema.rows, schema.record)
        stock = head.length if self.stock_length is None else self.stock_length
        manifest = Manifest(schema, head, running, dict(self.provenance or {}), stock)
        return _description(store, manifest)


def read_parts(contents: Contents, schema: Schema, faults: list[Fault]) -> Parts:
    """Read the intact parts of a commit's manifest, and append the faults of the others."""
    fields: dict[str, Any] = {}
    for name, key in _KEYS.items():
        fields[name] = None
        with noting(faults, key):
            fields[name] = _decode(name, schema, contents.get(key))
    blocks, finals = {}, {}
    for key in contents.keys(layout.EPISODES_PREFIX):
        with noting(faults, key):
            first = first_of(key, layout.EPISODES_PREFIX)
            blocks[first] = tables.with_known_causes(_records(contents.get(key), schema.record))
    for key in contents.keys(layout.FINALS_PREFIX):
        with noting(faults, key):
            first = first_of(key, layout.FINALS_PREFIX)
            finals[first] = len(_records(contents.get(key), encoding.view_dtype(schema.spec)))
    return Parts(schema, blocks=blocks, finals=finals, **fields)


def read_schema(contents: Contents, metadata: Mapping[str, Any], faults: list[Fault]) -> Schema:
    """Return the schema, from ``metadata.json`` if the key is damaged."""
    schemas: list[Schema] = []
    with noting(faults, layout.SCHEMA_KEY):
        schemas.append(Schema.decode(contents.get(layout.SCHEMA_KEY)))
    return schemas[0] if schemas else schema_in(metadata)


class Description(NamedTuple):
    """A vault's description; the fields are those of `offmarl.vault.Dataset`."""

    store: Store
    manifest: Manifest | None
    leaves: Mapping[str, Leaf]
    rows: int
    length: int
    provenance: Mapping[str, Any]
    unverified: tuple[tuple[int, int], ...] = ()
    grids: Mapping[str, Grid] = {}
    """How the chunks of each array are stored."""

    @property
    def path(self) -> PurePath:
        """The vault's path."""
        return self.store.path


def describe(store: Store, *, check_arrays: bool = True) -> Description:
    """Read the description of a vault of any program."""
    metadata = read_metadata(store)
    manifest = read_manifest(store)
    if manifest is None:
        return _describe_foreign(store, metadata, check_arrays)
    if any(metadata.get(key) != value for key, value in stock_metadata(manifest.schema).items()):
        raise VaultFormatError(
            f"{store.path / METADATA} contradicts the vault's own schema, so one of them was "
            "changed or damaged: copy the vault again from its source, or copy its intact "
            "episodes with `offmarl salvage`."
        )
    return _description(store, manifest)


def _description(store: Store, manifest: Manifest) -> Description:
    schema = manifest.schema
    return Description(
        store=store,
        manifest=manifest,
        leaves=schema.leaves,
        rows=schema.rows,
        length=manifest.length,
        provenance=manifest.provenance,
        unverified=manifest.unverified,
        grids=own_grids(schema),
    )


def _describe_foreign(store: Store, metadata: Mapping[str, Any], check_arrays: bool) -> Description:
    leaves, rows = parse_metadata(metadata)
    extra = {key: metadata[key] for key in metadata if key not in STOCK_KEYS}
    description = Description(store, None, leaves, rows, stock_length(store), extra)
    if not check_arrays:
        return description
    documents = store.get_all([f"{layout.prefix_of(name)}.zarray" for name in leaves])
    grids = {
        name: foreign_grid(name, leaf, rows, document)
        for (name, leaf), document in zip(leaves.items(), documents, strict=True)
    }
    return description._replace(grids=grids)


def foreign_grids(
    contents: Contents, metadata: Mapping[str, Any], faults: list[Fault]
) -> list[Grid]:
    """Return the arrays of another program's vault, and append faults of the unreadable ones."""
    leaves, rows = parse_metadata(metadata)
    grids = []
    for name, leaf in leaves.items():
        key = f"{layout.prefix_of(name)}.zarray"
        with noting(faults, key):
            grids.append(foreign_grid(name, leaf, rows, contents.get(key)))
    return grids


def foreign_grid(name: str, leaf: Leaf, rows: int, document: bytes) -> Grid:
    """Return the grid of another program's array; `VaultFormatError` if the metadata differ."""
    grid = Grid.of(name, load_json(document, f"the .zarray of {name}"))
    if grid.leaf != leaf or grid.shape[0] != rows:
        raise VaultFormatError(
            f"{METADATA} says that {name} has {rows} rows of {leaf.dtype} {leaf.shape}, and its "
            f"array has {grid.shape[0]} of {grid.leaf.dtype} {grid.leaf.shape}."
        )
    return grid


TIME_LIMIT = "time_limit"
"""In the record: steps after which the environment truncated episodes, if known."""
PUBLISHED = "published"
"""In the record, and in the provenance of these vaults: their source, licence and citation."""


class PullRecord(NamedTuple):
    """Facts recorded by `offmarl pull`; empty for other vaults."""

    time_limit: int | None = None
    provenance: Mapping[str, Any] = {}


def read_pull_record(store: Store) -> PullRecord:
    """Return the facts recorded next to a vault in a local directory.

    Invalid fields are ignored; the vault is readable without them.
    """
    if not isinstance(store, Directory):
        return PullRecord()
    try:
        content = Directory(store.path.parent).read(PULLED)
        record = load_json(content, PULLED) if content else {}
    except (OSError, ValueError, VaultFormatError):
        return PullRecord()
    limit, published = record.get(TIME_LIMIT), record.get(PUBLISHED)
    return PullRecord(
        limit if type(limit) is int and limit > 0 else None,
        {PUBLISHED: published} if isinstance(published, dict) else {},
    )
