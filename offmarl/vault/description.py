"""What a vault is, by its own account: its arrays, how far they go, and where it comes from."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from offmarl.errors import VaultFormatError
from offmarl.vault import layout
from offmarl.vault.layout import METADATA, Leaf
from offmarl.vault.manifest import Manifest, read_manifest, read_metadata, stock_length
from offmarl.vault.metadata import STOCK_KEYS, parse_metadata, to_metadata
from offmarl.vault.store import Store


class Description(NamedTuple):
    """As `offmarl.vault.Dataset` has it."""

    manifest: Manifest | None
    leaves: Mapping[str, Leaf]
    rows: int
    length: int
    provenance: Mapping[str, Any]
    unverified: tuple[tuple[int, int], ...] = ()


def describe(store: Store) -> Description:
    """Read what a vault says of itself; `VaultFormatError` where that is no sense."""
    metadata = read_metadata(store.driver)
    own = read_manifest(store)
    return _of_ours(store, own, metadata) if own else _of_others(store, metadata)


def _of_ours(store: Store, own: Manifest, metadata: Mapping[str, Any]) -> Description:
    expected = to_metadata(own.schema)
    if any(metadata.get(key) != expected[key] for key in STOCK_KEYS):
        raise VaultFormatError(
            f"{store.path / METADATA} contradicts the vault's own schema, so one of them was "
            "changed or damaged: copy the vault again from where it came from, or see what "
            "`offmarl repair` makes of it."
        )
    leaves = own.schema.leaves
    return Description(own, leaves, own.schema.rows, own.length, own.provenance, own.unverified)


def _of_others(store: Store, metadata: Mapping[str, Any]) -> Description:
    leaves, rows = parse_metadata(metadata)
    for name, leaf in leaves.items():
        _check_array(store, name, leaf, rows)
    told = {key: metadata[key] for key in metadata if key not in STOCK_KEYS}
    return Description(None, leaves, rows, stock_length(store), told)


def _check_array(store: Store, name: str, leaf: Leaf, rows: int) -> None:
    array = store.array(layout.prefix_of(name))
    found = Leaf(array.dtype.numpy_dtype, array.shape[2:])
    if found != leaf or array.shape[0] != rows:
        raise VaultFormatError(
            f"{store.path}: {METADATA} says that {name} has {rows} rows of {leaf.dtype} "
            f"{leaf.shape}, and its array has {array.shape[0]} of {found.dtype} {found.shape}."
        )
    chunk = array.chunk_layout.read_chunk.shape
    size = math.prod(size or 1 for size in chunk or ()) * leaf.dtype.itemsize
    if size > layout.MAX_CHUNK_BYTES:
        raise VaultFormatError(
            f"{store.path}: the chunks of {name} are said to have shape {chunk}, which no vault "
            "has, and reading one would fill the memory."
        )
