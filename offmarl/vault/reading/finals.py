"""Reading the views that episodes ended with."""

from functools import cached_property

import numpy as np

from offmarl.types import EnvSpec, View
from offmarl.vault import encoding, layout
from offmarl.vault.layout import NumpyArray
from offmarl.vault.reading.own import read_table
from offmarl.vault.storage.store import Store

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
    """

    def __init__(self, store: Store, spec: EnvSpec, count: int):
        self._store = store
        self._dtype = encoding.view_dtype(spec)
        self._count = count

    @cached_property
    def all(self) -> View:
        """All of them, ``(F, ...)``."""
        table = read_table(self._store, layout.FINALS_PREFIX, self._count, self._dtype)
        return encoding.unpack_view(table)

    def read(self, numbers: NumpyArray) -> View:
        """Read some, ``(len(numbers), ...)``."""
        if self._count * self._dtype.itemsize <= _IN_MEMORY_BYTES:
            return View(*(field[numbers] for field in self.all))
        views: NumpyArray = np.empty(len(numbers), self._dtype)
        block = np.searchsorted(self._firsts, numbers, side="right") - 1
        for one in np.unique(block):
            first = self._firsts[one]
            (data,) = self._store.get_all([layout.finals_key(int(first))])
            here = block == one
            views[here] = np.frombuffer(data, self._dtype)[numbers[here] - first]
        return encoding.unpack_view(views)

    @cached_property
    def _firsts(self) -> NumpyArray:
        """The number of the first view in each block of them."""
        prefix = layout.FINALS_PREFIX
        return np.array([int(key.removeprefix(prefix)) for key in self._store.keys(prefix)])
