"""The chunks of an array: what its ``.zarray`` document says of them, their keys and content."""

import bz2
import itertools
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from offmarl.errors import VaultFormatError
from offmarl.vault.layout import MAX_CHUNK_BYTES, NumpyArray, prefix_of

_CODECS = (None, "blosc", "bz2", "gzip", "zlib", "zstd")
"""What TensorStore's zarr driver reads. Codecs of other names could do anything: numcodecs has one
that unpickles."""
_ANY_HEADER = 47
"""zlib's window bits for data with a header of zlib or of gzip."""


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
    fill
        The value of chunks that are left out; None where none may be.
    order
        Of the entries of a chunk: "C", the last axis fastest, or "F".
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    compressor: str | None
    separator: str
    fill: np.generic | None
    order: Literal["C", "F"]

    @classmethod
    def of(cls, name: str, document: Mapping[str, Any], axes: int = 2) -> "Grid":
        """Read a ``.zarray`` document.

        Raises
        ------
        VaultFormatError
            It cannot be right, has fewer than ``axes`` axes, or says that chunks are stored in a
            way that TensorStore's zarr driver does not read.
        """
        compressor = document.get("compressor")
        try:
            dtype = np.dtype(document["dtype"])
            grid = cls(
                name=name,
                dtype=dtype,
                shape=tuple(map(int, document["shape"])),
                chunks=tuple(map(int, document["chunks"])),
                compressor=str(compressor["id"]) if compressor else None,
                separator=str(document.get("dimension_separator", ".")),
                fill=_fill(document["fill_value"], dtype),
                order=document.get("order", "C"),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise VaultFormatError(
                f"the .zarray of {name} cannot be understood: {error!r:.200}."
            ) from error
        grid._check(axes)
        grid._check_encoding(document.get("filters"))
        return grid

    def _check(self, axes: int) -> None:
        sizes = (*self.shape, *self.chunks)
        fits = len(self.shape) == len(self.chunks) >= axes and min(sizes) > 0
        if not fits or self.chunk_bytes > MAX_CHUNK_BYTES:
            raise VaultFormatError(
                f"the .zarray of {self.name} says that it has shape {self.shape} and chunks "
                f"{self.chunks} of {self.dtype}, which no vault has."
            )

    def _check_encoding(self, filters: Any) -> None:
        wrong = (
            (not _is_number(self.dtype), f"values of {self.dtype!s:.40}"),
            (self.compressor not in _CODECS, f"the compressor {self.compressor!r:.40}"),
            (self.order not in ("C", "F"), f"the order {self.order!r:.40}"),
            (self.separator not in (".", "/"), f"the separator {self.separator!r:.40}"),
            (bool(filters), "filters"),
        )
        if found := [what for is_wrong, what in wrong if is_wrong]:
            raise VaultFormatError(
                f"the .zarray of {self.name} has {', '.join(found)}, which cannot be read here."
            )

    @property
    def sparse(self) -> bool:
        """Whether chunks may be left out because a fill value stands for them."""
        return self.fill is not None

    def missing_chunk(self) -> NumpyArray:
        """Return the content of a chunk that is left out: the fill value, or zeros."""
        chunk: NumpyArray = np.zeros(self.chunks, self.dtype)
        if self.fill is not None:
            chunk[...] = self.fill
        return chunk

    def decode(self, value: bytes, place: str) -> NumpyArray:
        """Return the content of a chunk from its stored bytes.

        No more memory is used than the content of a chunk takes, whatever the bytes say.

        Raises
        ------
        VaultFormatError
            The bytes are damaged, or hold more or less than one chunk; the message names ``place``.
        """
        try:
            content = _decompress(self.compressor, value, self.chunk_bytes)
        except (RuntimeError, ValueError, OSError, EOFError, zlib.error) as error:
            raise VaultFormatError(f"{place} cannot be decoded: {error!s:.200}.") from error
        if len(content) != self.chunk_bytes:
            raise VaultFormatError(
                f"{place} has {len(content)} bytes instead of {self.chunk_bytes}."
            )
        return np.frombuffer(content, self.dtype).reshape(self.chunks, order=self.order)

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


def _fill(value: Any, dtype: np.dtype[Any]) -> np.generic | None:
    """Read the fill value of a document, where "NaN" and infinities are text."""
    if value is None:
        return None
    number = complex(*map(float, value)) if isinstance(value, list) else value
    number = float(number) if isinstance(number, str) else number
    found: np.generic = np.array([number], dtype)[0]
    return found


def _is_number(dtype: np.dtype[Any]) -> bool:
    """Whether values are numbers or booleans; those of ml_dtypes are void to NumPy."""
    return dtype.kind in "biufc" or (dtype.kind == "V" and dtype.type is not np.void)


def _decompress(codec: str | None, value: bytes, size: int) -> bytes:
    """Return the content of a compressed chunk, cut off soon after ``size`` bytes."""
    if codec in ("zlib", "gzip"):
        return zlib.decompressobj(_ANY_HEADER).decompress(value, size + 1)
    if codec == "bz2":
        return bz2.BZ2Decompressor().decompress(value, size + 1)
    if codec is None:
        return value
    found = _blosc_size(value) if codec == "blosc" else _zstd_size(value)
    if found != size:
        raise ValueError(f"it says that it holds {found} bytes instead of {size}")
    from numcodecs import get_codec  # imported here: few vaults need it

    return bytes(get_codec({"id": codec}).decode(value))


def _blosc_size(value: bytes) -> int:
    return int.from_bytes(value[4:8], "little")


def _zstd_size(value: bytes) -> int | None:
    """Return the size that the header of a Zstandard frame gives (RFC 8878, 3.1.1.1), if any."""
    if value[:4] != bytes.fromhex("28b52ffd") or len(value) < 6:
        raise ValueError("it is no Zstandard frame")
    flags = value[4]
    single = bool(flags & 0x20)
    size = (int(single), 2, 4, 8)[flags >> 6]
    begin = 5 + (not single) + (0, 1, 2, 4)[flags & 3]
    if size == 0:
        return None
    found = int.from_bytes(value[begin : begin + size], "little")
    return found + 256 if size == 2 else found
