"""Locks on files, which end with the process that holds them, even if it is killed."""

import fcntl
import glob
import os
import random
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

import msgspec

from offmarl.errors import RunError


class FileLock:
    """A lock on a file, which is made if it does not exist; `OSError` if it cannot be opened.

    Links are not followed. The file's text tells others who holds the lock.
    """

    _fd = -1

    def __init__(self, path: Path):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        self._fd, self._path = os.open(path, flags, 0o666), path
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise OSError(0, "not a regular file", str(path))

    def acquire(self, timeout: float = 0.0) -> bool:
        """Return whether the lock was obtained in time; `OSError` where the system has no flock."""
        end = time.monotonic() + timeout
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if time.monotonic() >= end:
                return False
            # Random intervals, so that many waiting processes do not try at the same time.
            time.sleep(random.uniform(0.001, 0.01))

    @property
    def text(self) -> str:
        """Beginning of the file's text."""
        return os.pread(self._fd, 1000, 0).decode(errors="replace")

    def write(self, text: str) -> None:
        """Replace the file's text, unless the disk is full."""
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode(), 0)

    def is_in_place(self) -> bool:
        """Whether the file is still at its path."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._fd), self._path.lstat())
        return False

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._fd >= 0:
            with suppress(OSError):  # closing is not enough if a forked process has it
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._close()

    def _close(self, close: Callable[[int], None] = os.close) -> None:  # at exit, `os` may be gone
        # Unlocking would release the lock of a process that this one was forked from.
        if self._fd >= 0:
            close(self._fd)
            self._fd = -1

    __del__ = _close


# ---------------------------------------------------------------------------------- runs


class _Holder(msgspec.Struct):
    """Who writes, as a lock's file says it in JSON."""

    host: str
    process: int
    since: float

    def __str__(self) -> str:
        return f"process {self.process} on {self.host:.100}"


_alone = ContextVar("nobody else writes", default=False)


@contextmanager
def take_over_locks() -> Iterator[None]:
    """Let `hold_lock` take over locks in the block, because another lock guards its work."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


@contextmanager
def hold_lock(lock: Path, target: Path, take_over: bool = False) -> Iterator[None]:
    """Hold the lock of a file or directory to write, while the block runs.

    The lock's file names its holder. The lock of a process that has died is taken over. On some
    file systems, locks do not reach other machines: ``take_over`` says that a process there ended.
    `RunError` if another process may hold the lock, or its file cannot be written.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = _take(lock, target, take_over or _alone.get())
    except OSError as error:
        reason = f"{target} cannot be written to ({error.strerror})"
        raise RunError(f"{reason}: choose another output with --out.") from None
    text = file.text
    try:
        yield
    finally:
        if file.is_in_place() and file.text == text:  # it was not taken over
            lock.unlink(missing_ok=True)
        file.release()


def _take(path: Path, target: Path, take_over: bool) -> FileLock:
    while True:
        file, host = FileLock(path), socket.gethostname()
        before = _holder(file)
        try:
            is_free = file.acquire()
        except OSError:  # the file system has no flock
            is_here = before is not None and before.host == host
            is_free = not (is_here and before and Path(f"/proc/{before.process}").exists())
        holder = _holder(file)
        if not is_free:
            since = f", for {_age(holder.since)}" if holder else ""
            raise RunError(
                f"{target} is being written by {holder or 'another process'}{since}: wait until it "
                "is done, stop it, or choose another output with --out."
            )
        if not file.is_in_place():  # its holder has just removed it
            continue
        if holder is not None and holder.host != host and not take_over:
            raise RunError(
                f"{target} was being written by {holder}, which has shown no sign of life for "
                f"{_age(_last_change(path, target))}, and cannot be seen from this machine: if it "
                "has ended, add --take-over."
            )
        file.write(msgspec.json.encode(_Holder(host, os.getpid(), time.time())).decode())
        return file


def _holder(file: FileLock) -> _Holder | None:
    """Return whom a lock's file names; None if it is new, or damaged."""
    with suppress(ValueError):
        return msgspec.json.decode(file.text, type=_Holder)
    return None


def _last_change(lock: Path, target: Path) -> float:
    """Return when a file beside a lock, or one of the target's name, changed last."""
    stem = glob.escape(target.stem)
    named = () if target.is_dir() else target.parent.glob(f"{stem}.*")
    times = [0.0]
    for path in (*lock.parent.glob("*"), *named):
        with suppress(OSError):
            times.append(path.lstat().st_mtime)
    return max(times)


def _age(since: float) -> str:
    seconds = max(time.time() - since, 0.0)
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
