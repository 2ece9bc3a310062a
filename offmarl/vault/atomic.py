"""Building beside its place what shall appear there whole: locked, made durable, and renamed."""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from offmarl.vault.drivers import Directory
from offmarl.vault.layout import LOCK
from offmarl.vault.lock import WriterLock
from offmarl.vault.system import errors_of

_SYNCS = 16


@contextmanager
def workspace(directory: Path) -> Iterator[Path]:
    """Make a directory to build in, cleared of what a killed process left; gone afterwards.

    Raises
    ------
    VaultLockedError
        Another process builds there.
    VaultError
        It cannot be made.
    """
    with errors_of(directory):
        make_directory(directory)
        lock = WriterLock(directory)
    try:
        clear(directory)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # before others may build there
        lock.release()


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a path of the same name, in a directory beside that may hold other things meanwhile.

    What is there when the block ends, a file or a directory, is made durable and takes the place;
    where the block fails nothing appears.

    Raises
    ------
    VaultExistsError
        There is something at the place.
    VaultLockedError, VaultError
        As for `workspace`.
    """
    refuse_existing(path)
    with workspace(path.with_name(f".{path.name}.part")) as beside:
        yield beside / path.name
        refuse_existing(path)
        with errors_of(path):
            publish(beside / path.name, path)


def refuse_existing(path: Path) -> None:
    """Raise `VaultExistsError` if anything exists there, even a link that leads nowhere."""
    Directory(path).refuse_existing()


def clear(directory: Path) -> None:
    """Remove what is in a directory, but not the lock that is held on it."""
    for rest in directory.iterdir():
        if rest.is_dir() and not rest.is_symlink():
            shutil.rmtree(rest)
        elif rest.name != LOCK:
            rest.unlink()


def make_directory(path: Path) -> None:
    """Make a directory and those above it, unless they are there, so that they outlast a crash."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def publish(source: Path, target: Path) -> None:
    """Make what is finished durable, and move it to its place, whose parent is durable."""
    with ThreadPoolExecutor(_SYNCS) as pool:  # a disk makes many files durable at once
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
