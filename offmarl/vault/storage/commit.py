"""One commit of an OCDBT store: its tree of keys, and the values.

A store keeps each value unchanged in one of its data files, and its tree records the file and the
offset. `Contents` walks that tree once. If the files are mapped, every step of an uncompressed
array then has a known address, so random windows of a dataset larger than memory are gathered as
fast as from an array in memory. A store keeps its earlier commits until it is compacted.
"""

import ctypes
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from offmarl.errors import VaultFormatError
from offmarl.vault.format.layout import damage_error, unseal
from offmarl.vault.storage import files
from offmarl.vault.storage.location import use_tensorstore
from offmarl.vault.storage.store import OcdbtStore, Registered, Store

_PROT_NONE = 0
_MAP_FIXED = 0x10  # on Linux and macOS; Python's mmap has neither constant


class ValueLocation(NamedTuple):
    """Location of a value in a data file."""

    file: str
    offset: int
    length: int


class Tree(NamedTuple):
    """The tree of one commit of a store."""

    values: dict[str, ValueLocation | bytes]
    """Location of the value of each key, or the value itself if it is short."""
    live_bytes: Mapping[str, int]
    """By data file, the bytes in it that values and nodes take."""
    lost: tuple[str, ...]
    """Why parts of the tree cannot be read; the keys below these parts are missing."""

    @property
    def files(self) -> frozenset[str]:
        """The data files that values and nodes are in."""
        return frozenset(self.live_bytes)


def current_tree(store: OcdbtStore) -> Tree:
    """Read the tree of the last commit."""
    *_, last = _manifest(store)["versions"]
    return _read(store, last["root"].get("location"))


def config_of(store: OcdbtStore) -> dict[str, Any]:
    """Return the settings of a store, its identity among them."""
    return dict(_manifest(store)["config"])


def live_bytes(store: OcdbtStore) -> int:
    """Return the bytes that the tree and the values of the last commit take in data files."""
    statistics = _manifest(store)["versions"][-1]["root"]["statistics"]
    return int(statistics["num_tree_bytes"] + statistics["num_indirect_value_bytes"])


def live_files(store: OcdbtStore) -> frozenset[str]:
    """Return the data files that anything in the store refers to, its earlier commits included.

    `ValueError` or `OSError` if a part cannot be read, since any file may then be needed.
    """
    names: set[str] = set()
    seen: set[str] = set()
    waiting: list[Any] = [_manifest(store)]
    while waiting:
        node = waiting.pop()
        for commit in node.get("versions") or node.get("entries", []):
            tree = _read(store, commit.get("root", {}).get("location"), seen)
            if tree.lost:
                raise ValueError(tree.lost[0])
            names |= tree.files
        for child in node.get("version_tree_nodes") or node.get("entries", []):
            place = child.get("location")
            if place is not None and place not in seen:
                seen.add(place)
                names.add(_place(place).file)
                waiting.append(ts.ocdbt.dump(store.files, place).result())
    return frozenset(names)


def _manifest(store: OcdbtStore) -> Any:
    use_tensorstore(store.path)
    store.check()
    return ts.ocdbt.dump(store.files).result()


def _read(store: OcdbtStore, root: str | None, seen: set[str] | None = None) -> Tree:
    """Read the nodes of a tree whose locations are not in ``seen``, and add these.

    A forged tree could name one node many times, or itself.
    """
    values: dict[str, ValueLocation | bytes] = {}
    live_bytes: Counter[str] = Counter()
    lost: list[str] = []
    seen = set() if seen is None else seen
    waiting: list[tuple[str, bytes, int | None]] = [(root, b"", None)] if root else []
    while waiting:
        location, prefix, parent_height = waiting.pop()
        if location in seen:
            continue
        seen.add(location)
        try:
            place = _place(location)
            live_bytes[place.file] += place.length
            node = ts.ocdbt.dump(store.files, location).result()
        except (ValueError, OSError) as error:
            lost.append(str(error).partition(" [")[0])
            continue
        if parent_height is not None and node["height"] != parent_height - 1:
            lost.append(f"{location} is in the wrong place of the tree")
            continue
        for entry in node["entries"]:
            key = prefix + bytes(entry["key"])
            if "location" in entry:
                child_prefix = prefix + bytes(entry["subtree_common_prefix"])
                waiting.append((entry["location"], child_prefix, node["height"]))
                continue
            name = key.decode(errors="replace")
            try:
                if "inline_value" in entry:
                    values[name] = bytes(entry["inline_value"])
                else:
                    values[name] = value = _place(entry["indirect_value"])
                    live_bytes[value.file] += value.length
            except ValueError as error:
                lost.append(f"the place of {name!r:.200}: {error}")
    return Tree(values, live_bytes, tuple(lost))


def _place(location: str) -> ValueLocation:
    """Parse ``kind:base:file:offset:length``; `ValueError` if it leads out of the store."""
    _, base, file, offset, length = location.split(":")
    return ValueLocation(files.check_name(base + file), int(offset), int(length))


class Contents:
    """The content of one commit of a store; if it is mapped, it never changes."""

    region: "Region | None" = None
    """The mapped data files."""

    def __init__(self, store: Store, tree: Tree):
        self.store, self.path, self.tree = store, store.path, tree

    @staticmethod
    def of(store: Store) -> "Contents":
        """Return the content of the last commit of a store."""
        if isinstance(store, Registered):
            return _RegisteredContents(store)
        assert isinstance(store, OcdbtStore)
        return Contents(store, current_tree(store))

    @staticmethod
    def mapped(store: OcdbtStore) -> "Contents":
        """Map the last commit; `OSError` or `ValueError` if not all files can be read."""
        contents = Contents(store, current_tree(store))
        if contents.tree.lost:
            raise ValueError(contents.tree.lost[0])
        places = [x for x in contents.tree.values.values() if isinstance(x, ValueLocation)]
        region = Region(store.directory, sorted({place.file for place in places}))
        for place in places:
            if place.offset + place.length > region.sizes[place.file]:
                raise ValueError(f"{place.file} was cut short")
        contents.region = region
        return contents

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, sorted."""
        return sorted(key for key in self.tree.values if key.startswith(prefix))

    def stored(self, key: str) -> tuple[int | None, str]:
        """Return the size of a stored value, None if it is missing, and a description of its fault.

        The value is not read. Only on this machine is it known whether its file is long enough.
        """
        if key not in self.tree.values:
            return None, "it is missing"
        place = self.tree.values[key]
        if not isinstance(place, ValueLocation):
            return len(place), ""
        is_cut_off = self.store.is_local and (
            place.offset + place.length > self._sizes.get(place.file, 0)
        )
        return place.length, "its data file is missing or truncated" if is_cut_off else ""

    @cached_property
    def _sizes(self) -> dict[str, int]:
        paths = {name: Path(self.store.directory, name) for name in self.tree.files}
        return {name: file.lstat().st_size for name, file in paths.items() if file.is_file()}

    def start(self, key: str) -> Callable[[], bytes]:
        """Start to read the stored value of a key that exists; calling the result returns it."""
        place = self.tree.values[key]
        if not isinstance(place, ValueLocation):
            return lambda: place
        span = slice(place.offset, place.offset + place.length)
        assert isinstance(self.store, OcdbtStore)
        future = self.store.files.read(place.file, byte_range=span)
        return lambda: _finish_read(key, future, place.length)

    def get(self, key: str) -> bytes:
        """Return the value of a key; `VaultFormatError` where it is missing or damaged."""
        if key not in self.tree.values:
            raise VaultFormatError(f"{key} is missing.")
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that must exist."""
        if lost := [key for key in keys if key not in self.tree.values]:
            raise damage_error(self.path, f"it has lost {lost[0]}")
        value_of = self._value if self.region else lambda key: self.start(key)()
        values = unseal({key: bytes(value_of(key)) for key in keys}, self.path)
        return [values[key] for key in keys]

    def fetch(self, keys: Sequence[str], _: int) -> Iterator[Any]:
        """Yield the stored values of keys of mapped files, not copied; None for missing ones."""
        return map(self._value, keys)

    def _value(self, key: str) -> Any:
        place = self.tree.values.get(key)
        if not isinstance(place, ValueLocation) or self.region is None:
            return place
        begin = self.region.starts[place.file] + place.offset
        return self.region.bytes[begin : begin + place.length].data


class _RegisteredContents(Contents):
    """The content of a store in a registered place, whose files offmarl cannot inspect."""

    def __init__(self, store: Registered):
        self._values, self._value_sizes = store.values, store.values.sizes("")
        super().__init__(store, Tree(dict.fromkeys(self._value_sizes, b""), {}, ()))

    def stored(self, key: str) -> tuple[int | None, str]:
        """Return the size of a value, None if it is missing, and a description of its fault."""
        size = self._value_sizes.get(key)
        return size, "it is missing" if size is None else ""

    def start(self, key: str) -> Callable[[], bytes]:
        """Return a function that reads the value of a key."""

        def read() -> bytes:
            (value,) = self._values.read([key])
            if value is None:
                raise VaultFormatError(f"{key} is missing.")
            return value

        return read


def _finish_read(key: str, future: Any, length: int) -> bytes:
    """Return the bytes read; `VaultFormatError` if some are missing."""
    try:
        reply = future.result()
    except (ValueError, OSError) as error:
        raise VaultFormatError(f"{key} cannot be read from its data file: {error}.") from error
    if reply.state != "value" or len(reply.value) != length:
        raise VaultFormatError(f"the data file of {key} is missing or truncated.")
    return bytes(reply.value)


class Region:
    """Regular files of a directory, mapped into one range of memory, one after the other.

    They are unmapped when the last array on them is garbage-collected. The data stays readable
    after the files are deleted. `MemoryError` if the system refuses the map.
    """

    bytes: NDArray[np.uint8]
    """``(size,)``, read-only. Each file begins at a page; do not read between the end of a file and
    the next page."""

    def __init__(self, directory: Path, names: Sequence[str]):
        self.sizes = {name: Path(directory, name).stat().st_size for name in names}
        """Bytes of each file."""
        self.starts: dict[str, int] = {}
        """The index in ``bytes`` at which each file begins."""
        total = 0
        for name, size in self.sizes.items():
            self.starts[name] = total
            total += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        total = max(total, mmap.PAGESIZE)
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANON
        self._base = _map(None, total, _PROT_NONE, anonymous, -1)
        memory = (ctypes.c_ubyte * total).from_address(self._base)
        # Threads may still read when the interpreter ends; the system unmaps the memory then.
        weakref.finalize(memory, _libc().munmap, self._base, total).atexit = False
        for name in names:  # one at a time: there may be more files than a process may open
            self._map_file(directory, name)
        self.bytes = np.frombuffer(memoryview(memory), np.uint8)
        self.bytes.flags.writeable = False

    def _map_file(self, directory: Path, name: str) -> None:
        file = files.open_file(directory, name)
        try:
            if os.fstat(file).st_size < self.sizes[name]:
                raise ValueError(f"{name} was cut short")
            start, shared = self._base + self.starts[name], mmap.MAP_SHARED | _MAP_FIXED
            if self.sizes[name]:
                _map(start, self.sizes[name], mmap.PROT_READ, shared, file)
        finally:
            os.close(file)

    def items(self, size: int) -> NDArray[Any]:
        """Return a view whose item i is the ``size`` bytes from index i on; items overlap.

        Indexing it with an array gathers items. NumPy copies each item as one block, whatever its
        alignment, which is the fastest gather measured.
        """
        count = len(self.bytes) - size + 1
        return np.ndarray((count,), f"V{size}", self.bytes.data, strides=(1,))

    def will_need(self, begins: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Ask the kernel to read intervals of bytes from the disk, without waiting for them."""
        advise, page = _libc().madvise, mmap.PAGESIZE
        first = begins // page * page
        for start, count in zip(first.tolist(), (begins + sizes - first).tolist(), strict=True):
            advise(self._base + start, count, mmap.MADV_WILLNEED)

    def release(self) -> None:
        """Drop the pages from the process's resident memory; they stay in the page cache."""
        _libc().madvise(self._base, len(self.bytes), mmap.MADV_DONTNEED)


def _map(address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    mapped = _libc().mmap(address, size, protection, flags, descriptor, 0)
    if mapped == ctypes.c_void_p(-1).value:
        raise MemoryError(os.strerror(ctypes.get_errno()))
    return int(mapped)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_int64]
    libc.mmap.restype = pointer
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    return libc
