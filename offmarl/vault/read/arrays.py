"""The arrays of a vault: any interval of time, and windows from anywhere.

All of them are read from chunks, whose bytes come from mapped files, from requests to another
machine, or from a driver that a user registered. Each chunk is compared with its checksum and
decoded. Uncompressed chunks of mapped files are used in place, and a bounded number of the others
is kept in memory.
"""

import math
import os
import re
import resource
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmarl._ahead import ahead, depth_of, in_pool
from offmarl._arrays import as_items
from offmarl.errors import VaultError, VaultFormatError
from offmarl.vault.format.layout import MAX_CHUNK_BYTES, NumpyArray, Schema, damage_error
from offmarl.vault.format.metadata import Grid
from offmarl.vault.format.tables import Episodes
from offmarl.vault.format.windows import WindowPlaces, put_steps
from offmarl.vault.read.chunks import Checks, ChunkPart, ChunkPlace, Chunks, MappedArray, map_arrays
from offmarl.vault.read.manifest import Description, map_contents
from offmarl.vault.storage.commit import Contents
from offmarl.vault.storage.location import is_forked
from offmarl.vault.storage.store import Store

_CACHE_BYTES = 2**26
"""Bytes of decoded chunks that are kept in memory."""
_DECODED_AHEAD = 2 * (os.cpu_count() or 1)
_KEYS_A_CHUNK = 64
"""Reading one chunk without a map takes about as long as mapping this many chunks."""

_UNBACKED_STEPS, _UNBACKED_BYTES = 2**20, 2**28
"""Steps over all rows, and bytes of another program's, that a vault may have, or that may be read,
before they are compared with the chunks.
"""
_STOCK_STEPS = 2**20
"""Most steps over all rows of a chunk that flashbax writes."""
_PLACE = re.compile(r"\d+[./]\d+")
"""The block of rows and the number of a chunk, at the beginning of its key."""

_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # macOS counts by process only


class Arrays:
    """Reads the arrays of one vault; its owner checks that the requested steps and rows exist.

    ``episodes`` returns the vault's episodes; an error names those that the damage affects. With
    ``checked``, every chunk is compared before it is first used, if it has a checksum of offmarl.
    ``mapped`` says whether the files may be mapped into memory.
    """

    def __init__(
        self, vault: Description, episodes: Callable[[], Episodes], checked: bool, mapped: bool
    ):
        self._vault, self._may_map = vault, mapped
        self._episodes = episodes
        self._schema: Schema | None = None
        self._has_length, self._unbacked = False, _unbacked_steps(vault)
        if checked and vault.manifest and vault.manifest.schema.codec == "raw":
            # A forged length must not make the checks, which hold state for each chunk, take much
            # memory.
            self.check_length()
            self._schema = vault.manifest.schema
        self._map_lock = Lock()
        self._is_mapped = False
        self._chunks = self._open(None)
        self._cache: OrderedDict[ChunkPlace, NumpyArray] = OrderedDict()
        self._cache_bytes, self._cache_lock = 0, Lock()
        self._chunks_read = 0
        # If windows are in memory already, prefetching costs more than gathering them. If they are
        # not, gathering without prefetching would wait for the disk page by page.
        self._cold = True

    def _open(self, contents: Contents | None) -> Chunks:
        vault, values = self._vault, contents or self._vault.store
        checks = Checks(values, vault, self._schema, self._episodes) if self._schema else None
        return Chunks(values, map_arrays(contents, vault) if contents else {}, checks)

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._vault.leaves:
                raise VaultError(
                    f"{self._vault.path} has no array named {name!r}: it has "
                    f"{', '.join(self._vault.leaves)}."
                )

    def chunk(self, name: str) -> tuple[int, int]:
        """Return the rows and the steps of an array's chunks."""
        rows, steps, *_ = self._vault.grids[name].chunks
        return rows, steps

    def check_length(self) -> None:
        """Raise `VaultFormatError` if there is less data than the vault's length needs."""
        if not self._has_length:
            check_length(self._vault)
        self._has_length = True

    def blocks(
        self, names: Iterable[str], start: int, rows: int, most: int
    ) -> Iterator[tuple[int, int]]:
        """Cut time into intervals of about ``most`` bytes that end where chunks do."""
        self.check_length()
        names, length = list(names), self._vault.length
        step_bytes = rows * sum(self._vault.leaves[name].step_bytes for name in names)
        grids = [self._vault.grids[name] for name in names]
        # Chunks of flags may have far more steps than those of images. They are kept in memory.
        sizes = {
            grid.chunks[1]
            for grid in grids
            if grid.chunk_bytes > _CACHE_BYTES // 8
            or step_bytes * min(grid.chunks[1], length) <= MAX_CHUNK_BYTES
        }
        chunk = max(sizes or {min(grid.chunks[1] for grid in grids)})
        if self._vault.manifest is None and step_bytes * min(chunk, length) > MAX_CHUNK_BYTES:
            raise VaultFormatError(
                f"{self._vault.path} has chunks of {chunk:,} steps, of which its arrays would take "
                f"{step_bytes * chunk:,} bytes of memory: read fewer arrays, or some steps."
            )
        size = chunk * max(1, most // (step_bytes * chunk))
        begins = range(start // size * size, length, size)
        return ((max(begin, start), min(begin + size, length)) for begin in begins)

    def _map(self) -> Chunks:
        """Return the source of chunks; the first call maps the files."""
        if self._may_map and not self._is_mapped:
            with self._map_lock:
                if not self._is_mapped:
                    contents = map_contents(self._vault.store, self._vault.manifest)
                    if contents:
                        self._chunks = self._open(contents)
                self._is_mapped = True
        return self._chunks

    @property
    def values(self) -> Store | Contents:
        """Where to read other keys of the vault: its mapped files, if forked processes may."""
        return self._chunks.values

    def prepare_fork(self) -> None:
        """Let forked processes read the arrays; does nothing if the files cannot be mapped."""
        self.check_length()  # forked processes cannot
        self._map()

    def read(
        self, names: Iterable[str], rows: tuple[int, int], steps: tuple[int, int]
    ) -> dict[str, NumpyArray]:
        """Read ``(B, T, ...)`` of some arrays; ``rows`` and ``steps`` are intervals."""
        names = list(names)
        self._check_names(names)
        lead = rows[1] - rows[0], steps[1] - steps[0]
        if lead[0] * max(lead[1], 1) > self._unbacked:
            self.check_length()
        chunks = self._map() if self._map_pays(names, *lead) else self._chunks
        sizes = {self.chunk(name) for name in names}
        cuts = {size: ([*cut(*rows, size[0])], [*cut(*steps, size[1])]) for size in sizes}
        arrays: dict[str, NumpyArray] = {}
        parts: list[ChunkPart] = []
        for name in names:
            leaf, (by_rows, by_steps) = self._vault.leaves[name], cuts[self.chunk(name)]
            out = arrays[name] = np.empty((*lead, *leaf.shape), leaf.dtype)
            for number, times, to_steps in by_steps:
                for block, inside, to_rows in by_rows:
                    place = ChunkPlace(name, block, number)
                    parts.append(ChunkPart(place, (inside, times), out[to_rows, to_steps]))
        self._copy(chunks, parts)
        return arrays

    def windows(
        self,
        names: Iterable[str],
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        length: int,
    ) -> dict[str, NumpyArray]:
        """Gather W windows ``(W, length, ...)`` of some arrays, each from a row and a start."""
        arrays: dict[str, NumpyArray] = {}
        names = list(names)
        for name, places, array in self._gather(names, rows, starts, length):
            is_mapped = isinstance(array, MappedArray)
            arrays[name] = array.windows(places) if is_mapped else array
        return {name: arrays[name] for name in names}

    def window_steps(
        self,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        length: int,
        index: NDArray[np.int64],
        out: Mapping[str, NumpyArray],
        at: NDArray[np.int64] | None,
    ) -> None:
        """Gather windows, and write some of their steps to arrays ``out``, by name.

        ``index`` and ``at`` are those of `put_steps`.
        """
        counts = {array.shape[1] for array in out.values()}
        first = {count: np.ascontiguousarray(index[:, :count]) for count in counts}
        for name, places, array in self._gather([*out], rows, starts, length):
            steps = first[out[name].shape[1]]
            if isinstance(array, MappedArray):
                array.window_steps(places, steps, out[name], at)
            else:
                put_steps(array, steps, out[name], at)

    def _gather(
        self,
        names: Sequence[str],
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        length: int,
    ) -> Iterator[tuple[str, WindowPlaces, Any]]:
        """Yield each array's name, its places of windows, and the mapped array or the windows.

        All chunks of windows were compared.
        """
        self._check_names(names)
        chunks = self._map()
        sizes = {self.chunk(name) for name in names}
        by_size = {size: WindowPlaces(rows, starts, length, *size) for size in sizes}
        places = {name: by_size[self.chunk(name)] for name in names}
        mapped = [name for name in names if name in chunks.maps]
        unmapped = [name for name in names if name not in chunks.maps]
        before = _disk_reads()
        if mapped:
            chunks.compare(mapped, places[mapped[0]], self._cold)
        for name in mapped if self._cold else ():
            chunks.maps[name].prefetch(places[name])
        yield from ((name, places[name], chunks.maps[name]) for name in mapped)
        windows = self._gather_unmapped(chunks, unmapped, places) if unmapped else {}
        yield from ((name, places[name], windows.pop(name)) for name in unmapped)
        self._cold = _disk_reads() > before

    def _map_pays(self, names: Iterable[str], rows: int, steps: int) -> bool:
        """Whether the map exists, or the reads so far took as long as making it would."""
        if self._is_mapped:
            return True
        self._chunks_read += self._count(names, rows, steps)
        most = self._count(self._vault.leaves, self._vault.rows, self._vault.length)
        return self._chunks_read * _KEYS_A_CHUNK >= most

    def _count(self, names: Iterable[str], rows: int, steps: int) -> int:
        """Return the number of chunks of some arrays that this many rows and steps fill."""
        sizes = (self.chunk(name) for name in names)
        return sum(-(-rows // size[0]) * -(-steps // size[1]) for size in sizes)

    # ------------------------------------------------------------------------------ chunks

    def _read(
        self, chunks: Chunks, places: Sequence[ChunkPlace]
    ) -> Iterator[tuple[ChunkPlace, NumpyArray]]:
        """Yield chunks ``(rows, steps, *leaf)`` that are not mapped; do not write to them.

        Several are read and decoded at once, and those in memory come first.
        """
        misses = []
        for place in places:
            if (chunk := self._cache.get(place)) is None:
                misses.append(place)
            else:
                yield place, chunk
        if chunks.checks:
            chunks.checks.load({place.number for place in misses})
        keys = [self._keys(place) for place in misses]
        depth = depth_of(max((self._bytes_of(place) for place in misses), default=0))
        values = chunks.values.fetch([key for chunk_keys in keys for key in chunk_keys], depth)
        encoded = (
            (place, [*islice(values, len(chunk_keys))])
            for place, chunk_keys in zip(misses, keys, strict=True)
        )
        if len(misses) < 2 or is_forked():
            yield from ((place, self._decode(chunks, place, parts)) for place, parts in encoded)
            return

        def decode(entry: tuple[ChunkPlace, Sequence[Any]]) -> Any:
            return in_pool(partial(self._decode, chunks, *entry))

        for (place, _), done in ahead(encoded, decode, min(depth, _DECODED_AHEAD)):
            yield place, done.result()

    def _keys(self, place: ChunkPlace) -> list[str]:
        return self._vault.grids[place.name].keys(place.block, place.number)

    def _bytes_of(self, place: ChunkPlace) -> int:
        rows, steps = self.chunk(place.name)
        return rows * steps * self._vault.leaves[place.name].step_bytes

    def _decode(self, chunks: Chunks, place: ChunkPlace, values: Sequence[Any]) -> NumpyArray:
        """Return a chunk from its stored values, compared with its checksum.

        If offmarl wrote the vault, every chunk must exist; other programs may omit chunks that hold
        only the fill value.
        """
        chunk = self._joined(place, values)
        if chunks.checks is None:
            return chunk
        is_live = chunks.values is self._vault.store
        return chunks.checks.compare(place, chunk, partial(self._again, place) if is_live else None)

    def _again(self, place: ChunkPlace) -> NumpyArray:
        keys = self._keys(place)
        return self._joined(place, [*self._vault.store.fetch(keys, len(keys))])

    def _joined(self, place: ChunkPlace, values: Sequence[Any]) -> NumpyArray:
        grid, parts = self._vault.grids[place.name], []
        for key, value in zip(self._keys(place), values, strict=True):
            if value is None and self._vault.manifest:
                raise damage_error(self._vault.path, f"it has lost {key}")
            place_of = f"{self._vault.path}: {key}"
            parts.append(grid.missing_chunk() if value is None else grid.decode(value, place_of))
        return grid.join(parts)

    def _keep(self, place: ChunkPlace, chunk: NumpyArray) -> None:
        """Keep a decoded chunk until newer ones need its memory."""
        with self._cache_lock:
            if chunk.nbytes > _CACHE_BYTES or place in self._cache:
                return
            self._cache[place] = chunk
            self._cache_bytes += chunk.nbytes
            while self._cache_bytes > _CACHE_BYTES:
                _, oldest = self._cache.popitem(last=False)
                self._cache_bytes -= oldest.nbytes

    def _copy(self, chunks: Chunks, parts: Sequence[ChunkPart]) -> None:
        """Copy parts of chunks to their targets."""
        unmapped = {part.place: part for part in parts if part.place.name not in chunks.maps}
        chunks.copy([part for part in parts if part.place not in unmapped])
        for place, chunk in self._read(chunks, [*unmapped]) if unmapped else ():
            part = unmapped[place]
            part.target[...] = selection = chunk[part.source]
            if selection.size < chunk.size:
                self._keep(place, chunk)

    def _gather_unmapped(
        self, chunks: Chunks, names: Sequence[str], places: Mapping[str, WindowPlaces]
    ) -> dict[str, NumpyArray]:
        """Gather windows ``(W, length, *leaf)`` of arrays that are not mapped."""
        arrays: dict[str, NumpyArray] = {}
        steps: dict[ChunkPlace, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        for name in names:
            leaf, lead = self._vault.leaves[name], (len(places[name].rows), places[name].length)
            arrays[name] = np.empty((*lead, *leaf.shape), leaf.dtype)
            for block, number, to_steps, from_steps in places[name].by_chunk:
                steps[ChunkPlace(name, block, number)] = to_steps, from_steps
        for place, chunk in self._read(chunks, [*steps]):
            to_steps, from_steps = steps[place]
            as_items(arrays[place.name])[to_steps] = as_items(chunk)[from_steps]
            self._keep(place, chunk)
        return arrays


def cut(start: int, stop: int, size: int) -> Iterator[tuple[int, slice, slice]]:
    """Cut an interval at multiples of ``size``: yield each block, and its part in both."""
    for block in range(start // size, -(-stop // size)) if start < stop else ():
        begin, end = max(start, block * size), min(stop, (block + 1) * size)
        inside = slice(begin - block * size, end - block * size)
        yield block, inside, slice(begin - start, end - start)


def _disk_reads() -> int:
    """Return the blocks that this thread has read from disk, and its major page faults.

    File systems in user space count no blocks.
    """
    usage = resource.getrusage(_THREAD)
    return usage.ru_inblock + usage.ru_majflt


def _unbacked_steps(vault: Description) -> int:
    """Return the steps over all rows that are not compared with the chunks."""
    if vault.manifest:  # which has no chunks that were left out
        return _UNBACKED_STEPS
    step_bytes = sum(grid.leaf.step_bytes for grid in vault.grids.values())
    return min(_UNBACKED_STEPS, _UNBACKED_BYTES // max(step_bytes, 1))


def check_length(vault: Description) -> None:
    """Raise `VaultFormatError` if there are far fewer chunks than the rows and the length need.

    Chunks that other programs left out are read as zeros, and some state is kept for each chunk of
    offmarl, so a forged index of a few bytes could stand for billions of steps. The chunks that
    exist bound the work.
    """
    # Some memory is taken for each row of another program's vault even if it is empty.
    steps, backed = vault.rows * max(vault.length, vault.manifest is None), 0
    unbacked = _unbacked_steps(vault)
    if steps <= unbacked:
        return
    chunk_steps = {name: math.prod(grid.chunks[:2]) for name, grid in vault.grids.items()}
    least = min(chunk_steps.values(), default=0)
    for name, grid in vault.grids.items():
        # Not all of it, because a chunk of billions of steps may be empty.
        counted = min(chunk_steps[name], max(least, _STOCK_STEPS))
        backed = max(backed, counted * _count_chunks(vault, grid))
        if steps <= 2 * backed + unbacked:
            return
    lack = (
        f"it says that it has {vault.rows:,} rows of {vault.length:,} steps, and there is data "
        f"for {backed:,} steps over all rows at most: it has lost data, or its length is "
        "damaged or forged"
    )
    if vault.manifest:
        raise damage_error(vault.path, lack)
    raise VaultFormatError(
        f"{vault.path} is damaged: {lack}. Copy the vault again from its source."
    )


def _count_chunks(vault: Description, grid: Grid) -> int:
    """Return the number of an array's chunks that exist."""
    keys = (key.removeprefix(grid.prefix) for key in vault.store.keys(grid.prefix))
    return len({match[0] for key in keys if (match := _PLACE.match(key))})
