"""The index of a published vault: where each value is in the vault's files, and its checksum.

A vault is published as its own files, which stock flashbax opens once they are downloaded. Whoever
reads them over a network fetches the index first, and then only the ranges of bytes that are
needed. The index is JSON, compressed by gzip; its SHA-256 is in the dataset's card.
"""

import gzip
import os
import zlib
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import NamedTuple

import google_crc32c
import msgspec
import numpy as np

from offmarl import tracking
from offmarl.errors import HubError
from offmarl.records import Count
from offmarl.tracking import Advance
from offmarl.vault.format.layout import MAX_CHUNK_BYTES, damage_error
from offmarl.vault.storage.commit import Contents, ValueLocation
from offmarl.vault.storage.files import open_file

_MOST = 2**30
"""Maximum bytes of an index, uncompressed, all of which is read into memory."""
_GZIP = 31
"""zlib's window bits for data with a header of gzip."""


class ValueRange(NamedTuple):
    """Where a value is in the files of a vault."""

    file: str
    offset: int
    length: int
    crc32c: int


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """The content of an index: a table of the values, by columns, and the shortest values."""

    files: list[str]
    """Paths in the vault's directory."""
    keys: list[str]
    file: list[Count]
    """Number of the file that holds each key's value."""
    offset: list[Count]
    length: list[Count]
    crc32c: list[int]
    inline: dict[str, bytes]
    """Values that are in no file, because OCDBT keeps short ones in its tree; in base64."""


def build_index(contents: Contents, name: str) -> bytes:
    """Return the index of a vault on this machine; every value is read for its checksum."""
    if contents.tree.lost:
        raise damage_error(contents.store.path, contents.tree.lost[0])
    values = contents.tree.values.items()
    inline = {key: value for key, value in values if isinstance(value, bytes)}
    placed = sorted((at, key) for key, at in values if isinstance(at, ValueLocation))
    files = sorted({at.file for at, _ in placed})
    numbers = {file: number for number, file in enumerate(files)}
    total, sums = sum(at.length for at, _ in placed), []
    with tracking.progress(f"index {name}", total, unit="bytes") as advance:
        for file, locations in groupby((at for at, _ in placed), lambda at: at.file):
            sums += _checksums(open_file(contents.store.directory, file), locations, advance)
    document = Document(
        files,
        keys=[key for _, key in placed],
        file=[numbers[at.file] for at, _ in placed],
        offset=[at.offset for at, _ in placed],
        length=[at.length for at, _ in placed],
        crc32c=sums,
        inline=inline,
    )
    return gzip.compress(msgspec.json.encode(document), mtime=0)


def _checksums(descriptor: int, places: Iterable[ValueLocation], advance: Advance) -> list[int]:
    """Return the CRC32Cs of the values in an open file, which is closed."""
    checksums = []
    with os.fdopen(descriptor, "rb") as file:
        for place in places:
            file.seek(place.offset)
            checksums.append(google_crc32c.value(file.read(place.length)))
            advance(place.length)
    return checksums


class Index:
    """The index of a published vault, from an untrusted source; `HubError` if it is damaged.

    ``sizes`` are the bytes of each file of the vault; every place must be inside its file.
    """

    def __init__(self, data: bytes, sizes: Mapping[str, int], name: str):
        try:
            most = min(_MOST, max(100 * len(data), 2**20))  # real ones inflate to ten times that
            text = zlib.decompressobj(_GZIP).decompress(data, most + 1)
            if len(text) > most:
                raise ValueError(f"it has more than {most:,} bytes")
            self._document = document = msgspec.json.decode(text, type=Document)
            self._rows = {key: row for row, key in enumerate(document.keys)}
            _check(document, self._rows, sizes)
        except (ValueError, IndexError, zlib.error) as error:
            raise HubError(f"{name} is not the index of a vault ({error!s:.200}).") from error

    def get(self, key: str) -> ValueRange | bytes | None:
        """Return where the value of a key is, or the value; None if there is no such key."""
        if (row := self._rows.get(key)) is None:
            return self._document.inline.get(key)
        document = self._document
        file = document.files[document.file[row]]
        return ValueRange(file, document.offset[row], document.length[row], document.crc32c[row])

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the keys that begin with a prefix, and the bytes of their values."""
        document = self._document
        lengths = [*zip(document.keys, document.length, strict=True)]
        lengths += [(key, len(value)) for key, value in document.inline.items()]
        return {key: length for key, length in lengths if key.startswith(prefix)}


def _check(document: Document, rows: Mapping[str, int], sizes: Mapping[str, int]) -> None:
    """Raise `ValueError` or `IndexError` if an index contradicts itself or the files."""
    columns = document.file, document.offset, document.length, document.crc32c
    if {len(column) for column in columns} != {len(document.keys)}:
        raise ValueError("its columns have different lengths")
    if len(rows) < len(document.keys) or rows.keys() & document.inline.keys():
        raise ValueError("a key is there twice")
    if unknown := {*document.files} - sizes.keys():
        raise ValueError(f"the card does not list {min(unknown)!r:.80}")
    if len({*document.files}) < len(document.files):
        raise ValueError("a file is there twice")
    ends = np.array([sizes[file] for file in document.files], np.int64)
    file, offset, length = (np.array(column, np.int64) for column in columns[:3])
    if (offset + length > ends[file]).any():
        raise ValueError("a value is outside of its file")
    if length.max(initial=0) > MAX_CHUNK_BYTES:
        raise ValueError(f"a value has {length.max():,} bytes")
    order = np.lexsort((offset, file))
    file, begin, end = file[order], offset[order], (offset + length)[order]
    if ((begin[1:] < end[:-1]) & (file[1:] == file[:-1])).any():
        raise ValueError("a value lies inside another")
