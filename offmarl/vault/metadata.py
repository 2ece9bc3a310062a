"""What a vault begins with, and what stock programs look at: ``metadata.json``, ``.zarray``."""

import math
import re
from collections.abc import Mapping
from typing import Any

import google_crc32c
import numpy as np

from offmarl.errors import VaultFormatError
from offmarl.vault import tables
from offmarl.vault.layout import (
    BARE,
    HEAD_KEY,
    INDEX_KEY,
    INDEX_PREFIX,
    MAX_CHUNK_BYTES,
    MAX_ROWS,
    PROVENANCE_KEY,
    RUNNING_KEY,
    SCHEMA_KEY,
    TIME_AXIS,
    Head,
    Leaf,
    Schema,
    dump_json,
    encode_index,
    prefix_of,
)

STOCK_VERSION = 1.2
STOCK_KEYS = ("version", "structure_shape", "structure_dtype")
"""The keys of ``metadata.json`` that are not the user's own."""

_MAX_DEPTH = 32
_DTYPES = frozenset(np.dtype(code).name for code in "?bBhHiIlLqQefdFD")
"""The types of arrays that flashbax and JAX have and NumPy too."""
_EXTENSION_TYPES = frozenset(
    {"bfloat16", "float8_e3m4", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz"}
    | {"float8_e5m2", "float8_e5m2fnuz", "int2", "int4"}
)
"""Those that TensorStore and JAX add to NumPy's."""


def to_metadata(schema: Schema) -> dict[str, Any]:
    """Return the content of ``metadata.json`` that stock programs open the vault by."""
    found = schema.leaves
    lead = (schema.rows, schema.chunk_steps)
    return {
        "version": STOCK_VERSION,
        "structure_shape": _nest({name: str((*lead, *leaf.shape)) for name, leaf in found.items()}),
        "structure_dtype": _nest({name: leaf.dtype.name for name, leaf in found.items()}),
        "offmarl": _signed(schema.to_json()),
    }


def _signed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with its CRC32C: the copy of it that is kept beside the store."""
    return {**schema, "crc32c": f"{google_crc32c.value(dump_json(schema)):08x}"}


def schema_in(metadata: Mapping[str, Any]) -> Schema:
    """Return the copy of the schema in ``metadata.json``; `VaultFormatError` if it is not sound."""
    copy = metadata.get("offmarl")
    schema = {k: v for k, v in copy.items() if k != "crc32c"} if isinstance(copy, dict) else {}
    if copy != _signed(schema):
        raise VaultFormatError("metadata.json has no sound copy of the vault's schema.")
    return Schema.from_json(schema)


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
    found = {n: Leaf(_parse_dtype(n, dtypes[n]), shape[2:]) for n, shape in parsed.items()}
    rows = {shape[0] for shape in parsed.values()}
    if len(rows) > 1 or not 0 < max(rows) <= MAX_ROWS:
        raise VaultFormatError(f"metadata.json gives its arrays {sorted(rows)} rows.")
    return found, rows.pop()


def _parse_shape(name: str, text: Any) -> tuple[int, ...]:
    match = re.fullmatch(r"\((\d{1,18}(?:, \d{1,18})+)\)", str(text))
    if not match:
        raise VaultFormatError(f"metadata.json gives {name} the shape {text!r:.80}.")
    sizes = tuple(int(size) for size in match[1].split(","))
    if math.prod(sizes[2:]) > MAX_CHUNK_BYTES:
        raise VaultFormatError(f"metadata.json gives {name} the shape {text!r:.80}.")
    return sizes


def _parse_dtype(name: str, text: Any) -> np.dtype[Any]:
    if str(text) not in _DTYPES | _EXTENSION_TYPES:
        raise VaultFormatError(
            f"metadata.json gives {name or 'the array'} the type {text!r:.80}, which offmarl does "
            "not read. If it is a type of the flashbax that wrote the vault, read it with that."
        )
    return np.dtype(text)


def _nest(flat: Mapping[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *groups, field = name.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[field] = value
    return tree


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping | list):
        return {prefix.removesuffix(".") if prefix else BARE: tree}
    if prefix.count(".") > _MAX_DEPTH:
        raise VaultFormatError("metadata.json nests its arrays too deeply to be a vault's.")
    if isinstance(tree, list):
        # Stock gives the entries of a list no names, so that it can only store lists of one.
        if len(tree) != 1:
            raise VaultFormatError(f"metadata.json has a list of {len(tree)} arrays, not of one.")
        tree = {"": tree[0]}
    parts = [_flatten(value, f"{prefix}{name}.") for name, value in tree.items()]
    return {name: value for part in parts for name, value in part.items()}


def zarray(leaf: Leaf, schema: Schema) -> bytes:
    """Return the zarr v2 ``.zarray`` document of a leaf."""
    compressor = {"id": "zstd", "level": 1} if schema.codec == "zstd" else None
    return _zarray(
        leaf.dtype,
        (schema.rows, TIME_AXIS, *leaf.shape),
        (schema.chunk_rows, schema.chunk_steps, *leaf.shape),
        compressor,
    )


def index_zarray() -> bytes:
    """Return the ``.zarray`` document of the valid length."""
    return _zarray(np.dtype("<i4"), (1,), (1,), None)


def zarrays(schema: Schema) -> dict[str, bytes]:
    """Return the keys and values of all ``.zarray`` documents of a vault of offmarl."""
    found = {
        prefix_of(name) + ".zarray": zarray(leaf, schema) for name, leaf in schema.leaves.items()
    }
    return found | {INDEX_PREFIX + ".zarray": index_zarray()}


def _zarray(
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    compressor: dict[str, Any] | None,
) -> bytes:
    return dump_json(
        {
            "zarr_format": 2,
            "shape": shape,
            "chunks": chunks,
            "dtype": dtype.str,
            "compressor": compressor,
            "fill_value": None,
            "order": "C",
            "filters": None,
            "dimension_separator": ".",
        }
    )


def without_episodes(
    schema: Schema, provenance: Mapping[str, Any], head: Head, stock_length: int = 0
) -> dict[str, bytes]:
    """Return all keys and values of a vault of offmarl that has no chunks, or none told of yet."""
    running = tables.none_running(schema.rows, schema.spec.num_agents)
    return zarrays(schema) | {
        INDEX_KEY: encode_index(stock_length),
        SCHEMA_KEY: dump_json(schema.to_json()),
        HEAD_KEY: dump_json(head._asdict()),
        RUNNING_KEY: running.tobytes(),
        PROVENANCE_KEY: dump_json(dict(provenance)),
    }
