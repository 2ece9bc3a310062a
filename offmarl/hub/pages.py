"""Pages of remote files: fetched by range requests, and kept in a bounded cache.

The cache is a directory of files, one for each page. A page is written to a file of its own and
then renamed, so processes share the cache without locks for reading. When the pages take more than
the limit, those that were not used for the longest time are removed. Pages have no checksums: a
reader checks each value, and drops the pages of a wrong one.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from filelock import FileLock

from offmarl._ahead import in_thread
from offmarl._memory import return_blocks_from
from offmarl.errors import OptionError
from offmarl.hub import client
from offmarl.hub.client import Remote, assets_directory
from offmarl.paths import STREAM_CACHE

PAGE = 2**20
"""Bytes of a page."""
DEFAULT_GB = 10.0

_REQUESTS = 8
"""Requests at a time."""
_REQUEST_PAGES = 8
"""Maximum pages of a request."""
_MEMORY_PAGES = 48
"""Pages that are kept in memory, because a page holds many small values."""
_SCANS = 20
"""The cache is measured again after this fraction of its limit was written."""
_LEFT = 0.9
"""Fraction of the limit that is left when pages are removed."""


def limit_bytes() -> int:
    """Return the limit of the cache in bytes, from the environment variable or the default."""
    text = os.environ.get(STREAM_CACHE, "")
    try:
        gigabytes = float(text) if text else DEFAULT_GB
        if not 0 <= gigabytes < float("inf"):
            raise ValueError
    except ValueError as error:
        raise OptionError(f"{STREAM_CACHE} is a size in GB, such as 10, not {text!r}.") from error
    return int(gigabytes * 1e9)


def page_cache() -> "PageCache":
    """Return the cache of this process, beside the pulled datasets."""
    return _cache_in(assets_directory("datasets", "streamed"))


class PageCache:
    """Pages on the disk, which several processes share, and the pages used last, in memory."""

    def __init__(self, root: Path):
        self.root = root
        self._lock = threading.Lock()
        self._recent: OrderedDict[str, bytes] = OrderedDict()
        self._written: int | None = None

    def get(self, name: str) -> bytes | None:
        """Return the content of a page; None if it is not in the cache."""
        content, path = self._recent.get(name), self._path(name)
        if content is None:
            try:
                content = path.read_bytes()
            except OSError:
                return None
            with suppress(OSError):  # it was removed meanwhile, or belongs to another user
                os.utime(path)
        self._keep(name, content)
        return content

    def has(self, name: str) -> bool:
        """Whether a page is in the cache."""
        return name in self._recent or self._path(name).exists()

    def put(self, name: str, content: bytes) -> None:
        """Keep a page; older pages are removed from the disk if there is no room for it."""
        self._keep(name, content)
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
        with self._lock:
            self._recent.pop(name, None)
        with suppress(OSError):
            self._path(name).unlink()

    @property
    def size(self) -> int:
        """Bytes of all pages on the disk."""
        return sum(size for _, size, _ in self._files())

    def clear(self) -> int:
        """Remove all pages, and return the bytes freed on the disk."""
        self.forget()
        return self._remove(0)

    def forget(self) -> None:
        """Remove the pages from memory."""
        with self._lock:
            self._recent.clear()

    def _keep(self, name: str, content: bytes) -> None:
        with self._lock:
            self._recent[name] = content
            self._recent.move_to_end(name)
            while len(self._recent) > _MEMORY_PAGES:
                self._recent.popitem(last=False)

    def _path(self, name: str) -> Path:
        return self.root / name[:2] / name

    def _make_room(self, num_bytes: int, limit: int) -> None:
        """Remove pages if the cache would exceed its limit; it is measured from time to time."""
        with self._lock:
            if self._written is not None:
                self._written += num_bytes
                if self._written < limit // _SCANS:
                    return
            self._written = 0
        # Processes measure at different times, each after a share of the limit.
        if self.size + num_bytes > limit - limit // _SCANS:
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
        files = []
        for path in self.root.glob("*/*"):
            with suppress(OSError):
                about = path.stat()
                files.append((about.st_mtime, about.st_size, path))
        return files


_cache_in = cache(PageCache)


class Pages:
    """The pages of one remote file, whose SHA-256 must be known."""

    def __init__(self, remote: Remote, owner: str):
        self.remote, self._cache = remote, page_cache()
        # Another repository does not share its pages: it could claim the SHA-256 of its files.
        self._identity = hashlib.sha256(f"{owner} {remote.sha256}".encode()).hexdigest()
        self._lock = threading.Lock()
        self._coming: dict[int, Future[dict[int, bytes]]] = {}
        return_blocks_from(PAGE)  # otherwise training took 140 MB more

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` to ``stop``."""
        pages = _pages(start, stop)
        content = b"".join(map(self._page, pages))
        return content[start - pages.start * PAGE : stop - pages.start * PAGE]

    def drop(self, start: int, stop: int) -> None:
        """Forget the pages of an interval, because a value on them is damaged."""
        for page in _pages(start, stop):
            self._cache.drop(self._name(page))

    def start(self, spans: Iterable[tuple[int, int]]) -> set[Future[dict[int, bytes]]]:
        """Start to fetch the pages of intervals that are not in the cache, several at a time.

        Returns the pending requests; their results raise the errors of `read`.
        """
        pages = sorted({page for span in spans for page in _pages(*span)})
        with self._lock:
            missing = [
                page
                for page in pages
                if page not in self._coming and not self._cache.has(self._name(page))
            ]
            for run in _runs(missing):
                future = in_thread(partial(self._fetch_in_turn, run), "offmarl-fetch")
                self._coming |= dict.fromkeys(run, future)
            return {self._coming[page] for page in pages if page in self._coming}

    def _name(self, page: int) -> str:
        return f"{self._identity}.{page}"

    def _page(self, page: int) -> bytes:
        if (future := self._coming.get(page)) is not None:
            return future.result()[page]
        content = self._cache.get(self._name(page))
        return self._fetch(range(page, page + 1))[page] if content is None else content

    def _fetch_in_turn(self, run: range) -> dict[int, bytes]:
        try:
            with _requests:
                return self._fetch(run)
        finally:
            with self._lock:
                for page in run:
                    self._coming.pop(page, None)

    def _fetch(self, run: range) -> dict[int, bytes]:
        """Fetch pages by one request, and keep them."""
        end = min(run.stop * PAGE, self.remote.size)
        blocks = client.stream(self.remote, run.start * PAGE, end)
        contents: dict[int, bytes] = {}
        for page, content in zip(run, _paged(blocks), strict=True):
            self._cache.put(self._name(page), content)
            contents[page] = content
        return contents


_requests = threading.BoundedSemaphore(_REQUESTS)


def _pages(start: int, stop: int) -> range:
    """Return the pages that hold an interval."""
    return range(start // PAGE, -(-stop // PAGE))


def _paged(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield pages, of which the last may be shorter, from blocks of any size."""
    buffer = bytearray()
    for block in blocks:
        buffer += block
        while len(buffer) >= PAGE:
            yield bytes(memoryview(buffer)[:PAGE])
            del buffer[:PAGE]
    if buffer:
        yield bytes(buffer)


def _runs(pages: list[int]) -> list[range]:
    """Group sorted pages that follow one another, into runs of a request each."""
    runs: list[range] = []
    for page in pages:
        if runs and runs[-1].stop == page and len(runs[-1]) < _REQUEST_PAGES:
            runs[-1] = range(runs[-1].start, page + 1)
        else:
            runs.append(range(page, page + 1))
    return runs
