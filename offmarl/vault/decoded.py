"""Reads compressed arrays of a vault's mapped data files without TensorStore.

Only forked processes do: TensorStore, which decodes with several threads, is faster.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmarl.errors import VaultFormatError
from offmarl.vault import layout
from offmarl.vault.layout import Leaf, NumpyArray, load_json
from offmarl.vault.metadata import Grid
from offmarl.vault.mmap import MappedArray, Snapshot
from offmarl.vault.windows import WindowPlaces, put_steps

_KEPT_BYTES = 2**25
"""Bytes of decoded chunks that are kept for each array."""


@dataclass(frozen=True)
class DecodedArray(MappedArray):
    """An array ``(rows, T, *leaf)`` with compressed chunks in mapped files.

    Attributes
    ----------
    addresses
        Empty: chunks are found by their keys.
    snapshot
        The mapped store.
    grid
        How chunks are encoded.
    complete
        Whether a missing chunk is an error; otherwise it holds the fill value.
    """

    snapshot: Snapshot
    grid: Grid
    complete: bool
    _kept: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make the cache of decoded chunks."""
        count = max(1, _KEPT_BYTES // max(1, self.chunk_bytes))
        object.__setattr__(self, "_kept", lru_cache(count)(self._decode))

    def chunk(self, block: int, number: int) -> NumpyArray:
        """Return one chunk ``(chunk_rows, chunk_steps, *leaf)``, read-only."""
        found: NumpyArray = self._kept(block, number)
        return found

    def _decode(self, block: int, number: int) -> NumpyArray:
        key = self.leaf.chunk_key(self.name, block, number)
        stored = self.snapshot.value(key)
        if stored is None and self.complete:
            raise VaultFormatError(f"the vault has lost {key}: run `offmarl verify`.")
        return self.grid.missing_chunk() if stored is None else self.grid.decode(stored, key)

    def windows_at(self, places: WindowPlaces) -> NumpyArray:
        """Gather ``(W, length, *leaf)``, a chunk after the other."""
        rows, starts, length = places.rows, places.starts, places.length
        out: NumpyArray = np.empty((len(starts), length, *self.leaf.shape), self.leaf.dtype)
        times = starts[:, None] + np.arange(length)
        block, row = np.divmod(rows, self.chunk_rows)
        number, time = np.divmod(times, self.chunk_steps)
        for here in np.unique(block):
            for one in np.unique(number[block == here]):
                window, step = np.nonzero((block == here)[:, None] & (number == one))
                content = self.chunk(int(here), int(one))
                out[window, step] = content[row[window], time[window, step]]
        return out

    def window_steps_at(
        self,
        places: WindowPlaces,
        index: NDArray[np.int64],
        out: NumpyArray,
        at: NDArray[np.int64] | None,
    ) -> None:
        """Gather windows, and write some of their steps to an array."""
        put_steps(self.windows_at(places), index, out, at)

    def prefetch(self, rows: NDArray[np.int64], starts: NDArray[np.int64], length: int) -> None:
        """Do nothing: chunks are read as they are decoded."""

    def prefetch_chunks(self, places: Any) -> None:
        """Do nothing: chunks are read as they are decoded."""


def decode_arrays(
    snapshot: Snapshot, leaves: Mapping[str, Leaf], complete: bool
) -> dict[str, DecodedArray]:
    """Return the arrays of a store that can be decoded, by name.

    An array can be if its chunks hold whole steps.
    """
    found = {}
    for name, leaf in leaves.items():
        key = f"{layout.prefix_of(name)}.zarray"
        grid = Grid.of(name, load_json(snapshot.value(key) or b"{}", key))
        if grid.separator != "." or grid.chunks[2:] != leaf.shape or grid.dtype != leaf.dtype:
            continue
        rows, steps, *_ = grid.chunks
        nowhere = np.zeros((0, 0), np.int64)
        region = snapshot.region
        found[name] = DecodedArray(
            name, leaf, rows, steps, region, nowhere, snapshot, grid, complete
        )
    return found
