"""Whether the parts of a manifest agree with one another and with ``metadata.json``."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np

from offmarl.errors import VaultError, VaultFormatError
from offmarl.vault import layout, tables
from offmarl.vault.checked import agrees
from offmarl.vault.commit import Contents, ahead
from offmarl.vault.faults import Fault, expect, noting, of_chunk
from offmarl.vault.grid import Chunk, Grid
from offmarl.vault.layout import NumpyArray, Schema
from offmarl.vault.manifest import Parts
from offmarl.vault.metadata import STOCK_KEYS, to_metadata
from offmarl.vault.store import Store


def check(parts: Parts) -> None:
    """Raise `VaultFormatError` where the parts contradict one another."""
    head, stock_length, table = parts.head, parts.stock_length, parts.table
    if head is None or stock_length is None or parts.running is None:
        return
    expect(
        head.whole_length(stock_length) >= head.length,
        f"the vault has {head.length} steps a row, and its index was set back to {stock_length}.",
    )
    if table is None:
        raise VaultFormatError(f"of {head.episodes} episodes some are not in the episode table.")
    _check_contiguous(table, head.length, parts.schema.rows)
    finals = table["final"][table["final"] >= 0]
    expect(
        sum(parts.finals.values()) == head.finals and _distinct_below(finals, head.finals),
        f"the {head.finals} final views are not those that the episode table names.",
    )


def _check_contiguous(table: tables.Table, length: int, rows: int) -> None:
    """Raise where the episodes of a row do not stand one after the other from its start to end."""
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
        "the episodes of the episode table do not stand one after the other to the vault's end.",
    )


def _distinct_below(numbers: NumpyArray, stop: int) -> bool:
    return len(np.unique(numbers)) == len(numbers) and bool((numbers < stop).all())


def check_metadata(metadata: Mapping[str, Any], schema: Schema) -> None:
    """Raise `VaultFormatError` where ``metadata.json`` is not what follows from the schema."""
    expected = json.loads(layout.dump_json(to_metadata(schema)))
    keys = STOCK_KEYS if metadata.get("offmarl") == {"version": 1} else expected
    wrong = [key for key in keys if metadata.get(key) != expected[key]]
    expect(not wrong, f"its {', '.join(wrong)} is not what the vault's schema says.")


def unchecked(contents: Contents, own: Parts) -> list[str]:
    """Say what of a vault of offmarl no checksum protects.

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


_Reads = list[tuple[Chunk, int, Callable[[], bytes]]]
"""Chunks of one stretch of time, their place among all of it, and their values to come."""
Checked = tuple[Fault | None, int]
"""What is wrong with a chunk, if anything, and the bytes read."""


def misplaced(contents: Contents, grid: Grid, chunk: Chunk) -> str:
    """Say what is wrong with a chunk that was not read yet; empty where nothing is."""
    if chunk.key not in contents:
        return "" if grid.sparse else "it is missing"
    size = contents.size(chunk.key)
    if grid.compressor is None and size != grid.chunk_bytes:
        return f"it has {size} bytes instead of {grid.chunk_bytes}"
    return "its data file is not there, or cut off" if contents.is_cut_off(chunk.key) else ""


def placed_length(contents: Contents, grids: Iterable[Grid], length: int) -> int:
    """Return the steps up to the first chunk that is not where it should be."""
    for grid in grids:
        wrong = (chunk for chunk in grid.within(length) if misplaced(contents, grid, chunk))
        length = min(length, next((chunk.steps[0] for chunk in wrong), length))
    return length


def stored_bytes(contents: Contents, grid: Grid, length: int) -> int:
    """Return how many bytes of an array there are to read."""
    return sum(contents.size(chunk.key) for chunk in _placed(contents, grid, length))


def _placed(contents: Contents, grid: Grid, length: int) -> Iterator[Chunk]:
    limit = len(contents.tree.values)  # a forged index may speak of more chunks than can be
    for chunk in grid.within(min(length, limit * grid.chunks[1])):
        if chunk.key in contents and not misplaced(contents, grid, chunk):
            yield chunk


def decoded(
    store: Store, contents: Contents, grids: Iterable[Grid], length: int
) -> Iterator[Checked]:
    """Decode every chunk, which checks what checksums its codec has."""
    for grid in grids:
        try:
            array = store.array(layout.prefix_of(grid.name))
        except VaultError:
            continue  # its description is at fault, and that has been said

        def read(chunk: Chunk, array: NumpyArray = array) -> Callable[[], NumpyArray]:
            return array[slice(*chunk.rows), slice(*chunk.steps)].read().result

        for chunk, result in ahead(_placed(contents, grid, length), read, grid.chunk_bytes):
            faults: list[Fault] = []
            with noting(faults):
                result()
            fault = of_chunk(chunk, f"it cannot be decoded: {faults[0].what}") if faults else None
            yield fault, contents.size(chunk.key)


def checksums_of(contents: Contents, grids: list[Grid], own: Parts) -> Iterator[Checked]:
    """Compare the CRC32C of every chunk of a ``raw`` vault with those kept beside them.

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
    for number, reads in ahead(numbers, start, size):
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
