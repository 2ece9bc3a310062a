"""Asking the hub, and its mirrors, what they have; their answers are not trusted."""

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, NoReturn
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    get_token,
    hf_hub_url,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from offmarl.errors import HubError, HubUnreachableError

MIRRORS = "OFFMARL_MIRRORS"
"""Environment variable: addresses to try after that of the hub, with spaces between them."""

TransportError: type[Exception] = HfHubHTTPError.__bases__[0]
"""What the HTTP library raises. huggingface_hub 1 brings httpx along and 2 brings httpx2; this is
the one that it speaks through."""

_PATIENCE = 1.2
"""Seconds in which the first hop towards a hub must accept a connection."""
_TIMEOUT = 10.0
"""Seconds in which a hub must answer a question."""

_COMMIT = re.compile("[0-9a-f]{40}")
_SHA256 = re.compile("[0-9a-f]{64}")


class Remote(NamedTuple):
    """A file on the hub, at one commit."""

    urls: tuple[str, ...]
    """Where to get it: the hub, then mirrors."""
    commit: str
    size: int
    """Bytes."""
    sha256: str | None
    """The hub's own, which it has of every large file."""


def endpoints() -> tuple[str, ...]:
    """Return the addresses of the hub (``HF_ENDPOINT``) and of mirrors, in the order to try."""
    mirrors = (mirror.rstrip("/") for mirror in os.environ.get(MIRRORS, "").split())
    return tuple(dict.fromkeys((constants.ENDPOINT, *mirrors)))


def token_for(url: str) -> str | None:
    """Return the user's token, which nobody but the hub itself is shown."""
    ours = urlsplit(url)[:2] == urlsplit(constants.ENDPOINT)[:2]
    return get_token() if ours else None


def answering() -> list[str]:
    """Return the endpoints that accept connections.

    Raises
    ------
    HubUnreachableError
        None does, or offline mode is on.
    """
    if constants.HF_HUB_OFFLINE:
        raise HubUnreachableError("offline mode is on (HF_HUB_OFFLINE), so the hub is not asked.")
    tried = problems()
    found = [endpoint for endpoint, problem in tried.items() if not problem]
    if not found:
        reasons = "; ".join(f"{endpoint}: {problem}" for endpoint, problem in tried.items())
        raise HubUnreachableError(f"no hub can be reached ({reasons}).")
    return found


def problems() -> dict[str, str]:
    """Try all endpoints at once and say why each cannot be reached; "" where it can.

    Looking up a name may take longer than anybody wants to wait, and cannot be interrupted: hence
    threads, which are left behind.
    """
    addresses = endpoints()
    found = dict.fromkeys(addresses, f"no answer in {_PATIENCE:g} s")

    def attempt(endpoint: str) -> None:
        try:
            socket.create_connection(_first_hop(endpoint), _PATIENCE).close()
            found[endpoint] = ""
        except (OSError, ValueError) as error:
            found[endpoint] = getattr(error, "strerror", None) or str(error)

    threads = [threading.Thread(target=attempt, args=(one,), daemon=True) for one in addresses]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _PATIENCE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def _first_hop(endpoint: str) -> tuple[str, int]:
    """Return the host and port to connect to: the proxy's, where one is set."""
    scheme = urlsplit(endpoint).scheme
    address = urlsplit(getproxies().get(scheme, endpoint))
    return address.hostname or "", address.port or {"http": 80}.get(address.scheme, 443)


def find(repository: str, path: str, revision: str) -> Remote:
    """Ask for a file's size, hash and commit.

    Raises
    ------
    HubUnreachableError
        No hub answers, or offline mode is on.
    HubError
        There is no such repository, revision or file, or one may not have it; or the answer makes
        no sense.
    """
    found = answering()
    problem = HubUnreachableError(f"no hub answers about {repository}.")
    for endpoint in found:
        try:
            return _ask(endpoint, found, repository, path, revision)
        except HubUnreachableError as error:
            problem = error
    raise problem


def _ask(endpoint: str, mirrors: list[str], repository: str, path: str, revision: str) -> Remote:
    url = _url(endpoint, repository, path, revision)
    with errors_of(repository, revision, path):
        found = get_hf_file_metadata(
            url, token=token_for(url) or False, timeout=_TIMEOUT, endpoint=endpoint
        )
    commit, size = found.commit_hash or "", found.size or 0
    if not _COMMIT.fullmatch(commit) or not 0 < size < 2**63:
        raise HubError(
            f"the hub's answer about {path} of {repository} makes no sense (commit "
            f"{found.commit_hash!r}, size {found.size!r}): a proxy or a mirror may have changed it."
        )
    first = (endpoint, *(mirror for mirror in mirrors if mirror != endpoint))
    urls = tuple(_url(mirror, repository, path, commit) for mirror in first)
    return Remote(urls, commit, size, found.etag if _SHA256.fullmatch(found.etag or "") else None)


def _url(endpoint: str, repository: str, path: str, revision: str) -> str:
    with errors_of(repository, revision, path):
        return hf_hub_url(
            repository, path, repo_type="dataset", revision=revision, endpoint=endpoint
        )


@contextmanager
def bars(shown: bool) -> Iterator[None]:
    """Let the client show its own progress while the block runs, or not."""
    before = are_progress_bars_disabled()
    if not shown:
        disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()


@contextmanager
def errors_of(repository: str, revision: str = "main", path: str = "") -> Iterator[None]:
    """Turn what the hub's client raises into errors of ours."""
    try:
        yield
    except HFValidationError as error:
        raise HubError(f"{repository!r} cannot be the name of a repository: {error}") from error
    except GatedRepoError as error:
        raise HubError(
            f"{repository} is gated: ask for access on its page, and log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"there is no dataset repository {repository}, or it is private and you are not "
            "logged in (`hf auth login`)."
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(
            f"{repository} has no revision {revision!r}: give a branch, a tag or a commit, or none "
            "for the one that the card names."
        ) from error
    except EntryNotFoundError as error:
        raise HubError(f"{repository} has no file {path} at revision {revision!r}.") from error
    except (HfHubHTTPError, TransportError, OSError, ValueError) as error:
        _raise_transport(repository, error)


def _raise_transport(repository: str, error: Exception) -> NoReturn:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    first = str(error).strip().partition("\n")[0]
    if status is None or status >= 500:
        raise HubUnreachableError(f"the hub did not answer about {repository}: {first}") from error
    raise HubError(f"the hub refused what was asked about {repository}: {first}") from error
