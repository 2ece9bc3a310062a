"""Zip archives: looked through before anything in them is believed."""

import math
import stat
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path, PurePath, PurePosixPath

from offmarl.errors import VaultError, VaultFormatError
from offmarl.vault.storage.location import Location
from offmarl.vault.storage.store import MANIFEST, METADATA, errors_of

_TAIL = 2**16
"""Bytes at an archive's end in which its directory lies, but for archives of very many files."""
_LARGEST_DIRECTORY = 2**28
_LARGEST_DOCUMENT = 2**26
"""Files that are read whole to open a vault are not as large in any honest one."""
_MOST_DEFLATED = 200
"""Files that inflate to more times their size, and to a gigabyte together, are a bomb."""


def members_of(location: Location) -> list[zipfile.ZipInfo]:
    """Return the files of the archive that a location leads into, from its directory alone.

    Raises
    ------
    VaultFormatError
        It is no zip archive, it is damaged, or something about it is not to be trusted: names that
        lead out of it, links, a file that is there twice, encryption, sizes that cannot be.
    """
    archive = location.archive
    if archive is None:
        raise VaultError(f"{location.path} does not lie in an archive.")
    with errors_of(archive), readable(archive), _opened(archive) as opened:
        members = opened.infolist()
    _check(archive, members)
    return [member for member in members if not member.is_dir()]


def _check(archive: PurePath, members: Iterable[zipfile.ZipInfo]) -> None:
    """Raise `VaultFormatError` where an archive's directory is not to be trusted."""
    packed = unpacked = 0
    stop = -math.inf  # places count from the archive's tail where only that was read
    names: set[PurePosixPath] = set()
    for member in sorted(members, key=lambda one: one.header_offset):
        name = PurePosixPath(member.filename)
        if fault := _fault(member) or ("is there twice" if name in names else ""):
            raise _distrust(archive, f"its file {member.filename!r:.200} {fault}")
        if member.header_offset < stop:
            raise _distrust(archive, f"its file {member.filename!r:.200} lies inside another")
        names.add(name)
        stop = member.header_offset + member.compress_size
        packed, unpacked = packed + member.compress_size, unpacked + member.file_size
    if unpacked > max(_MOST_DEFLATED * packed, 2**30):
        raise _distrust(archive, f"its {packed} bytes would inflate to {unpacked}")


def _fault(member: zipfile.ZipInfo) -> str:
    """Return what is wrong with a file of an archive, if anything."""
    name = PurePosixPath(member.filename)
    kind = stat.S_IFMT(member.external_attr >> 16)
    if not name.parts or name.is_absolute() or {"..", "\\", ":"} & {*name.parts, *member.filename}:
        return "has a name that leads out of it"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is a link or a device"
    if member.flag_bits & 1:
        return "is encrypted"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "is compressed in another way than deflate"
    if name.name in (METADATA, MANIFEST) and member.file_size > _LARGEST_DOCUMENT:
        return f"has {member.file_size} bytes, which no vault's has"
    return ""


def _distrust(archive: PurePath, fault: str) -> VaultFormatError:
    return VaultFormatError(f"{archive} is not to be trusted: {fault}. It was left alone.")


@contextmanager
def readable(archive: PurePath) -> Iterator[None]:
    """Turn what a damaged archive raises into an error of ours."""
    try:
        yield
    except FileNotFoundError as error:
        raise VaultFormatError(f"there is no archive {archive}.") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, UnicodeError) as error:
        raise VaultFormatError(
            f"{archive} is damaged or not a zip archive ({error}): fetch it again."
        ) from error


def _opened(archive: PurePath) -> zipfile.ZipFile:
    """Open an archive, elsewhere than on this machine for its directory alone."""
    if isinstance(archive, Path):
        return zipfile.ZipFile(archive)
    size = _TAIL
    while True:
        tail = _read_tail(archive, size)
        try:
            return zipfile.ZipFile(BytesIO(tail))
        except (zipfile.BadZipFile, ValueError):
            if len(tail) < size or size >= _LARGEST_DIRECTORY:
                raise
            size *= 16


def _read_tail(archive: PurePath, size: int) -> bytes:
    files = Location(archive.parent).files
    try:
        found = files.read(archive.name, byte_range=slice(-size, None)).result()
    except ValueError as error:
        if "OUT_OF_RANGE" not in str(error):
            raise
        found = files.read(archive.name).result()  # it is smaller
    if found.state != "value":
        raise FileNotFoundError
    return bytes(found.value)
