"""The documents that stock programs read: ``metadata.json``, and ``.zarray`` of each array."""

import bz2
import itertools
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import google_crc32c
import numpy as np

from offmarl.errors import VaultFormatError
from offmarl.types import unflatten_tree
from offmarl.vault.format import tables
from offmarl.vault.format.layout import (
    BARE,
    HEAD_KEY,
    INDEX_KEY,
    INDEX_PREFIX,
    MAX_AXES,
    MAX_CHUNK_BYTES,
    MAX_ROWS,
    PROVENANCE_KEY,
    RUNNING_KEY,
    SCHEMA_KEY,
    TIME_AXIS,
    Head,
    Leaf,
    NumpyArray,
    Schema,
    dump_json,
    encode_index,
    prefix_of,
)

STOCK_VERSION = 1.2
STOCK_KEYS = ("version", "structure_shape", "structure_dtype")
"""The keys of ``metadata.json`` that are not the user's own."""

_MAX_DEPTH, _MAX_PREFIX = 32, 2**11
_DTYPES = frozenset(np.dtype(code).name for code in "?bBhHiIlLqQefdFD")
"""Types of arrays that flashbax, JAX and NumPy have."""
_EXTENSION_TYPES = frozenset(
    {"bfloat16", "float8_e3m4", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz"}
    | {"float8_e5m2", "float8_e5m2fnuz", "int2", "int4"}
)
"""Types that TensorStore and JAX add to NumPy's."""


def stock_metadata(schema: Schema) -> dict[str, Any]:
    """Return the part of ``metadata.json`` that stock programs open the vault with."""
    leaves = schema.leaves
    lead = (schema.rows, schema.chunk_steps)
    return {
        "version": STOCK_VERSION,
        "structure_shape": unflatten_tree({x: str((*lead, *y.shape)) for x, y in leaves.items()}),
        "structure_dtype": unflatten_tree({x: y.dtype.name for x, y in leaves.items()}),
    }


def to_metadata(schema: Schema) -> dict[str, Any]:
    """Return the content of ``metadata.json``."""
    return {**stock_metadata(schema), "offmarl": _signed(schema.to_json())}


def _signed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the copy of a schema for ``metadata.json``, with its CRC32C."""
    return {**schema, "crc32c": f"{google_crc32c.value(dump_json(schema)):08x}"}


def schema_in(metadata: Mapping[str, Any]) -> Schema:
    """Return the copy of the schema in ``metadata.json``; `VaultFormatError` if it is damaged."""
    return Schema.from_json(intact_copy(metadata))


def intact_copy(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the copy of the schema as JSON, compared with its checksum."""
    copy = metadata.get("offmarl")
    schema = {k: v for k, v in copy.items() if k != "crc32c"} if isinstance(copy, dict) else {}
    if copy != _signed(schema):
        raise VaultFormatError("metadata.json has no intact copy of the vault's schema.")
    return schema


def parse_metadata(metadata: Mapping[str, Any]) -> tuple[dict[str, Leaf], int]:
    """Return the arrays that ``metadata.json`` of any program describes, and their rows."""
    version = metadata.get("version")
    if not isinstance(version, int | float) or not 1 <= version < 2:
        raise VaultFormatError(
            f"metadata.json has version {version!r:.80}, and offmarl reads versions 1.x of "
            "flashbax's vaults: convert it with the flashbax that wrote it."
        )
    shapes = _flatten(metadata.get("structure_shape"))
    dtypes = _flatten(metadata.get("structure_dtype"))
    if shapes.keys() != dtypes.keys() or not shapes:
        raise VaultFormatError("metadata.json does not name a shape and a type for every array.")
    parsed = {name: _parse_shape(name, shape) for name, shape in shapes.items()}
    leaves = {n: Leaf(_parse_dtype(n, dtypes[n]), shape[2:]) for n, shape in parsed.items()}
    rows = {shape[0] for shape in parsed.values()}
    if len(rows) > 1 or not 0 < max(rows) <= MAX_ROWS:
        raise VaultFormatError(f"metadata.json gives its arrays {sorted(rows)} rows.")
    return leaves, rows.pop()


def _parse_shape(name: str, text: Any) -> tuple[int, ...]:
    match = re.fullmatch(r"\((\d{1,18}(?:, \d{1,18})+)\)", str(text))
    sizes = tuple(int(size) for size in match[1].split(",")) if match else ()
    if not sizes or math.prod(sizes[2:]) > MAX_CHUNK_BYTES:
        raise VaultFormatError(f"metadata.json gives {name} the shape {text!r:.80}.")
    return sizes


def _parse_dtype(name: str, text: Any) -> np.dtype[Any]:
    if str(text) not in _DTYPES | _EXTENSION_TYPES:
        raise VaultFormatError(
            f"metadata.json gives {name or 'the array'} the type {text!r:.80}, which offmarl does "
            "not read. Read the vault with the version of flashbax that wrote it."
        )
    return np.dtype(text)


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping | list):
        return {prefix.removesuffix(".") if prefix else BARE: tree}
    if prefix.count(".") > _MAX_DEPTH or len(prefix) > _MAX_PREFIX:  # it is repeated in each name
        raise VaultFormatError("metadata.json nests its arrays too deeply to be a vault's.")
    if isinstance(tree, list):
        # Stock gives the entries of a list no names, so that it can only store lists of one.
        if len(tree) != 1:
            raise VaultFormatError(f"metadata.json has a list of {len(tree)} arrays, not of one.")
        tree = {"": tree[0]}
    parts = [_flatten(value, f"{prefix}{name}.") for name, value in tree.items()]
    return {name: value for part in parts for name, value in part.items()}


def zarrays(schema: Schema) -> dict[str, bytes]:
    """Return the keys and values of all ``.zarray`` documents (zarr v2) of a vault of offmarl."""
    index = Grid(INDEX_PREFIX, np.dtype("<i4"), (1,), (1,))
    documents = {grid.prefix: grid.to_json() for grid in own_grids(schema).values()}
    documents[INDEX_PREFIX] = index.to_json()
    return {f"{prefix}.zarray": json.dumps(x).encode() for prefix, x in documents.items()}


def without_episodes(schema: Schema, provenance: Mapping[str, Any]) -> dict[str, bytes]:
    """Return all keys and values of a new vault of offmarl, which has no steps."""
    running = tables.none_running(schema.rows, schema.record)
    return zarrays(schema) | {
        INDEX_KEY: encode_index(0),
        SCHEMA_KEY: dump_json(schema.to_json()),
        HEAD_KEY: dump_json(Head()._asdict()),
        RUNNING_KEY: running.tobytes(),
        PROVENANCE_KEY: dump_json(dict(provenance)),
    }


_CODECS = (None, "blosc", "bz2", "gzip", "zlib", "zstd")
"""Codecs that TensorStore's zarr driver reads. Others are refused, because numcodecs has one that
unpickles."""
_MOST_PARTS = 2**10
"""Maximum chunks that one step is divided into; each is a key that is looked up."""
_ANY_HEADER = 47
"""zlib's window bits for data with a header of zlib or of gzip."""


class Chunk(NamedTuple):
    """A chunk of an array, and its rows and steps: the place of an `offmarl.vault.Fault`."""

    key: str
    leaf: str
    rows: tuple[int, int]
    """The first, and the one after the last."""
    steps: tuple[int, int]


@dataclass(frozen=True)
class Grid:
    """An array's chunks."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    """The shape of a chunk."""
    compressor: str | None = None
    """The codec's name; None if chunks are not compressed."""
    separator: str = "."
    fill: np.generic | None = None
    """The value of omitted chunks; None if no chunk may be omitted."""
    order: Literal["C", "F"] = "C"
    """The order of a chunk's entries: the last axis changes fastest, or the first ("F")."""

    @cached_property
    def prefix(self) -> str:
        """The prefix of the array's keys."""
        return prefix_of(self.name)

    def to_json(self) -> dict[str, Any]:
        """Return the ``.zarray`` document of an array that offmarl writes."""
        compressor = {"id": "zstd", "level": 1} if self.compressor else None
        return {
            "zarr_format": 2,
            "shape": self.shape,
            "chunks": self.chunks,
            "dtype": self.dtype.name if self.dtype.kind == "V" else self.dtype.str,
            "compressor": compressor,
            "fill_value": None,
            "order": "C",
            "filters": None,
            "dimension_separator": ".",
        }

    @classmethod
    def of(cls, name: str, document: Mapping[str, Any], axes: int = 2) -> "Grid":
        """Read a ``.zarray`` document."""
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
            raise VaultFormatError(f"the .zarray of {name} is invalid: {error!r:.200}.") from error
        grid._check(axes)
        grid._check_encoding(document.get("filters"))
        return grid

    def _check(self, axes: int) -> None:
        sizes = (*self.shape, *self.chunks)
        fits = 2 + MAX_AXES >= len(self.shape) == len(self.chunks) >= axes and min(sizes) > 0
        inner = zip(self.shape[2:], self.chunks[2:], strict=False)
        if (
            not fits
            or self.chunk_bytes > MAX_CHUNK_BYTES
            or math.prod(-(-size // chunk) for size, chunk in inner) > _MOST_PARTS
        ):
            raise VaultFormatError(
                f"the .zarray of {self.name} says that it has shape {self.shape} and chunks "
                f"{self.chunks} of {self.dtype}, which no vault has."
            )

    def _check_encoding(self, filters: Any) -> None:
        # NumPy reports the types of ml_dtypes as void.
        is_void = self.dtype.kind == "V" and self.dtype.type is not np.void
        wrong = (
            (self.dtype.kind not in "biufc" and not is_void, f"values of {self.dtype!s:.40}"),
            (self.compressor not in _CODECS, f"the compressor {self.compressor!r:.40}"),
            (self.order not in ("C", "F"), f"the order {self.order!r:.40}"),
            (self.separator not in (".", "/"), f"the separator {self.separator!r:.40}"),
            (bool(filters), "filters"),
        )
        if faults := [fault for is_wrong, fault in wrong if is_wrong]:
            raise VaultFormatError(
                f"the .zarray of {self.name} has {', '.join(faults)}, which cannot be read here."
            )

    @property
    def leaf(self) -> Leaf:
        """Type and shape of a single step of a single row."""
        return Leaf(self.dtype.newbyteorder("="), self.shape[2:])

    @cached_property
    def is_plain(self) -> bool:
        """Whether the bytes of a chunk are those of its steps, one after the other."""
        return (
            self.compressor is None
            and (self.order, self.separator) == ("C", ".")
            and self.chunks[2:] == self.shape[2:]
            and self.dtype.isnative
        )

    def join(self, parts: Sequence[NumpyArray]) -> NumpyArray:
        """Return the whole steps of parts that were decoded, in the order of `keys`."""
        if self.chunks[2:] == self.shape[2:]:
            return parts[0].astype(self.leaf.dtype, copy=False)
        steps: NumpyArray = np.empty((*self.chunks[:2], *self.shape[2:]), self.leaf.dtype)
        for index, part in zip(self._inner(), parts, strict=True):
            starts = (i * size for i, size in zip(index, self.chunks[2:], strict=True))
            spans = (slice(a, a + size) for a, size in zip(starts, self.chunks[2:], strict=True))
            target = steps[(slice(None), slice(None), *spans)]
            target[...] = part[tuple(map(slice, target.shape))]
        return steps

    def _inner(self) -> Iterator[tuple[int, ...]]:
        """Yield the indices of the chunks that divide the steps of a block and a time."""
        counts = (-(-s // c) for s, c in zip(self.shape[2:], self.chunks[2:], strict=True))
        return itertools.product(*map(range, counts))

    def keys(self, block: int, number: int) -> list[str]:
        """Return the keys of the chunks of a block of rows and of a time, which hold its steps."""
        join = self.separator.join
        return [self.prefix + join(map(str, (block, number, *inner))) for inner in self._inner()]

    def missing_chunk(self) -> NumpyArray:
        """Return the content of an omitted chunk: the fill value, or zeros."""
        chunk: NumpyArray = np.zeros(self.chunks, self.dtype)
        if self.fill is not None:
            chunk[...] = self.fill
        return chunk

    def decode(self, value: Any, place: str) -> NumpyArray:
        """Return the content of a chunk from its stored bytes.

        Memory use is bounded by the size of a chunk, even if the bytes are forged.
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

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk, uncompressed."""
        return self.dtype.itemsize * math.prod(self.chunks)

    def within(self, length: int) -> Iterator[Chunk]:
        """Yield the chunks of the first ``length`` steps, by time and then by rows."""
        for number in range(-(-length // self.chunks[1])):
            rows, steps, *_ = self.chunks
            step_span = number * steps, min(length, (number + 1) * steps)
            for block in range(-(-self.shape[0] // rows)):
                row_span = block * rows, min(self.shape[0], (block + 1) * rows)
                for key in self.keys(block, number):
                    yield Chunk(key, self.name, row_span, step_span)


@lru_cache(32)
def own_grids(schema: Schema) -> Mapping[str, Grid]:
    """Return the arrays that a vault of offmarl has."""
    compressor = "zstd" if schema.codec == "zstd" else None
    lead, chunk = (schema.rows, TIME_AXIS), (schema.chunk_rows, schema.chunk_steps)
    return {
        name: Grid(name, leaf.dtype, (*lead, *leaf.shape), (*chunk, *leaf.shape), compressor)
        for name, leaf in schema.leaves.items()
    }


def _fill(value: Any, dtype: np.dtype[Any]) -> np.generic | None:
    """Read the fill value of a document, where "NaN" and infinities are text."""
    if value is None or dtype.kind not in "biufcV" or dtype.itemsize > 32:  # refused later
        return None
    number = complex(*map(float, value)) if isinstance(value, list) else value
    number = float(number) if isinstance(number, str) else number
    fill: np.generic = np.array([number], dtype)[0]
    return fill


def _decompress(codec: str | None, value: Any, size: int) -> Any:
    """Return the content of a compressed chunk, cut off soon after ``size`` bytes."""
    if codec in ("zlib", "gzip"):
        return zlib.decompressobj(_ANY_HEADER).decompress(value, size + 1)
    if codec == "bz2":
        return bz2.BZ2Decompressor().decompress(value, size + 1)
    if codec is None:
        return value
    of_blosc, stored = (int.from_bytes(value[at : at + 4], "little") for at in (4, 12))
    if codec == "blosc" and stored != len(value):  # which its library does not compare
        raise ValueError(f"its header gives {stored} stored bytes, and there are {len(value)}")
    content_size = of_blosc if codec == "blosc" else _zstd_size(value)
    if content_size != size:
        raise ValueError(f"its header gives {content_size} bytes instead of {size}")
    from numcodecs import get_codec  # imported here: few vaults need it

    # Into memory of that size: a value may hold more frames than the one of its header.
    return get_codec({"id": codec}).decode(value, bytearray(size))


def _zstd_size(value: bytes | memoryview) -> int | None:
    """Return the size that the header of a Zstandard frame gives (RFC 8878, 3.1.1.1), if any."""
    if value[:4] != bytes.fromhex("28b52ffd") or len(value) < 6:
        raise ValueError("it is not a Zstandard frame")
    flags = value[4]
    single = bool(flags & 0x20)
    size = (int(single), 2, 4, 8)[flags >> 6]
    begin = 5 + (not single) + (0, 1, 2, 4)[flags & 3]
    if size == 0:
        return None
    content_size = int.from_bytes(value[begin : begin + size], "little")
    return content_size + 256 if size == 2 else content_size
