"""What is in a zip archive of vaults, told by its directory before the rest of it is fetched."""

import itertools
import zipfile
from collections.abc import Iterable, Mapping
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from offmarl.errors import HubError, unknown_name
from offmarl.hub.fetch import Download, View
from offmarl.vault.archive import members_of
from offmarl.vault.drivers import vaults_among

_TAIL = 2**16
"""Bytes at an archive's end in which its directory lies, but for archives of very many files."""


class Contents(NamedTuple):
    """The directory of an archive.

    Attributes
    ----------
    members
        Its files, in the order they lie in.
    roots
        Where in it the vaults lie, by uid.
    end
        Where the files end and the directory begins.
    """

    members: tuple[zipfile.ZipInfo, ...]
    roots: Mapping[str, PurePosixPath]
    end: int

    def of(self, uid: str) -> dict[str, zipfile.ZipInfo]:
        """Return a vault's files by path below it; `UnknownNameError` where there is no such."""
        if uid not in self.roots:
            raise unknown_name("uid", uid, self.roots)
        root = self.roots[uid]
        named = ((PurePosixPath(member.filename), member) for member in self.members)
        return {
            str(name.relative_to(root)): member
            for name, member in named
            if name.is_relative_to(root)
        }

    def intervals(self, members: Iterable[zipfile.ZipInfo]) -> list[tuple[int, int]]:
        """Return the bytes that files take in the archive, neighbours joined."""
        starts = [member.header_offset for member in self.members]
        stop_of = dict(itertools.pairwise([*starts, self.end]))
        found: list[tuple[int, int]] = []
        for start in sorted(member.header_offset for member in members):
            joined = found.pop()[0] if found and found[-1][1] == start else start
            found.append((joined, stop_of[start]))
        return found


def contents(download: Download, name: str) -> Contents:
    """Fetch an archive's directory, and refuse what is not to be trusted before the rest comes.

    Parameters
    ----------
    download
        The archive.
    name
        What to call it in an error.

    Raises
    ------
    HubError
        It is no zip archive, or there is no vault in it.
    VaultFormatError
        Its names or sizes are not to be trusted.
    """
    download.ensure(max(0, download.size - _TAIL), download.size)
    try:
        with zipfile.ZipFile(BufferedReader(View(download))) as archive:
            end = archive.start_dir
    except (zipfile.BadZipFile, NotImplementedError, UnicodeError, ValueError) as error:
        raise HubError(f"{name} is not a zip archive ({error}): nothing was unpacked.") from error
    return read_contents(download.path, end)


def read_contents(path: Path, end: int = 0) -> Contents:
    """Read the directory of an archive whose files need not all be here; see `contents`."""
    members = sorted(members_of(path), key=lambda one: one.header_offset)
    roots = {root.name: root for root in vaults_among(one.filename for one in members)}
    if not roots:
        raise HubError(f"there is no vault in {path}: nothing was unpacked.")
    return Contents(tuple(members), roots, end)
