"""Archives on the hub as vaults on this machine: download, check, unpack, move into place.

huggingface_hub resumes a download within one process only and does not check the bytes that it
has. A `Download` writes a file in parts and keeps a journal of the parts and their checksums, so
that a killed process continues where it stopped.
"""

import hashlib
import io
import itertools
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple

from offmarl import tracking, vault
from offmarl.errors import HubChecksumError, HubError, unknown_name
from offmarl.hub.cache import Entry
from offmarl.hub.card import Card
from offmarl.hub.client import Connection, Received, Remote
from offmarl.vault.archive import members_of
from offmarl.vault.location import vaults_among

PART = 8 * 2**20
"""Bytes that are written and recorded at once: the most that a killed process loses."""

JOURNAL = ".journal"


class Download:
    """A partly downloaded file, whose parts may arrive in any order; it survives its process.

    Parameters
    ----------
    path
        The local file; a journal is kept beside it.
    remote
        The remote file.
    """

    def __init__(self, path: Path, remote: Remote):
        self.path = path
        self.size = remote.size
        self._journal = path.with_name(path.name + JOURNAL)
        self._connection = Connection(remote)
        self._identity = {"commit": remote.commit, "size": remote.size, "sha256": remote.sha256}
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._have = self._resume()

    def close(self) -> None:
        """Close the connection and the file, and keep the parts received. Idempotent."""
        self._connection.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Close the download and delete its files."""
        self.close()
        self.path.unlink(missing_ok=True)
        self._journal.unlink(missing_ok=True)

    @property
    def fetched(self) -> int:
        """Bytes received by this process."""
        return self._connection.total

    def report_to(self, received: Received) -> None:
        """Call ``received`` with the number of bytes as they arrive."""
        self._connection.received = received

    def missing(self, start: int, stop: int) -> int:
        """Return how many bytes of an interval have not been received."""
        return sum(end - begin for begin, end in self._gaps(start, stop))

    def parts(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes of an interval in order, and download what is missing."""
        for begin in range(start, stop, PART):
            end = min(begin + PART, stop)
            for gap in self._gaps(begin, end):
                (_, run_end), *_ = self._gaps(gap[0], stop)
                self._write(gap[0], self._connection.read(*gap, run_end))
            yield os.pread(self._fd, end - begin, begin)

    def ensure(self, start: int, stop: int) -> None:
        """Download what is missing of an interval."""
        for _ in self.parts(start, stop):
            pass

    def sha256(self) -> str:
        """Download what is missing, and return the hash of the whole file."""
        hasher = hashlib.sha256()
        for part in self.parts(0, self.size):
            hasher.update(part)
        return hasher.hexdigest()

    def _gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of an interval that have not been received."""
        gaps = []
        for begin, end in self._have:
            if start < min(begin, stop):
                gaps.append((start, min(begin, stop)))
            start = max(start, end)
        return [*gaps, (start, stop)] if start < stop else gaps

    def _write(self, start: int, data: bytes) -> None:
        """Make a part durable, then record it in the journal."""
        os.pwrite(self._fd, data, start)
        os.fsync(self._fd)
        self._note({"start": start, "stop": start + len(data), "crc32": zlib.crc32(data)})
        self._have = _merge([*self._have, (start, start + len(data))])

    def _note(self, record: dict[str, Any]) -> None:
        with self._journal.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _resume(self) -> list[tuple[int, int]]:
        """Return the intervals that an earlier process received, if their checksums agree."""
        identity, *records = _read_journal(self._journal) or [{}]
        if identity != self._identity:
            os.ftruncate(self._fd, 0)
            records = []
        os.ftruncate(self._fd, self.size)
        intact = [record for record in records if self._intact(record)]
        self._journal.unlink(missing_ok=True)  # its last line may be incomplete
        for record in (self._identity, *intact):
            self._note(record)
        return _merge([(record["start"], record["stop"]) for record in intact])

    def _intact(self, record: dict[str, Any]) -> bool:
        data = os.pread(self._fd, record["stop"] - record["start"], record["start"])
        return zlib.crc32(data) == record["crc32"]


def _read_journal(path: Path) -> list[dict[str, Any]]:
    """Return a journal's records up to the first incomplete one."""
    records = []
    with suppress(FileNotFoundError, ValueError):
        for line in path.read_text().splitlines():
            records.append(json.loads(line))
    return records


def _merge(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of intervals as sorted intervals that do not touch."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


class RemoteFile(io.RawIOBase):
    """A download as a file object, which downloads what is read."""

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
        """Change the position and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._download.size}
        self._position = max(0, base[whence] + offset)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the current position."""
        stop = min(self._position + len(buffer), self._download.size)
        data = b"".join(self._download.parts(self._position, max(self._position, stop)))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


# -------------------------------------------------------------------------------- archives

_TAIL = 2**16
"""Bytes at the end of an archive that hold its directory, unless it has very many files."""


class Directory(NamedTuple):
    """The directory of a zip archive of vaults.

    Attributes
    ----------
    members
        The files, in the order of their offsets.
    roots
        The paths of the vaults in the archive, by uid.
    end
        Offset at which the files end and the directory begins.
    """

    members: tuple[zipfile.ZipInfo, ...]
    roots: Mapping[str, PurePosixPath]
    end: int

    def of(self, uid: str) -> dict[str, zipfile.ZipInfo]:
        """Return a vault's files by relative path; `UnknownNameError` for an unknown uid."""
        if uid not in self.roots:
            raise unknown_name("uid", uid, self.roots)
        root = self.roots[uid]
        named = ((PurePosixPath(member.filename), member) for member in self.members)
        return {
            str(name.relative_to(root)): member
            for name, member in named
            if name.is_relative_to(root)
        }

    def intervals(self, members: Iterable[zipfile.ZipInfo]) -> list[tuple[int, int]]:
        """Return the byte intervals of files in the archive, with adjacent ones merged."""
        starts = [member.header_offset for member in self.members]
        stop_of = dict(itertools.pairwise([*starts, self.end]))
        found: list[tuple[int, int]] = []
        for start in sorted(member.header_offset for member in members):
            joined = found.pop()[0] if found and found[-1][1] == start else start
            found.append((joined, stop_of[start]))
        return found


def _fetch_directory(download: Download, name: str) -> Directory:
    """Download and check an archive's directory, before the rest is downloaded."""
    download.ensure(max(0, download.size - _TAIL), download.size)
    try:
        with zipfile.ZipFile(BufferedReader(RemoteFile(download))) as archive:
            end = archive.start_dir
    except (zipfile.BadZipFile, NotImplementedError, UnicodeError, ValueError) as error:
        raise HubError(f"{name} is not a zip archive ({error}): nothing was unpacked.") from error
    return _local_directory(download.path, end)


def _local_directory(path: Path, end: int = 0) -> Directory:
    """Read the directory of a local archive, whose other bytes may be missing."""
    members = sorted(members_of(path), key=lambda one: one.header_offset)
    roots = {root.name: root for root in vaults_among(one.filename for one in members)}
    if not roots:
        raise HubError(f"{path} contains no vault: nothing was unpacked.")
    return Directory(tuple(members), roots, end)


# ------------------------------------------------------------------------------ installing

_ARCHIVE = "archive.zip"
_UNPACKED = "unpacked"


@contextmanager
def read_directory(entry: Entry, remote: Remote, name: str) -> Iterator[tuple[Download, Directory]]:
    """Read the directory of a remote archive, and keep the bytes received for the next time."""
    download = Download(entry.arriving / _ARCHIVE, remote)
    try:
        yield download, _fetch_directory(download, name)
    finally:
        download.close()


def install_archive(
    entry: Entry, card: Card, remote: Remote, uid: str | None, published: str | None
) -> int:
    """Install vaults from the archive of a dataset, and return the bytes downloaded."""
    with read_directory(entry, remote, f"the archive of {card.name}") as (download, found):
        uids = list(found.roots) if uid is None else [uid]
        members = [member for one in uids for member in found.of(one).values()]
        spans = [(0, remote.size)] if uid is None else found.intervals(members)
        missing = sum(download.missing(*span) for span in spans)
        check_room(entry, missing + sum(member.file_size for member in members))
        with show_progress(card.name, download, spans):
            if uid is None:
                check = check_whole(card.name, download, published or remote.sha256, published)
            else:
                for span in spans:
                    download.ensure(*span)
                check = "CRC-32 of every file"
    try:
        for one in uids:
            _install(entry, card, one, download.path, found, check)
    finally:
        download.discard()  # also if it was damaged, so that the next pull starts again
    return download.fetched


def install_pieces(entry: Entry, card: Card, uid: str, remotes: Sequence[Remote]) -> int:
    """Install a vault that was published as one archive, and return the bytes downloaded.

    Earlier versions cut the archive of a large vault into pieces.
    """
    files = card.uids[uid].files
    downloads = [
        Download(entry.arriving / f"{uid}.{i}.shard", remote) for i, remote in enumerate(remotes)
    ]
    missing = sum(download.missing(0, download.size) for download in downloads)
    check_room(entry, missing + 2 * sum(file.size for file in files))
    archive = entry.arriving / f"{uid}.zip"
    with archive.open("wb") as joined:
        for file, download in zip(files, downloads, strict=True):
            with show_progress(f"{card.name}/{uid}", download, [(0, download.size)]):
                check_whole(file.path, download, file.sha256, file.sha256)
            download.close()
            with download.path.open("rb") as shard:
                shutil.copyfileobj(shard, joined)
    check = "SHA-256 of every shard, from the dataset's card"
    try:
        _install(entry, card, uid, archive, _local_directory(archive), check)
    finally:
        archive.unlink()
        for download in downloads:
            download.discard()
    return sum(download.fetched for download in downloads)


@contextmanager
def show_progress(
    name: str, download: Download, spans: Sequence[tuple[int, int]]
) -> Iterator[None]:
    """Show how much of some intervals of a download has arrived."""
    total = sum(stop - start for start, stop in spans)
    here = total - sum(download.missing(*span) for span in spans)
    with tracking.progress(name, total, here, unit="bytes") as advance:
        download.report_to(advance)
        yield


def check_room(entry: Entry, needed: int) -> None:
    """Raise `HubError` if the disk of a dataset has too little free space."""
    """Raise `HubError` if the disk of a dataset has too little free space."""
    free = shutil.disk_usage(entry.path).free
    if needed > free:
        raise HubError(
            f"{entry.path} needs {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free on its "
            "disk: free some space, pull one uid, or give another --out."
        )


def check_whole(name: str, download: Download, wanted: str | None, published: str | None) -> str:
    """Download what is missing of a file, check its hash, and return how it was checked."""
    found = download.sha256()
    if wanted is None:
        return "CRC-32 of every file (no hash is published)"
    if found != wanted:
        download.discard()
        raise HubChecksumError(
            f"{name} arrived with SHA-256 {found}, but {wanted} was published: it was damaged or "
            "replaced on the way. Nothing was unpacked; pull it again, from another mirror if "
            "this repeats."
        )
    origin = "from the dataset's card" if published else "from the hub, as the card has none"
    return f"SHA-256 of the archive, {origin}"


def open_limited(path: PurePath, time_limit: int | None) -> vault.Dataset:
    """Open a vault; the time limit applies unless the vault records how its episodes ended."""
    found = vault.open_vault(path)
    if found.native or time_limit in (None, found.time_limit):
        return found
    return vault.open_vault(path, time_limit=time_limit)


def _install(
    entry: Entry, card: Card, uid: str, archive: Path, found: Directory, check: str
) -> None:
    """Unpack a vault into a temporary directory, check it, and move it into place."""
    if uid in entry.uids:
        return
    scratch = entry.arriving / _UNPACKED
    shutil.rmtree(scratch, ignore_errors=True)
    (path,) = vault.unpack(archive, scratch, str(found.roots[uid]))
    digest = card.uids[uid].digest if uid in card.uids else None
    if digest and open_limited(path, card.time_limit).digest() != digest:
        raise HubChecksumError(
            f"{card.name}/{uid} does not have the digest that its card gives, so it is not what "
            "was published. Nothing was installed."
        )
    facts = {
        "check": f"{check}; digest of its content, from the card" if digest else check,
        "files": {name: [one.file_size, one.CRC] for name, one in found.of(uid).items()},
    }
    entry.note({"uids": entry.record.get("uids", {}) | {uid: facts}})
    path.rename(entry.path / uid)
    shutil.rmtree(scratch)
