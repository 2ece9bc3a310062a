"""Requests to the hub, whose answers are not trusted."""

import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from huggingface_hub import constants, get_hf_file_metadata, get_session, get_token, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from offmarl._ahead import unreachable
from offmarl.errors import HubError, HubUnreachableError, OptionError
from offmarl.hub import card as cards
from offmarl.hub.card import CARD, Card, File

TransportError: type[Exception] = HfHubHTTPError.__bases__[0]
"""The base error of the HTTP library: huggingface_hub 1 depends on httpx, and 2 on httpx2."""

_PATIENCE = 1.2
"""Seconds in which the first hop towards a hub must accept a connection."""
_TIMEOUT = 10.0
"""Seconds in which a hub must answer a request for metadata."""

NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""Names of repositories, such as org/name."""
_COMMIT = re.compile("[0-9a-f]{40}")
_SHA256 = re.compile("[0-9a-f]{64}")


Kind = Literal["dataset", "model"]
"""Kind of a repository."""


class Remote(NamedTuple):
    """A file on the hub, at one commit."""

    url: str
    commit: str
    size: int
    """Bytes."""
    sha256: str | None
    """The hub's own hash, which it has for every large file."""


def check_name(repository: str) -> None:
    """Raise `OptionError` unless a text can be the name of a repository."""
    if not NAME.fullmatch(repository):
        raise OptionError(f"a repository is named org/name: got {repository!r}.")


def assets_directory(*parts: str) -> Path:
    """Return a directory of offmarl in the hub's directory of assets, which need not exist."""
    return Path(constants.HF_ASSETS_CACHE, "offmarl", *parts)


def reach() -> None:
    """Raise `HubUnreachableError` unless the hub accepts connections."""
    reason = "offline mode is on (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else problem()
    if reason:
        raise HubUnreachableError(
            f"{constants.ENDPOINT} cannot be reached ({reason}). `offmarl cache ls` lists the "
            "datasets on this machine."
        )


def problem() -> str:
    """Return why the hub cannot be reached; an empty text if it can."""
    return unreachable(constants.ENDPOINT, _PATIENCE)


def find(repository: str, path: str, revision: str, kind: Kind = "dataset") -> Remote:
    """Return a file's size, hash and commit."""
    reach()
    with errors_of(repository, revision, path):
        url = hf_hub_url(repository, path, repo_type=kind, revision=revision)
        metadata = get_hf_file_metadata(url, timeout=_TIMEOUT)
    commit, size = metadata.commit_hash or "", metadata.size or 0
    if not _COMMIT.fullmatch(commit) or not 0 < size < 2**63:
        raise HubError(
            f"the hub's answer about {path} of {repository} is invalid (commit "
            f"{metadata.commit_hash!r}, size {metadata.size!r}): a proxy may have changed it."
        )
    sha256 = metadata.etag if _SHA256.fullmatch(metadata.etag or "") else None
    return Remote(
        hf_hub_url(repository, path, repo_type=kind, revision=commit), commit, size, sha256
    )


def find_card(repository: str, revision: str) -> tuple[str, Card]:
    """Return the commit of a revision, and the card that `push` published with it."""
    remote, name = find(repository, CARD, revision), f"{CARD} of {repository}"
    return remote.commit, cards.parse(read_text_file(remote, name), name)


def remote_of(repository: str, commit: str, file: File, kind: Kind = "dataset") -> Remote:
    """Return a file whose size and hash a card gives; the hub is not asked."""
    with errors_of(repository, commit, file.path):
        url = hf_hub_url(repository, file.path, repo_type=kind, revision=commit)
        return Remote(url, commit, file.size, file.sha256)


@contextmanager
def errors_of(repository: str, revision: str = "main", path: str = "") -> Iterator[None]:
    """Turn errors of the hub's client into `HubError`."""
    try:
        yield
    except HFValidationError as error:
        raise HubError(f"{repository!r} cannot be the name of a repository: {error}") from error
    except GatedRepoError as error:
        raise HubError(
            f"{repository} is gated: request access on its page, and log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"no repository {repository} exists, or it is private and you are not logged "
            "in (`hf auth login`)."
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(
            f"{repository} has no revision {revision!r}: give a branch, a tag or a commit, or "
            "leave it out for the revision that the card names."
        ) from error
    except EntryNotFoundError as error:
        raise HubError(f"{repository} has no file {path} at revision {revision!r}.") from error
    except (HfHubHTTPError, TransportError, OSError, ValueError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        first = str(error).strip().partition("\n")[0]
        if getattr(error, "filename", None) is not None:  # of a file here
            raise HubError(f"{repository}: {first}") from error
        if status is None or status >= 500:
            text = f"the hub did not answer about {repository}: {first}"
            raise HubUnreachableError(text) from error
        if status in (401, 403):
            raise _no_access(repository, status) from error
        raise HubError(f"the hub refused a request about {repository}: {first}") from error


def _no_access(place: str, status: int) -> HubError:
    return HubError(
        f"the hub refuses access to {place} ({status}): log in with `hf auth login`, or set "
        "HF_TOKEN, with a token that may read the repository; a push needs one that may write to "
        "it. What was received is kept."
    )


# ------------------------------------------------------------------------------------ bytes

_ATTEMPTS = 8
"""Consecutive failed attempts after which a download is given up."""
_PAUSE = 0.25
_LONGEST_PAUSE = 60.0
_SILENCE = 30.0
"""Seconds without a byte after which a connection is closed."""

_RETRIED = frozenset({403, 408, 425, 429, 500, 502, 503, 504})
"""Status codes after which a request is repeated; 403 is the answer of an expired signed URL."""


class _TryAgainError(Exception):
    """A failure that another attempt may not meet; the server asks to wait ``after`` seconds."""

    def __init__(self, reason: str, after: float = 0.0):
        super().__init__(reason)
        self.after = after


def stream(remote: Remote, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes from ``start`` to ``stop`` as they arrive, over connections that may break.

    A broken connection is continued by another one from where it was. `HubError` after several
    failures in a row, or if an answer is not the requested interval.
    """
    failures = 0
    while start < stop:
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        if token := get_token():  # the client removes it when redirected to another host
            headers["Authorization"] = f"Bearer {token}"
        options: Any = {"headers": headers, "timeout": _SILENCE, "follow_redirects": True}
        try:
            with get_session().stream("GET", remote.url, **options) as response:
                _check(response, remote, start)
                for block in response.iter_raw():
                    if not (content := block[: stop - start]):
                        break  # the server sends the file beyond `stop`
                    start, failures = start + len(content), 0
                    yield content
            if start < stop:
                raise _TryAgainError("the connection ended early")
        except (_TryAgainError, TransportError) as error:
            failures += 1
            if start < stop:
                _pause(remote, failures, error)


def _check(response: Any, remote: Remote, start: int) -> None:
    """Refuse an answer that is not the requested interval."""
    status, size, headers = response.status_code, remote.size, response.headers
    after = 0.0
    with suppress(ValueError):
        after = float(headers.get("Retry-After", ""))
    if not response.history:  # the hub itself answers, not where it redirects to
        if status == 401 or (status == 403 and "X-Error-Code" in headers):
            raise _no_access(remote.url, status)
        if status in (404, 410):
            raise HubError(
                f"{remote.url} is missing on the hub ({status}): it was removed, or not uploaded. "
                "What was received is kept; if you own the repository, push it again."
            )
    if status in _RETRIED:
        raise _TryAgainError(f"the server answered {status}", after)
    content_range = headers.get("Content-Range", "")
    interval = content_range.startswith(f"bytes {start}-") and content_range.endswith(f"/{size}")
    is_whole = start == 0 and headers.get("Content-Length", str(size)) == str(size)
    if not ((status == 206 and interval) or (status == 200 and is_whole)):
        raise HubError(
            f"{response.url.host} answered {status} {content_range} to a request for bytes from "
            f"{start} of {size}: it cannot serve parts of this file, or the file has changed."
        )


def _pause(remote: Remote, failures: int, error: Exception) -> None:
    """Wait before the next attempt, or give up."""
    if failures > _ATTEMPTS:
        raise HubError(
            f"{remote.url} failed {failures} times in a row: {error or type(error).__name__}. "
            "The data received is kept; repeat the command to continue."
        ) from error
    pause = min(_LONGEST_PAUSE, _PAUSE * 2 ** (failures - 1)) * random.uniform(0.5, 1)
    time.sleep(max(pause, min(getattr(error, "after", 0.0), 2 * _LONGEST_PAUSE)))


LARGEST = 2**21
"""Maximum size of a text file in bytes; the card of half a terabyte of vaults is smaller."""


def read_text_file(remote: Remote, name: str) -> str:
    """Download a small text file, such as a card."""
    if remote.size > LARGEST:
        raise HubError(
            f"{name} has {remote.size:,} bytes; at most {LARGEST:,} are read of such a file."
        )
    try:
        return b"".join(stream(remote, 0, remote.size)).decode()
    except UnicodeDecodeError as error:
        raise HubError(f"{name} is not text in UTF-8 ({error.reason}).") from error
