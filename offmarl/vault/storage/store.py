"""Stores: the places that vaults are kept in, each with small files, keys and values.

A store is a directory, a part of a zip archive, a bucket, a web address, or a place of a scheme
that a user registered with `offmarl.vault.register_driver`. Each commit replaces keys and values
atomically. Differences between the kinds are methods and flags, so the layers above do not test
for the kind. `store_of` parses a path once; the store is then passed to everything that reads,
writes or checks the vault.
"""

import math
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from functools import cached_property, partial
from pathlib import Path, PurePath
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import tensorstore as ts

from offmarl._ahead import ahead, in_thread
from offmarl.errors import VaultError, VaultFormatError, VaultNotFoundError
from offmarl.paths import SCHEMES, openers
from offmarl.tracking import RUN_FILE
from offmarl.vault.format.layout import (
    MANIFEST,
    METADATA,
    UNFINISHED,
    damage_error,
    load_json,
    seal,
    unseal,
)
from offmarl.vault.storage import files
from offmarl.vault.storage.files import WriterLock, conflict_error, errors_of, vault_error
from offmarl.vault.storage.location import (
    ARCHIVE_SUFFIX,
    BUCKETS,
    EMPTY,
    WEB,
    Url,
    absolute_location,
    caching_context,
    finish_remote,
    kvstore_spec,
    use_tensorstore,
    vaults_among,
)

T = TypeVar("T")

_READERS = 8
"""Threads that read from a place that a user registered."""
_COALESCING = {
    "experimental_read_coalescing_threshold_bytes": 2**16,
    "experimental_read_coalescing_merged_bytes": 2**23,
    "experimental_read_coalescing_interval": "1ms",
}
"""Reads of values that lie together on another machine become one request."""


Pending = Future[Any] | ts.Future[Any]
"""A commit in progress."""


class Store(ABC):
    """One place, at an absolute path or a `Url`; a path may lead into an archive."""

    is_writable = False
    is_remote = False
    """Whether reads are requests to another machine."""
    is_local = False
    """Whether it is a directory here: files can be mapped, locked and moved."""

    def __init__(self, path: PurePath):
        self.path = path

    @property
    def directory(self) -> Path:
        """The directory on this machine; `VaultError` for other places."""
        raise VaultError(
            f"{self.path} is not a directory on this machine, which is needed here: unpack or "
            "copy it first."
        )

    @property
    def num_bytes(self) -> int | None:
        """Bytes that the files take; None if finding out would mean reading them."""
        return None

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist."""

    @property
    def digest(self) -> str | None:
        """The published digest of the vault's content; None if there is none."""
        return None

    def prefetch(self, keys: Sequence[str]) -> None:
        """Start to read the values of keys, where single reads are slow; may do nothing."""
        del keys

    def write(self, name: str, content: bytes) -> None:
        """Write a small file; the caller syncs it if it must be durable."""
        raise VaultError(f"{self.path} cannot be written to: {name} of {len(content)} bytes.")

    def clear(self) -> None:
        """Remove all files, where vaults are created in place."""
        raise VaultError(f"{self.path} cannot be written to.")

    @abstractmethod
    def is_vault(self) -> bool:
        """Whether the place looks like a vault."""

    @abstractmethod
    def vaults(self) -> list[PurePath]:
        """Return the vaults below: of a directory right below it, elsewhere at any depth.

        A vault that is being created does not exist yet. Links to vaults are left out: in a
        directory from an untrusted source they may lead to private data.
        """

    def links(self) -> list[Path]:
        """Return the symbolic links to vaults right below a directory."""
        return []

    def check(self) -> None:
        """Raise `VaultFormatError` if the files are not safe to open."""
        return

    def lock(self, timeout: float = 0.0) -> WriterLock:
        """Take the vault's lock; see `WriterLock`."""
        if not self.is_writable:
            raise VaultError(f"{self.path} cannot be written to: unpack or copy the vault first.")
        return WriterLock(self.directory if self.is_local else None, timeout)

    def refuse_existing(self) -> None:
        """Raise `VaultExistsError` if a vault cannot be created because something exists."""
        if self.is_vault():
            raise files.exists_error(self.path)

    def missing(self) -> VaultError:
        """Return the error for a place without a vault at it or below it."""
        return VaultNotFoundError(f"there is no vault at {self.path}.")

    # ------------------------------------------------------------------------------ keys

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
        self, writes: Mapping[str, bytes | bytearray], fence: Mapping[str, bytes]
    ) -> Pending:
        """Start to write all values or none; they are copied before the call returns.

        ``fence`` has keys and the generations that they must still have: `VaultConflictError`, also
        from `Pending.result`, if one has changed.
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
        pairs = zip(keys, self.attempt(partial(self._read, keys)), strict=True)
        return unseal({key: value for key, value in pairs if value is not None}, self.path)

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that must exist."""
        values = self.get_some(keys)
        if lost := [key for key in keys if key not in values]:
            raise damage_error(self.path, f"it has lost {lost[0]}")
        return [values[key] for key in keys]

    def attempt(self, read: Callable[[], T], again: Callable[[], T] | None = None) -> T:
        """Call ``read`` and return its result; convert errors of TensorStore to `VaultError`.

        ``again``, by default ``read``, is called if a compaction removed files between two reads,
        because the new files hold the same data.
        """
        again = again or read
        use_tensorstore(self.path)
        try:
            return finish_remote(read, again) if self.is_remote else read()
        except (ValueError, OSError) as error:
            if not isinstance(error, ValueError) or "NOT_FOUND" not in str(error):
                raise vault_error(error, self.path) from error
        # Outside `except`, because the exception keeps the result of the first call in memory.
        with errors_of(self.path):
            return finish_remote(again, again) if self.is_remote else again()


class OcdbtStore(Store):
    """A store whose files TensorStore reads, with an OCDBT database in them."""

    staleness: float | None = -math.inf
    """Bound on the age of TensorStore's cached data: minus infinity (the cache is always current)
    if nothing can be written; None if TensorStore must read again."""

    def __init__(self, path: PurePath):
        super().__init__(path)
        self._settings: dict[str, Any] = {}

    def spec(self) -> dict[str, Any]:
        """Return TensorStore's specification of the files below, named by relative paths."""
        return kvstore_spec(self.path, "/")

    @cached_property
    def context(self) -> ts.Context:
        """TensorStore's context for everything opened here, with a cache."""
        use_tensorstore(self.path)
        return caching_context()

    @cached_property
    def files(self) -> ts.KvStore:
        """The files below."""
        return ts.KvStore.open(self.spec(), context=self.context).result()

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist."""

        def read() -> bytes | None:
            reply = self.files.read(name, staleness_bound=self.staleness).result()
            if self.is_remote and reply.state == "value" and not reply.value:
                raise ValueError(EMPTY)
            return bytes(reply.value) if reply.state == "value" else None

        return finish_remote(read, read) if self.is_remote else read()

    def names(self) -> list[str]:
        """Return the relative paths of all files below."""
        with errors_of(self.path):
            return [name.decode() for name in self.files.list().result()]

    def is_vault(self) -> bool:
        """Whether the place looks like a vault."""
        return all(self.read(name) is not None for name in (METADATA, MANIFEST))

    def vaults(self) -> list[PurePath]:
        """Return the vaults below, at any depth."""
        return [self.path / path for path in vaults_among(self.names())]

    @cached_property
    def _kv(self) -> ts.KvStore:
        self.check()  # TensorStore follows links
        spec = {"driver": "ocdbt", "base": self.spec(), **self._settings}
        spec |= _COALESCING if self.is_remote else {}
        return ts.KvStore.open(spec, context=self.context).result()

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        bound = self.staleness
        reads = [self._kv.read(key, staleness_bound=bound) for key in keys]
        replies = [read.result() for read in reads]
        return [bytes(value.value) if value.state == "value" else None for value in replies]

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, sorted."""
        span = ts.KvStore.KeyRange(prefix, prefix + "\xff")
        return self.attempt(lambda: sorted(x.decode() for x in self._kv.list(span).result()))

    def stamps(self, keys: Sequence[str]) -> tuple[list[bytes], list[bytes]]:
        """Return the first 4 bytes of keys, and their generations."""
        start, most = self._kv.read, slice(0, 4)
        replies = self.attempt(
            lambda: [read.result() for read in [start(key, byte_range=most) for key in keys]]
        )
        return [bytes(x.value) for x in replies], [bytes(x.stamp.generation) for x in replies]

    def fetch(self, keys: Sequence[str], depth: int) -> Iterator[bytes | None]:
        """Yield the stored values of keys, in order; None for each that does not exist."""
        for key, read in ahead(keys, self._start, depth):
            reply = self.attempt(read.result, partial(self._again, key))
            yield bytes(reply.value) if reply.state == "value" else None

    def _start(self, key: str) -> Any:
        use_tensorstore(self.path)
        return self._kv.read(key, staleness_bound=self.staleness)

    def _again(self, key: str) -> Any:
        return self._start(key).result()

    def commit(
        self, writes: Mapping[str, bytes | bytearray], fence: Mapping[str, bytes]
    ) -> Pending:
        """Start to write all values or none."""
        # TensorStore overwrites the unfinished manifest of a killed process without truncating it.
        # If that was longer, its rest would follow the new manifest.
        if self.is_local:
            (self.directory / UNFINISHED).unlink(missing_ok=True)
        transaction = ts.Transaction(atomic=True, repeatable_read=True)
        inside = self._kv.with_transaction(transaction)
        reads = {key: inside.read(key, if_not_equal=stamp) for key, stamp in fence.items()}
        if any(read.result().stamp.generation != fence[key] for key, read in reads.items()):
            transaction.abort()
            raise conflict_error(self.path)
        # TensorStore takes a bytearray too, though its types do not say so.
        sealed = cast("Mapping[str, bytes]", seal(writes))
        pending = [inside.write(key, value) for key, value in sealed.items()]
        done = transaction.commit_async()
        # Dropping a future cancels its write, so the futures are kept until the commit is done.
        done.add_done_callback(lambda _: pending.clear())
        return done

    def beside(self, manifest: Path, config: Mapping[str, Any]) -> "OcdbtStore":
        """Return a new database with the same data files, and its manifest in another directory."""
        assert self.context  # both need the same one, to share files
        store = copy(self)
        store.__dict__.pop("_kv", None)
        store._settings = {"manifest": kvstore_spec(manifest, "/"), "config": config}
        return store


class Directory(OcdbtStore):
    """A directory on this machine, which need not exist."""

    is_writable = is_local = True
    staleness = None

    @property
    def directory(self) -> Path:
        """The directory."""
        return Path(self.path)

    @cached_property
    def context(self) -> ts.Context:
        """A context without a cache: the system caches files."""
        use_tensorstore(self.path)
        return ts.Context()

    @property
    def num_bytes(self) -> int:
        """Bytes that the files take."""
        return sum(_size(file) for file in self.directory.rglob("*"))

    def read(self, name: str) -> bytes | None:
        """Return the content of a small regular file, or None if it does not exist."""
        try:
            with os.fdopen(files.open_file(self.directory, name), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        (self.directory / name).write_bytes(content)

    def is_vault(self) -> bool:
        """Whether the directory looks like a vault."""
        return (self.directory / METADATA).is_file() and (self.directory / MANIFEST).is_file()

    def vaults(self) -> list[PurePath]:
        """Return the vaults right below."""
        return [path for path in self._below() if not path.is_symlink()]

    def links(self) -> list[Path]:
        """Return the symbolic links to vaults right below."""
        return [path for path in self._below() if path.is_symlink()]

    def _below(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        return sorted(
            path
            for path in self.directory.iterdir()
            if not path.name.startswith(".") and Directory(path).is_vault()
        )

    def check(self) -> None:
        """Raise `VaultFormatError` if the directory holds links or special files."""
        files.check_regular_files(self.directory)

    def refuse_existing(self) -> None:
        """Raise `VaultExistsError` if anything exists, even a broken link."""
        files.refuse_existing(self.directory)

    def missing(self) -> VaultError:
        """Return the error for a directory or a file that is not a vault."""
        if self.directory.is_file():
            return VaultFormatError(
                f"{self.path} is a file, and a vault is a directory: give a vault, or make one of "
                "a file of another project with `offmarl convert`."
            )
        if (self.directory / RUN_FILE).is_file():
            return VaultFormatError(
                f"{self.path} is the directory of a run, and not a vault: give the directory of a "
                "dataset, or see `offmarl report` and `offmarl compare` for what a run has done."
            )
        if (self.directory / MANIFEST).exists():
            return VaultFormatError(
                f"{self.path} is damaged: it lacks {METADATA}. `offmarl verify` says what is "
                "intact, and `offmarl salvage` copies it."
            )
        if self.directory.exists():
            return VaultFormatError(
                f"{self.path} is not a vault: a vault is a directory with {METADATA} and "
                f"{MANIFEST} in it. `offmarl ls` lists those in a directory."
            )
        return super().missing()


class Archive(OcdbtStore):
    """A path into a zip archive, on this machine or elsewhere."""

    def __init__(self, path: PurePath, archive: PurePath):
        super().__init__(path)
        self.archive = archive
        self.is_remote = isinstance(archive, Url)

    @property
    def _prefix(self) -> str:
        inside = self.path.relative_to(self.archive).as_posix()
        return "" if inside == "." else f"{inside}/"

    def spec(self) -> dict[str, Any]:
        """Return TensorStore's specification of the files below, named by relative paths."""
        return {"driver": "zip", "base": kvstore_spec(self.archive), "path": self._prefix}

    def names(self) -> list[str]:
        """Check the archive, and return the relative paths of all files below."""
        from offmarl.vault.storage.archive import members_of  # few vaults need it

        prefix, names = self._prefix, (member.filename for member in members_of(self.archive))
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def is_vault(self) -> bool:
        """Whether the place looks like a vault."""
        return {METADATA, MANIFEST} <= set(self.names())


class Web(OcdbtStore):
    """A web address, which can only be read and not listed."""

    is_remote = True

    def names(self) -> list[str]:
        """Raise `VaultNotFoundError`, because web servers do not list directories."""
        raise VaultNotFoundError(
            f"there is no vault at {self.path}, and web servers do not list what is below it: "
            "give the whole path of a vault, such as https://host/name.vlt/uid."
        )


class Bucket(OcdbtStore):
    """An address in an object store."""

    is_writable = is_remote = True
    staleness = None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, durably."""
        self.files.write(name, content).result()

    def clear(self) -> None:
        """Remove all files."""
        self.files.delete_range(ts.KvStore.KeyRange()).result()


# ---------------------------------------------------------------------------------- users


@runtime_checkable
class KeyValues(Protocol):
    """A key-value store below a URL, which a user's driver provides; see `register_driver`.

    Keys are relative paths, such as ``observations./0.0`` or, below the directory of several
    vaults, ``main/observations./0.0``. Several threads may call one object.
    """

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of keys; None for each key that does not exist."""

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """Return the keys that begin with a prefix, and the bytes of their values."""

    def generations(self, keys: Sequence[str]) -> list[bytes]:
        """Return a stamp for each key, missing ones too; every write of a key changes its stamp."""

    def commit(self, writes: Mapping[str, bytes], fence: Mapping[str, bytes]) -> None:
        """Write all values or none, durably.

        Parameters
        ----------
        writes
            Keys and values.
        fence
            Keys and the generations that they must still have.

        Raises
        ------
        VaultConflictError
            A key of the fence has another generation; nothing was written.
        """

    def clear(self) -> None:
        """Remove all keys."""


Factory = Callable[[str], KeyValues]
"""Opens the key-value store below a URL, which need not hold anything."""


class Registered(Store):
    """A place of a scheme that a user registered.

    Its key-value store also holds ``metadata.json``, which is written last when a vault is created,
    so a vault exists once this key does.
    """

    is_writable = True

    def __init__(self, path: Url, values: KeyValues):
        super().__init__(path)
        self.values = values

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return sum(self.values.sizes("").values())

    def read(self, name: str) -> bytes | None:
        """Return the value of a key, or None."""
        (value,) = self.values.read([name])
        return value

    def prefetch(self, keys: Sequence[str]) -> None:
        """Start to read the values of keys, if the store can."""
        if prefetch := getattr(self.values, "prefetch", None):
            prefetch(keys)

    def write(self, name: str, content: bytes) -> None:
        """Write one value."""
        self.values.commit({name: content}, {})

    def clear(self) -> None:
        """Remove all keys."""
        self.values.clear()

    def is_vault(self) -> bool:
        """Whether ``metadata.json`` exists."""
        return self.read(METADATA) is not None

    def vaults(self) -> list[PurePath]:
        """Return the vaults below, at any depth."""
        return [self.path / path for path in vaults_among(self.values.sizes(""), (METADATA,))]

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        if len(keys) > 1:
            self.prefetch(keys)
        return self.values.read(keys)

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, sorted."""
        return sorted(self.attempt(lambda: self.values.sizes(prefix)))

    def stamps(self, keys: Sequence[str]) -> tuple[list[bytes], list[bytes]]:
        """Return the first 4 bytes of keys, and their generations."""
        with errors_of(self.path):
            generations = self.values.generations(keys)
            values = self.values.read(keys)
        return [(value or b"")[:4] for value in values], generations

    def commit(
        self, writes: Mapping[str, bytes | bytearray], fence: Mapping[str, bytes]
    ) -> "Future[None]":
        """Write all values or none; done when the call returns."""
        self.values.commit({key: bytes(value) for key, value in seal(writes).items()}, fence)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def fetch(self, keys: Sequence[str], depth: int) -> Iterator[bytes | None]:
        """Yield the stored values of keys, in order; None for each that does not exist."""
        for batch, _ in ahead(_divided(keys, depth), self.prefetch, 2):
            if len(batch) == 1:
                yield from self.attempt(partial(self.values.read, batch))
                continue
            parts = _divided(batch, -(-len(batch) // _READERS))
            for part, read in ahead(parts, self._start, _READERS):
                yield from self.attempt(read.result, partial(self.values.read, part))

    def _start(self, keys: Sequence[str]) -> "Future[list[bytes | None]]":
        return in_thread(partial(self.values.read, keys), "offmarl-read")


def _divided(keys: Sequence[str], size: int) -> list[Sequence[str]]:
    return [keys[first : first + size] for first in range(0, len(keys), size)]


def register_driver(scheme: str, factory: Factory) -> None:
    """Register a driver for URLs of a scheme, such as ``memory://name/data.vlt/main``.

    Parameters
    ----------
    scheme
        In lower case, without ``://``. A scheme that was registered before is replaced.
    factory
        Called with the URL of a vault, or of a directory of vaults. Calls with the same URL must
        return views of the same data.

    Raises
    ------
    VaultError
        The scheme belongs to offmarl, or is not a word of lower-case letters, digits and ``+.-``.
    """
    if scheme in (*SCHEMES, "file") or not re.fullmatch(r"[a-z][a-z0-9+.-]+", scheme):
        raise VaultError(f"{scheme!r} cannot be registered as the scheme of a driver.")
    openers[scheme] = lambda url: Registered(url, factory(str(url)))


# ---------------------------------------------------------------------------------- paths


def store_of(path: str | os.PathLike[str]) -> Store:
    """Return the store of a path or URL as users write it; the place need not exist."""
    full = absolute_location(path)
    if isinstance(full, Url) and full.scheme in openers:
        store: Store = openers[full.scheme](full)
        return store
    if isinstance(full, Url) and full.scheme not in (*BUCKETS, *WEB):
        raise VaultError(
            f"{full} has a scheme that this process did not register: call "
            f"`offmarl.vault.register_driver({full.scheme!r}, ...)` in every process that opens "
            "the vault, spawned ones too."
        )
    try:
        if not isinstance(full, Url) and Path(full).is_dir():
            return Directory(full)
        for part in (full, *full.parents):
            is_archive = part.name.endswith(ARCHIVE_SUFFIX)
            if is_archive and (isinstance(part, Url) or Path(part).is_file()):
                return Archive(full, part)
    except OSError as error:
        raise VaultError(f"{full} is not a valid path: {error.strerror}.") from error
    if not isinstance(full, Url):
        return Directory(full)
    return Bucket(full) if full.scheme in BUCKETS else Web(full)


def _size(file: Path) -> int:
    try:
        status = file.stat()
    except FileNotFoundError:  # compaction removed it
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
