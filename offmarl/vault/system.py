"""Errors of TensorStore and the operating system, as errors of offmarl."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePath

from offmarl.errors import (
    VaultConflictError,
    VaultError,
    VaultFormatError,
    VaultFullError,
    VaultNotFoundError,
)

_NO_ROOM = ("No space left", "ENOSPC", "File too large", "EFBIG", "EDQUOT", "quota exceeded")

_LOST_CHUNK = re.compile(r'NOT_FOUND: chunk .* stored at "([^"]+)"')
_MOST_TEXT = 1000


@contextlib.contextmanager
def errors_of(path: PurePath) -> Iterator[None]:
    """Turn what tensorstore and the system raise about a vault into errors of offmarl."""
    try:
        yield
    except (ValueError, OSError) as error:
        # What follows is for TensorStore's developers, and may quote what a vault says at length.
        text = str(error).partition(" [")[0][:_MOST_TEXT]
        if "Generation mismatch" in text:
            raise conflict(path) from error
        if "Configuration mismatch" in text:
            raise VaultError(
                f"{path} is another vault than when it was opened, or was repaired: open it again."
            ) from error
        if lost := _LOST_CHUNK.search(text):
            raise VaultFormatError(
                f"{path} has lost {lost[1]}: `offmarl verify` tells what is left of the vault, and "
                "`offmarl repair` keeps that."
            ) from error
        if any(sign in text for sign in _NO_ROOM):
            raise full(path) from error
        raise VaultError(f"{path} cannot be read or written: {text}") from error


def full(path: PurePath) -> VaultFullError:
    """Return the error for a disk without room."""
    return VaultFullError(
        f"there is no room on the disk for {path}: everything committed is safe and readable. Make "
        "room, then flush the writer or repeat the command."
    )


def conflict(path: PurePath) -> VaultError:
    """Return the error for a vault that was changed, or taken away, under an open writer."""
    if isinstance(path, Path) and not path.exists():
        return VaultNotFoundError(
            f"there is no vault at {path} any more: it was moved or removed while it was open for "
            "writing. Move it back and flush the writer again, or resume it where it is now."
        )
    return VaultConflictError(
        f"{path} was changed by a program that does not know our lock; nothing was written over "
        "it. Stop that program and open the vault again: the steps it appended will be adopted."
    )
