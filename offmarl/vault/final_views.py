"""The final views of a vault: what the last step of each episode led to."""

from functools import cached_property

import numpy as np

from offmarl.types import EnvSpec, View, map_tree
from offmarl.vault import encoding, layout
from offmarl.vault.layout import NumpyArray
from offmarl.vault.manifest import read_table
from offmarl.vault.store import Store

_IN_MEMORY_BYTES = 2**25
"""Size up to which all final views are kept in memory; larger ones are read in blocks."""


class FinalViews:
    """The final views of a vault, which may not fit in memory.

    Parameters
    ----------
    store, spec
        The vault's store and spec.
    count
        Number of final views: F.
    in_memory_bytes
        Size up to which all views are read at once and kept; 32 MB by default.
    """

    def __init__(self, store: Store, spec: EnvSpec, count: int, in_memory_bytes: int | None = None):
        most = _IN_MEMORY_BYTES if in_memory_bytes is None else in_memory_bytes
        self._store = store
        self._dtype = encoding.view_dtype(spec)
        self._count = count
        self._in_memory = count * self._dtype.itemsize <= most

    def prepare_fork(self) -> None:
        """Read what forked processes need besides the blocks of views."""
        _ = self.all if self._in_memory else self._firsts

    @cached_property
    def all(self) -> View:
        """All final views, ``(F, ...)``."""
        table = read_table(self._store, layout.FINALS_PREFIX, self._count, self._dtype)
        return encoding.unpack_view(table)

    def read(self, numbers: NumpyArray) -> View:
        """Return the views of these numbers, ``(len(numbers), ...)``."""
        if self._in_memory:
            found: View = map_tree(lambda leaf: leaf[numbers], self.all)
            return found
        views: NumpyArray = np.empty(len(numbers), self._dtype)
        block = self._block_of(numbers)
        keys = {one: layout.finals_key(int(self._firsts[one])) for one in np.unique(block).tolist()}
        self._store.driver.prefetch([*keys.values()])
        for one, key in keys.items():
            (data,) = self._store.get_all([key])
            first, here = self._firsts[one], block == one
            views[here] = np.frombuffer(data, self._dtype)[numbers[here] - first]
        return encoding.unpack_view(views)

    def in_block(self, key: str, numbers: NumpyArray) -> NumpyArray:
        """Return the mask of the numbers that are stored under a key; false for -1."""
        first = int(key.removeprefix(layout.FINALS_PREFIX))
        return (numbers >= 0) & (self._firsts[self._block_of(numbers)] == first)

    def _block_of(self, numbers: NumpyArray) -> NumpyArray:
        return np.searchsorted(self._firsts, numbers, side="right") - 1

    @cached_property
    def _firsts(self) -> NumpyArray:
        """The number of the first view in each block of views."""
        prefix = layout.FINALS_PREFIX
        return np.array([int(key.removeprefix(prefix)) for key in self._store.keys(prefix)])
