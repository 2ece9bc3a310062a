"""Installs vaults that were published in shards: each is downloaded, checked, and joined.

A shard's data file is moved into the vault as it is, and the shard's archive is removed before the
next one is downloaded. An interrupted installation continues after the last whole shard.
"""

import json
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from offmarl.errors import HubChecksumError, HubError
from offmarl.hub.cache import Entry
from offmarl.hub.card import Card, File
from offmarl.hub.client import Remote
from offmarl.hub.install import Download, check_room, check_whole, open_limited, show_progress
from offmarl.hub.packing import LIST
from offmarl.hub.shards import Directory, check_size, read_directory
from offmarl.vault.files import publish
from offmarl.vault.layout import DATA, METADATA, load_json
from offmarl.vault.shards import DataFile, join_shards

_BLOCK = 2**20
_NODES = "nodes"
_RECORD = "done.json"
_CHECK = "SHA-256 of every shard, from the dataset's card"


class _Done(NamedTuple):
    """A shard whose data file is in the vault."""

    name: str
    """The data file."""
    size: int
    crc: int


class _Workplace:
    """The directory that a vault is joined in, before it is moved into place."""

    def __init__(self, entry: Entry, uid: str):
        self.vault = entry.arriving / f"{uid}.joined"
        self._notes = entry.arriving / f"{uid}.shards"
        (self.vault / DATA).mkdir(parents=True, exist_ok=True)
        (self._notes / _NODES).mkdir(parents=True, exist_ok=True)
        self.done: dict[str, _Done] = {}
        if (record := self._notes / _RECORD).is_file():
            found: dict[str, Any] = json.loads(record.read_text())
            self.done = {
                sha256: done
                for sha256, values in found.items()
                if self._holds(done := _Done(*values))
            }

    def _holds(self, done: _Done) -> bool:
        path = self.vault / done.name
        return path.is_file() and path.stat().st_size == done.size

    def add(self, sha256: str, archive: Path, directory: Directory) -> None:
        """Move a shard's data file into the vault, and keep the list of its values."""
        part = self.vault / f"{directory.values}.part"
        with archive.open("rb") as source, part.open("wb") as target:
            source.seek(directory.start)
            rest, crc = directory.size, 0
            while rest:
                block = source.read(min(_BLOCK, rest))
                target.write(block)
                rest, crc = rest - len(block), zlib.crc32(block, crc)
        (self._notes / _NODES / sha256).write_bytes(
            json.dumps([[key, *place] for key, place in directory.places.items()]).encode()
        )
        part.replace(self.vault / directory.values)
        self.done[sha256] = _Done(directory.values, directory.size, crc)
        record = self._notes / _RECORD
        partial = record.with_suffix(".part")
        partial.write_text(json.dumps(self.done))
        partial.replace(record)

    def places(self, sha256: str) -> dict[str, tuple[int, int]]:
        """Return the places of the values in a shard's data file."""
        listed = json.loads((self._notes / _NODES / sha256).read_text())
        return {key: (offset, length) for key, offset, length in listed}

    def discard(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.vault, ignore_errors=True)
        shutil.rmtree(self._notes, ignore_errors=True)


def install_shards(entry: Entry, card: Card, uid: str, remotes: Sequence[Remote]) -> int:
    """Install a vault that was published in shards, and return the bytes downloaded."""
    if uid in entry.uids:
        return 0
    files, place = card.uids[uid].files, _Workplace(entry, uid)
    missing = [file for file in files[1:] if file.sha256 not in place.done]
    largest = max(file.size for file in files)
    check_room(entry, sum(file.size for file in missing) + largest + files[0].size)
    fetched = 0
    for file, remote in zip(files[1:], remotes[1:], strict=True):
        if file.sha256 not in place.done:
            with _archive(entry, card, uid, file, remote) as (archive, download):
                place.add(file.sha256, archive, _directory(archive, file))
                fetched += download.fetched
    with _archive(entry, card, uid, files[0], remotes[0]) as (archive, download):
        fetched += download.fetched
        _join(place, archive, files)
    _publish(entry, card, uid, place)
    return fetched


@contextmanager
def _archive(
    entry: Entry, card: Card, uid: str, file: File, remote: Remote
) -> Iterator[tuple[Path, Download]]:
    """Download an archive and check its hash; it is removed at the end of the block."""
    download = Download(entry.arriving / f"{file.sha256}.shard", remote)
    try:
        with show_progress(f"{card.name}/{uid}", download, [(0, download.size)]):
            check_whole(file.path, download, file.sha256, file.sha256)
        yield download.path, download
    except BaseException:
        download.close()
        raise
    download.discard()


def _directory(archive: Path, file: File) -> Directory:
    size = archive.stat().st_size

    def read(start: int, stop: int) -> bytes:
        with archive.open("rb") as opened:
            opened.seek(start)
            return opened.read(stop - start)

    return read_directory(read, read(max(0, size - _BLOCK), size), size, file.path)


def _join(place: _Workplace, archive: Path, files: Sequence[File]) -> None:
    """Write the keys of the whole vault, given the archive of the index."""
    index = _directory(archive, files[0])
    with archive.open("rb") as opened:

        def content(name: str) -> bytes:
            if name not in index.files:
                raise HubError(f"{files[0].path} is not the index of a vault: it has no {name}.")
            start, stop = index.files[name]
            check_size(stop - start, f"{name} of {files[0].path}")
            opened.seek(start)
            return opened.read(stop - start)

        def small() -> Iterator[tuple[str, bytes]]:
            for key, (offset, length) in index.places.items():
                opened.seek(index.start + offset)
                yield key, opened.read(length)

        listed = load_json(content(LIST), f"{LIST} of {files[0].path}")
        by_path = {file.path: file.sha256 for file in files[1:]}
        try:
            shards = [(by_path[one["path"]], int(one["first"])) for one in listed["shards"]]
        except (KeyError, TypeError, ValueError) as error:
            raise HubError(
                f"the index {files[0].path} does not list the shards of the card ({error}): it was "
                "pushed by two programs at once, or is damaged. Push the dataset again."
            ) from error
        data = [DataFile(place.done[one].name, first, place.places(one)) for one, first in shards]
        join_shards(place.vault, content(METADATA), small(), data)


def _publish(entry: Entry, card: Card, uid: str, place: _Workplace) -> None:
    """Check the digest of a joined vault, record its files, and move it into place."""
    digest = card.uids[uid].digest
    if digest and open_limited(place.vault, card.time_limit).digest() != digest:
        place.discard()
        raise HubChecksumError(
            f"{card.name}/{uid} does not have the digest that its card gives, so it is not what "
            "was published. Nothing was installed."
        )
    known = {done.name: [done.size, done.crc] for done in place.done.values()}
    found = {
        path.relative_to(place.vault).as_posix(): path
        for path in sorted(place.vault.rglob("*"))
        if path.is_file()
    }
    facts = {
        "check": f"{_CHECK}; digest of its content, from the card" if digest else _CHECK,
        "files": {name: known.get(name) or _sum(path) for name, path in found.items()},
    }
    entry.note({"uids": entry.record.get("uids", {}) | {uid: facts}})
    publish(place.vault, entry.path / uid)
    place.discard()


def _sum(path: Path) -> list[int]:
    """Return the size and the CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return [path.stat().st_size, crc]
