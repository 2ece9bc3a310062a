"""Files of the hub on this machine: download, check, unpack, move into place.

A file is downloaded to a file of its own, which a killed process leaves and the next one continues.
Nothing is moved into place before it was compared with what was published.
"""

import errno
import hashlib
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePath, PurePosixPath
from threading import Event, Lock
from typing import NamedTuple

from offmarl import tracking, vault
from offmarl._ahead import ahead, in_thread
from offmarl.errors import HubChecksumError, HubError, OffmarlError, unknown_name
from offmarl.hub import client
from offmarl.hub.cache import CachedDataset
from offmarl.hub.card import Card, File
from offmarl.hub.client import Remote
from offmarl.vault.storage.archive import directory_bytes, extract, members_of, readable
from offmarl.vault.storage.files import publish
from offmarl.vault.storage.location import vaults_among

_TAIL = 2**16
"""Bytes at the end of an archive that hold its directory, unless it has very many files."""
_FILES_AT_ONCE = 8
_LONGEST_WAIT = 5.0
"""Seconds to wait for downloads that another one's failure has stopped."""


def download(
    remote: Remote, path: Path, name: str, sha256: str | None, received: Callable[[int], object]
) -> int:
    """Download a file, from where an earlier call stopped, and return the bytes received.

    Another file must have another path. ``received`` is called with the bytes of each block.
    `HubChecksumError` if the file differs from a published hash.
    """
    with path.open("a+b") as file:
        offset = file.tell()
        if offset > remote.size:
            offset = file.truncate(0)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256")
        received(offset)
        for block in client.stream(remote, offset, remote.size):
            file.write(block)
            file.flush()
            digest.update(block)
            received(len(block))
    if sha256 not in (None, actual := digest.hexdigest()):
        path.unlink()
        raise HubChecksumError(
            f"{name} arrived with SHA-256 {actual}, but {sha256} was published: it was damaged or "
            "replaced on the way. Nothing was unpacked; pull it again."
        )
    return remote.size - offset


def download_files(
    files: Mapping[str, File], place: Path, locate: Callable[[File], Remote], name: str
) -> int:
    """Download the files that a directory lacks, several at a time; return bytes received."""
    missing = [
        (number, path, file)
        for number, (path, file) in enumerate(files.items())
        if not (place / path).exists()
    ]
    total = sum(file.size for *_, file in missing)
    check_room(place.parent, total)
    stopped, display, started = Event(), Lock(), list[Future[int]]()
    with tracking.progress(name, total, unit="bytes") as advance:

        def received(count: int) -> None:
            if stopped.is_set():
                raise CancelledError
            with display:
                advance(count)

        def fetch(number: int, path: str, file: File) -> int:
            part = place.parent / f"{file.sha256}.{number}.part"  # several may have one content
            fetched = download(locate(file), part, file.path, file.sha256, received)
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            part.replace(place / path)
            return fetched

        def start(item: tuple[int, str, File]) -> Future[int]:
            started.append(in_thread(partial(fetch, *item), "offmarl-download"))
            return started[-1]

        try:
            return sum(future.result() for _, future in ahead(missing, start, _FILES_AT_ONCE))
        except BaseException:  # leave no thread that writes to a file of the next attempt
            stopped.set()
            wait(started, _LONGEST_WAIT)
            raise


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the errors of a disk that is full, or that cannot be written, into `HubError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise HubError(
                f"{path} cannot be written ({error.strerror or error}): give another --out, or set "
                "HF_HOME to a directory that can."
            ) from error
        raise HubError(
            f"the disk of {path} is full: nothing was installed. Free some space and repeat the "
            "command, which continues from here."
        ) from error


def check_room(place: Path, size: int) -> None:
    """Raise `HubError` if a disk has no room for so many bytes, less those of partial files."""
    # Blocks, because an archive of which some intervals have arrived has its whole size.
    needed = size - sum(512 * part.stat().st_blocks for part in place.rglob("*.part"))
    free = shutil.disk_usage(place).free
    if needed > free:
        raise HubError(
            f"{place} needs {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free on its disk: "
            "free some space, pull one uid, or give another --out."
        )


def open_limited(path: PurePath, time_limit: int | None) -> vault.Dataset:
    """Open a vault; the time limit applies unless the vault records how its episodes ended."""
    dataset = vault.open_vault(path)
    if dataset.native or time_limit in (None, dataset.time_limit):
        return dataset
    return vault.open_vault(path, time_limit=time_limit)


def install_files(entry: CachedDataset, card: Card, uid: str, repository: str, commit: str) -> int:
    """Install a vault whose files `push` published, and return the bytes downloaded."""
    files, _ = card.files_of(uid)
    locate = partial(client.remote_of, repository, commit)
    fetched = download_files(files, entry.arriving / uid, locate, f"{card.name}/{uid}")
    checksums = {name: (file.size, file.sha256) for name, file in files.items()}
    _publish(entry, card, uid, "SHA-256 of every file, from the dataset's card", checksums)
    return fetched


def _publish(
    entry: CachedDataset,
    card: Card,
    uid: str,
    check: str,
    files: Mapping[str, tuple[int, int | str]],
) -> None:
    """Check the digest of a vault that has arrived, record its files, and move it into place."""
    place = entry.arriving / uid
    digest = card.uids[uid].digest if uid in card.uids else None
    if digest and open_limited(place, card.time_limit).digest() != digest:
        shutil.rmtree(place)
        raise HubChecksumError(
            f"{card.name}/{uid} does not have the digest that its card gives, so it is not what "
            "was published. Nothing was installed."
        )
    facts = {
        "check": f"{check}; digest of its content, from the card" if digest else check,
        "files": files,
    }
    entry.note({"uids": entry.record.get("uids", {}) | {uid: facts}})
    publish(place, entry.path / uid)


# -------------------------------------------------------------------------------- archives


class RemoteArchive(NamedTuple):
    """A remote zip archive of vaults, with some of its bytes in a local file of its size."""

    path: Path
    remote: Remote
    vaults: dict[str, dict[str, zipfile.ZipInfo]]
    """The files of each vault by their paths in it, by uid."""
    stops: dict[int, int]
    """Where the bytes of each file end, by where they begin."""
    directory: int
    """Bytes downloaded for the directory."""

    def of(self, uid: str | None) -> dict[str, dict[str, zipfile.ZipInfo]]:
        """Return the files of one vault or of all; `UnknownNameError` for an unknown uid."""
        if uid is None:
            return self.vaults
        if uid not in self.vaults:
            raise unknown_name("uid", uid, self.vaults)
        return {uid: self.vaults[uid]}

    def fetch(self, member: zipfile.ZipInfo) -> int:
        """Download a file to its place in the local archive: all up to the next file."""
        start = member.header_offset
        return _fetch(self.remote, self.path, start, self.stops[start])


def _fetch(remote: Remote, path: Path, start: int, stop: int) -> int:
    """Download an interval of a file to its place in a local one; return its bytes."""
    with path.open("r+b") as file:
        file.seek(start)
        for block in client.stream(remote, start, stop):
            file.write(block)
    return stop - start


@contextmanager
def open_archive(place: Path, remote: Remote, name: str) -> Iterator[RemoteArchive]:
    """Download and check the directory of an archive, to a file in ``place`` for the block."""
    path, size = place / "archive.zip", remote.size
    try:
        path.write_bytes(b"")
        os.truncate(path, size)
        have, needed = 0, _TAIL
        while have < min(needed, size):  # the tail, and then the rest of the directory
            _fetch(remote, path, max(0, size - needed), size - have)
            have = min(needed, size)
            with path.open("rb") as file:
                file.seek(size - have)
                needed = directory_bytes(path, file.read())
        try:
            with zipfile.ZipFile(path) as archive:
                end = archive.start_dir
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise HubError(
                f"{name} is not a zip archive ({error}): nothing was unpacked."
            ) from error
        members = members_of(path)
        starts = sorted(member.header_offset for member in members)
        stops = dict(pairwise([*starts, end]))
        yield RemoteArchive(path, remote, _vaults_of(members, name), stops, have)
    finally:
        path.unlink(missing_ok=True)


def _vaults_of(
    members: Sequence[zipfile.ZipInfo], name: str
) -> dict[str, dict[str, zipfile.ZipInfo]]:
    """Return the files of each vault of an archive by their paths in it, by uid."""
    roots = {root.name: root for root in vaults_among(member.filename for member in members)}
    if not roots:
        raise HubError(f"{name} contains no vault: nothing was unpacked.")
    uids = {root: uid for uid, root in roots.items()}
    vaults: dict[str, dict[str, zipfile.ZipInfo]] = {uid: {} for uid in roots}
    for member in members:
        path = PurePosixPath(member.filename)
        for root in uids.keys() & {*path.parents}:
            vaults[uids[root]][str(path.relative_to(root))] = member
    return vaults


def install_archive(
    entry: CachedDataset, card: Card, remote: Remote, uid: str | None, published: str | None
) -> int:
    """Install vaults from the archive of a dataset, and return the bytes downloaded.

    A single one is downloaded file by file; all are downloaded as one file, which has a hash.
    ``published`` is that hash in the card, which takes precedence over that of the hub.
    """
    with open_archive(entry.arriving, remote, card.name) as archive:
        vaults = {x: files for x, files in archive.of(uid).items() if x not in entry.uids}
        missing = {
            x: {name: y for name, y in files.items() if not (entry.arriving / x / name).exists()}
            for x, files in vaults.items()
        }
        members = [member for files in missing.values() for member in files.values()]
        num_bytes = remote.size if uid is None else sum(member.compress_size for member in members)
        check_room(entry.path, num_bytes + sum(member.file_size for member in members))
        path, fetched, check = archive.path, archive.directory, "CRC-32 of every file"
        if uid is None:
            path = entry.arriving / f"{remote.sha256 or remote.commit}.part"
            sha256 = published or remote.sha256
            with tracking.progress(card.name, remote.size, unit="bytes") as advance:
                fetched += download(remote, path, card.name, sha256, advance)
            check = f"{check} (no hash is published)"
            if sha256:
                origin = "the dataset's card" if published else "the hub, as the card has none"
                check = f"SHA-256 of the archive, from {origin}"
        try:
            for vault_uid, files in vaults.items():
                fetched += _unpack(archive, missing[vault_uid], path, entry.arriving / vault_uid)
                sums = {name: (x.file_size, x.CRC) for name, x in files.items()}
                _publish(entry, card, vault_uid, check, sums)
        except OffmarlError:  # it is damaged: let the next pull start again
            path.unlink()
            raise
        path.unlink()
        return fetched


def _unpack(
    archive: RemoteArchive, files: Mapping[str, zipfile.ZipInfo], path: Path, place: Path
) -> int:
    """Unpack files of a vault from the archive at ``path`` to the directory of its uid.

    If this is the local file of ``archive``, they are downloaded to it first. Returns the bytes
    downloaded.
    """
    total, fetched = sum(member.compress_size for member in files.values()), 0
    part = place.with_name("unpacked.part")
    with (
        tracking.progress(place.name, total, unit="bytes") as advance,
        readable(path),
        path.open("rb", buffering=0) as file,  # a buffer would hold old bytes
        zipfile.ZipFile(file) as archive_file,
    ):
        for name, member in files.items():
            if path == archive.path:
                fetched += archive.fetch(member)
            extract(archive_file, member, part)
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            part.replace(place / name)
            advance(member.compress_size)
    return fetched
