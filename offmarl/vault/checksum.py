"""Checksums on the values of our own keys.

OCDBT checks its manifest and its nodes, and so which keys there are and what short values hold; the
values that it keeps outside of nodes it does not check. So ours end in a mark and their CRC32C.
"""

from pathlib import PurePath

import google_crc32c

from offmarl.errors import VaultFormatError

OWN_PREFIX = "offmarl/"
_MARK = b"\x00c1c"
_SIZE = len(_MARK) + 4


def seal(key: str, value: bytes | bytearray) -> bytes | bytearray:
    """Return what to store under a key: values of offmarl with their checksum, others as given."""
    if not key.startswith(OWN_PREFIX):
        return value
    return b"".join((value, _MARK, google_crc32c.value(value).to_bytes(4, "big")))


def is_sealed(stored: bytes) -> bool:
    """Whether a value under one of offmarl's keys has a checksum; those of version 1 have none."""
    return stored[-_SIZE:-4] == _MARK


def unseal(key: str, stored: bytes, path: PurePath) -> bytes:
    """Return the value that `seal` was given; `VaultFormatError` where the checksum is wrong."""
    if not key.startswith(OWN_PREFIX) or not is_sealed(stored):
        return stored
    value = stored[:-_SIZE]
    if google_crc32c.value(value) != int.from_bytes(stored[-4:], "big"):
        raise VaultFormatError(
            f"{path} is damaged: the checksum of {key} is wrong. `offmarl verify` tells what is "
            "left of the vault, and `offmarl repair` keeps that."
        )
    return value
