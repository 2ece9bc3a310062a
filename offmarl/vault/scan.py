"""Our own keys, read one by one, so that what is damaged takes nothing else with it."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from offmarl.errors import VaultFormatError
from offmarl.vault import encoding, layout, tables
from offmarl.vault.commit import Contents
from offmarl.vault.faults import Fault, noting
from offmarl.vault.layout import Head, NumpyArray, Schema
from offmarl.vault.metadata import STOCK_KEYS, schema_in, to_metadata


class Books(NamedTuple):
    """What could be read of our own keys; None where something could not."""

    schema: Schema
    head: Head | None
    stock_length: int | None
    """The length that stock programs see."""
    ended: dict[int, tables.Table]
    """The sound blocks of the episode table, by the number of their first record."""
    running: tables.Table | None
    provenance: dict[str, object] | None
    finals: dict[int, int]
    """How many final views are in each block that is there, by the number of the first."""

    @property
    def own_length(self) -> int:
        """Steps of each row that we wrote, or adopted."""
        return self.head.length if self.head else self.stock_length or 0

    @property
    def length(self) -> int:
        """Steps of each row."""
        if self.head is None or self.stock_length is None:
            return self.own_length
        return max(self.head.length, self.head.whole_length(self.stock_length))

    @property
    def table(self) -> tables.Table | None:
        """The whole episode table, those that run on included; None where it is not known whole."""
        if self.running is None or self.head is None:
            return None
        blocks = [self.ended[first] for first in sorted(self.ended)]
        table = np.concatenate([*blocks, self.running[self.running["length"] > 0]])
        starts = np.cumsum([0, *map(len, blocks)])
        whole = sorted(self.ended) == starts[:-1].tolist() and starts[-1] == self.head.episodes
        return table if whole else None


def read(contents: Contents, schema: Schema, faults: list[Fault]) -> Books:
    """Read what can be read, and note what cannot."""
    head = stock_length = running = provenance = None
    dtype = tables.dtype(schema.spec.num_agents)
    with noting(faults, layout.HEAD_KEY):
        head = Head.from_json(contents.get_json(layout.HEAD_KEY))
    with noting(faults, layout.INDEX_KEY):
        stock_length = layout.decode_index(contents.get(layout.INDEX_KEY))
    with noting(faults, layout.RUNNING_KEY):
        running = np.frombuffer(contents.get(layout.RUNNING_KEY), dtype)
        _expect(len(running) == schema.rows, f"it has {len(running)} rows of {schema.rows}.")
    with noting(faults, layout.PROVENANCE_KEY):
        provenance = contents.get_json(layout.PROVENANCE_KEY)
    ended = {}
    for key in contents.keys(layout.EPISODES_PREFIX):
        with noting(faults, key):
            first = int(key.removeprefix(layout.EPISODES_PREFIX))
            ended[first] = np.frombuffer(contents.get(key), dtype)
    finals = {}
    for key in contents.keys(layout.FINALS_PREFIX):
        with noting(faults, key):
            first = int(key.removeprefix(layout.FINALS_PREFIX))
            finals[first] = len(final_views(contents, schema, first))
    return Books(schema, head, stock_length, ended, running, provenance, finals)


def final_views(contents: Contents, schema: Schema, first: int) -> NumpyArray:
    """Read a block of packed final views; `VaultFormatError` where it is damaged."""
    dtype = encoding.view_dtype(schema.spec)
    data = contents.get(layout.finals_key(first))
    _expect(len(data) % dtype.itemsize == 0, f"{len(data)} bytes are no whole final views.")
    return np.frombuffer(data, dtype)


def _expect(condition: bool | np.bool_, otherwise: str) -> None:
    if not condition:
        raise VaultFormatError(otherwise)


def check(books: Books) -> None:
    """Raise `VaultFormatError` where tables that can be read contradict one another."""
    head, stock_length, table = books.head, books.stock_length, books.table
    if head is None or stock_length is None or books.running is None:
        return
    _expect(
        head.whole_length(stock_length) >= head.length,
        f"the vault has {head.length} steps a row, and its index was set back to {stock_length}.",
    )
    if table is None:
        raise VaultFormatError(f"of {head.episodes} episodes some are not in the episode table.")
    _check_contiguous(table, head.length, books.schema.rows)
    finals = table["final"][table["final"] >= 0]
    _expect(
        sum(books.finals.values()) == head.finals and _distinct_below(finals, head.finals),
        f"the {head.finals} final views are not those that the episode table names.",
    )


def _check_contiguous(table: tables.Table, length: int, rows: int) -> None:
    """Raise where the episodes of a row do not stand one after the other from its start to end."""
    table = table[np.lexsort((table["start"], table["row"]))]
    ends = table["start"] + table["length"]
    first = np.diff(table["row"], prepend=-1) != 0
    before = np.where(first, 0, np.roll(ends, 1))
    last = np.roll(first, -1)
    _expect(
        (table["length"] > 0).all()
        and (table["start"] == before).all()
        and (ends[last] == length).all()
        and table["row"][first].tolist() == list(range(rows if length else 0)),
        "the episodes of the episode table do not stand one after the other to the vault's end.",
    )


def _distinct_below(numbers: NumpyArray, stop: int) -> bool:
    return len(np.unique(numbers)) == len(numbers) and bool((numbers < stop).all())


def read_schema(contents: Contents, metadata: Mapping[str, Any], faults: list[Fault]) -> Schema:
    """Return the schema, from ``metadata.json`` where our key is damaged.

    Raises
    ------
    VaultFormatError
        It is nowhere to be had.
    """
    found: list[Schema] = []
    with noting(faults, layout.SCHEMA_KEY):
        found.append(Schema.from_json(contents.get_json(layout.SCHEMA_KEY)))
    return found[0] if found else schema_in(metadata)


def check_metadata(metadata: Mapping[str, Any], schema: Schema) -> None:
    """Raise `VaultFormatError` where ``metadata.json`` is not what follows from the schema."""
    expected = json.loads(layout.dump_json(to_metadata(schema)))
    keys = STOCK_KEYS if metadata.get("offmarl") == {"version": 1} else expected
    wrong = [key for key in keys if metadata.get(key) != expected[key]]
    _expect(not wrong, f"its {', '.join(wrong)} is not what the vault's schema says.")


def unchecked(contents: Contents, own: Books) -> list[str]:
    """Say what of a vault of ours no checksum protects.

    Raises
    ------
    VaultFormatError
        Checksums are missing that should be there.
    """
    notes = []
    version = contents.get_json(layout.SCHEMA_KEY).get("version")
    if contents.unsealed and version == 1:
        notes.append("our own keys: version 1 kept no checksums of them.")
    elif contents.unsealed:
        raise VaultFormatError(f"{', '.join(sorted(contents.unsealed))} have no checksum.")
    if own.length > own.own_length:
        notes.append(
            f"steps {own.own_length - own.own_length % own.schema.chunk_steps} to "
            f"{own.length - 1}: a stock program appended to them, without checksums."
        )
    return notes
