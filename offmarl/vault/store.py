"""The key-value store below a vault: atomic commits, locks, and errors in our own words."""

import contextlib
import errno
import fcntl
import json
import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar, cast

import tensorstore as ts

from offmarl.errors import (
    VaultConflictError,
    VaultError,
    VaultFormatError,
    VaultFullError,
    VaultLockedError,
    VaultNotFoundError,
)
from offmarl.vault import regular_files
from offmarl.vault.checksum import seal, unseal
from offmarl.vault.location import Location

MANIFEST = "manifest.ocdbt"
UNFINISHED = f"{MANIFEST}.__lock"
METADATA = "metadata.json"
DATA = "d"
LOCK = "writer.lock"

_NO_ROOM = ("No space left", "ENOSPC", "File too large", "EFBIG", "EDQUOT", "quota exceeded")

_LOST_CHUNK = re.compile(r'NOT_FOUND: chunk .* stored at "([^"]+)"')
_MOST_TEXT = 1000

T = TypeVar("T")


class Store:
    """An OCDBT key-value store in a directory, in an archive, or in an object store.

    Parameters
    ----------
    path
        Where it is, or will be.
    config
        OCDBT's settings for a new one.

    Raises
    ------
    VaultFormatError
        Its directory holds links, which may lead out of it.
    """

    def __init__(self, path: PurePath, config: Mapping[str, Any] | None = None):
        self.path = path
        self.location = Location.of(path)
        if self.location.is_directory:
            regular_files.check_regular_files(self.location.directory)
        self._dropped: set[str] = set()
        self._context = self.location.context
        self._spec = {"driver": "ocdbt", "base": self.location.kvstore()}
        if config:
            self._spec["config"] = config
        self._kv = ts.KvStore.open(self._spec, context=self._context).result()

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None."""
        found = self.attempt(lambda: self._read(key).result())
        return unseal(key, bytes(found.value), self.path) if found.state == "value" else None

    def _read(self, key: str) -> "ts.Future[ts.KvStore.ReadResult]":
        return self._kv.read(key, staleness_bound=self.location.staleness)

    def get_json(self, key: str) -> dict[str, Any] | None:
        """Return the JSON object that a key holds, or None."""
        value = self.get(key)
        return None if value is None else load_json(value, f"{self.path}: {key}")

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, sorted."""
        span = ts.KvStore.KeyRange(prefix, prefix + "\xff")
        return sorted(key.decode() for key in self.attempt(lambda: self._kv.list(span).result()))

    def get_all(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys that must be there."""
        found = self.attempt(lambda: [read.result() for read in [self._read(k) for k in keys]])
        missing = [key for key, value in zip(keys, found, strict=True) if value.state != "value"]
        if missing:
            raise VaultFormatError(f"{self.path} has lost {missing[0]}: the vault is damaged.")
        values = (bytes(value.value) for value in found)
        return [unseal(key, value, self.path) for key, value in zip(keys, values, strict=True)]

    def stamps(self, keys: Sequence[str]) -> tuple[list[bytes], list[bytes]]:
        """Return the first bytes of keys, and their generations, which change with every write.

        A key that is not there has a generation too.
        """
        with self.errors():
            reads = [self._kv.read(key, byte_range=slice(0, 4)) for key in keys]
            found = [read.result() for read in reads]
        return [bytes(x.value) for x in found], [bytes(x.stamp.generation) for x in found]

    def array(self, prefix: str, *, write: bool = False, complete: bool = False) -> ts.TensorStore:
        """Open the zarr array whose keys begin with ``prefix``.

        Where it is ``complete``, a chunk that is not there is an error, not zeros.
        """
        spec: dict[str, Any] = {"driver": "zarr", "kvstore": {**self._spec, "path": prefix}}
        if complete:
            spec["fill_missing_data_reads"] = False
        if not self.location.is_writable:
            spec |= {"recheck_cached_metadata": False, "recheck_cached_data": False}
        options: dict[str, Any] = {"open": True, "read": True, "write": write}
        return self.attempt(lambda: ts.open(spec, context=self._context, **options).result())

    def commit(
        self, writes: Mapping[str, bytes | bytearray], fence: Mapping[str, bytes]
    ) -> "ts.Future[None]":
        """Start to write all values or none.

        Parameters
        ----------
        writes
            Keys and values.
        fence
            Keys and the generations they must still have.

        Returns
        -------
        Future
            Done when everything is durable.
        """
        self._clear_unfinished()
        transaction = ts.Transaction(atomic=True, repeatable_read=True)
        inside = self._kv.with_transaction(transaction)
        reads = {key: inside.read(key, if_not_equal=stamp) for key, stamp in fence.items()}
        if any(read.result().stamp.generation != fence[key] for key, read in reads.items()):
            transaction.abort()
            raise conflict(self.path)
        # TensorStore takes a bytearray too, though its types do not say so.
        sealed = {key: cast("bytes", seal(key, value)) for key, value in writes.items()}
        pending = [inside.write(key, value) for key, value in sealed.items()]
        done = transaction.commit_async()
        # A dropped future is a dropped write: they live as long as the commit does.
        done.add_done_callback(lambda _: pending.clear())
        return done

    def _clear_unfinished(self) -> None:
        """Remove the manifest that a killed process had begun to write beside the present one.

        TensorStore writes over that file without cutting it to size: where it was longer, its rest
        would stay behind the new manifest, which nobody could read.
        """
        if self.location.is_directory:
            (self.location.directory / UNFINISHED).unlink(missing_ok=True)

    def drop_pages(self) -> None:
        """Ask the kernel not to keep in memory what has been written since the last call.

        A recording outgrows the page cache, and every page it takes is one that others lose; on
        virtual machines a fresh page costs more than writing it.
        """
        if not (hasattr(os, "posix_fadvise") and self.location.is_directory):
            return
        data = self.location.directory / DATA
        files = {file.name for file in data.iterdir()}
        for name in files - self._dropped:
            with contextlib.suppress(OSError), (data / name).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._dropped = files

    def attempt(self, read: Callable[[], T]) -> T:
        """Return what ``read`` does; errors are ours.

        It is called again where a compaction took files away between two reads of it: the new ones
        say the same.
        """
        with self.errors():
            try:
                return read()
            except ValueError as error:
                if "NOT_FOUND" not in str(error):
                    raise
            # Not inside `except`, which would keep what was read the first time in memory.
            return read()

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """Turn what tensorstore raises into errors of ours."""
        return errors_of(self.path)


def load_json(data: bytes, name: str) -> dict[str, Any]:
    """Read a JSON object that anybody may have written; `VaultFormatError` where it is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise VaultFormatError(f"{name} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise VaultFormatError(f"{name} does not hold a JSON object.")
    return value


@contextlib.contextmanager
def errors_of(path: PurePath) -> Iterator[None]:
    """Turn what tensorstore and the system raise about a vault into errors of ours."""
    try:
        yield
    except (ValueError, OSError) as error:
        # What follows is for TensorStore's developers, and may quote what a vault says at length.
        text = str(error).partition(" [")[0][:_MOST_TEXT]
        if "Generation mismatch" in text:
            raise conflict(path) from error
        if "Configuration mismatch" in text:
            raise VaultError(
                f"{path} is another vault than when it was opened, or was repaired: open it again."
            ) from error
        if lost := _LOST_CHUNK.search(text):
            raise VaultFormatError(
                f"{path} has lost {lost[1]}: `offmarl verify` tells what is left of the vault, and "
                "`offmarl repair` keeps that."
            ) from error
        if any(sign in text for sign in _NO_ROOM):
            raise _full(path) from error
        raise VaultError(f"{path} cannot be read or written: {text}") from error


def _full(path: PurePath) -> VaultFullError:
    return VaultFullError(
        f"there is no room on the disk for {path}: everything committed is safe and readable. Make "
        "room, then flush the writer or repeat the command."
    )


def conflict(path: PurePath) -> VaultError:
    """Return the error for a vault that was changed, or taken away, under an open writer."""
    if isinstance(path, Path) and not path.exists():
        return VaultNotFoundError(
            f"there is no vault at {path} any more: it was moved or removed while it was open for "
            "writing. Move it back and flush the writer again, or resume it where it is now."
        )
    return VaultConflictError(
        f"{path} was changed by a program that does not know our lock; nothing was written over "
        "it. Stop that program and open the vault again: the steps it appended will be adopted."
    )


class WriterLock:
    """The exclusive right to write to a directory; it dies with the process that holds it.

    Object stores know no locks: there is nothing to hold, and the fence of a commit alone tells
    that somebody else wrote.
    """

    def __init__(self, path: PurePath, timeout: float = 0.0):
        self._fd = -1
        location = Location.of(path)
        if not location.is_writable:
            raise VaultError(f"{path} cannot be written to: unpack or copy the vault first.")
        if not location.is_directory:
            return
        directory = location.directory
        regular_files.check_regular_files(directory)
        try:
            self._fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise _full(path) from error
            raise VaultError(f"{directory} cannot be written to: {error.strerror}.") from error
        try:
            locked = self._wait(timeout)
        except OSError as error:
            self._close()
            raise VaultError(
                f"{directory} cannot be locked ({error.strerror}): its file system lacks flock, or "
                "was mounted without it. Write to a local disk, and move the vault afterwards."
            ) from error
        if not locked:
            holder = os.pread(self._fd, 1000, 0).decode(errors="replace") or "another process"
            self._close()
            raise VaultLockedError(
                f"{directory} is being written by {holder}: wait until it is done, or stop it."
            )
        with contextlib.suppress(OSError):  # it only tells others who we are
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _wait(self, timeout: float) -> bool:
        """Return whether the lock was had in time."""
        end = time.monotonic() + timeout
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if time.monotonic() >= end:
                return False
            # Not all at the same time: who has waited long has had more tries.
            time.sleep(random.uniform(0.001, 0.01))

    def release(self) -> None:
        """Let others write; again does nothing."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # a forked process may have it open, too
            self._close()

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        # Only closed: to unlock would take the lock from the process that this one was forked from.
        if self._fd >= 0:
            self._close()
