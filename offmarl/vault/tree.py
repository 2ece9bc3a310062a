"""The tree of an OCDBT store: which keys a commit has, and where in the files their values lie.

A store keeps its earlier commits until it is compacted, and even without its manifest the nodes in
its data files can be found: so what a damaged store held can still be known.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import tensorstore as ts

from offmarl.vault import regular_files
from offmarl.vault.drivers import TensorStoreDriver
from offmarl.vault.layout import DATA, MANIFEST

_NODE_MAGIC = bytes.fromhex("0cdb20de")
"""What every node of the tree begins with; its length follows in 8 bytes, little-endian."""
_HEADER = 12


class ValueLocation(NamedTuple):
    """Where a value lies."""

    file: str
    offset: int
    length: int


class Tree(NamedTuple):
    """What one commit of a store holds."""

    values: dict[str, ValueLocation | bytes]
    """Where the value of each key lies; short values are in the nodes themselves."""
    files: frozenset[str]
    """The data files that values and nodes are in."""
    lost: tuple[str, ...]
    """Why parts of the tree cannot be read; the keys below them are missing here."""


def current(driver: TensorStoreDriver) -> Tree:
    """Read the tree of the last commit.

    Raises
    ------
    ValueError, OSError
        The manifest cannot be read.
    """
    *_, last = _manifest(driver)["versions"]
    return _read(driver, last["root"].get("location"))


def config_of(driver: TensorStoreDriver) -> dict[str, Any]:
    """Return the settings of a store, its identity among them.

    Raises
    ------
    ValueError, OSError
        The manifest cannot be read.
    """
    found: dict[str, Any] = _manifest(driver)["config"]
    return found


def live_files(driver: TensorStoreDriver) -> frozenset[str]:
    """Return the data files that anything in the store refers to, its earlier commits included.

    Raises
    ------
    ValueError, OSError
        The manifest cannot be read.
    """
    found: set[str] = set()
    for kind, node in _history(driver, _manifest(driver)):
        found |= {_place(node).file} if kind == "versions" else _read(driver, node).files
    return frozenset(found)


def earlier(driver: TensorStoreDriver) -> Iterator[Tree]:
    """Yield the trees of earlier commits, the latest first, as far as they can be found.

    Where the manifest is gone they are those whose nodes lie in the data files, in no order.
    """
    try:
        history = _history(driver, _manifest(driver))
    except (ValueError, OSError):
        roots = _scattered(driver)
    else:
        roots = (node for kind, node in history if kind == "root")
        next(roots, None)
    for root in roots:
        yield _read(driver, root)


def _manifest(driver: TensorStoreDriver) -> Any:
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


def _scattered(driver: TensorStoreDriver) -> Iterator[str]:
    """Yield what may be roots of trees: every node in the data files."""
    driver.check()
    for name in driver.files.list().result():
        file = name.decode()
        if file == MANIFEST or not file.startswith(f"{DATA}/"):
            continue
        data = bytes(driver.files.read(file).result().value)
        offset = data.find(_NODE_MAGIC)
        while offset >= 0:
            size = int.from_bytes(data[offset + 4 : offset + _HEADER], "little")
            if _HEADER < size <= len(data) - offset:
                yield f"btreenode::{file}:{offset}:{size}"
            offset = data.find(_NODE_MAGIC, offset + 1)


def _read(driver: TensorStoreDriver, root: str | None) -> Tree:
    values: dict[str, ValueLocation | bytes] = {}
    files: set[str] = set()
    lost: list[str] = []
    # The height of every node is less than its parent's, or a forged tree might have no end.
    waiting: list[tuple[str, bytes, int | None]] = [(root, b"", None)] if root else []
    while waiting:
        node, prefix, above = waiting.pop()
        try:
            files.add(_place(node).file)
            found = ts.ocdbt.dump(driver.files, node).result()
        except (ValueError, OSError) as error:
            lost.append(str(error).partition(" [")[0])
            continue
        height = found["height"]
        if above is not None and height != above - 1:
            lost.append(f"{node} is not where it belongs")
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
                files.add(value.file)
    return Tree(values, frozenset(files), tuple(lost))


def _value(entry: Any) -> ValueLocation | bytes:
    if "inline_value" in entry:
        return bytes(entry["inline_value"])
    return _place(entry["indirect_value"])


def _place(location: str) -> ValueLocation:
    """Take apart ``kind:base:file:offset:length``; `ValueError` where it leads out of the store."""
    _, base, file, offset, length = location.split(":")
    return ValueLocation(regular_files.check_name(base + file), int(offset), int(length))
