"""Pages of remote files: fetched by range requests, checked, and kept in a bounded cache.

The cache is a directory of files, one for each page. A page is written to a file of its own and
then renamed, so processes share the cache without locks for reading. When the pages take more than
the limit, those that were not used for the longest time are removed. A page is compared with its
published checksum whenever it is read, from the network or from the disk.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import google_crc32c
import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from offmarl._ahead import in_thread
from offmarl._heap import return_blocks_from
from offmarl.errors import HubChecksumError, HubError, OptionError
from offmarl.hub.client import Connection, Remote, kept_in
from offmarl.hub.packing import PAGE
from offmarl.paths import STREAM_CACHE

DEFAULT_GB = 10.0

_REQUESTS = 8
"""Requests at a time."""
_REQUEST_PAGES = 8
"""Maximum pages of a request."""
_MEMORY_PAGES = 48
"""Pages that are kept in memory, for the small values that a page has many of."""
_SCANS = 20
"""The cache is measured again after this fraction of its limit was written."""
_LEFT = 0.9
"""Fraction of the limit that is left when pages are removed."""
_TRIES = 3
"""Requests for a page whose checksum is wrong."""


def limit_bytes() -> int:
    """Return the limit of the cache in bytes, from the environment variable or the default."""
    text = os.environ.get(STREAM_CACHE, "")
    try:
        found = float(text) if text else DEFAULT_GB
        if not 0 <= found < float("inf"):
            raise ValueError
    except ValueError as error:
        raise OptionError(f"{STREAM_CACHE} is a size in GB, such as 10, not {text!r}.") from error
    return int(found * 1e9)


def directory() -> Path:
    """Return the directory of the cache, beside that of the pulled datasets."""
    return kept_in("datasets", "streamed")


class PageCache:
    """Pages on the disk, which several processes share.

    Parameters
    ----------
    root
        The directory; created if it does not exist.
    """

    def __init__(self, root: Path):
        self.root = root
        self._lock = threading.Lock()
        self._written: int | None = None

    def get(self, name: str) -> bytes | None:
        """Return the content of a page; None if it is not in the cache."""
        path = self._path(name)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        with suppress(OSError):  # it was removed meanwhile, or belongs to another user
            os.utime(path)
        return content

    def has(self, name: str) -> bool:
        """Whether a page is in the cache."""
        return self._path(name).exists()

    def put(self, name: str, content: bytes) -> None:
        """Keep a page, unless there is no room for it; older pages are removed to make room."""
        limit = limit_bytes()
        if len(content) > limit:
            return
        path = self._path(name)
        part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            self._make_room(len(content), limit)
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(content)
            part.replace(path)
        except OSError:  # a full disk, or one that cannot be written: work without the cache
            with suppress(OSError):
                part.unlink()

    def drop(self, name: str) -> None:
        """Remove a page."""
        with suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    @property
    def size(self) -> int:
        """Bytes of all pages."""
        return sum(size for _, size, _ in self._files())

    def clear(self) -> int:
        """Remove all pages, and return the bytes freed."""
        return self._remove(0)

    def _path(self, name: str) -> Path:
        return self.root / name[:2] / name

    def _make_room(self, coming: int, limit: int) -> None:
        """Remove pages if the cache would exceed its limit; it is measured from time to time."""
        with self._lock:
            if self._written is not None:
                self._written += coming
                if self._written < limit // _SCANS:
                    return
            self._written = 0
        # Processes measure at different times, each after a share of the limit.
        if self.size + coming > limit - limit // _SCANS:
            self._remove(int(limit * _LEFT))

    def _remove(self, limit: int) -> int:
        """Remove the pages that were not used for the longest time; return the bytes freed."""
        self.root.mkdir(parents=True, exist_ok=True)
        freed = 0
        with FileLock(self.root / ".lock"):
            files = sorted(self._files())
            total = sum(size for _, size, _ in files)
            for _, size, path in files:
                if total - freed <= limit:
                    break
                with suppress(OSError):
                    path.unlink()
                    freed += size
        return freed

    def _files(self) -> list[tuple[float, int, Path]]:
        found = []
        for path in self.root.glob("*/*"):
            with suppress(OSError):
                about = path.stat()
                found.append((about.st_mtime, about.st_size, path))
        return found


class Pages:
    """The pages of one remote file.

    Parameters
    ----------
    remote
        The file; its SHA-256 must be known.
    cache
        Where pages are kept.
    owner
        The repository. Others do not share its pages: they could claim the SHA-256 of its files.
    """

    def __init__(self, remote: Remote, cache: PageCache, owner: str):
        self.remote, self._cache = remote, cache
        self._identity = hashlib.sha256(f"{owner} {remote.sha256}".encode()).hexdigest()
        self._hashed = 0
        self._sums: NDArray[np.uint32] | None = None
        self._lock = threading.Lock()
        self._coming: dict[int, Future[bytes]] = {}
        return_blocks_from(PAGE)  # otherwise training took 140 MB more

    @property
    def name(self) -> str:
        """What to call the file in an error."""
        return self.remote.urls[0]

    def tail(self, size: int) -> bytes:
        """Return the last bytes of the file, which has no checksums there."""
        size = min(size, self.remote.size)
        name = f"{self._identity}.tail"
        found = self._cache.get(name)
        if found is None or len(found) != size:
            start, stop = self.remote.size - size, self.remote.size
            with closing(Connection(self.remote)) as connection:
                found = self._receive(connection, start, stop, stop)
            self._cache.put(name, found)
        return found

    def keep_tail(self, tail: bytes) -> None:
        """Keep the pages that lie in the last bytes of the file, which were read already."""
        offset = self.remote.size - len(tail)
        for page in range(-(-offset // PAGE), -(-self.remote.size // PAGE)):
            content = tail[page * PAGE - offset : (page + 1) * PAGE - offset]
            if self._is_intact(page, content):
                self._keep(page, content)

    def drop_tail(self) -> None:
        """Remove the last bytes from the cache, because they turned out to be damaged."""
        self._cache.drop(f"{self._identity}.tail")

    def check_with(self, sums: NDArray[np.uint32], hashed: int) -> None:
        """Set the checksums of the pages, and the bytes that they cover, for all later reads."""
        self._sums, self._hashed = sums, hashed

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` to ``stop``, which pages cover."""
        first, last = start // PAGE, (stop - 1) // PAGE
        found = b"".join(self._page(page) for page in range(first, last + 1))
        return found[start - first * PAGE : stop - first * PAGE]

    def start(self, spans: Iterable[tuple[int, int]]) -> "list[Future[bytes]]":
        """Start to fetch the pages of intervals that are not in the cache, several at a time.

        Returns the pages that are under way; their results raise what `read` does.
        """
        ranges = (range(start // PAGE, -(-stop // PAGE)) for start, stop in spans)
        wanted = sorted({page for pages in ranges for page in pages})
        with self._lock:
            missing = [page for page in wanted if page not in self._coming and not self._has(page)]
            for run in _runs(missing):
                future = in_thread(partial(self._fetch_in_turn, run), "offmarl-fetch")
                for page in run:
                    self._coming[page] = _picked(future, run.index(page))
            return [self._coming[page] for page in wanted if page in self._coming]

    def _has(self, page: int) -> bool:
        return (self._identity, page) in _recent or self._cache.has(f"{self._identity}.{page}")

    def _page(self, page: int) -> bytes:
        key = (self._identity, page)
        if (kept := _recent.get(key)) is not None:
            return kept
        with self._lock:
            coming = self._coming.get(page)
        found = coming.result() if coming else self._cached(page)
        if found is None:
            (found,) = self._fetch_run([page])
        self._keep(page, found)
        return found

    def _keep(self, page: int, content: bytes) -> None:
        """Keep a page in memory, where it is not compared again."""
        if self._sums is not None:
            _recent.put((self._identity, page), content)

    def _cached(self, page: int) -> bytes | None:
        name = f"{self._identity}.{page}"
        found = self._cache.get(name)
        if found is not None and not self._is_intact(page, found):
            self._cache.drop(name)  # the disk damaged it: fetch it again
            return None
        return found

    def _fetch_in_turn(self, run: list[int]) -> list[bytes]:
        with _requests:
            return self._fetch_run(run)

    def _fetch_run(self, run: list[int]) -> list[bytes]:
        """Fetch pages that follow one another by one request, and keep them."""
        connection = Connection(self.remote)
        try:
            return [self._fetch_page(connection, page, run[-1]) for page in run]
        finally:
            connection.close()
            with self._lock:
                for page in run:
                    self._coming.pop(page, None)

    def _fetch_page(self, connection: Connection, page: int, last: int) -> bytes:
        """Fetch a page of a request that goes on to the page ``last``, and keep it."""
        start = page * PAGE
        for _ in range(_TRIES):
            found = self._receive(connection, start, start + PAGE, (last + 1) * PAGE)
            if self._is_intact(page, found):
                self._cache.put(f"{self._identity}.{page}", found)
                self._keep(page, found)
                return found
            connection.close()
        self.drop_tail()
        raise HubChecksumError(
            f"bytes {start} to {start + len(found)} of {self.name} arrived {_TRIES} times with a "
            "wrong checksum: the connection or a mirror damages them. Nothing of them was used; "
            "what was fetched before is kept."
        )

    def _is_intact(self, page: int, content: bytes) -> bool:
        if self._sums is None or page >= len(self._sums):
            return True
        covered = self._covered(page)
        return len(content) >= covered and google_crc32c.value(content[:covered]) == int(
            self._sums[page]
        )

    def _covered(self, page: int) -> int:
        """Return how many bytes of a page its checksum covers: of the last one only some."""
        return min(PAGE, self._hashed - page * PAGE)

    def _receive(self, connection: Connection, start: int, stop: int, end: int) -> bytes:
        """Return bytes of the file, up to its end; the request goes on to ``end``."""
        size = self.remote.size
        try:
            return connection.read(start, min(stop, size), min(end, size))
        except HubError as error:
            raise type(error)(f"{error} Pages fetched before stay in {self._cache.root}.") from None


class _Recent:
    """The pages that were used last, of all files of the process."""

    def __init__(self) -> None:
        self._pages: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, int]) -> bytes | None:
        """Return a page; None if it is not here."""
        with self._lock:
            if key in self._pages:
                self._pages.move_to_end(key)
            return self._pages.get(key)

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._pages

    def put(self, key: tuple[str, int], content: bytes) -> None:
        """Keep a page."""
        with self._lock:
            self._pages[key] = content
            self._pages.move_to_end(key)
            while len(self._pages) > _MEMORY_PAGES:
                self._pages.popitem(last=False)


_recent = _Recent()
_requests = threading.BoundedSemaphore(_REQUESTS)


def _runs(pages: list[int]) -> list[list[int]]:
    """Group sorted pages that follow one another, into runs of a request each."""
    found: list[list[int]] = []
    for page in pages:
        if found and found[-1][-1] == page - 1 and len(found[-1]) < _REQUEST_PAGES:
            found[-1].append(page)
        else:
            found.append([page])
    return found


def _picked(future: "Future[list[bytes]]", index: int) -> "Future[bytes]":
    """Return a future of one item of another future's list."""
    found: Future[bytes] = Future()

    def done(whole: "Future[list[bytes]]") -> None:
        if whole.cancelled():
            found.cancel()
        elif (error := whole.exception()) is not None:
            found.set_exception(error)
        else:
            found.set_result(whole.result()[index])

    future.add_done_callback(done)
    return found
