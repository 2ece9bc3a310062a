"""Parses paths and URLs as users write them, and translates them for TensorStore."""

import os
import posixpath
import re
import time
from collections.abc import Callable, Iterable
from pathlib import PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from offmarl._ahead import end_if_abandoned
from offmarl.errors import VaultError
from offmarl.paths import SCHEMES, SERVER, hide_credentials, openers, url_or_path
from offmarl.vault.format.layout import MANIFEST, METADATA

if TYPE_CHECKING:
    import tensorstore as ts

T = TypeVar("T")

ARCHIVE_SUFFIX = ".zip"
_CACHE_BYTES = 2**26
_SERVICES = ("s3", "gcs", "http")
_RETRIES = {"max_retries": 8, "initial_delay": "100ms"}
"""About half a minute, as the pauses double."""
EMPTY = "the file is empty"
_CUT_SHORT = re.compile(
    "Expected Content-Range header|OUT_OF_RANGE: Requested byte range|etag not found in response|"
    r"Encoded length \(0\) is less|" + EMPTY
)
"""Errors of TensorStore for an answer that ended within its headers, or was empty."""
_TRIES = 5
_PAUSE_SECONDS = 0.1
BUCKETS = ("s3", "gs")
WEB = ("http", "https")
HUB = "hf"


class Url(PurePosixPath):
    """An address such as ``s3://bucket/coverage.vlt/expert``, with the methods of a path.

    Its text hides a user name and password: it ends up on terminals, in logs and in provenance.
    """

    def __str__(self) -> str:
        return hide_credentials(super().__str__().replace(":/", "://", 1))

    @property
    def scheme(self) -> str:
        """The part before ``://``."""
        return self.parts[0].removesuffix(":")

    @property
    def host(self) -> str:
        """The bucket, or the server and its port."""
        return self.parts[1]

    @property
    def key(self) -> str:
        """The part after the host."""
        return "/".join(self.parts[2:])


def absolute_location(path: str | os.PathLike[str]) -> PurePath:
    """Return an absolute `Path`, or a `Url` where one is given; see `offmarl.paths.local`.

    A URL with a single slash, as `pathlib` writes it, is accepted.
    """
    if isinstance(path, Url):
        return path
    if isinstance(place := url_or_path(path), str):
        return _url(place)
    if "\\" in place.as_posix():  # TensorStore would read the path differently
        raise VaultError(f"{place} has a backslash in it, which TensorStore takes for a slash.")
    return place


def _url(text: str) -> Url:
    scheme, _, address = text.partition("://")
    display = hide_credentials(text)
    if scheme not in (schemes := {*SCHEMES, *openers}) or not address.strip("/"):
        raise VaultError(
            f"{display} has an unsupported scheme: give a path, or a URL that begins with "
            f"{', '.join(f'{name}://' for name in sorted(schemes))} and a bucket or server."
        )
    host, _, key = address.lstrip("/").partition("/")
    if scheme in BUCKETS and ("@" in host or ":" in host):
        raise VaultError(
            f"{display} has a user name or password in it, which buckets do not accept: set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or log in with the provider's tools."
        )
    if not SERVER.match(host.rpartition("@")[2]):
        raise VaultError(
            f"{display} names no server: write / in a user name or password as %2F, and @ as %40."
        )
    key = posixpath.normpath(key or ".")
    if key.split("/")[0] == "..":
        raise VaultError(f"{display} leads out of its bucket or server.")
    return Url(f"{scheme}://{host}", key)


def kvstore_spec(path: PurePath, end: str = "") -> dict[str, Any]:
    """Return the specification of a file, or of a directory where ``end`` is a slash."""
    if not isinstance(path, Url):
        return {"driver": "file", "path": f"{path}{end}"}
    key = f"{path.key}{end}" if path.key else ""
    match path.scheme:
        case "s3":
            return {"driver": "s3", "bucket": path.host, "path": key, **_aws()}
        case "gs":
            return {"driver": "gcs", "bucket": path.host, "path": key}
        case _:
            return {"driver": "http", "base_url": f"{path.scheme}://{path.host}/", "path": key}


def _aws() -> dict[str, Any]:
    """Return options from AWS's environment variables that TensorStore does not read itself."""
    variables = {
        "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "aws_region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    }
    options: dict[str, Any] = {
        option: os.environ[name]
        for option, names in variables.items()
        for name in reversed(names)
        if os.environ.get(name)
    }
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        options["aws_credentials"] = {"type": "environment"}
    return options


def caching_context() -> "ts.Context":
    """Return a context with a cache and retries, for archives and other machines."""
    import tensorstore as ts

    retries = {f"{kind}_request_retries": _RETRIES for kind in _SERVICES}
    return ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}, **retries})


def finish_remote(result: Callable[[], T], again: Callable[[], T]) -> T:
    """Return the result of a read that was started; call ``again`` if its answer was cut short.

    TensorStore repeats requests that fail, except those whose answer ends within its headers.
    Errors stay those of the read. A read that may find an empty file raises a `ValueError` of
    `EMPTY`.
    """
    for _ in range(_TRIES):
        end_if_abandoned()
        try:
            return result()
        except ValueError as error:
            if not _CUT_SHORT.search(str(error)):
                raise
        time.sleep(_PAUSE_SECONDS)
        result = again
    return result()


_user: list[int] = []
"""The process that used TensorStore first: this one, or the one that this was forked from."""


def is_forked() -> bool:
    """Whether this process was forked from one that had used TensorStore."""
    return bool(_user) and _user[0] != os.getpid()


def use_tensorstore(path: PurePath) -> None:
    """Note that this process uses TensorStore; `VaultError` in a forked one.

    TensorStore's threads do not survive a fork, and its first call there would end the process. A
    forked process can only read what the other prepared: see `Dataset.prepare_fork`.
    """
    if not _user:
        _user.append(os.getpid())
    elif is_forked():
        raise VaultError(
            f"{path} cannot be read in a forked process, because TensorStore's threads do not "
            "survive a fork: start the process with spawn or forkserver, for example "
            "DataLoader(..., multiprocessing_context='spawn')."
        )


def vaults_among(
    names: Iterable[str], required: tuple[str, ...] = (METADATA, MANIFEST)
) -> list[PurePosixPath]:
    """Return the directories of vaults that files of these names belong to, sorted."""
    paths = {PurePosixPath(name) for name in names if name.endswith(required)}
    directories = {path.parent for path in paths if path.parent.parts}
    vaults = [path for path in directories if all(path / name in paths for name in required)]
    return sorted(path for path in vaults if not path.name.startswith("."))
