"""Reading the views that episodes ended with."""

from functools import cached_property

import numpy as np

from offmarl.types import EnvSpec, View
from offmarl.vault import encoding, layout
from offmarl.vault.layout import NumpyArray
from offmarl.vault.manifest import read_table
from offmarl.vault.store import Store

_IN_MEMORY_BYTES = 2**25
"""Views that take more are read in blocks when they are asked for."""


class FinalViews:
    """The final views of a vault, which may be more than fit in memory.

    Parameters
    ----------
    store, spec
        The vault's.
    count
        How many there are.
    in_memory_bytes
        Where all take no more, they are read at once and kept.
    """

    def __init__(
        self, store: Store, spec: EnvSpec, count: int, in_memory_bytes: int = _IN_MEMORY_BYTES
    ):
        self._store = store
        self._dtype = encoding.view_dtype(spec)
        self._count = count
        self._in_memory = count * self._dtype.itemsize <= in_memory_bytes

    @cached_property
    def all(self) -> View:
        """All of them, ``(F, ...)``."""
        table = read_table(self._store, layout.FINALS_PREFIX, self._count, self._dtype)
        return encoding.unpack_view(table)

    def read(self, numbers: NumpyArray) -> View:
        """Read some, ``(len(numbers), ...)``."""
        if self._in_memory:
            return View(*(field[numbers] for field in self.all))
        views: NumpyArray = np.empty(len(numbers), self._dtype)
        block = self._block_of(numbers)
        for one in np.unique(block):
            first = self._firsts[one]
            (data,) = self._store.get_all([layout.finals_key(int(first))])
            here = block == one
            views[here] = np.frombuffer(data, self._dtype)[numbers[here] - first]
        return encoding.unpack_view(views)

    def in_block(self, key: str, numbers: NumpyArray) -> NumpyArray:
        """Return which views are stored under a key; none that are -1."""
        first = int(key.removeprefix(layout.FINALS_PREFIX))
        return (numbers >= 0) & (self._firsts[self._block_of(numbers)] == first)

    def _block_of(self, numbers: NumpyArray) -> NumpyArray:
        return np.searchsorted(self._firsts, numbers, side="right") - 1

    @cached_property
    def _firsts(self) -> NumpyArray:
        """The number of the first view in each block of them."""
        prefix = layout.FINALS_PREFIX
        return np.array([int(key.removeprefix(prefix)) for key in self._store.keys(prefix)])
