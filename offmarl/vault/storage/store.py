"""The store of a vault: keys and values that each commit replaces atomically.

`Store.open` parses a path once. The store is then passed to everything that reads, writes or checks
the vault.
"""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import PurePath
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import tensorstore as ts

from offmarl._ahead import ahead, in_thread
from offmarl.errors import VaultFormatError
from offmarl.vault.format.layout import (
    DATA,
    MANIFEST,
    UNFINISHED,
    load_json,
    seal,
    unseal,
)
from offmarl.vault.storage.bulk import Block, DataFile, write_blocks
from offmarl.vault.storage.drivers import Driver, Registered, TensorStoreDriver, driver_of
from offmarl.vault.storage.files import conflict, errors_of, vault_error
from offmarl.vault.storage.location import finish_remote, kvstore_spec, use_tensorstore

T = TypeVar("T")

_BULK_BYTES = 2**23
"""Size from which blocks are written to a file of their own."""
_READERS = 8
"""Threads that read from a place that a user registered."""
_COALESCING = {
    "experimental_read_coalescing_threshold_bytes": 2**16,
    "experimental_read_coalescing_merged_bytes": 2**23,
    "experimental_read_coalescing_interval": "1ms",
}
"""Reads of values that lie together on another machine become one request."""


@runtime_checkable
class Pending(Protocol):
    """A commit in progress."""

    def result(self) -> Any:
        """Wait until everything is durable; raises if nothing was written."""

    def exception(self) -> Any:
        """Wait, and return what `result` would raise, or None."""

    def done(self) -> bool:
        """Whether the commit is finished."""


class Store(ABC):
    """A vault's keys and values; made by `Store.open`."""

    driver: Driver
    path: PurePath

    @staticmethod
    def open(path: str | os.PathLike[str]) -> "Store":
        """Return the store at a path, which need not exist.

        Nothing is read before the first use, which raises `VaultFormatError` if the directory
        holds links. `VaultError` for a URL of an unknown scheme, or an invalid path.
        """
        return store_of(driver_of(path))

    @abstractmethod
    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the stored values of keys; None for each that does not exist."""

    @abstractmethod
    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, sorted."""

    @abstractmethod
    def stamps(self, keys: Sequence[str]) -> tuple[list[bytes], list[bytes]]:
        """Return the first 4 bytes of keys, and their generations, which change with every write.

        A key that does not exist has a generation too.
        """

    @abstractmethod
    def commit(
        self,
        writes: Mapping[str, bytes | bytearray],
        fence: Mapping[str, bytes],
        blocks: Sequence[Block] = (),
    ) -> Pending:
        """Start to write all values or none.

        ``fence`` has keys and the generations that they must still have: `VaultConflictError`, also
        from `Pending.result`, if one has changed. ``blocks`` are more keys and values, in memory
        that must not change until the commit is done.
        """

    @abstractmethod
    def fetch(self, keys: Sequence[str], depth: int) -> Iterator[bytes | None]:
        """Yield the stored values of keys, in order; None for each that does not exist.

        At most ``depth`` are read ahead.
        """

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None."""
        return self.get_some([key]).get(key)

    def get_json(self, key: str) -> dict[str, Any] | None:
        """Return the JSON object that a key holds, or None."""
        value = self.get(key)
        return None if value is None else load_json(value, f"{self.path}: {key}")

    def get_some(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values of those keys that exist."""
        found = zip(keys, self.attempt(lambda: self._read(keys)), strict=True)
        return unseal({key: value for key, value in found if value is not None}, self.path)

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that must exist."""
        found = self.get_some(keys)
        if lost := [key for key in keys if key not in found]:
            raise VaultFormatError(f"{self.path} has lost {lost[0]}: the vault is damaged.")
        return [found[key] for key in keys]

    def drop_pages(self) -> None:
        """Ask the system to drop data written since the last call from its cache."""
        return

    def attempt(self, read: Callable[[], T], again: Callable[[], T] | None = None) -> T:
        """Call ``read`` and return its result; convert errors of TensorStore to `VaultError`.

        ``again``, by default ``read``, is called if a compaction removed files between two reads,
        because the new files hold the same data.
        """
        again = again or read
        use_tensorstore(self.path)
        is_remote = isinstance(self.driver, TensorStoreDriver) and self.driver.is_remote
        try:
            return finish_remote(read, again) if is_remote else read()
        except (ValueError, OSError) as error:
            if not isinstance(error, ValueError) or "NOT_FOUND" not in str(error):
                raise vault_error(error, self.path) from error
        # Outside `except`, because the exception keeps the result of the first call in memory.
        with errors_of(self.path):
            return finish_remote(again, again) if is_remote else again()


def store_of(driver: Driver, config: Mapping[str, Any] | None = None) -> Store:
    """Return the store of a place; ``config`` has OCDBT's settings for a new one."""
    if isinstance(driver, Registered):
        return KeyValueStore(driver)
    assert isinstance(driver, TensorStoreDriver)
    return OcdbtStore(driver, config)


class OcdbtStore(Store):
    """An OCDBT database in a directory, an archive or an object store, through TensorStore.

    ``config`` has OCDBT's settings for a new store. ``manifest`` is the directory of the manifest,
    if it is not the place itself.
    """

    def __init__(
        self,
        driver: TensorStoreDriver,
        config: Mapping[str, Any] | None = None,
        manifest: PurePath | None = None,
    ):
        self.driver: TensorStoreDriver = driver
        self.path = driver.path
        self._dropped: set[str] = set()
        self._spec: dict[str, Any] = {"driver": "ocdbt", "base": driver.spec()}
        if driver.is_remote:
            self._spec |= _COALESCING
        if config:
            self._spec["config"] = config
        if manifest:
            self._spec["manifest"] = kvstore_spec(manifest, "/")

    @cached_property
    def _kv(self) -> ts.KvStore:
        self.driver.check()  # TensorStore follows links
        return ts.KvStore.open(self._spec, context=self.driver.context).result()

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        bound = self.driver.staleness
        reads = [self._kv.read(key, staleness_bound=bound) for key in keys]
        found = [read.result() for read in reads]
        return [bytes(value.value) if value.state == "value" else None for value in found]

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, sorted."""
        span = ts.KvStore.KeyRange(prefix, prefix + "\xff")
        return sorted(key.decode() for key in self.attempt(lambda: self._kv.list(span).result()))

    def stamps(self, keys: Sequence[str]) -> tuple[list[bytes], list[bytes]]:
        """Return the first 4 bytes of keys, and their generations."""
        start, most = self._kv.read, slice(0, 4)
        found = self.attempt(
            lambda: [read.result() for read in [start(key, byte_range=most) for key in keys]]
        )
        return [bytes(x.value) for x in found], [bytes(x.stamp.generation) for x in found]

    def fetch(self, keys: Sequence[str], depth: int) -> Iterator[bytes | None]:
        """Yield the stored values of keys, in order; None for each that does not exist."""
        for key, read in ahead(keys, self._start, depth):
            found = self.attempt(read.result, partial(self._again, key))
            yield bytes(found.value) if found.state == "value" else None

    def _start(self, key: str) -> Any:
        use_tensorstore(self.path)
        return self._kv.read(key, staleness_bound=self.driver.staleness)

    def _again(self, key: str) -> Any:
        return self._start(key).result()

    def commit(
        self,
        writes: Mapping[str, bytes | bytearray],
        fence: Mapping[str, bytes],
        blocks: Sequence[Block] = (),
    ) -> Pending:
        """Start to write all values or none."""
        size = sum(len(block.memory) for block in blocks)
        # A small file costs more than it saves: it is synced beside that of TensorStore.
        if blocks and not (self.driver.can_map and size >= _BULK_BYTES):
            writes, blocks = {**writes, **_values_of(blocks)}, ()
        # TensorStore overwrites the unfinished manifest of a killed process without truncating it.
        # If that was longer, its rest would follow the new manifest.
        self.driver.clear_unfinished(UNFINISHED)
        transaction = ts.Transaction(atomic=True, repeatable_read=True)
        inside = self._kv.with_transaction(transaction)
        reads = {key: inside.read(key, if_not_equal=stamp) for key, stamp in fence.items()}
        if any(read.result().stamp.generation != fence[key] for key, read in reads.items()):
            transaction.abort()
            raise conflict(self.path)
        # TensorStore takes a bytearray too, though its types do not say so.
        sealed = cast("Mapping[str, bytes]", seal(writes))
        pending = [inside.write(key, value) for key, value in sealed.items()]
        if blocks:
            work = partial(self._commit_bulk, transaction, blocks, pending)
            return in_thread(work, "offmarl-commit")
        done = transaction.commit_async()
        # Dropping a future cancels its write, so the futures are kept until the commit is done.
        done.add_done_callback(lambda _: pending.clear())
        return done

    def _commit_bulk(
        self, transaction: ts.Transaction, blocks: Sequence[Block], pending: list[Any]
    ) -> None:
        """Write blocks to a file, and commit a transaction with references to them."""
        try:
            self._refer_to_file(transaction, write_blocks(self.driver.directory, blocks))
        except BaseException:
            transaction.abort()
            raise
        # If this fails, the new manifest may be in place already, so the file is kept.
        transaction.commit_async().result()
        pending.clear()

    def _refer_to_file(self, transaction: ts.Transaction, file: DataFile) -> None:
        """Add references to the values of a data file to a transaction."""
        context = self.driver.context
        memory = {"driver": "memory", "path": f"{file.name}/"}
        own = ts.KvStore.open(memory, context=context).result()
        own.write(MANIFEST, file.manifest).result()
        spec = {"driver": "ocdbt", "base": self.driver.spec(), "manifest": memory}
        inside = self._kv.with_transaction(transaction)
        found = ts.KvStore.open(spec, context=context).result()
        found.experimental_copy_range_to(inside).result()
        own.delete_range(ts.KvStore.KeyRange()).result()

    def refer_to(self, other: "OcdbtStore") -> None:
        """Take over all keys of another store with the same driver; the values are not copied."""
        other._kv.experimental_copy_range_to(self._kv).result()

    def drop_pages(self) -> None:
        """Ask the kernel to drop data written since the last call from the page cache.

        A long recording would fill the page cache and evict the pages of other programs. On virtual
        machines, allocating a new page costs more than writing it.
        """
        if not (hasattr(os, "posix_fadvise") and self.driver.can_map):
            return
        data = self.driver.directory / DATA
        files = {file.name for file in data.iterdir()}
        for name in files - self._dropped:
            with contextlib.suppress(OSError), (data / name).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._dropped = files


def _divided(keys: Sequence[str], size: int) -> list[Sequence[str]]:
    return [keys[first : first + size] for first in range(0, len(keys), size)]


def _values_of(blocks: Iterable[Block]) -> dict[str, bytes]:
    return {key: value for block in blocks for key, value in block.values().items()}


class KeyValueStore(Store):
    """A store in a place that a user registered."""

    def __init__(self, driver: Registered):
        self.driver: Registered = driver
        self.path = driver.path
        self._values = driver.values

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        if len(keys) > 1:
            self.driver.prefetch(keys)
        return self._values.read(keys)

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, sorted."""
        return sorted(self.attempt(lambda: self._values.sizes(prefix)))

    def stamps(self, keys: Sequence[str]) -> tuple[list[bytes], list[bytes]]:
        """Return the first 4 bytes of keys, and their generations."""
        with errors_of(self.path):
            generations = self._values.generations(keys)
            values = self._values.read(keys)
        return [(value or b"")[:4] for value in values], generations

    def commit(
        self,
        writes: Mapping[str, bytes | bytearray],
        fence: Mapping[str, bytes],
        blocks: Sequence[Block] = (),
    ) -> "Future[None]":
        """Write all values or none; done when the call returns."""
        writes = {**writes, **_values_of(blocks)}
        self._values.commit({key: bytes(value) for key, value in seal(writes).items()}, fence)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def fetch(self, keys: Sequence[str], depth: int) -> Iterator[bytes | None]:
        """Yield the stored values of keys, in order; None for each that does not exist."""
        for batch, _ in ahead(_divided(keys, depth), self.driver.prefetch, 2):
            if len(batch) == 1:
                yield from self.attempt(partial(self._values.read, batch))
                continue
            parts = _divided(batch, -(-len(batch) // _READERS))
            for part, read in ahead(parts, self._start, _READERS):
                yield from self.attempt(read.result, partial(self._values.read, part))

    def _start(self, keys: Sequence[str]) -> "Future[list[bytes | None]]":
        return in_thread(partial(self._values.read, keys), "offmarl-read")
