"""Opens, locks and replaces files and directories on this machine.

Vaults are untrusted input. A vault's index names the files that hold its data, and its directory
may contain links, so a forged vault could make offmarl read, publish or truncate another file.
Names must therefore be plain relative paths to regular files, and links are not followed.

A process may be killed at any time. Files and directories are therefore built in a temporary place
under a lock, made durable, and renamed to their final path.
"""

import contextlib
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path, PurePath

from offmarl._lock import FileLock
from offmarl.errors import (
    VaultConflictError,
    VaultError,
    VaultExistsError,
    VaultFormatError,
    VaultFullError,
    VaultLockedError,
    VaultNotFoundError,
)
from offmarl.paths import no_empty_directories
from offmarl.vault.format.layout import LOCK, damage_error

_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_LOST_FILE = ("Requested byte range", "NOT_FOUND: Error reading")
"""Errors of TensorStore for a file that is shorter than its references, or missing."""

_NO_ROOM = ("No space left", "ENOSPC", "File too large", "EFBIG", "EDQUOT", "quota exceeded")
_MOST_TEXT = 1000
_SYNCS = 16
_SETTLE_SECONDS = 0.1
"""Time for the other writes of a failed call to end: zarr does not wait for them."""
_DISCARDS = 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@lru_cache(maxsize=1024)  # a store has few files, but each value refers to one
def check_name(name: str) -> str:
    """Return the name of a data file; `ValueError` if it may lead out of the vault."""
    if not _NAME.fullmatch(name) or {".", ".."} & {*name.split("/")}:
        raise ValueError(f"{name!r:.200} is not the name of a file inside the vault")
    return name


def check_regular_files(directory: Path) -> None:
    """Raise `VaultFormatError` if a vault's directory contains links or special files.

    TensorStore follows links, so call this before it opens anything. A directory that cannot be
    listed raises `VaultError`.
    """
    waiting = [os.fspath(directory)]
    while waiting:
        subdirectory = waiting.pop()
        try:
            with os.scandir(subdirectory) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif not entry.is_file(follow_symlinks=False):
                        raise _refused(directory, Path(entry.path))
        except (FileNotFoundError, NotADirectoryError):
            pass  # the directory does not exist, or a writer removed it
        except OSError as error:
            raise VaultError(
                f"{subdirectory} cannot be read: {error.strerror}. Reading a vault needs "
                "permission to list all of its directories."
            ) from error


def _refused(directory: Path, path: Path) -> VaultFormatError:
    kind = "a symbolic link" if path.is_symlink() else "not a regular file"
    return VaultFormatError(
        f"{directory} is not safe to open: its {path.relative_to(directory)} is {kind}, so data "
        "outside the vault could be read or overwritten. Replace it with a copy of the file, or "
        "copy the vault again from its source."
    )


def open_file(directory: Path, name: str) -> int:
    """Open a regular file of a vault for reading, and return its descriptor.

    Links below the directory are not followed, even if they are created during the call.
    """
    *parents, last = check_name(name).split("/")
    parent = os.open(directory, _DIRECTORY)
    try:
        for part in parents:
            child = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            os.close(parent)
            parent = child
        # O_NONBLOCK: a named pipe would wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(last, flags, dir_fd=parent)
    finally:
        os.close(parent)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{name} is not a regular file")
    return descriptor


@contextlib.contextmanager
def errors_of(path: PurePath) -> Iterator[None]:
    """Convert errors that TensorStore and the system raise about a vault to `VaultError`."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise vault_error(error, path) from error


def vault_error(error: ValueError | OSError, path: PurePath) -> VaultError:
    """Return the `VaultError` for an error that TensorStore or the system raised about a vault."""
    # The text after " [" is for TensorStore's developers, and may quote much of the vault.
    text = str(error).partition(" [")[0][:_MOST_TEXT]
    if "Generation mismatch" in text:
        return conflict_error(path)
    if "Configuration mismatch" in text:
        return VaultError(f"{path} was replaced after it was opened: open it again.")
    if any(sign in text for sign in _LOST_FILE):
        return damage_error(path, "a data file is missing or truncated")
    if any(sign in text for sign in _NO_ROOM):
        return full_disk_error(path)
    return VaultError(f"{path} cannot be read or written: {text}")


def full_disk_error(path: PurePath) -> VaultFullError:
    """Return the error for a full disk."""
    return VaultFullError(
        f"there is no space left on the disk of {path}. Everything committed is safe and readable: "
        "free some space, then flush the writer or repeat the command."
    )


def conflict_error(path: PurePath) -> VaultError:
    """Return the error for a vault that was changed or moved while a writer had it open."""
    if isinstance(path, Path) and not path.exists():
        return VaultNotFoundError(
            f"there is no vault at {path} any more: it was moved or removed while it was open for "
            "writing. Move it back and flush the writer again, or resume it where it is now."
        )
    return VaultConflictError(
        f"{path} was changed by a program that does not use offmarl's lock; nothing was "
        "overwritten. Stop that program and open the vault again, which adopts the steps that it "
        "appended."
    )


class WriterLock:
    """The exclusive right to write to a directory; it ends with the process that holds it.

    Where ``directory`` is None, as in buckets, only the fence of a commit detects another writer.
    `VaultLockedError` names the process that still has the lock after ``timeout`` seconds.
    """

    def __init__(self, directory: Path | None, timeout: float = 0.0):
        self._file: FileLock | None = None
        # The holder may have removed the file with its directory, and another may have a new one.
        while directory and not (self._file and self._file.is_in_place()):
            self._file = _locked_file(directory, timeout)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._file is not None:
            self._file.release()


def _locked_file(directory: Path, timeout: float) -> FileLock:
    """Lock the file in a directory that names its writer."""
    check_regular_files(directory)
    with errors_of(directory):
        file = FileLock(directory / LOCK)
    try:
        locked = file.acquire(timeout)
    except OSError as error:
        raise VaultError(
            f"{directory} cannot be locked ({error.strerror}): its file system lacks flock, or "
            "was mounted without it. Write to a local disk, and move the vault afterwards."
        ) from error
    if not locked:
        raise VaultLockedError(
            f"{directory} is being written by {file.text or 'another process'}: wait until it is "
            "done, or stop it."
        )
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    return file


@contextmanager
def workspace(directory: Path) -> Iterator[Path]:
    """Create an empty directory to build in, under a lock; it is removed afterwards."""
    with no_empty_directories(directory.parent):
        with errors_of(directory):
            make_directory(directory)
            lock = WriterLock(directory)
        try:
            clear_directory(directory)
            yield directory
        except BaseException:
            time.sleep(_SETTLE_SECONDS)
            raise
        finally:
            for _ in range(_DISCARDS):  # a library may still write there
                shutil.rmtree(directory, ignore_errors=True)
                if not directory.exists():
                    break
            lock.release()


@contextmanager
def built_whole(path: Path) -> Iterator[Path]:
    """Yield a path of the same name in a temporary directory next to the given one.

    When the block ends, the file or directory at the yielded path is made durable and moved to
    ``path``. If the block fails, nothing appears there.
    """
    refuse_existing(path)
    with workspace(path.with_name(f".{path.name}.part")) as part:
        yield part / path.name
        refuse_existing(path)
        with errors_of(path):
            publish(part / path.name, path)


def refuse_existing(path: Path) -> None:
    """Raise `VaultExistsError` if anything exists at a path, even a broken link."""
    if path.exists() or path.is_symlink():
        raise exists_error(path)


def exists_error(path: PurePath) -> VaultExistsError:
    """Return the error for a path where something exists."""
    return VaultExistsError(
        f"{path} already exists: choose another path, or remove it. In Python, vault.resume "
        "appends to a vault."
    )


def clear_directory(directory: Path) -> None:
    """Remove everything in a directory except the lock file."""
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents durably."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def publish(source: Path, target: Path) -> None:
    """Make a finished file or directory durable, and move it to its place."""
    with ThreadPoolExecutor(_SYNCS) as pool:  # a disk syncs many files at once
        list(pool.map(sync, (*source.rglob("*"), source)))
    source.rename(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
