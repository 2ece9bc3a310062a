"""Checking the chunks of arrays, one by one."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import numpy as np

from offmarl.errors import VaultError
from offmarl.vault import layout
from offmarl.vault.checked import agrees
from offmarl.vault.commit import Contents, ahead
from offmarl.vault.faults import Fault, noting, of_chunk
from offmarl.vault.grid import Chunk, Grid
from offmarl.vault.layout import NumpyArray
from offmarl.vault.scan import Books
from offmarl.vault.store import Store

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


def checksums_of(contents: Contents, grids: list[Grid], own: Books) -> Iterator[Checked]:
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


def _compare(contents: Contents, number: int, reads: _Reads, own: Books) -> Iterator[Checked]:
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


def _agrees(value: bytes, expected: int, chunk: Chunk, own: Books) -> bool:
    shape = own.schema.chunk_rows, own.schema.chunk_steps, -1
    steps = np.frombuffer(value, np.uint8).reshape(shape)
    return agrees(steps, expected, chunk.steps[1] - chunk.steps[0])
