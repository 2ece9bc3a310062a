"""Unpacking archives of vaults."""

import shutil
import zipfile
from pathlib import Path, PurePosixPath

from offmarl.errors import VaultFormatError, VaultFullError
from offmarl.paths import local
from offmarl.vault.archive import members_of, readable
from offmarl.vault.atomic import (
    make_directory,
    publish,
    refuse_existing,
    workspace,
)
from offmarl.vault.drivers import vaults_among
from offmarl.vault.system import errors_of

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
    found = {member.filename: member for member in members_of(archive)}
    vaults = [path for path in vaults_among(found) if _below(path, members)]
    if not vaults:
        raise VaultFormatError(f"there is no vault in {archive / (members or '')}.")
    roots = {*vaults}
    wanted = [one for one in found.values() if roots & {*PurePosixPath(one.filename).parents}]
    for path in vaults:
        refuse_existing(destination / path)
    with errors_of(destination), workspace(destination / f".{archive.name}.part") as part:
        _check_room(part, archive, sum(member.file_size for member in wanted))
        with readable(archive), zipfile.ZipFile(archive) as opened:
            for member in wanted:
                _extract(opened, member, part / member.filename)
        for path in vaults:
            make_directory((destination / path).parent)
            publish(part / path, destination / path)
    return [destination / path for path in vaults]


def _below(path: PurePosixPath | str, prefix: PurePosixPath | str | None) -> bool:
    return prefix is None or PurePosixPath(path).is_relative_to(prefix)


def _check_room(directory: Path, archive: Path, size: int) -> None:
    free = shutil.disk_usage(directory).free
    if size > free:
        raise VaultFullError(
            f"{archive} takes {size} bytes unpacked, and {directory.parent} has room for {free}: "
            "nothing was unpacked."
        )


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(member) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target, _BLOCK_BYTES)
