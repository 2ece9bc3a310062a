"""Locks of vaults on this machine: one writer at a time."""

import contextlib
import errno
import fcntl
import os
import random
import socket
import time
from pathlib import Path

from offmarl.errors import VaultError, VaultLockedError
from offmarl.vault import regular_files
from offmarl.vault.layout import LOCK
from offmarl.vault.system import full


class WriterLock:
    """The exclusive right to write to a directory; it ends with the process that holds it.

    Parameters
    ----------
    directory
        What to lock. None for places without locks, such as buckets: nothing is held, and only the
        fence of a commit detects another writer.
    timeout
        Seconds to wait for another process.

    Raises
    ------
    VaultLockedError
        Another process holds the lock; the message names it.
    VaultError
        The directory cannot be written to or locked.
    """

    def __init__(self, directory: Path | None, timeout: float = 0.0):
        self._fd = -1
        if directory is None:
            return
        regular_files.check_regular_files(directory)
        try:
            self._fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise full(directory) from error
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
        """Return whether the lock was obtained in time."""
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
        """Let others write. Idempotent."""
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
