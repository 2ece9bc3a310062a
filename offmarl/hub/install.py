"""Vaults on the hub as vaults on this machine: download, check, unpack, move into place.

A file is downloaded to a file of its own, which a killed process leaves and the next one continues.
Nothing is moved into place before it was compared with what was published.
"""

import hashlib
import os
import shutil
import zipfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple

from offmarl import tracking, vault
from offmarl.errors import HubChecksumError, HubError, OffmarlError, unknown_name
from offmarl.hub import client
from offmarl.hub.cache import Entry
from offmarl.hub.card import Card
from offmarl.hub.client import Connection, Received, Remote
from offmarl.vault.archive import directory_bytes, extract, members_of, readable
from offmarl.vault.files import publish
from offmarl.vault.location import vaults_among

PART = 8 * 2**20
"""Bytes that are written at once: the most of a file that a killed process loses."""
_TAIL = 2**16
"""Bytes at the end of an archive that hold its directory, unless it has very many files."""


def fetch(remote: Remote, path: Path, received: Received) -> tuple[int, str]:
    """Download a file, from where an earlier call stopped; return the bytes received and SHA-256.

    ``received`` is called with the bytes that there are, and as others arrive. A file of other
    content must have another path.
    """
    with path.open("a+b") as file, closing(Connection(remote)) as connection:
        here = file.tell()
        if here > remote.size:
            here = file.truncate(0)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256")
        received(here)
        connection.received = received
        for begin in range(here, remote.size, PART):
            part = connection.read(begin, min(begin + PART, remote.size), remote.size)
            digest.update(part)
            file.write(part)
            file.flush()
        return connection.total, digest.hexdigest()


def fetch_checked(remote: Remote, path: Path, name: str, sha256: str, received: Received) -> int:
    """Download a file that has a published hash, and return the bytes received."""
    fetched, found = fetch(remote, path, received)
    if found != sha256:
        path.unlink()
        raise HubChecksumError(
            f"{name} arrived with SHA-256 {found}, but {sha256} was published: it was damaged or "
            "replaced on the way. Nothing was unpacked; pull it again, from another mirror if "
            "this repeats."
        )
    return fetched


def open_limited(path: PurePath, time_limit: int | None) -> vault.Dataset:
    """Open a vault; the time limit applies unless the vault records how its episodes ended."""
    found = vault.open_vault(path)
    if found.native or time_limit in (None, found.time_limit):
        return found
    return vault.open_vault(path, time_limit=time_limit)


def install_files(entry: Entry, card: Card, uid: str, repository: str, commit: str) -> int:
    """Install a vault whose files `push` published, and return the bytes downloaded."""
    files, _ = card.files_of(uid)
    place, fetched = entry.arriving / uid, 0
    missing = {name: file for name, file in files.items() if not (place / name).exists()}
    total = sum(file.size for file in missing.values())
    _check_room(entry, total)
    with tracking.progress(f"{card.name}/{uid}", total, unit="bytes") as advance:
        for name, file in missing.items():
            part = entry.arriving / f"{file.sha256}.part"
            remote = client.known(repository, file, commit)
            fetched += fetch_checked(remote, part, file.path, file.sha256, advance)
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            part.replace(place / name)
    known = {name: (file.size, file.sha256) for name, file in files.items()}
    _publish(entry, card, uid, "SHA-256 of every file, from the dataset's card", known)
    return fetched


def _check_room(entry: Entry, needed: int) -> None:
    """Raise `HubError` if the disk of a dataset has too little free space."""
    free = shutil.disk_usage(entry.path).free
    if needed > free:
        raise HubError(
            f"{entry.path} needs {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free on its "
            "disk: free some space, pull one uid, or give another --out."
        )


def _publish(
    entry: Entry, card: Card, uid: str, check: str, files: Mapping[str, tuple[int, int | str]]
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


class Archive(NamedTuple):
    """A remote zip archive of vaults, of which some intervals are in a local file of its size."""

    path: Path
    connection: Connection
    members: tuple[zipfile.ZipInfo, ...] = ()
    """The files, in the order of their offsets."""
    roots: Mapping[str, PurePosixPath] = {}
    """The paths of the vaults in the archive, by uid."""
    end: int = 0
    """Where the files end, and the directory begins."""

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

    def span(self, member: zipfile.ZipInfo) -> tuple[int, int]:
        """Return where a file is in the archive: up to the next one."""
        start = member.header_offset
        behind = bisect_right(self.members, start, key=lambda one: one.header_offset)
        stop = self.members[behind].header_offset if behind < len(self.members) else self.end
        return start, stop

    def fetch(self, start: int, stop: int) -> None:
        """Download an interval to its place in the local file."""
        with self.path.open("r+b") as file:
            file.seek(start)
            for begin in range(start, stop, PART):
                file.write(self.connection.read(begin, min(begin + PART, stop), stop))


@contextmanager
def open_archive(place: Path, remote: Remote, name: str) -> Iterator[Archive]:
    """Download and check the directory of an archive, to a file in ``place`` for the block."""
    path = place / "archive.zip"
    try:
        with closing(Connection(remote)) as connection:
            path.write_bytes(b"")
            os.truncate(path, remote.size)
            archive = Archive(path, connection)
            _fetch_directory(archive, remote.size)
            try:
                with zipfile.ZipFile(path) as opened:
                    end = opened.start_dir
            except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
                raise HubError(
                    f"{name} is not a zip archive ({error}): nothing was unpacked."
                ) from error
            members = sorted(members_of(path), key=lambda one: one.header_offset)
            roots = {root.name: root for root in vaults_among(one.filename for one in members)}
            if not roots:
                raise HubError(f"{name} contains no vault: nothing was unpacked.")
            yield archive._replace(members=tuple(members), roots=roots, end=end)
    finally:
        path.unlink(missing_ok=True)


def _fetch_directory(archive: Archive, size: int) -> None:
    """Download the end of an archive, and what is missing of its directory."""
    have, needed = 0, _TAIL
    while have < min(needed, size):
        archive.fetch(max(0, size - needed), size - have)
        have = min(needed, size)
        with archive.path.open("rb") as file:
            file.seek(size - have)
            needed = directory_bytes(archive.path, file.read())


def install_archive(
    entry: Entry, card: Card, remote: Remote, uid: str | None, published: str | None
) -> int:
    """Install vaults from the archive of a dataset, and return the bytes downloaded.

    A single one is downloaded file by file; all are downloaded as one file, which has a hash.
    """
    with open_archive(entry.arriving, remote, card.name) as archive:
        uids = list(archive.roots) if uid is None else [uid]
        members = [member for one in uids for member in archive.of(one).values()]
        coming = remote.size if uid is None else sum(one.compress_size for one in members)
        _check_room(entry, coming + sum(one.file_size for one in members))
        path, fetched, check = archive.path, 0, "CRC-32 of every file"
        if uid is None:
            path = entry.arriving / f"{remote.sha256 or remote.commit}.part"
            fetched, check = _fetch_whole(remote, path, card.name, published)
        try:
            for one in uids:
                if one not in entry.uids:
                    _unpack(archive, one, path, entry.arriving / one)
                    files = archive.of(one).items()
                    sums = {name: (member.file_size, member.CRC) for name, member in files}
                    _publish(entry, card, one, check, sums)
        except OffmarlError:  # it is damaged: let the next pull start again
            path.unlink()
            raise
        path.unlink()
        return fetched + archive.connection.total


def _fetch_whole(remote: Remote, path: Path, name: str, published: str | None) -> tuple[int, str]:
    """Download an archive and compare its hash; return the bytes received, and what was compared.

    ``published`` is the SHA-256 in the card, which takes precedence over that of the hub.
    """
    origin = "from the dataset's card" if published else "from the hub, as the card has none"
    with tracking.progress(name, remote.size, unit="bytes") as advance:
        if wanted := published or remote.sha256:
            fetched = fetch_checked(remote, path, name, wanted, advance)
            return fetched, f"SHA-256 of the archive, {origin}"
        fetched, _ = fetch(remote, path, advance)
        return fetched, "CRC-32 of every file (no hash is published)"


def _unpack(archive: Archive, uid: str, path: Path, place: Path) -> None:
    """Unpack the files of a vault that are not there yet, from the archive at ``path``.

    Where this is the local file of ``archive``, they are downloaded to it first.
    """
    files = {name: one for name, one in archive.of(uid).items() if not (place / name).exists()}
    total = sum(member.compress_size for member in files.values())
    part = place.with_name("unpacked.part")
    with (
        tracking.progress(uid, total, unit="bytes") as advance,
        readable(path),
        path.open("rb", buffering=0) as file,  # a buffer would hold what was there before
        zipfile.ZipFile(file) as opened,
    ):
        for name, member in files.items():
            if path == archive.path:
                archive.fetch(*archive.span(member))
            extract(opened, member, part)
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            part.replace(place / name)
            advance(member.compress_size)
