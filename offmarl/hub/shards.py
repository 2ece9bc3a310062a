"""Published shards as they are read: their directories, and the values of a whole vault."""

import io
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offmarl.errors import HubError, VaultConflictError, VaultFormatError
from offmarl.hub.card import File
from offmarl.hub.packing import INDEX, LIST, PAGE, PAGES, content_offset, framed
from offmarl.hub.pages import Pages
from offmarl.vault import layout
from offmarl.vault.bulk import read_node
from offmarl.vault.files import check_name
from offmarl.vault.layout import DATA, METADATA, load_json
from offmarl.vault.metadata import Grid
from offmarl.vault.shards import cut_chunk_key, grids_of

_TAIL = 2**20
"""Bytes of an archive's end that are read first."""
_OPEN = 32
"""Shards whose directories are kept in memory."""
_TOGETHER = 2**25
"""Bytes that are fetched together, which are in memory until all have arrived."""
_MOST = 2**28
"""Maximum bytes of a list of values, or of a document, all of which is read into memory."""

Span = tuple[int, int]
"""First byte, and the one after the last."""


class Directory(NamedTuple):
    """Where everything is in the archive of a shard or an index."""

    values: str
    """Name of the data file that holds the values."""
    start: int
    """Where its content begins in the archive."""
    size: int
    """Its bytes."""
    crc: int
    """Its CRC-32."""
    node: str
    """Name of the data file that lists the values."""
    files: Mapping[str, Span]
    """The places of the other files in the archive, by the last part of their names."""
    places: Mapping[str, Span]
    """Offset in the data file, and length, of each value by key."""
    pages: NDArray[np.uint32]
    """The checksums of pages."""
    hashed: int
    """Bytes that the pages cover."""


Read = Callable[[int, int], bytes]
"""Reads an interval of a file."""


def read_directory(read: Read, tail: bytes, size: int, name: str) -> Directory:
    """Read the directory of an archive that `offmarl.hub.packing` made."""
    try:
        members = _members(tail, size)
        data = {one: check_name(one[one.rfind(f"{DATA}/") :]) for one in _data_of(members, name)}
    except (zipfile.BadZipFile, NotImplementedError, UnicodeError, ValueError) as error:
        raise HubError(f"{name} is not the archive of a shard ({error}).") from error
    _check_places(members, name)
    values, node = data
    start, stop, crc = members[values]
    offset = size - len(tail)

    def content(member: str) -> bytes:
        begin, end, _ = members[member]
        check_size(end - begin, f"{member!r:.80} of {name}")
        return tail[begin - offset : end - offset] if begin >= offset else read(begin, end)

    sums, hashed = content(PAGES), members[PAGES][0] - content_offset(PAGES, 0)
    if len(sums) != 4 * -(-hashed // PAGE) or zlib.crc32(sums) != members[PAGES][2]:
        raise VaultFormatError(f"{name} is damaged: the checksums of its pages are not whole.")
    return Directory(
        data[values],
        start,
        stop - start,
        crc,
        data[node],
        {_last(one): members[one][:2] for one in members if one not in data},
        _inside(read_node(content(node), f"the list of values in {name}"), stop - start, name),
        np.frombuffer(sums, ">u4").astype(np.uint32),
        hashed,
    )


def _members(tail: bytes, size: int) -> dict[str, tuple[int, int, int]]:
    """Return where the content of each file of an archive is, and its CRC-32; in order."""
    shift = size - len(tail)  # `zipfile` counts from the beginning of what it is given
    found = {}
    with zipfile.ZipFile(io.BytesIO(tail)) as archive:
        for one in sorted(archive.infolist(), key=lambda one: one.header_offset):
            start = content_offset(one.filename, one.header_offset + shift)
            stop = start + one.compress_size
            stored = one.compress_type == zipfile.ZIP_STORED
            if not stored or not 0 <= start <= stop <= size or one.filename in found:
                raise ValueError(f"{one.filename!r:.80} has an impossible place")
            found[one.filename] = start, stop, one.CRC
    return found


def _data_of(members: Mapping[str, Any], name: str) -> list[str]:
    """Return the files with the values and with the list of them; `HubError` without them."""
    data = [one for one in members if f"/{DATA}/" in f"/{one}"]
    if PAGES not in members or len(data) != 2 or METADATA not in {_last(one) for one in members}:
        raise HubError(
            f"{name} was published by an earlier version of offmarl, and cannot be streamed: "
            "`offmarl pull` downloads it; push it again to stream it."
        )
    return data


def _check_places(members: dict[str, tuple[int, int, int]], name: str) -> None:
    """Raise `VaultFormatError` unless the files of an archive follow one another without gaps.

    The directory of an archive has no checksum, and a damaged place would be that of other data.
    """
    at = 0
    for member, (start, stop, _) in members.items():
        if start != content_offset(member, at):
            raise VaultFormatError(f"{name} is damaged: {member!r:.80} has an impossible place.")
        at += framed(member, stop - start)


def _inside(places: dict[str, Span], size: int, name: str) -> dict[str, Span]:
    """Return the places of values; `VaultFormatError` if one is outside of its file."""
    if any(offset + length > size for offset, length in places.values()):
        raise VaultFormatError(f"{name} is damaged: it lists values that it does not hold.")
    return places


def check_size(size: int, name: str) -> None:
    """Raise `HubError` if a file of an archive is too large to be read into memory."""
    if size > _MOST:
        raise HubError(f"{name} has {size:,} bytes; at most {_MOST:,} are read of such a file.")


def _last(name: str) -> str:
    return name.rpartition("/")[2]


class Archive:
    """A published archive, read by range requests.

    Parameters
    ----------
    pages
        Its pages.
    """

    def __init__(self, pages: Pages):
        self.pages = pages
        size = pages.remote.size
        try:
            tail = pages.tail(_TAIL)
            self.directory = read_directory(pages.read, tail, size, pages.name)
        except (VaultFormatError, HubError):
            pages.drop_tail()
            raise
        pages.check_with(self.directory.pages, self.directory.hashed)
        pages.keep_tail(tail)

    def file(self, name: str) -> bytes | None:
        """Return the content of one of its files, by the last part of its name."""
        if (span := self.directory.files.get(name)) is None:
            return None
        check_size(span[1] - span[0], f"{name} of {self.pages.name}")
        return self.pages.read(*span)

    def value(self, key: str) -> bytes | None:
        """Return the value of a key; None if it does not exist."""
        span = self.span(key)
        return None if span is None else self.pages.read(*span) if span[0] < span[1] else b""

    def span(self, key: str) -> Span | None:
        """Return where the value of a key is in the archive."""
        if (place := self.directory.places.get(key)) is None:
            return None
        start = self.directory.start + place[0]
        return start, start + place[1]


def _fetch(spans: Iterable[tuple[Archive, list[Span]]]) -> None:
    """Fetch intervals of archives, several requests at a time."""
    coming = [archive.pages.start(some) for archive, some in spans]
    for future in (one for some in coming for one in some):
        future.result()


class ShardedValues:
    """The values of a published vault, read from its shards; a `KeyValues` that nothing writes to.

    Parameters
    ----------
    files
        The archives of the vault, as its card lists them.
    open_pages
        Returns the pages of an archive.
    name
        What to call the vault in an error.
    """

    def __init__(self, files: Sequence[File], open_pages: Callable[[File], Pages], name: str):
        self.name, self._files = name, {file.path: file for file in files}
        self._open_pages = open_pages
        self._archive = lru_cache(_OPEN)(self._open)
        first = files[0]
        self._index = self._open(first.path)
        documents = {
            key: value
            for key in self._index.directory.places
            if key.endswith(".zarray") and (value := self._index.value(key)) is not None
        }
        self._grids: dict[str, Grid] = grids_of(documents)
        self.digest: str | None = None
        self._shards, self._stops = [first.path], np.array([layout.TIME_AXIS])
        if (listed := self._index.file(LIST)) is not None:
            self._read_list(load_json(listed, f"{LIST} of {name}"))

    def _read_list(self, listed: dict[str, Any]) -> None:
        try:
            shards = listed["shards"]
            self._shards = [str(shard["path"]) for shard in shards]
            firsts = np.array([int(shard["first"]) for shard in shards], np.int64)
            self._stops = np.array([int(shard["stop"]) for shard in shards], np.int64)
            self.digest = str(listed["digest"])
            if len(shards) < 2:
                raise ValueError("it lists fewer than two shards")
            if firsts.tolist() != [0, *self._stops[:-1].tolist()]:
                raise ValueError("its shards do not follow one another")
            if (firsts >= self._stops).any():
                raise ValueError("it has an empty shard")
            if any((firsts % grid.chunks[1]).any() for grid in self._grids.values()):
                raise ValueError("a shard begins inside of a chunk")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise HubError(f"the index of {self.name} is damaged ({error}).") from error

    @property
    def metadata(self) -> bytes | None:
        """The content of ``metadata.json``."""
        return self._index.file(METADATA)

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of keys; None for each key that does not exist."""
        if METADATA in keys:
            return [self.metadata if key == METADATA else self.read([key])[0] for key in keys]
        return [archive.value(own) for archive, own in map(self._locate, keys)]

    def prefetch(self, keys: Sequence[str]) -> None:
        """Fetch the values of keys, several requests at a time, so that `read` finds them."""
        spans: dict[str, tuple[Archive, list[Span]]] = {}
        size = 0
        for key in keys:
            archive, own = self._locate(key)
            if (span := archive.span(own)) is not None:
                spans.setdefault(archive.pages.name, (archive, []))[1].append(span)
                size += span[1] - span[0]
            if size > _TOGETHER:
                _fetch(spans.values())
                spans, size = {}, 0
        _fetch(spans.values())

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """Return the keys that begin with a prefix, and the bytes of their values."""
        found = {}
        for key, (_, length) in self._index.directory.places.items():
            if key.startswith(prefix):
                found[key] = length
        if len(self._shards) > 1 and any(
            one.startswith(prefix) or prefix.startswith(one) for one in self._grids
        ):
            found |= self._chunk_sizes(prefix)
        return found

    def _chunk_sizes(self, prefix: str) -> dict[str, int]:
        """Return the bytes of chunks by key, which needs the directories of all shards."""
        found = {}
        for path, first in zip(self._shards, [0, *self._stops.tolist()], strict=False):
            for key, (_, length) in self._archive(path).directory.places.items():
                if (cut := cut_chunk_key(key, self._grids)) is not None:
                    name, grid, index = cut
                    index[1] += first // grid.chunks[1]
                    whole = name + grid.separator.join(map(str, index))
                    if whole.startswith(prefix):
                        found[whole] = length
        return found

    def generations(self, keys: Sequence[str]) -> list[bytes]:
        """Return a stamp for each key; a commit on the hub never changes."""
        return [b"1"] * len(keys)

    def commit(self, writes: Mapping[str, bytes], fence: Mapping[str, bytes]) -> None:
        """Raise `VaultConflictError`: published data is not written to."""
        del writes, fence
        raise VaultConflictError(f"{self.name} is published, and cannot be changed: pull it first.")

    def clear(self) -> None:
        """Raise `VaultConflictError`: published data is not removed."""
        self.commit({}, {})

    def _locate(self, key: str) -> tuple[Archive, str]:
        """Return the archive that holds a key, and the key there."""
        if len(self._shards) == 1 or key.startswith(layout.OWN_PREFIX):
            return self._index, key
        if (cut := cut_chunk_key(key, self._grids)) is None:
            return self._index, key
        prefix, grid, index = cut
        step = index[1] * grid.chunks[1]
        number = int(np.searchsorted(self._stops, step, side="right"))
        if number == len(self._shards):
            return self._index, key
        first = int(self._stops[number - 1]) if number else 0
        index[1] -= first // grid.chunks[1]
        own = prefix + grid.separator.join(map(str, index))
        return self._archive(self._shards[number]), own

    def _open(self, path: str) -> Archive:
        file = self._files.get(path)
        if file is None:
            raise HubError(f"the card of {self.name} does not list {path!r:.80}: push it again.")
        return Archive(self._open_pages(file))


def is_index(file: File) -> bool:
    """Whether a file of a card is the index of a vault in several shards."""
    return file.path.endswith(f"/{INDEX}.zip")
