"""From an archive on the hub to vaults in their place: fetched, checked, unpacked, renamed."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath

from offmarl import tracking, vault
from offmarl.errors import HubChecksumError, HubError
from offmarl.hub.archive import Contents, contents, read_contents
from offmarl.hub.cache import Entry
from offmarl.hub.catalogue import Card
from offmarl.hub.client import Remote
from offmarl.hub.fetch import Download

_ARCHIVE = "archive.zip"
_UNPACKED = "unpacked"


@contextmanager
def peek(entry: Entry, remote: Remote, name: str) -> Iterator[tuple[Download, Contents]]:
    """Fetch an archive's directory, and leave what there is of it for the next time.

    Parameters
    ----------
    entry
        Where it is to go; locked.
    remote
        The archive.
    name
        What to call it in an error.
    """
    download = Download(entry.arriving / _ARCHIVE, remote)
    try:
        yield download, contents(download, name)
    finally:
        download.close()


def bring_archive(
    entry: Entry, card: Card, remote: Remote, uid: str | None, published: str | None
) -> int:
    """Bring vaults of an archive that holds all of a dataset's, and return the bytes fetched.

    Parameters
    ----------
    entry
        Where they go; locked.
    card
        The dataset's.
    remote
        The archive.
    uid
        The vault wanted; None for all, which is when the hash of the whole can be checked.
    published
        The archive's SHA-256 as the card has it.
    """
    with peek(entry, remote, f"the archive of {card.name}") as (download, found):
        uids = list(found.roots) if uid is None else [uid]
        members = [member for one in uids for member in found.of(one).values()]
        spans = [(0, remote.size)] if uid is None else found.intervals(members)
        missing = sum(download.missing(*span) for span in spans)
        _check_room(entry, missing + sum(member.file_size for member in members))
        with _progress(card.name, download, spans):
            if uid is None:
                check = _check_whole(card.name, download, published or remote.sha256, published)
            else:
                for span in spans:
                    download.ensure(*span)
                check = "CRC-32 of every file"
    try:
        for one in uids:
            _place(entry, card, one, download.path, found, check)
    finally:
        download.forget()  # where it was damaged too, so that the next pull starts afresh
    return download.fetched


def bring_shards(entry: Entry, card: Card, uid: str, remotes: Sequence[Remote]) -> int:
    """Bring a vault whose own archive is cut into shards, and return the bytes fetched."""
    files = card.uids[uid].files
    downloads = [
        Download(entry.arriving / f"{uid}.{i}.shard", remote) for i, remote in enumerate(remotes)
    ]
    missing = sum(download.missing(0, download.size) for download in downloads)
    _check_room(entry, missing + 2 * sum(file.size for file in files))
    archive = entry.arriving / f"{uid}.zip"
    with archive.open("wb") as joined:
        for file, download in zip(files, downloads, strict=True):
            with _progress(f"{card.name}/{uid}", download, [(0, download.size)]):
                _check_whole(file.path, download, file.sha256, file.sha256)
            download.close()
            with download.path.open("rb") as shard:
                shutil.copyfileobj(shard, joined)
    check = "SHA-256 of every shard, from the dataset's card"
    try:
        _place(entry, card, uid, archive, read_contents(archive), check)
    finally:
        archive.unlink()
        for download in downloads:
            download.forget()
    return sum(download.fetched for download in downloads)


@contextmanager
def _progress(name: str, download: Download, spans: Sequence[tuple[int, int]]) -> Iterator[None]:
    total = sum(stop - start for start, stop in spans)
    here = total - sum(download.missing(*span) for span in spans)
    with tracking.progress(name, total, here, unit="bytes") as advance:
        download.tell(advance)
        yield


def _check_room(entry: Entry, needed: int) -> None:
    free = shutil.disk_usage(entry.path).free
    if needed > free:
        raise HubError(
            f"{entry.path} would need {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free on "
            "that disk: make room, pull one uid, or give another --out."
        )


def _check_whole(name: str, download: Download, wanted: str | None, published: str | None) -> str:
    """Fetch what is missing of a file, compare its hash, and return what was compared."""
    found = download.sha256()
    if wanted is None:
        return "CRC-32 of every file (no hash is published)"
    if found != wanted:
        download.forget()
        raise HubChecksumError(
            f"{name} arrived with SHA-256 {found}, and {wanted} was published: it was damaged or "
            "exchanged on its way. Nothing was unpacked; pull it again, from another mirror if "
            "this repeats."
        )
    origin = "from the dataset's card" if published else "the hub's own: the card has none"
    return f"SHA-256 of the archive, {origin}"


def open_limited(path: PurePath, time_limit: int | None) -> vault.Dataset:
    """Open a vault with a time limit unless it tells how its episodes ended."""
    found = vault.open_vault(path)
    if found.native or time_limit in (None, found.time_limit):
        return found
    return vault.open_vault(path, time_limit=time_limit)


def _place(entry: Entry, card: Card, uid: str, archive: Path, found: Contents, check: str) -> None:
    """Unpack a vault beside its place, check what can be, and move it there."""
    if uid in entry.uids:
        return
    scratch = entry.arriving / _UNPACKED
    shutil.rmtree(scratch, ignore_errors=True)
    (path,) = vault.unpack(archive, scratch, str(found.roots[uid]))
    digest = card.uids[uid].digest if uid in card.uids else None
    if digest and open_limited(path, card.time_limit).digest() != digest:
        raise HubChecksumError(
            f"{card.name}/{uid} has another digest than its card says: it is not what was "
            "published. Nothing was put in place."
        )
    facts = {
        "check": f"{check}; digest of its content, from the card" if digest else check,
        "files": {name: [one.file_size, one.CRC] for name, one in found.of(uid).items()},
    }
    entry.note({"uids": entry.record.get("uids", {}) | {uid: facts}})
    path.rename(entry.path / uid)
    shutil.rmtree(scratch)
