"""Fetching a large file, or parts of one, so that no interruption costs more than a part.

huggingface_hub resumes within a process only and does not check what it has. Here what arrived is
written part by part into a file beside its place, with a journal of which parts are there and
their checksums, so that a process that is killed goes on where it was.
"""

import hashlib
import io
import json
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import get_session

from offmarl.errors import HubError
from offmarl.hub.client import Remote, TransportError, token_for

PART = 8 * 2**20
"""Bytes that are written, and noted, at once: the most that a killed process loses."""

JOURNAL = ".journal"

_ATTEMPTS = 8
"""Attempts in a row that may bring nothing."""
_PAUSE = 0.5
_LONGEST_PAUSE = 60.0
_TIMEOUT = 30.0
"""Seconds without a byte after which a connection is given up."""

_RETRIED = frozenset({403, 408, 425, 429, 500, 502, 503, 504})
"""403 is what the signed address of a file answers once it has expired."""

Received = Callable[[int], None]
"""Told of bytes as they arrive."""


def _nobody(_: int) -> None:
    """No-op callback."""


class _TryAgainError(Exception):
    """A connection failed in a way that another may not; ``after`` seconds the server asks for."""

    def __init__(self, reason: str, after: float = 0.0):
        super().__init__(reason)
        self.after = after


class Wire:
    """The bytes of a remote file from any position on, over connections that may break."""

    def __init__(self, remote: Remote):
        self.received: Received = _nobody
        self.total = 0
        """Bytes received so far."""
        self._remote = remote
        self._failures = 0
        self._response: Any = None
        self._chunks: Iterator[bytes] = iter(())
        self._rest = b""
        self._position = -1

    def read(self, start: int, stop: int, end: int) -> bytes:
        """Return the bytes of an interval; reading is expected to go on from there to ``end``.

        Raises
        ------
        HubError
            The file is not there any more, is another, or does not come in many attempts.
        """
        data = bytearray()
        while len(data) < stop - start:
            try:
                got = self._receive(start + len(data), stop, end)
            except (_TryAgainError, TransportError) as error:
                self._recover(error)
                continue
            self._failures = 0
            self.received(len(got))
            self.total += len(got)
            data += got
        return bytes(data)

    def close(self) -> None:
        """Close the connection; the next read opens another."""
        if self._response is not None:
            self._response.close()
        self._response, self._position, self._rest = None, -1, b""

    def _receive(self, start: int, stop: int, end: int) -> bytes:
        """Return some bytes from ``start`` on, at least one."""
        if self._position != start:
            self._open(start, end)
        if not self._rest:
            self._rest = next(self._chunks, b"")
            if not self._rest:
                raise _TryAgainError("the connection ended early")
        got, self._rest = self._rest[: stop - start], self._rest[stop - start :]
        self._position += len(got)
        return got

    def _open(self, start: int, end: int) -> None:
        self.close()
        url = self._remote.urls[self._failures % len(self._remote.urls)]
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        if token := token_for(url):  # the client takes it off where it is sent on to another host
            headers["Authorization"] = f"Bearer {token}"
        session = get_session()
        request = session.build_request("GET", url, headers=headers, timeout=_TIMEOUT)
        self._response = session.send(request, stream=True, follow_redirects=True)
        self._check(start)
        self._chunks = self._response.iter_raw()
        self._position = start

    def _check(self, start: int) -> None:
        """Refuse an answer that is not the interval asked for."""
        response, size = self._response, self._remote.size
        status = response.status_code
        if status in _RETRIED:
            raise _TryAgainError(f"the server answered {status}", _retry_after(response))
        given = response.headers.get("Content-Range", "")
        interval = given.startswith(f"bytes {start}-") and given.endswith(f"/{size}")
        whole = start == 0 and response.headers.get("Content-Length", str(size)) == str(size)
        if not ((status == 206 and interval) or (status == 200 and whole)):
            raise HubError(
                f"{response.url.host} answered {status} {given} to a request for bytes from "
                f"{start} of {size}: it does not serve this file in parts, or has another by now."
            )

    def _recover(self, error: Exception) -> None:
        """Wait before another attempt, or give up."""
        self.close()
        self._failures += 1
        if self._failures > _ATTEMPTS:
            raise HubError(
                f"{self._remote.urls[0]} does not arrive: {error or type(error).__name__}, "
                f"{self._failures} times in a row. What is here is kept: the same command goes on."
            ) from error
        pause = min(_LONGEST_PAUSE, _PAUSE * 2 ** (self._failures - 1)) * random.uniform(0.5, 1)
        time.sleep(max(pause, min(getattr(error, "after", 0.0), 2 * _LONGEST_PAUSE)))


def _retry_after(response: Any) -> float:
    with suppress(ValueError):
        return float(response.headers.get("Retry-After", ""))
    return 0.0


class Download:
    """A remote file that is arriving in parts, in any order, and survives its process.

    Parameters
    ----------
    path
        Where the parts are collected; a journal stands beside it.
    remote
        The file.
    """

    def __init__(self, path: Path, remote: Remote):
        self.path = path
        self.size = remote.size
        self._journal = path.with_name(path.name + JOURNAL)
        self._wire = Wire(remote)
        self._identity = {"commit": remote.commit, "size": remote.size, "sha256": remote.sha256}
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._have = self._resume()

    def close(self) -> None:
        """Close the connection and the file; what is there stays."""
        self._wire.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def forget(self) -> None:
        """Close it, and remove what is there."""
        self.close()
        self.path.unlink(missing_ok=True)
        self._journal.unlink(missing_ok=True)

    @property
    def fetched(self) -> int:
        """Bytes that came over the wire; not those that an earlier process left."""
        return self._wire.total

    def tell(self, received: Received) -> None:
        """Call ``received`` with the number of bytes as they arrive."""
        self._wire.received = received

    def missing(self, start: int, stop: int) -> int:
        """Return how many bytes of an interval are still to come."""
        return sum(end - begin for begin, end in self._gaps(start, stop))

    def parts(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes of an interval in order, from here or from the hub."""
        for begin in range(start, stop, PART):
            end = min(begin + PART, stop)
            for gap in self._gaps(begin, end):
                (_, run_end), *_ = self._gaps(gap[0], stop)
                self._write(gap[0], self._wire.read(*gap, run_end))
            yield os.pread(self._fd, end - begin, begin)

    def ensure(self, start: int, stop: int) -> None:
        """Fetch what is missing of an interval."""
        for _ in self.parts(start, stop):
            pass

    def sha256(self) -> str:
        """Fetch what is missing, and return the hash of the whole, taken as it arrives."""
        hasher = hashlib.sha256()
        for part in self.parts(0, self.size):
            hasher.update(part)
        return hasher.hexdigest()

    def _gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of an interval that are not here."""
        gaps = []
        for begin, end in self._have:
            if start < min(begin, stop):
                gaps.append((start, min(begin, stop)))
            start = max(start, end)
        return [*gaps, (start, stop)] if start < stop else gaps

    def _write(self, start: int, data: bytes) -> None:
        """Make a part durable, then note that it is there."""
        os.pwrite(self._fd, data, start)
        os.fsync(self._fd)
        self._note({"start": start, "stop": start + len(data), "crc32": zlib.crc32(data)})
        self._have = _merge([*self._have, (start, start + len(data))])

    def _note(self, record: dict[str, Any]) -> None:
        with self._journal.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _resume(self) -> list[tuple[int, int]]:
        """Return the intervals that an earlier process left, and that are as it noted them."""
        identity, *records = _read_journal(self._journal) or [{}]
        if identity != self._identity:
            os.ftruncate(self._fd, 0)
            records = []
        os.ftruncate(self._fd, self.size)
        intact = [record for record in records if self._intact(record)]
        self._journal.unlink(missing_ok=True)  # its last line may have been cut off
        for record in (self._identity, *intact):
            self._note(record)
        return _merge([(record["start"], record["stop"]) for record in intact])

    def _intact(self, record: dict[str, Any]) -> bool:
        data = os.pread(self._fd, record["stop"] - record["start"], record["start"])
        return zlib.crc32(data) == record["crc32"]


def _read_journal(path: Path) -> list[dict[str, Any]]:
    """Return a journal's records up to the first that a crash cut off."""
    records = []
    with suppress(FileNotFoundError, ValueError):
        for line in path.read_text().splitlines():
            records.append(json.loads(line))
    return records


def _merge(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of intervals, sorted, none touching another."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


class View(io.RawIOBase):
    """A download as a file: what is read of it is fetched first."""

    def __init__(self, download: Download):
        self._download = download
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move, and return the position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._download.size}
        self._position = max(0, base[whence] + offset)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the position on."""
        stop = min(self._position + len(buffer), self._download.size)
        data = b"".join(self._download.parts(self._position, max(self._position, stop)))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
