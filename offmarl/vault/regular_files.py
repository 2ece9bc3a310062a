"""Files of a vault's directory, and nothing outside it.

A vault may come from anyone. Its index names the files that hold its data, and its directory may
hold links, so a forged vault could have another file read, published or cut short. The names must
therefore be plain relative paths, and what they name must be regular files that no link leads to.
"""

import os
import re
import stat
from pathlib import Path

from offmarl.errors import VaultError, VaultFormatError

_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def check_name(name: str) -> str:
    """Return the name of a data file; `ValueError` where it may lead out of the vault."""
    if not _NAME.fullmatch(name) or {".", ".."} & {*name.split("/")}:
        raise ValueError(f"{name!r:.200} is not the name of a file inside the vault")
    return name


def check_regular_files(directory: Path) -> None:
    """Raise `VaultFormatError` where a vault's directory holds links or special files.

    TensorStore follows links, so this comes before it opens anything. A directory that cannot be
    listed raises `VaultError`.
    """
    waiting = [os.fspath(directory)]
    while waiting:
        below = waiting.pop()
        try:
            with os.scandir(below) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif not entry.is_file(follow_symlinks=False):
                        raise _refused(directory, Path(entry.path))
        except (FileNotFoundError, NotADirectoryError):
            pass  # nothing is there, or a writer removed it
        except OSError as error:
            raise VaultError(
                f"{below} cannot be read: {error.strerror}. Who reads a vault needs the right to "
                "list all of its directories."
            ) from error


def _refused(directory: Path, path: Path) -> VaultFormatError:
    kind = "a symbolic link" if path.is_symlink() else "not a regular file"
    return VaultFormatError(
        f"{directory} is not to be trusted: its {path.relative_to(directory)} is {kind}, so data "
        "outside the vault could be read or overwritten. Replace it by a copy of the file, or copy "
        "the vault again from where it came from."
    )


def open_file(directory: Path, name: str) -> int:
    """Open a regular file of a vault for reading, and return its descriptor.

    No link is followed below the directory, even one that is made meanwhile.

    Raises
    ------
    ValueError
        The name may lead out of the vault, or is that of something else than a regular file.
    OSError
        It cannot be opened; `FileNotFoundError` where there is none.
    """
    *parents, last = check_name(name).split("/")
    parent = os.open(directory, _DIRECTORY)
    try:
        for part in parents:
            below = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            os.close(parent)
            parent = below
        # O_NONBLOCK: a named pipe would wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        found = os.open(last, flags, dir_fd=parent)
    finally:
        os.close(parent)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise ValueError(f"{name} is not a regular file")
    return found
