"""Resolves paths as users write them."""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

from offmarl.errors import OptionError

_OF_FILES = (".vlt", ".zip")
"""Suffixes of paths: a text with one of these is never looked up as a dataset's name."""

SERVER = re.compile(r"(\[[^\]/@]*\]|[^\[\]/:@]+)(:\d+)?(?=/|$)")
"""A host and perhaps a port, without a user name or password."""
SCHEMES = ("s3", "gs", "hf", "http", "https")
"""The schemes of offmarl; `openers` has others."""

_OTHERS = ("file", "ftp", "sftp", "gcs", "az", "abfs", "hdfs")
"""Schemes that nothing opens, and that users write."""

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/", re.IGNORECASE)
"""The beginning of a URL, of which `pathlib` leaves one slash."""

_URL = re.compile(r"((?:--[\w-]+=)?[a-z][a-z0-9+.-]+):/{1,2}(?=[^/])", re.IGNORECASE)
"""How a URL begins, also as the value of an option."""


def local(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a file or directory here; `OptionError` if it cannot have one.

    ``~`` and ``~user`` are expanded. ``..`` has the meaning of the operating system: after a
    symbolic link it leads to the parent of the link's target. Other links are kept, so that a vault
    keeps the name that its user gave it.
    """
    text = os.fspath(path)
    if not text:
        raise OptionError("the path is empty: give the path of a file or directory.")
    if "\0" in text:
        raise OptionError(f"{text!r} cannot be a path: give the path of a file or directory.")
    try:  # as libraries need it that write files
        str(text).encode()
    except UnicodeEncodeError:
        raise OptionError(
            f"{text!r} is not UTF-8: rename it, or set PYTHONUTF8=1 if the terminal shows its name."
        ) from None
    try:
        full = expand_user(text).absolute()
    except FileNotFoundError as error:
        raise OptionError(
            f"{text} is relative to a working directory that was removed: change to another "
            "directory, or give an absolute path."
        ) from error
    return _without_parents(full)


def local_output(path: str | os.PathLike[str]) -> Path:
    """Return `local` of a path that is written; `OptionError` for a URL, as which it is meant."""
    if isinstance(place := url_or_path(path), str):
        raise OptionError(
            f"{hide_credentials(place)} is a URL, and this is written on this machine: give a "
            "path, and copy a vault elsewhere with `offmarl cat`."
        )
    return place


def url_or_path(path: str | os.PathLike[str]) -> str | Path:
    """Return a URL as text, or the `local` path.

    `pathlib` leaves one slash of a URL; then only the schemes that are known are those of one.
    """
    text = os.fspath(path)
    if "://" in text:
        return text
    match = _SCHEME.match(text)
    if match is None or match[1].lower() not in {*SCHEMES, *_OTHERS, *openers}:
        return local(text)
    return f"{match[1]}://{text[match.end() :]}"


_texts: dict[Path, str] = {}


def remember_paths(arguments: Iterable[str]) -> None:
    """Remember how the arguments of a command write paths, for `path_text`."""
    _texts.clear()
    for argument in (".", *arguments):
        text = argument.partition("=")[2] if argument.startswith("-") else argument
        with suppress(OptionError):
            _texts[local(text)] = text


def path_text(path: PurePath) -> str:
    """Return a path for people, as the command's arguments write it or its nearest parent."""
    near = next((place for place in (path, *path.parents) if place in _texts), None)
    return str(path if near is None else Path(_texts[near]) / path.relative_to(near))


def distinct_paths(paths: Iterable[Path]) -> list[Path]:
    """Return paths without those that lead to the same place as an earlier one."""
    by_place: dict[str, Path] = {}
    for path in paths:
        by_place.setdefault(os.path.realpath(path), path)
    return [*by_place.values()]


@contextmanager
def no_empty_directories(path: Path, always: bool = False) -> Iterator[None]:
    """Remove the directories that the block makes up to a path, where they are still empty.

    ``always``: also if the block does not fail.
    """
    missing = [directory for directory in (path, *path.parents) if not os.path.lexists(directory)]
    done = False
    try:
        yield
        done = not always
    finally:
        for directory in () if done else missing:
            with suppress(OSError):
                directory.rmdir()


def kind_of(path: Path, kinds: Collection[str], what: str) -> str:
    """Return the suffix of a file to write, without the dot; `OptionError` if not of ``kinds``.

    ``what`` names the content in messages, such as "a figure".
    """
    kind = path.suffix.removeprefix(".").lower()
    if kind not in kinds:
        raise OptionError(
            f"{what} cannot be written to {path}: give a path that ends in .{' or .'.join(kinds)}."
        )
    return kind


def cache_directory(name: str) -> Path | None:
    """Return the directory ``~/.cache/offmarl/name``, which need not exist.

    ``XDG_CACHE_HOME`` replaces ``~/.cache``. None for a user without a home directory.
    """
    home = expand_user(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return home / "offmarl" / name if home.is_absolute() else None


def is_off(variable: str) -> bool:
    """Whether an environment variable turns something off: it is ``off``, ``0`` or ``no``."""
    return os.environ.get(variable, "").lower() in ("off", "0", "no")


def expand_user(text: str) -> Path:
    """Return a path with ``~`` and ``~user`` expanded, if the user exists."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises for others


def _without_parents(path: Path) -> Path:
    """Resolve a path up to its last ``..``; the rest is unchanged."""
    if ".." not in path.parts:
        return path
    last = len(path.parts) - path.parts[::-1].index("..")
    # Unlike Path.resolve, this does not raise if links form a circle.
    return Path(os.path.realpath(Path(*path.parts[:last])), *path.parts[last:])


_UNUSUAL = re.compile(r"[^\w .,:;=+@%()\[\]!-]")
"""Characters that are not allowed in file names taken from data."""


def safe_path(*names: str, option: str) -> Path:
    """Return a safe relative path made of names from data; it never leads upward.

    Slashes separate directories. Empty parts, leading dots and unusual characters are removed or
    replaced, because the author of the data chose the names. `OptionError` names the ``option`` to
    give instead of an unusable name.
    """
    components = [[_clean(part) for part in name.split("/")] for name in names]
    for name, parts in zip(names, components, strict=True):
        if not any(parts):
            raise OptionError(f"the name {name!r} in the data cannot be a path: give {option}.")
    return Path(*(part for parts in components for part in parts if part))


def _clean(part: str) -> str:
    return _UNUSUAL.sub("-", part).strip().lstrip(".-")[:100]


Finder = Callable[[str, bool], Path | None]
"""Returns the path of a dataset's name; None for any other text. See `path_of_name`."""

finders: list[Finder] = []
"""What finds names that can be given in place of paths of existing data: layers above the vault
define the names, and `offmarl` adds the finder of those of datasets."""


def path_of_name(text: str, single: bool) -> Path | None:
    """Return the path of the data of a name, or None if the text is a path.

    With ``single``, the name of a dataset of several vaults is refused, however many are here.
    """
    paths = (finder(text, single) for finder in finders) if may_be_name(text) else ()
    return next((path for path in paths if path), None)


def may_be_name(text: str) -> bool:
    """Whether a text looks like a dataset's name and no path of that name exists.

    Absolute paths, paths with ``..`` or ``.vlt`` in them, and URLs are never names.
    """
    parts = text.rstrip("/").split("/")
    odd = {"", ".", "..", "~"} & {*parts} or any(part.endswith(_OF_FILES) for part in parts)
    return len(parts) > 1 and not odd and not os.path.lexists(local(text))


openers: dict[str, Callable[[Any], Any]] = {}
"""What opens URLs, by scheme: layers above the vault and `offmarl.vault.register_driver` add it."""


STREAM_CACHE = "OFFMARL_STREAM_CACHE_GB"
"""Environment variable: the most that pages of remote datasets take on the disk, in GB."""


def hide_credentials(text: str) -> str:
    """Return a URL with its user name and password replaced by ``***``.

    A password may contain ``/`` or ``@`` that should have been percent-encoded. So unless the URL
    begins with a server, everything before its last ``@`` is hidden.
    """
    scheme, separator, address = text.partition("://")
    server = address.lstrip("/")
    if not separator or "@" not in server or SERVER.match(server):
        return text
    return f"{scheme}://***@{server.rpartition('@')[2]}"


def hide_all_credentials(value: Any) -> Any:
    """Return data with the credentials of all URLs in it hidden."""
    if isinstance(value, Mapping):
        return {key: hide_all_credentials(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(hide_all_credentials, value))
    if not isinstance(value, str | PurePath) or not (url := _URL.match(text := str(value))):
        return value
    hidden = hide_credentials(f"{url[1]}://{text[url.end() :]}")  # a path has one slash
    return hidden if "***@" in hidden else value
