"""Checks zip archives of vaults before anything in them is used, and unpacks them."""

import math
import os
import re
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path, PurePath, PurePosixPath

import tensorstore as ts

from offmarl.errors import VaultFormatError, VaultFullError
from offmarl.paths import local
from offmarl.vault.format.layout import MANIFEST, METADATA
from offmarl.vault.storage.files import (
    errors_of,
    make_directory,
    publish,
    refuse_existing,
    workspace,
)
from offmarl.vault.storage.location import (
    EMPTY,
    caching_context,
    finish_remote,
    kvstore_spec,
    vaults_among,
)

_TAIL = 2**16 + 2**10
"""Bytes read from the end of an archive: its end records, and most directories as a whole."""
_MOST_DIRECTORY = 2**24
"""Maximum bytes of an archive's directory."""
_MOST_FILES = 2**17
"""Maximum files of an archive; checking this many takes about two seconds."""
_END = struct.Struct("<4x4xHHI4x2x")
_END64 = struct.Struct("<4x8x2x2x4x4x8xQQ8x")
_LOCATOR = 20
"""Bytes between the ZIP64 end record and the other end record."""
_IN_ZIP64 = 2**32 - 1
"""Value of a 32-bit field whose number is stored in the ZIP64 record instead."""
_IN_ZIP64_COUNT = 2**16 - 1
_LEADS_OUT = re.compile(r"[\\:]|(^|/)\.\.(/|$)")
_LARGEST_DOCUMENT = 2**26
"""Maximum bytes of a file that is read whole to open a vault; real ones are far smaller."""
_MOST_DEFLATED = 200
"""An archive that inflates to more than this many times its size, and over 1 GB, is refused."""


def members_of(archive: PurePath) -> list[zipfile.ZipInfo]:
    """Return the files of a zip archive, from its directory alone."""
    with errors_of(archive), readable(archive), _opened(archive) as zip_file:
        members = zip_file.infolist()
    _check(archive, members)
    return [member for member in members if not member.is_dir()]


def _check(archive: PurePath, members: Iterable[zipfile.ZipInfo]) -> None:
    """Raise `VaultFormatError` if an archive's directory is unsafe."""
    packed = unpacked = 0
    stop = -math.inf  # if only the archive's tail was read, offsets count from there
    names: set[str] = set()
    for member in sorted(members, key=lambda info: info.header_offset):
        name = str(PurePosixPath(member.filename))
        if fault := _fault(member, name) or ("is there twice" if name in names else ""):
            raise _distrust(archive, f"its file {member.filename!r:.200} {fault}")
        if member.header_offset < stop:
            raise _distrust(archive, f"its file {member.filename!r:.200} lies inside another")
        names.add(name)
        stop = member.header_offset + member.compress_size
        packed, unpacked = packed + member.compress_size, unpacked + member.file_size
    if unpacked > max(_MOST_DEFLATED * packed, 2**30):
        raise _distrust(archive, f"its {packed} bytes would inflate to {unpacked}")


def _fault(member: zipfile.ZipInfo, name: str) -> str:
    """Return the fault of a file of an archive; empty if there is none."""
    kind = stat.S_IFMT(member.external_attr >> 16)
    if name in (".", "/") or name.startswith("/") or _LEADS_OUT.search(member.filename):
        of_windows = "\\" in member.filename and ".." not in member.filename
        return f"has a name {'with backslashes' if of_windows else 'that leads out of it'}"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is a link or a device"
    if member.flag_bits & 1:
        return "is encrypted"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "uses a compression other than deflate"
    if name.rpartition("/")[2] in (METADATA, MANIFEST) and member.file_size > _LARGEST_DOCUMENT:
        return f"has {member.file_size} bytes, more than in any vault"
    return ""


def _distrust(archive: PurePath, fault: str) -> VaultFormatError:
    return VaultFormatError(f"{archive} is not safe to open: {fault}. Nothing was read from it.")


@contextmanager
def readable(archive: PurePath) -> Iterator[None]:
    """Convert the errors of reading a damaged archive to `VaultFormatError`."""
    try:
        yield
    except FileNotFoundError as error:
        raise VaultFormatError(f"there is no archive {archive}.") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, UnicodeError) as error:
        raise VaultFormatError(
            f"{archive} is damaged or not a zip archive ({error}): download it again."
        ) from error


def _opened(archive: PurePath) -> zipfile.ZipFile:
    """Open an archive; if it is on another machine, only its directory is read."""
    read_tail = _tail_of_file if isinstance(archive, Path) else _tail_from_afar
    tail = read_tail(archive, _TAIL)
    if (size := directory_bytes(archive, tail)) > len(tail):
        tail = read_tail(archive, size)
        directory_bytes(archive, tail)
    return zipfile.ZipFile(archive if isinstance(archive, Path) else BytesIO(tail))


def directory_bytes(archive: PurePath, tail: bytes) -> int:
    """Return the bytes of an archive's directory and of what follows it.

    Python reads a directory as a whole, which takes seconds for a hundred thousand files. It uses
    the ZIP64 end record wherever one exists, so the two end records must agree.
    """
    end = _find_end(tail)
    if end < 0:
        return 0
    *_, files, size = _END.unpack_from(tail, end)
    if tail[max(0, end - _LOCATOR) :].startswith(b"PK\6\7"):
        wide = end - _LOCATOR - _END64.size
        if wide < 0 or not tail.startswith(b"PK\6\6", wide):
            raise _distrust(archive, "its end record is not where it must be")
        *_, files64, size64 = _END64.unpack_from(tail, wide)
        if size not in (size64, _IN_ZIP64) or files not in (files64, _IN_ZIP64_COUNT):
            raise _distrust(archive, "its two end records contradict each other")
        end, files, size = wide, files64, size64
    if size > _MOST_DIRECTORY:
        raise _distrust(archive, f"its directory takes {size} bytes, and a dataset's far less")
    # Python reads all entries that exist, even if the end record gives another count.
    if (count := max(files, tail.count(b"PK\1\2", max(0, end - size), end))) > _MOST_FILES:
        raise _distrust(archive, f"it has {count} files, and a dataset far fewer")
    return len(tail) - end + size


def _find_end(tail: bytes) -> int:
    """Return where the end record begins, searched for as `zipfile` does; -1 if there is none."""
    last = len(tail) - _END.size
    if last >= 0 and tail.startswith(b"PK\5\6", last) and tail.endswith(b"\0\0"):
        return last
    position = tail.rfind(b"PK\5\6", max(0, last - 2**16))
    return position if position <= last else -1


def _tail_of_file(archive: PurePath, size: int) -> bytes:
    with Path(archive).open("rb") as file:
        file.seek(-min(size, os.fstat(file.fileno()).st_size), os.SEEK_END)
        return file.read()


def _tail_from_afar(archive: PurePath, size: int) -> bytes:
    spec = kvstore_spec(archive.parent, "/")
    files = ts.KvStore.open(spec, context=caching_context()).result()

    def read(part: slice | None = None) -> bytes:
        reply = files.read(archive.name, byte_range=part).result()
        if reply.state != "value":
            raise FileNotFoundError
        if not reply.value:
            raise ValueError(EMPTY)
        return bytes(reply.value)

    def read_end() -> bytes | None:
        """Return the last bytes; None if the archive is smaller, or the answer was cut short."""
        try:
            return read(slice(-size, None))
        except ValueError as error:
            if "OUT_OF_RANGE" not in str(error):
                raise
            return None

    try:
        tail = finish_remote(read_end, read_end)
        return finish_remote(read, read) if tail is None else tail
    except ValueError as error:
        if str(error) != EMPTY:
            raise
        return b""


_BLOCK_BYTES = 2**20


def unpack(archive: Path, destination: Path, members: str | None = None) -> list[Path]:
    """Unpack the vaults in a zip archive; each appears at its path whole or not at all.

    Names and sizes are checked before anything is written, and checksums while unpacking. Files
    that belong to no vault stay in the archive.

    Parameters
    ----------
    archive
        The zip archive.
    destination
        The directory to unpack to; created if it does not exist.
    members
        A path inside the archive, such as ``"3m.vlt/Good"``: only vaults below it are unpacked.

    Returns
    -------
    list
        The paths of the vaults.

    Raises
    ------
    VaultExistsError
        One of the paths exists.
    VaultFullError
        The disk has too little free space.
    VaultLockedError
        Another process unpacks the same archive there.
    VaultFormatError
        The archive is damaged or unsafe, or has no such vault.
    """
    archive, destination = local(archive), local(destination)
    infos = {member.filename: member for member in members_of(archive)}
    vaults = [
        path
        for path in vaults_among(infos)
        if members is None or PurePosixPath(path).is_relative_to(members)
    ]
    if not vaults:
        raise VaultFormatError(f"there is no vault in {archive / (members or '')}.")
    roots = {*vaults}
    to_unpack = [x for x in infos.values() if roots & {*PurePosixPath(x.filename).parents}]
    for path in vaults:
        refuse_existing(destination / path)
    with errors_of(destination), workspace(destination / f".{archive.name}.part") as part:
        _check_room(part, archive, sum(member.file_size for member in to_unpack))
        with readable(archive), zipfile.ZipFile(archive) as zip_file:
            for member in to_unpack:
                extract(zip_file, member, part / member.filename)
        for path in vaults:
            make_directory((destination / path).parent)
            publish(part / path, destination / path)
    return [destination / path for path in vaults]


def _check_room(directory: Path, archive: Path, size: int) -> None:
    free = shutil.disk_usage(directory).free
    if size > free:
        raise VaultFullError(
            f"{archive} takes {size} bytes unpacked, and {directory.parent} has room for {free}: "
            "nothing was unpacked."
        )


def extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> None:
    """Unpack one file of an archive, and compare its checksum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(member) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target, _BLOCK_BYTES)
