"""Reads the commits of an OCDBT store: the tree of keys of each, and the values.

A store keeps its earlier commits until it is compacted.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore as ts

from offmarl.errors import VaultFormatError
from offmarl.vault.drivers import Driver, TensorStoreDriver
from offmarl.vault.files import check_name
from offmarl.vault.forking import use_tensorstore
from offmarl.vault.key_values import Registered
from offmarl.vault.layout import load_json, unseal
from offmarl.vault.store import Store


class ValueLocation(NamedTuple):
    """Location of a value in a data file."""

    file: str
    offset: int
    length: int


class Tree(NamedTuple):
    """The tree of one commit of a store."""

    values: dict[str, ValueLocation | bytes]
    """Location of each key's value, or the value itself if it is short."""
    live_bytes: Mapping[str, int]
    """By data file, the bytes in it that values and nodes take."""
    lost: tuple[str, ...]
    """Why parts of the tree cannot be read; the keys below these parts are missing."""

    @property
    def files(self) -> frozenset[str]:
        """The data files that values and nodes are in."""
        return frozenset(self.live_bytes)


def current_tree(driver: TensorStoreDriver) -> Tree:
    """Read the tree of the last commit."""
    *_, last = _manifest(driver)["versions"]
    return _read(driver, last["root"].get("location"))


def config_of(driver: TensorStoreDriver) -> dict[str, Any]:
    """Return the settings of a store, its identity among them."""
    found: dict[str, Any] = _manifest(driver)["config"]
    return found


def live_bytes(driver: TensorStoreDriver) -> int:
    """Return the bytes that the tree and the values of the last commit take in data files."""
    statistics = _manifest(driver)["versions"][-1]["root"]["statistics"]
    return int(statistics["num_tree_bytes"] + statistics["num_indirect_value_bytes"])


def live_files(driver: TensorStoreDriver) -> frozenset[str]:
    """Return the data files that anything in the store refers to, its earlier commits included."""
    found: set[str] = set()
    for kind, node in _history(driver, _manifest(driver)):
        found |= {_place(node).file} if kind == "versions" else _read(driver, node).files
    return frozenset(found)


def _manifest(driver: TensorStoreDriver) -> Any:
    use_tensorstore(driver.path)
    driver.check()
    return ts.ocdbt.dump(driver.files).result()


def _history(driver: TensorStoreDriver, node: Any) -> Iterator[tuple[str, str]]:
    """Yield where the roots of all commits are, the latest first, and the nodes that list them."""
    for version in reversed(node.get("versions") or node.get("entries", [])):
        if "location" in version.get("root", {}):
            yield "root", version["root"]["location"]
    for child in reversed(node.get("version_tree_nodes") or node.get("entries", [])):
        if "location" in child:
            yield "versions", child["location"]
            with suppress(ValueError, OSError):
                found = ts.ocdbt.dump(driver.files, child["location"]).result()
                yield from _history(driver, found)


def _read(driver: TensorStoreDriver, root: str | None) -> Tree:
    values: dict[str, ValueLocation | bytes] = {}
    live_bytes: Counter[str] = Counter()
    lost: list[str] = []
    # Each node must be lower than its parent; otherwise a forged tree could be endless.
    waiting: list[tuple[str, bytes, int | None]] = [(root, b"", None)] if root else []
    while waiting:
        node, prefix, above = waiting.pop()
        try:
            place = _place(node)
            live_bytes[place.file] += place.length
            found = ts.ocdbt.dump(driver.files, node).result()
        except (ValueError, OSError) as error:
            lost.append(str(error).partition(" [")[0])
            continue
        height = found["height"]
        if above is not None and height != above - 1:
            lost.append(f"{node} is in the wrong place of the tree")
            continue
        for entry in found["entries"]:
            key = prefix + bytes(entry["key"])
            if "location" in entry:
                below = prefix + bytes(entry["subtree_common_prefix"])
                waiting.append((entry["location"], below, height))
                continue
            try:
                value = _value(entry)
            except ValueError as error:
                lost.append(f"the place of {key.decode(errors='replace')!r:.200}: {error}")
                continue
            values[key.decode(errors="replace")] = value
            if isinstance(value, ValueLocation):
                live_bytes[value.file] += value.length
    return Tree(values, live_bytes, tuple(lost))


def _value(entry: Any) -> ValueLocation | bytes:
    if "inline_value" in entry:
        return bytes(entry["inline_value"])
    return _place(entry["indirect_value"])


def _place(location: str) -> ValueLocation:
    """Parse ``kind:base:file:offset:length``; `ValueError` if it leads out of the store."""
    _, base, file, offset, length = location.split(":")
    return ValueLocation(check_name(base + file), int(offset), int(length))


class Contents:
    """The content of one commit of a store, the last or an earlier one.

    Attributes
    ----------
    driver
        The place of the store.
    tree
        The keys and the locations of their values.
    """

    def __init__(self, driver: Driver, tree: Tree):
        self.driver = driver
        self.tree = tree

    @staticmethod
    def of(store: Store) -> "Contents":
        """Return the content of the last commit of a store."""
        driver = store.driver
        if isinstance(driver, Registered):
            return _RegisteredContents(driver)
        assert isinstance(driver, TensorStoreDriver)
        return Contents(driver, current_tree(driver))

    def __contains__(self, key: str) -> bool:
        return key in self.tree.values

    def size(self, key: str) -> int:
        """Return the size in bytes of the stored value of a key that exists."""
        value = self.tree.values[key]
        return value.length if isinstance(value, ValueLocation) else len(value)

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, sorted."""
        return sorted(key for key in self.tree.values if key.startswith(prefix))

    def is_cut_off(self, key: str) -> bool:
        """Whether a value reaches past the end of its file; checked on this machine only."""
        place = self.tree.values[key]
        if not isinstance(place, ValueLocation) or not self.driver.can_map:
            return False
        return place.offset + place.length > self._sizes.get(place.file, 0)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        files = {name: Path(self.driver.directory, name) for name in self.tree.files}
        return {name: file.lstat().st_size for name, file in files.items() if file.is_file()}

    def fetch(self, key: str) -> Callable[[], bytes]:
        """Start to read the stored value of a key that exists; calling the result returns it."""
        place = self.tree.values[key]
        if not isinstance(place, ValueLocation):
            return lambda: place
        span = slice(place.offset, place.offset + place.length)
        assert isinstance(self.driver, TensorStoreDriver)
        read = self.driver.files.read(place.file, byte_range=span)
        return lambda: _whole(key, read, place.length)

    def get(self, key: str) -> bytes:
        """Return the value of a key; `VaultFormatError` where it is missing or damaged."""
        if key not in self:
            raise VaultFormatError(f"{key} is missing.")
        return unseal(key, self.fetch(key)(), self.driver.path)

    def get_json(self, key: str) -> dict[str, Any]:
        """Return the JSON object that a key holds; `VaultFormatError` where there is none."""
        return load_json(self.get(key), key)


class _RegisteredContents(Contents):
    """The content of a store in a registered place, whose files offmarl cannot inspect."""

    def __init__(self, driver: Registered):
        self._values_of = driver.values
        self._value_sizes = driver.values.sizes("")
        super().__init__(driver, Tree(dict.fromkeys(self._value_sizes, b""), {}, ()))

    def size(self, key: str) -> int:
        """Return the bytes stored under a key that exists."""
        return self._value_sizes[key]

    def fetch(self, key: str) -> Callable[[], bytes]:
        """Return a function that reads the value of a key."""

        def read() -> bytes:
            (value,) = self._values_of.read([key])
            if value is None:
                raise VaultFormatError(f"{key} is missing.")
            return value

        return read


def _whole(key: str, read: Any, length: int) -> bytes:
    """Return the bytes read; `VaultFormatError` if some are missing."""
    try:
        found = read.result()
    except (ValueError, OSError) as error:
        raise VaultFormatError(f"{key} cannot be read from its data file: {error}.") from error
    if found.state != "value" or len(found.value) != length:
        raise VaultFormatError(f"the data file of {key} is missing or truncated.")
    return bytes(found.value)
