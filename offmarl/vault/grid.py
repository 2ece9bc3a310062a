"""The chunks of an array: what its ``.zarray`` document says of them, and their keys."""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from offmarl.errors import VaultFormatError
from offmarl.vault.layout import MAX_CHUNK_BYTES, prefix_of


class Chunk(NamedTuple):
    """A chunk, or one of several that a stretch of time and rows is cut into."""

    key: str
    leaf: str
    rows: tuple[int, int]
    """The first, and the one after the last."""
    steps: tuple[int, int]


class Grid(NamedTuple):
    """An array's chunks.

    Attributes
    ----------
    name
        The array's name on disk.
    shape, chunks
        Of the array, and of a chunk.
    compressor
        The codec's name; None where chunks are stored as they are.
    sparse
        Whether chunks may be left out because a fill value stands for them.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    compressor: str | None
    separator: str
    sparse: bool

    @classmethod
    def of(cls, name: str, document: Mapping[str, Any]) -> "Grid":
        """Read a ``.zarray`` document; `VaultFormatError` where it cannot be right."""
        compressor = document.get("compressor")
        try:
            grid = cls(
                name=name,
                dtype=np.dtype(document["dtype"]),
                shape=tuple(map(int, document["shape"])),
                chunks=tuple(map(int, document["chunks"])),
                compressor=str(compressor["id"]) if compressor else None,
                separator=str(document.get("dimension_separator", ".")),
                sparse=document["fill_value"] is not None,
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise VaultFormatError(
                f"the .zarray of {name} cannot be understood: {error!r:.200}."
            ) from error
        grid._check()
        return grid

    def _check(self) -> None:
        sizes = (*self.shape, *self.chunks)
        fits = len(self.shape) == len(self.chunks) >= 2 and min(sizes) > 0
        if not fits or self.chunk_bytes > MAX_CHUNK_BYTES:
            raise VaultFormatError(
                f"the .zarray of {self.name} says that it has shape {self.shape} and chunks "
                f"{self.chunks} of {self.dtype}, which no vault has."
            )

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk, uncompressed."""
        return self.dtype.itemsize * math.prod(self.chunks)

    def within(self, length: int) -> Iterator[Chunk]:
        """Yield the chunks of the first ``length`` steps, by time and then by rows."""
        for number in range(-(-length // self.chunks[1])):
            yield from self.at(number, length)

    def at(self, number: int, length: int) -> Iterator[Chunk]:
        """Yield the chunks of one stretch of time, by rows, up to step ``length``."""
        rows, steps, *_ = self.chunks
        span = number * steps, min(length, (number + 1) * steps)
        counts = (-(-s // c) for s, c in zip(self.shape, self.chunks, strict=True))
        first, _, *rest = map(range, counts)
        for block, *inner in itertools.product(first, *rest):
            key = prefix_of(self.name) + self.separator.join(map(str, (block, number, *inner)))
            yield Chunk(
                key, self.name, (block * rows, min(self.shape[0], (block + 1) * rows)), span
            )
