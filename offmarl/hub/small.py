"""Small files of a repository, such as cards: bounded, and kept under names of our own.

The hub's client names what it keeps by the ETag that a server sends, which can lead out of its
cache. Here nothing that a server sends becomes a part of a path.
"""

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from offmarl import tracking
from offmarl.errors import HubError, HubUnreachableError, RunError
from offmarl.hub import cache, client
from offmarl.hub.client import Remote
from offmarl.hub.fetch import Wire

LARGEST = 2**21
"""Bytes; the card of half a terabyte in shards takes less."""


class SmallFile(NamedTuple):
    """A text file of a repository."""

    commit: str
    text: str
    asked: bool = True
    """Whether the hub was asked; if not, this is the copy that was fetched last."""


def small_file(repository: str, path: str, revision: str) -> SmallFile:
    """Return a small text file at a revision.

    A file is fetched once for each commit. Where no hub answers, the copy is returned that was
    fetched last time for this revision, if there is one.

    Parameters
    ----------
    repository
        Such as "org/name".
    path
        In the repository.
    revision
        A branch, tag or commit.

    Raises
    ------
    HubUnreachableError
        No hub answers, or offline mode is on, and the file was not fetched before.
    HubError
        There is no such repository, revision or file; it is too large, or is not text.
    """
    try:
        remote = client.find(repository, path, revision)
        name = f"{path} of {repository}"
        text = _kept(repository, path, remote.commit)
        if text is None:
            text = _fetch(remote, name)
            _keep(repository, path, remote.commit, text)
    except HubUnreachableError:
        commit = cache.recall(repository, revision)
        text = _kept(repository, path, commit)
        if text is None:
            raise
        return SmallFile(commit, text, asked=False)
    return SmallFile(remote.commit, text)


def _fetch(remote: Remote, name: str) -> str:
    """Fetch a file that the hub says is small; `Wire` takes no byte more than that."""
    if remote.size > LARGEST:
        raise HubError(
            f"{name} has {remote.size:,} bytes, and at most {LARGEST:,} are read of a file of its "
            "kind: it is not what it should be."
        )
    wire = Wire(remote)
    try:
        return wire.read(0, remote.size, remote.size).decode()
    except UnicodeDecodeError as error:
        raise HubError(f"{name} is not text in UTF-8 ({error.reason}).") from error
    finally:
        wire.close()


def _place(repository: str, path: str, commit: str) -> Path:
    """Return where a file is kept: its name is a hash of what it is."""
    told = "\n".join((repository, path, commit))
    return cache.root().parent / "cards" / f"{hashlib.sha256(told.encode()).hexdigest()}.json"


def _about(repository: str, path: str, commit: str) -> dict[str, Any]:
    return {"repository": repository, "path": path, "commit": commit}


def _keep(repository: str, path: str, commit: str, text: str) -> None:
    place = _place(repository, path, commit)
    with suppress(OSError):  # the download reports disk-full errors
        place.parent.mkdir(parents=True, exist_ok=True)
        tracking.write_json(place, {**_about(repository, path, commit), "text": text})


def _kept(repository: str, path: str, commit: str) -> str | None:
    """Return the text that was fetched before; None where there is none, or it is damaged."""
    place = _place(repository, path, commit)
    try:
        found = tracking.read_json(place.parent, place.name)
    except (RunError, OSError):
        return None
    text = found.pop("text", None)
    return text if found == _about(repository, path, commit) and isinstance(text, str) else None
