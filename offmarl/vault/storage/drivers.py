"""Drivers: the kinds of places that vaults are kept in.

A driver stands for one place: a directory, a part of a zip archive, a bucket, a web address, or a
place of a scheme that a user registered with `offmarl.vault.register_driver`. Differences between
the kinds are methods and flags of the driver, so the layers above do not test for the kind.
"""

import math
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from offmarl.errors import VaultError, VaultFormatError, VaultNotFoundError
from offmarl.paths import scheme_factory
from offmarl.tracking import RUN_FILE
from offmarl.vault.format.layout import MANIFEST, METADATA
from offmarl.vault.storage import files
from offmarl.vault.storage.files import WriterLock, errors_of
from offmarl.vault.storage.location import (
    ARCHIVE_SUFFIX,
    BUCKETS,
    EMPTY,
    WEB,
    Url,
    absolute,
    archive_context,
    caching_context,
    finish_remote,
    kvstore_spec,
    schemes,
    use_tensorstore,
    vaults_among,
)

if TYPE_CHECKING:
    import tensorstore as ts


class Driver(ABC):
    """One place, at an absolute path or a `Url`; a path may lead into an archive."""

    is_writable = False
    is_remote = False
    """Whether reads are requests to another machine."""
    can_lock = False
    """Whether a writer can lock a vault, so that several processes may take turns."""
    can_rename = False
    """Whether a directory built beside a place can be moved to it atomically."""
    can_map = False
    """Whether files can be mapped into memory."""

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
        return WriterLock(self.directory if self.can_lock else None, timeout)

    def clear_unfinished(self, name: str) -> None:
        """Remove a file that a killed commit left, if files can be removed."""
        del name

    def refuse_existing(self) -> None:
        """Raise `VaultExistsError` if a vault cannot be created because something exists."""
        if self.is_vault():
            raise files.existing(self.path)

    def missing(self) -> VaultError:
        """Return the error for a place without a vault at it or below it."""
        return VaultNotFoundError(f"there is no vault at {self.path}.")


class TensorStoreDriver(Driver):
    """A place whose files TensorStore reads."""

    staleness: float | None = -math.inf
    """Bound on the age of TensorStore's cached data: minus infinity (the cache is always current)
    if nothing can be written; None if TensorStore must read again."""

    def spec(self) -> dict[str, Any]:
        """Return TensorStore's specification of the files below, named by relative paths."""
        return kvstore_spec(self.path, "/")

    @cached_property
    def context(self) -> "ts.Context":
        """TensorStore's context for everything opened here, with a cache."""
        use_tensorstore(self.path)
        return caching_context()

    @cached_property
    def files(self) -> "ts.KvStore":
        """The files below."""
        import tensorstore as ts

        return ts.KvStore.open(self.spec(), context=self.context).result()

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist."""

        def read() -> bytes | None:
            found = self.files.read(name, staleness_bound=self.staleness).result()
            if self.is_remote and found.state == "value" and not found.value:
                raise ValueError(EMPTY)
            return bytes(found.value) if found.state == "value" else None

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
        return [self.path / found for found in vaults_among(self.names())]


class Directory(TensorStoreDriver):
    """A directory on this machine, which need not exist."""

    is_writable = can_lock = can_rename = can_map = True
    staleness = None

    @property
    def directory(self) -> Path:
        """The directory."""
        return Path(self.path)

    @cached_property
    def context(self) -> "ts.Context":
        """A context without a cache: the system caches files."""
        import tensorstore as ts

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
        return [below for below in self._below() if not below.is_symlink()]

    def links(self) -> list[Path]:
        """Return the symbolic links to vaults right below."""
        return [below for below in self._below() if below.is_symlink()]

    def _below(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        return sorted(
            below
            for below in self.directory.iterdir()
            if not below.name.startswith(".") and Directory(below).is_vault()
        )

    def check(self) -> None:
        """Raise `VaultFormatError` if the directory holds links or special files."""
        files.check_regular_files(self.directory)

    def clear_unfinished(self, name: str) -> None:
        """Remove a file that a killed commit left."""
        (self.directory / name).unlink(missing_ok=True)

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
        if self.directory.exists():
            return VaultFormatError(
                f"{self.path} is not a vault: a vault is a directory with {METADATA} and "
                f"{MANIFEST} in it."
            )
        return super().missing()


class Archive(TensorStoreDriver):
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

    @cached_property
    def context(self) -> "ts.Context":
        """A cache that all vaults of the archive share."""
        use_tensorstore(self.path)
        if isinstance(self.archive, Path):
            with suppress(OSError):
                about = self.archive.stat()
                return archive_context(
                    self.archive, (about.st_ino, about.st_size, about.st_mtime_ns)
                )
        return caching_context()

    def names(self) -> list[str]:
        """Check the archive, and return the relative paths of all files below."""
        from offmarl.vault.storage.archive import members_of  # few vaults need it

        prefix, names = self._prefix, (one.filename for one in members_of(self.archive))
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def is_vault(self) -> bool:
        """Whether the place looks like a vault."""
        return {METADATA, MANIFEST} <= set(self.names())


class Web(TensorStoreDriver):
    """A web address, which can only be read and not listed."""

    is_remote = True

    def names(self) -> list[str]:
        """Raise `VaultNotFoundError`, because web servers do not list directories."""
        raise VaultNotFoundError(
            f"there is no vault at {self.path}, and web servers do not list what is below it: "
            "give the whole path of a vault, such as https://host/name.vlt/uid."
        )


class Bucket(TensorStoreDriver):
    """An address in an object store."""

    is_writable = is_remote = True
    staleness = None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, durably."""
        self.files.write(name, content).result()

    def clear(self) -> None:
        """Remove all files."""
        import tensorstore as ts

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


class Registered(Driver):
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
        return [self.path / found for found in vaults_among(self.values.sizes(""), (METADATA,))]


openers: dict[str, Callable[[Url], Driver]] = {}
"""Factories of the registered schemes' drivers; `register_driver` adds to them."""


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
    reserved = schemes - openers.keys()
    if scheme in reserved or not re.fullmatch(r"[a-z][a-z0-9+.-]+", scheme):
        raise VaultError(f"{scheme!r} cannot be registered as the scheme of a driver.")
    schemes.add(scheme)
    openers[scheme] = lambda url: Registered(url, factory(str(url)))


# ---------------------------------------------------------------------------------- paths


def driver_of(path: str | os.PathLike[str]) -> Driver:
    """Return the driver for a path or URL as users write it; the place need not exist."""
    full = absolute(path)
    if isinstance(full, Url) and full.scheme in openers:
        return openers[full.scheme](full)
    if isinstance(full, Url) and (factory := scheme_factory(full.scheme)):
        driver: Driver = factory(full)
        return driver
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
        about = file.stat()
    except FileNotFoundError:  # compaction removed it
        return 0
    return about.st_size if stat.S_ISREG(about.st_mode) else 0
