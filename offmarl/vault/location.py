"""Where vaults lie: in directories, inside zip archives, in object stores and on web servers."""

import math
import os
import posixpath
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any

from offmarl.errors import VaultError, VaultNotFoundError
from offmarl.paths import local
from offmarl.vault import regular_files

if TYPE_CHECKING:
    import tensorstore as ts

ARCHIVE_SUFFIX = ".zip"
_CACHE_BYTES = 2**26
_SERVICES = ("s3", "gcs", "http")
_RETRIES = 6
"""About half a minute, as the pauses double from a second."""
_WRITABLE = ("s3", "gs")
_SCHEMES = (*_WRITABLE, "http", "https")
_COLLAPSED = re.compile(rf"({'|'.join(_SCHEMES)}):/(?=[^/])", re.IGNORECASE)
"""How `pathlib` writes the beginning of a URL."""
_SERVER = re.compile(r"(\[[^\]/@]*\]|[^\[\]/:@]+)(:\d+)?(?=/|$)")
"""A host and perhaps a port, without a user name or password."""


class Url(PurePosixPath):
    """An address such as ``s3://bucket/coverage.vlt/expert``, taken apart as paths are.

    Its text hides a user name and password: it ends up on terminals, in logs and in provenance.
    """

    def __str__(self) -> str:
        return hide_credentials(super().__str__().replace(":/", "://", 1))

    @property
    def scheme(self) -> str:
        """What stands before ``://``."""
        return self.parts[0].removesuffix(":")

    @property
    def host(self) -> str:
        """The bucket, or the server and its port."""
        return self.parts[1]

    @property
    def key(self) -> str:
        """What stands after the host."""
        return "/".join(self.parts[2:])


@dataclass(frozen=True)
class Location:
    """What a path means; made by `of`.

    Attributes
    ----------
    path
        An absolute path or a `Url`; one that leads into an archive is written as if the archive
        were a directory.
    archive
        The zip archive that it leads into, if it does.
    """

    path: PurePath
    archive: PurePath | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "Location":
        """Take a path or URL as a user writes it; nothing needs to be there.

        Raises
        ------
        VaultError
            It is a URL of a kind that nothing is kept under, or a path that cannot be one.
        """
        full = absolute(path)
        try:
            if not isinstance(full, Url) and Path(full).is_dir():
                return cls(full)
            for part in (full, *full.parents):
                if part.name.endswith(ARCHIVE_SUFFIX) and _is_file(part):
                    return cls(full, part)
        except OSError as error:
            raise VaultError(f"there can be nothing at {full}: {error.strerror}.") from error
        return cls(full)

    @property
    def is_directory(self) -> bool:
        """Whether it is on this machine and outside an archive.

        Files there can be locked, synced, renamed and mapped into memory.
        """
        return self.archive is None and not isinstance(self.path, Url)

    @property
    def is_writable(self) -> bool:
        """Whether vaults of this kind of place can be written."""
        if isinstance(self.path, Url):
            return self.archive is None and self.path.scheme in _WRITABLE
        return self.archive is None

    @property
    def directory(self) -> Path:
        """The directory on this machine; `VaultError` where it is none."""
        if not self.is_directory:
            raise VaultError(
                f"{self.path} is not a directory of this machine, which is needed here: unpack or "
                "copy it first."
            )
        return Path(self.path)

    def kvstore(self) -> dict[str, Any]:
        """Return TensorStore's specification of the files below, named by their relative paths."""
        if self.archive is None:
            return _kvstore(self.path, "/")
        inside = self.path.relative_to(self.archive).as_posix()
        prefix = "" if inside == "." else f"{inside}/"
        return {"driver": "zip", "base": _kvstore(self.archive), "path": prefix}

    @cached_property
    def context(self) -> "ts.Context":
        """What TensorStore shares between all that it opens here.

        Elsewhere than on this machine that is a cache, so that nothing is fetched twice.
        """
        import tensorstore as ts

        if self.is_directory:
            return ts.Context()
        if isinstance(self.archive, Path):
            with suppress(OSError):
                about = self.archive.stat()
                return _archive_context(
                    self.archive, (about.st_ino, about.st_size, about.st_mtime_ns)
                )
        return _caching_context()

    @property
    def staleness(self) -> float | None:
        """The time after which TensorStore must ask again what a file holds; None for now.

        What cannot be written does not change.
        """
        return None if self.is_writable else -math.inf

    @cached_property
    def files(self) -> "ts.KvStore":
        """The files below."""
        import tensorstore as ts

        return ts.KvStore.open(self.kvstore(), context=self.context).result()

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, or None if there is none.

        Raises
        ------
        OSError, ValueError
            It is there and cannot be read.
        """
        if self.is_directory:
            try:
                with os.fdopen(regular_files.open_file(self.directory, name), "rb") as file:
                    return file.read()
            except (FileNotFoundError, NotADirectoryError):
                return None
        found = self.files.read(name, staleness_bound=self.staleness).result()
        return bytes(found.value) if found.state == "value" else None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file; the caller syncs it where it must be durable.

        Raises
        ------
        OSError, ValueError
            It cannot be written.
        """
        if self.is_directory:
            (self.directory / name).write_bytes(content)
        else:
            self.files.write(name, content).result()

    def clear(self) -> None:
        """Remove all files below in an object store."""
        import tensorstore as ts

        self.files.delete_range(ts.KvStore.KeyRange()).result()

    def names(self) -> list[str]:
        """Return the relative paths of all files below; not for directories of this machine.

        Raises
        ------
        VaultNotFoundError
            It is on a web server.
        OSError, ValueError
            They cannot be listed.
        """
        try:
            return [name.decode() for name in self.files.list().result()]
        except NotImplementedError as error:
            raise VaultNotFoundError(
                f"there is no vault at {self.path}, and web servers do not list what is below it: "
                "give the whole path of a vault, such as https://host/name.vlt/uid."
            ) from error


@lru_cache(maxsize=4)
def _archive_context(_: Path, __: tuple[int, ...]) -> "ts.Context":
    """Share a cache between all vaults of an archive while it stays the same.

    Otherwise its directory would be read for each of them.
    """
    return _caching_context()


def _caching_context() -> "ts.Context":
    import tensorstore as ts

    retries = {f"{kind}_request_retries": {"max_retries": _RETRIES} for kind in _SERVICES}
    return ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}, **retries})


def absolute(path: str | os.PathLike[str]) -> PurePath:
    """Return an absolute `Path`, or a `Url` where one is given; see `offmarl.paths.local`.

    A URL with a single slash, as `pathlib` writes it, is taken for that URL.

    Raises
    ------
    VaultError
        It is a URL of a kind that nothing is kept under, or a path that cannot be one.
    OptionError
        It is empty.
    """
    if isinstance(path, Url):
        return path
    text = os.fspath(path)
    if _COLLAPSED.match(text):
        text = text.replace(":/", "://", 1)
    return _url(text) if "://" in text else _checked(local(text))


def _url(text: str) -> Url:
    scheme, _, rest = text.partition("://")
    shown = hide_credentials(text)
    if scheme not in _SCHEMES or not rest.strip("/"):
        raise VaultError(
            f"{shown} is not a place that vaults are kept in: give a path, or a URL that begins "
            f"with {', '.join(f'{known}://' for known in _SCHEMES)} and a bucket or server."
        )
    host, _, key = rest.lstrip("/").partition("/")
    if scheme in _WRITABLE and ("@" in host or ":" in host):
        raise VaultError(
            f"{shown} has a user name or password in it, which buckets do not take: set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or log in with the provider's tools."
        )
    if not _SERVER.match(host.rpartition("@")[2]):
        raise VaultError(
            f"{shown} names no server: write / in a user name or password as %2F, and @ as %40."
        )
    key = posixpath.normpath(key or ".")
    if key.split("/")[0] == "..":
        raise VaultError(f"{shown} leads out of its bucket or server.")
    return Url(f"{scheme}://{host}", key)


def hide_credentials(text: str) -> str:
    """Return a URL with its user name and password replaced by ``***``.

    A password may contain ``/`` or ``@`` that should have been percent-encoded. So unless the URL
    begins with a server, all that stands before its last ``@`` is hidden.
    """
    scheme, separator, rest = text.partition("://")
    server = rest.lstrip("/")
    if not separator or "@" not in server or _SERVER.match(server):
        return text
    return f"{scheme}://***@{server.rpartition('@')[2]}"


def _checked(path: Path) -> Path:
    """Raise `VaultError` where TensorStore would look for another path than we do."""
    if "\\" in path.as_posix():
        raise VaultError(f"{path} has a backslash in it, which TensorStore takes for a slash.")
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise VaultError(f"{str(path)!r} is not UTF-8, as the paths of vaults must be.") from error
    return path


def _is_file(path: PurePath) -> bool:
    return isinstance(path, Url) or Path(path).is_file()


def _kvstore(path: PurePath, end: str = "") -> dict[str, Any]:
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
    """Return what TensorStore does not take from AWS's usual environment variables itself."""
    variables = {
        "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "aws_region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    }
    found: dict[str, Any] = {
        option: os.environ[name]
        for option, names in variables.items()
        for name in reversed(names)
        if os.environ.get(name)
    }
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        found["aws_credentials"] = {"type": "environment"}
    return found
