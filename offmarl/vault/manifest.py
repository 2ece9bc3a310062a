"""Reading what a vault says of itself: ``metadata.json``, and our own keys."""

import json
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from offmarl.errors import VaultError, VaultFormatError
from offmarl.vault import layout, tables
from offmarl.vault.checksum import unseal
from offmarl.vault.drivers import Driver
from offmarl.vault.layout import METADATA, Head, NumpyArray, Schema, load_json
from offmarl.vault.metadata import zarrays
from offmarl.vault.mmap import Snapshot, open_snapshot
from offmarl.vault.store import Store


class Manifest(NamedTuple):
    """Our own keys, all of one commit."""

    schema: Schema
    head: Head
    running: tables.Table
    provenance: dict[str, Any]
    stock_length: int
    """The length that stock programs see."""

    @property
    def length(self) -> int:
        """Steps of each row, those that a stock program appended included."""
        return self.head.whole_length(self.stock_length)

    @property
    def unverified(self) -> tuple[tuple[int, int], ...]:
        """Intervals of steps that a stock program appended, adopted or not."""
        begin = self.head.length
        return self.head.unverified + (((begin, self.length),) if begin < self.length else ())


def stock_length(store: Store) -> int:
    """Return the steps of each row of a vault that others wrote.

    Raises
    ------
    VaultError
        Its index is damaged.
    """
    index = store.array(layout.INDEX_PREFIX)
    if index.shape != (1,) or index.dtype.numpy_dtype.kind != "i":
        raise VaultFormatError(f"{store.path}: the index is not one number.")
    length = int(store.attempt(lambda: index.read().result())[0])
    if length < 0:
        raise VaultFormatError(f"{store.path}: the index says that there are {length} steps.")
    return length


def read_metadata(driver: Driver) -> dict[str, Any]:
    """Return the content of ``metadata.json``."""
    file = driver.path / METADATA
    try:
        data = driver.read(METADATA)
    except (OSError, ValueError) as error:
        raise VaultFormatError(f"{file} cannot be read: {error}.") from error
    if data is None:
        raise VaultFormatError(f"{file} is missing.")
    return load_json(data, str(file))


def read_manifest(store: Store) -> Manifest | None:
    """Return our own keys, or None where there are none."""
    data = store.get_json(layout.SCHEMA_KEY)
    if data is None:
        return None
    schema = Schema.from_json(data)
    # A writer may commit between two reads; the head tells, because every commit changes it.
    while True:
        (head,) = store.get_all([layout.HEAD_KEY])
        own = _read_own(store, schema, Head.from_json(load_json(head, layout.HEAD_KEY)))
        if store.get(layout.HEAD_KEY) == head:
            return own


def _read_own(store: Store, schema: Schema, head: Head) -> Manifest:
    index, running, provenance = store.get_all(
        [layout.INDEX_KEY, layout.RUNNING_KEY, layout.PROVENANCE_KEY]
    )
    dtype = tables.dtype(schema.spec.num_agents)
    own = Manifest(
        schema=schema,
        head=head,
        running=np.frombuffer(running, dtype),
        provenance=load_json(provenance, layout.PROVENANCE_KEY),
        stock_length=layout.decode_index(index),
    )
    if own.length < head.length:
        raise VaultFormatError(
            f"{store.path} had {head.length} steps a row, and its index was set back to "
            f"{own.stock_length}: a program that does not know our lock wrote over it while it was "
            "being recorded."
        )
    return own


def read_table(store: Store, prefix: str, count: int, dtype: np.dtype[Any]) -> NumpyArray:
    """Return the first ``count`` records of a table that is kept in blocks."""
    keys = [key for key in store.keys(prefix) if int(key.removeprefix(prefix)) < count]
    data = b"".join(store.get_all(keys))
    if len(data) != count * dtype.itemsize:
        raise VaultFormatError(
            f"{store.path} has lost a part of {prefix}: of {count * dtype.itemsize} bytes "
            f"{len(data)} are there."
        )
    return np.frombuffer(data, dtype)


def read_episodes(store: Store, own: Manifest) -> tables.Table:
    """Return the episodes that we wrote: those that ended, and those that run on."""
    dtype = tables.dtype(own.schema.spec.num_agents)
    ended = read_table(store, layout.EPISODES_PREFIX, own.head.episodes, dtype)
    return np.concatenate([ended, own.running[own.running["length"] > 0]])


def check_documents(store: Store, schema: Schema) -> None:
    """Raise `VaultFormatError` where an array is described otherwise than the schema says.

    Nothing protects these documents, and data would be taken for what it is not.
    """
    for key, expected in zarrays(schema).items():
        if store.get_json(key) != json.loads(expected):
            raise VaultFormatError(
                f"{store.path} is damaged: {key} is not what the vault's schema says. `offmarl "
                "repair` sets it right."
            )


def snapshot_of(store: Store, own: Manifest | None) -> Snapshot | None:
    """Map a vault's files; None where that cannot be, or is of no use.

    Raises
    ------
    VaultError
        They are not those of when it was opened.
    """
    if own and own.schema.codec != "raw":
        return None
    try:
        snapshot = open_snapshot(store.driver)
    except (OSError, ValueError) as error:
        raise VaultError(
            f"{store.path} was changed, moved or damaged after it was opened ({error}): open it "
            "again, and if that does not help, see what `offmarl verify` says."
        ) from error
    if own and snapshot:
        check_same(own, snapshot, store.path)
    return snapshot


def check_same(own: Manifest, snapshot: Snapshot, path: PurePath) -> None:
    """Raise `VaultError` where a snapshot is not of the vault that was opened."""
    schema, head = (
        load_json(unseal(key, snapshot.value(key) or b"", path), f"{path}: {key}")
        for key in (layout.SCHEMA_KEY, layout.HEAD_KEY)
    )
    if Schema.from_json(schema) != own.schema or Head.from_json(head).length < own.head.length:
        raise VaultError(
            f"{path} is another vault, or a shorter one, than when it was opened: open it again."
        )
