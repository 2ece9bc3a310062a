"""Shards as they are published: zip archives that are packed while they are read.

The archive of a shard holds a vault: a data file with its values, a data file that lists them, the
manifest and ``metadata.json``. Behind these is ``pages.crc32c``, the checksums of the archive's
pages. A reader fetches the end of an archive, and then the pages that it needs. The index of a
vault of several shards is an archive of the same kind: it holds all values except chunks, and the
list of shards, and is not a vault itself.

Nothing is written to this machine. `PackedFile` makes the bytes of an archive from the vault's
values as they are asked for, the same bytes every time.
"""

import hashlib
import io
import json
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import google_crc32c

from offmarl.terminal import silent
from offmarl.vault import Dataset
from offmarl.vault.bulk import Listing, list_values
from offmarl.vault.layout import DATA, MANIFEST, METADATA
from offmarl.vault.open import SUFFIX
from offmarl.vault.shards import Sharding, Value

PAGE = 2**20
"""Bytes of a page, which has a checksum of its own."""
PAGES = "pages.crc32c"
"""The file of an archive that holds the checksums of the pages before it."""
INDEX = "index"
"""The directory of the index's files in its archive, and the name of the archive."""
LIST = "shards.json"
"""The file of the index that lists the shards."""

SMALLEST, LARGEST = 50_000_000, 1_250_000_000
"""Bytes of a shard: small data has small files, and a terabyte has 800 of them."""
_SHARDS = 16
"""Number of shards up to which they are of the smallest size."""

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_DESCRIPTOR = struct.Struct("<4s3L")
_DATE = 33
"""1980-01-01, as zip archives write it."""
_WIDE = 2**32 - 1


def shard_bytes(total: int) -> int:
    """Return about how many bytes a shard of a vault has, given the bytes of the vault."""
    return min(max(SMALLEST, total // _SHARDS), LARGEST)


class Part(NamedTuple):
    """A part of a file, which is read when it is needed."""

    size: int
    read: Callable[[], bytes]


class Member(NamedTuple):
    """A file in an archive."""

    name: str
    parts: Sequence[Part]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(part.size for part in self.parts)


def member(name: str, content: bytes) -> Member:
    """Return a file of known content."""
    return Member(name, [Part(len(content), partial(bytes, content))])


class PackedFile(io.BufferedIOBase):
    """A zip archive that is packed while it is read; its bytes depend on its members only.

    The members are listed again for each pass, and released at the end of one, so that many files
    can wait to be sent.

    Parameters
    ----------
    members
        Returns the files of the archive, the same ones on each call.

    Attributes
    ----------
    size, hashed
        Bytes of the archive, and those that the pages cover.
    advance
        Called with the number of bytes as they are read for the first time.
    """

    def __init__(self, members: Callable[[], Sequence[Member]]):
        self._members, self.advance = members, silent
        self._layout: _Layout | None = None
        self._position = self._hashed = 0
        self._sums = _Sums()
        self._part: tuple[int, bytes] = (0, b"")
        self.size, self.hashed = self._laid_out().size, self._laid_out().hashed
        self._layout = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Change the position and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to ``size`` bytes from the position on; all that follow by default."""
        stop = self.size if size is None or size < 0 else min(self._position + size, self.size)
        found = bytearray()
        while self._position < stop:
            found += self._read_some(stop)
        if self._position >= self.size:
            self._layout, self._part = None, (0, b"")
        return bytes(found)

    read1 = read

    def _read_some(self, stop: int) -> bytes:
        """Return at least one byte from the position on, and advance it."""
        layout = self._laid_out()
        if self._position >= layout.hashed and self._hashed < layout.hashed:
            self._hash_rest(layout)
        begin, content = self._part
        if not begin <= self._position < begin + len(content):
            self._part = begin, content = layout.part_at(self._position, self._sums)
        if begin <= self._hashed < begin + len(content):
            self._hash(layout, content[self._hashed - begin :])
        found = content[self._position - begin : stop - begin]
        self._position += len(found)
        return found

    def _hash_rest(self, layout: "_Layout") -> None:
        while self._hashed < layout.hashed:
            begin, content = layout.part_at(self._hashed, self._sums)
            self._hash(layout, content[self._hashed - begin :])

    def _hash(self, layout: "_Layout", content: bytes) -> None:
        content = content[: layout.hashed - self._hashed]
        self._sums.add(layout, self._hashed, content)
        self._hashed += len(content)
        self.advance(len(content))

    def _laid_out(self) -> "_Layout":
        if self._layout is None:
            self._layout = _Layout(self._members())
        return self._layout


class _Sums:
    """The checksums of an archive: of its members, and of its pages."""

    def __init__(self) -> None:
        self.members: dict[int, int] = {}
        """CRC-32 by the number of the member."""
        self.pages: list[int] = []
        self._page = self._filled = 0

    def add(self, layout: "_Layout", start: int, content: bytes) -> None:
        """Add the bytes of a part, which follow those added before."""
        number = layout.member_at(start)
        if number is not None:
            self.members[number] = zlib.crc32(content, self.members.get(number, 0))
        rest = memoryview(content)
        while rest:
            some, rest = rest[: PAGE - self._filled], rest[PAGE - self._filled :]
            self._page = google_crc32c.extend(self._page, bytes(some))
            self._filled += len(some)
            if self._filled == PAGE:
                self._end_page()

    def _end_page(self) -> None:
        self.pages.append(self._page)
        self._page = self._filled = 0

    def table(self) -> bytes:
        """Return the checksums of the pages, 4 bytes big-endian each."""
        last = [self._page] if self._filled else []
        return b"".join(page.to_bytes(4, "big") for page in (*self.pages, *last))


class _Layout:
    """Where everything is in an archive.

    Attributes
    ----------
    size
        Bytes of the archive.
    hashed
        Bytes that pages cover: all before the table of their checksums.
    """

    def __init__(self, members: Sequence[Member]):
        self._members = [*members]
        before = sum(framed(one.name, one.size) for one in members)
        self.hashed = before
        self._members.append(Member(PAGES, [Part(4 * -(-before // PAGE), bytes)]))
        self._parts: list[tuple[int, int | None, Callable[[_Sums], bytes]]] = []
        self._headers: list[int] = []
        at = 0
        for number, one in enumerate(self._members):
            self._headers.append(at)
            header = _local_header(one)
            pieces: list[tuple[int, int | None, Callable[[_Sums], bytes]]]
            pieces = [(len(header), None, partial(_constant, header))]
            pieces += [(part.size, number, partial(_lazy, part)) for part in self._content(number)]
            pieces.append((_DESCRIPTOR.size, None, partial(self._descriptor, number)))
            self._parts += pieces
            at += sum(size for size, *_ in pieces)
        directory = len(self._directory(_Sums(), at))
        self._parts.append((directory, None, partial(self._directory, at=at)))
        self._starts = [0, *accumulate(size for size, *_ in self._parts)]
        self.size = self._starts[-1]

    def _content(self, number: int) -> Sequence[Part]:
        return self._members[number].parts

    def member_at(self, position: int) -> int | None:
        """Return the number of the member that has a byte as its content."""
        return self._parts[bisect_right(self._starts, position) - 1][1]

    def part_at(self, position: int, sums: _Sums) -> tuple[int, bytes]:
        """Return the part that a byte is in: where it begins, and its bytes."""
        number = bisect_right(self._starts, position) - 1
        size, owner, read = self._parts[number]
        content = sums.table() if owner == len(self._members) - 1 else read(sums)
        if len(content) != size:
            raise OSError(f"a part of the archive has {len(content)} bytes instead of {size}")
        return self._starts[number], content

    def _crc(self, number: int, sums: _Sums) -> int:
        last = number == len(self._members) - 1
        return zlib.crc32(sums.table()) if last else sums.members.get(number, 0)

    def _descriptor(self, number: int, sums: _Sums) -> bytes:
        size = min(self._members[number].size, _WIDE)
        return _DESCRIPTOR.pack(b"PK\7\10", self._crc(number, sums), size, size)

    def _directory(self, sums: _Sums, at: int) -> bytes:
        entries = [
            _central_header(one, self._headers[number], self._crc(number, sums))
            for number, one in enumerate(self._members)
        ]
        whole = b"".join(entries)
        count = len(entries)
        wide = b""
        if at > _WIDE - 1:
            wide = _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(whole), at)
            wide += _LOCATOR.pack(b"PK\6\7", 0, at + len(whole), 1)
        offset = min(at, _WIDE)
        end = _END.pack(b"PK\5\6", 0, 0, count, count, len(whole), offset, 0)
        return whole + wide + end


def _constant(content: bytes, _: _Sums) -> bytes:
    return content


def _lazy(part: Part, _: _Sums) -> bytes:
    return part.read()


def framed(name: str, size: int) -> int:
    """Return the bytes that a member of this size takes, with what is before and behind it."""
    return content_offset(name, 0) + size + _DESCRIPTOR.size


def content_offset(name: str, header: int) -> int:
    """Return where the content of a member begins, given where its header does."""
    return header + _LOCAL.size + len(name.encode())


def _local_header(one: Member) -> bytes:
    """Return what is before a member's content; the checksum follows the content.

    The size would also follow it, but TensorStore needs it here to find what follows.
    """
    encoded, size = one.name.encode(), min(one.size, _WIDE)
    sizes = 0, size, size
    return _LOCAL.pack(b"PK\3\4", 45, 8, 0, 0, _DATE, *sizes, len(encoded), 0) + encoded


def _central_header(one: Member, offset: int, crc: int) -> bytes:
    encoded = one.name.encode()
    wide = [number for number in (one.size, one.size, offset) if number >= _WIDE]
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size = min(one.size, _WIDE)
    versions, attributes = (45, 45), (0, 0, 0o100644 << 16)
    return (
        _CENTRAL.pack(
            b"PK\1\2",
            *versions,
            *(8, 0, 0, _DATE),
            *(crc, size, size),
            *(len(encoded), len(extra), 0),
            *attributes,
            min(offset, _WIDE),
        )
        + encoded
        + extra
    )


# ------------------------------------------------------------------------------------ vaults


class Packed(NamedTuple):
    """An archive to publish."""

    path: str
    """In the repository."""
    members: Callable[[], Sequence[Member]]


def pack_vault(dataset: Dataset, digest: str) -> list[Packed]:
    """Return the archives that a vault is published as: one, or an index and several shards."""
    sharding = Sharding(dataset, shard_bytes(dataset.num_bytes or 0))
    uid, intervals = dataset.uid, sharding.intervals
    shards = [partial(_shard, dataset, sharding, digest, steps) for steps in intervals]
    if len(shards) == 1:
        return [Packed(f"data/{uid}.zip", shards[0])]
    paths = [f"data/{uid}/{number:05}.zip" for number in range(len(shards))]
    listed = {
        "version": 1,
        "digest": digest,
        "length": dataset.length,
        "unit": sharding.unit,
        "shards": [
            {"path": path, "first": steps.start, "stop": steps.stop}
            for path, steps in zip(paths, intervals, strict=True)
        ],
    }
    index = Packed(f"data/{uid}/{INDEX}.zip", partial(_index, sharding, listed))
    return [index, *(Packed(*one) for one in zip(paths, shards, strict=True))]


def _shard(dataset: Dataset, sharding: Sharding, digest: str, steps: range) -> list[Member]:
    identity = f"{dataset.uid} {digest} {steps.start} {steps.stop}"
    values, listing = _data(sharding.values(steps), identity)
    root = f"{dataset.name}{SUFFIX}/{dataset.uid}"
    return [
        Member(f"{root}/{values.name}", values.parts),
        member(f"{root}/{listing.name}", listing.node),
        member(f"{root}/{MANIFEST}", listing.manifest),
        member(f"{root}/{METADATA}", sharding.metadata),
    ]


def _index(sharding: Sharding, listed: dict[str, Any]) -> list[Member]:
    values, listing = _data(sharding.small_values(), f"{INDEX} {listed['digest']}")
    return [
        Member(f"{INDEX}/{values.name}", values.parts),
        member(f"{INDEX}/{listing.name}", listing.node),
        member(f"{INDEX}/{METADATA}", sharding.metadata),
        member(f"{INDEX}/{LIST}", json.dumps(listed).encode()),
    ]


def _data(values: Sequence[Value], identity: str) -> tuple[Member, Listing]:
    """Return the data file that holds values, and the one that lists them."""
    name = f"{DATA}/{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
    offsets = accumulate((value.size for value in values), initial=0)
    entries = [(one.key, at, one.size) for one, at in zip(values, offsets, strict=False)]
    parts = [Part(value.size, value.read) for value in values]
    return Member(name, parts), list_values(name, entries)
