"""The values of one commit of a store, read where the tree says that they lie."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from offmarl.errors import VaultFormatError
from offmarl.vault.checksum import OWN_PREFIX, is_sealed, unseal
from offmarl.vault.drivers import Driver, Registered, TensorStoreDriver
from offmarl.vault.layout import load_json
from offmarl.vault.store import Store
from offmarl.vault.tree import Tree, ValueLocation, current

T = TypeVar("T")


class Contents:
    """What one commit of a store holds, which need not be the last.

    Attributes
    ----------
    driver, tree
        The place, and where the values are in it.
    unsealed
        Keys of offmarl that were read so far and have no checksum; version 1 wrote none.
    """

    def __init__(self, driver: Driver, tree: Tree):
        self.driver = driver
        self.tree = tree
        self.unsealed: set[str] = set()

    @staticmethod
    def of(store: Store) -> "Contents":
        """Return what the last commit of a store holds.

        Raises
        ------
        ValueError, OSError, VaultFormatError
            The manifest cannot be read.
        """
        driver = store.driver
        if isinstance(driver, Registered):
            return _RegisteredContents(driver)
        assert isinstance(driver, TensorStoreDriver)
        return Contents(driver, current(driver))

    def __contains__(self, key: str) -> bool:
        return key in self.tree.values

    def size(self, key: str) -> int:
        """Return the bytes stored under a key that is there."""
        value = self.tree.values[key]
        return value.length if isinstance(value, ValueLocation) else len(value)

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, sorted."""
        return sorted(key for key in self.tree.values if key.startswith(prefix))

    def is_cut_off(self, key: str) -> bool:
        """Whether a value reaches past the end of its file; looked at on this machine only."""
        place = self.tree.values[key]
        if not isinstance(place, ValueLocation) or not self.driver.can_map:
            return False
        return place.offset + place.length > self._sizes.get(place.file, 0)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        files = {name: Path(self.driver.directory, name) for name in self.tree.files}
        return {name: file.lstat().st_size for name, file in files.items() if file.is_file()}

    def fetch(self, key: str) -> Callable[[], bytes]:
        """Start to read what is stored under a key that is there; call the result for it."""
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
        stored = self.fetch(key)()
        if key.startswith(OWN_PREFIX) and not is_sealed(stored):
            self.unsealed.add(key)
        return unseal(key, stored, self.driver.path)

    def get_json(self, key: str) -> dict[str, Any]:
        """Return the JSON object that a key holds; `VaultFormatError` where there is none."""
        return load_json(self.get(key), key)


class _RegisteredContents(Contents):
    """What a store in a registered place holds; its values are not in files that offmarl knows."""

    def __init__(self, driver: Registered):
        self._values_of = driver.values
        self._value_sizes = driver.values.sizes("")
        super().__init__(driver, Tree(dict.fromkeys(self._value_sizes, b""), frozenset(), ()))

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
    """Return the bytes read; `VaultFormatError` where they are not all there."""
    try:
        found = read.result()
    except (ValueError, OSError) as error:
        raise VaultFormatError(f"{key} cannot be read from its data file: {error}.") from error
    if found.state != "value" or len(found.value) != length:
        raise VaultFormatError(f"the data file of {key} is not there, or is cut off.")
    return bytes(found.value)


def ahead(
    items: Iterable[T], start: Callable[[T], Any], item_bytes: int, room: int = 2**26
) -> Iterator[tuple[T, Any]]:
    """Start work on items before its results are asked for, as many as memory has room for."""
    waiting: deque[tuple[T, Any]] = deque()
    depth = max(2, math.ceil(room / max(item_bytes, 2**16)))
    for item in items:
        waiting.append((item, start(item)))
        if len(waiting) == depth:
            yield waiting.popleft()
    yield from waiting
