"""The arrays of a vault, each read in the fastest available way.

Uncompressed arrays on this machine are read from memory maps (`offmarl.vault.mmap`), all
others through TensorStore, a bounded number of bytes at a time.
"""

import math
import resource
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from offmarl._ahead import ahead, depth_of, in_thread
from offmarl.errors import VaultError
from offmarl.vault import layout
from offmarl.vault.bounds import check_length, check_own_length
from offmarl.vault.checked import Checks, ChunkPlace, Fresh, checks_of
from offmarl.vault.decoded import decode_arrays
from offmarl.vault.forking import is_forked
from offmarl.vault.layout import NumpyArray
from offmarl.vault.manifest import Description, check_documents, snapshot_of
from offmarl.vault.mmap import MappedArray, cut, map_arrays
from offmarl.vault.tables import Episodes
from offmarl.vault.windows import WindowPlaces, put_steps, window_chunks

_IN_FLIGHT_BYTES = 2**26
"""Maximum bytes that TensorStore reads at once; they are held in addition to the result."""
_PART_BYTES = 2**25
"""Approximate bytes of data on another machine that are requested together."""
_RELEASE_BYTES = 2**24
"""Bytes compared between two calls of `Region.release`."""
_KEYS_A_CHUNK = 64
"""Reading one chunk through TensorStore takes about as long as mapping this many chunks."""

_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # macOS counts by process only


class _View(NamedTuple):
    """A way to read arrays, and the checks of chunks that are read in this way."""

    maps: Mapping[str, MappedArray]
    """The arrays that are mapped; all others are read through TensorStore."""
    checks: Checks | None


class Arrays:
    """Reads the arrays of one vault; `Dataset` checks that the requested steps and rows exist.

    Parameters
    ----------
    vault
        The vault's description. If offmarl wrote the vault, every chunk must exist; other programs
        may omit chunks that hold only the fill value.
    checks
        Compares every chunk before it is first used; None compares nothing.
    mapped
        Whether the files may be mapped into memory.
    """

    def __init__(
        self,
        vault: Description,
        checks: Checks | None,
        mapped: bool,
    ):
        self._store, self._leaves = vault.store, vault.leaves
        self._rows, self._length = vault.rows, vault.length
        self._schema = vault.manifest.schema if vault.manifest else None
        self._vault, self._may_map = vault, mapped
        self._has_length = False
        self._fetched = _View({}, checks)
        self._mapping = Lock()
        self._mapped: _View | None = None
        self._for_forks: _View | None = None
        self._opened: dict[str, Any] = {}
        self._chunks_read = 0
        # If windows are in memory already, prefetching costs more than gathering them. If they are
        # not, gathering without prefetching would wait for the disk page by page.
        self._cold = True

    def open(self, name: str) -> Any:
        """Open an array in TensorStore, or return the one that is open."""
        self._check_names([name])
        if name not in self._opened:
            prefix = layout.prefix_of(name)
            self._opened[name] = self._store.array(prefix, complete=self._schema is not None)
        return self._opened[name]

    def _open_together(self, names: Iterable[str]) -> None:
        """Open arrays at the same time, which takes requests to another machine."""
        opening = [
            in_thread(partial(self.open, name), "offmarl-open")
            for name in names
            if name not in self._opened
        ]
        for one in opening:
            one.result()

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._leaves:
                raise VaultError(
                    f"{self._store.path} has no array named {name!r}: it has "
                    f"{', '.join(self._leaves)}."
                )

    def chunk(self, name: str) -> tuple[int, int]:
        """Return the rows and the steps of an array's chunks."""
        if self._schema:
            return self._schema.chunk_rows, self._schema.chunk_steps
        rows, steps, *_ = self.open(name).chunk_layout.read_chunk.shape
        return rows, steps

    def _window_keys(
        self, names: Iterable[str], rows: NumpyArray, starts: NumpyArray, length: int
    ) -> list[str]:
        """Return the keys of the chunks that hold windows.

        Chunks that divide steps, as other programs may write, have more keys than these.
        """
        return [
            self._leaves[name].chunk_key(name, *place)
            for name in names
            for place in window_chunks(rows, starts, length, *self.chunk(name))
        ]

    def check_length(self) -> None:
        """Raise `VaultFormatError` if there is less data than the vault's length needs."""
        if not self._has_length:
            check_length(self._vault, lambda name: self.chunk(name)[1])
            self._has_length = True

    def _view(self) -> "_View":
        """Return the mapped files, mapping them on the first call; threads share them."""
        if self._for_forks and is_forked():
            return self._for_forks
        if self._mapped is None:
            with self._mapping:
                if self._mapped is None:
                    self._mapped = self._map()
        return self._mapped

    def prepare_fork(self) -> None:
        """Let forked processes read the arrays; does nothing if the files cannot be mapped."""
        vault = self._vault
        snapshot = snapshot_of(vault.store, vault.manifest, encoded=True) if self._may_map else None
        if snapshot is None or self._for_forks:
            return
        mapped = self._view()
        others = {name: leaf for name, leaf in self._leaves.items() if name not in mapped.maps}
        decoded = decode_arrays(snapshot, others, complete=self._schema is not None)
        self._for_forks = mapped._replace(maps={**mapped.maps, **decoded})
        vault.store.hold(snapshot)

    def _map(self) -> "_View":
        vault, checks = self._vault, self._fetched.checks
        snapshot = snapshot_of(vault.store, vault.manifest) if self._may_map else None
        if snapshot is None:
            return self._fetched
        maps = map_arrays(snapshot, self._leaves, self._rows, self._length)
        return _View(maps, checks.for_snapshot(snapshot) if checks else None)

    def read(
        self, names: Iterable[str], rows: range, steps: range, agents: Mapping[str, slice]
    ) -> dict[str, NumpyArray]:
        """Read ``(B, T, ...)`` of some arrays.

        ``agents`` maps names of arrays to a selection from their third axis.
        """
        names = list(names)
        self._check_names(names)
        if not self._store.driver.is_remote:
            return self._read_here(names, rows, steps, agents)
        self._open_together(names)
        found: dict[str, NumpyArray] = {}
        for part, inside in self._parts(names, rows, steps):
            starts = np.full(len(rows), part.start)
            keys = self._window_keys(names, np.array(rows, np.int64), starts, len(part))
            self._store.driver.prefetch(keys)
            some = self._read_here(names, rows, part, agents)
            if part == steps:
                return some
            for name, array in some.items():
                shape = len(rows), len(steps), *array.shape[2:]
                found.setdefault(name, np.empty(shape, array.dtype))[:, inside] = array
        return found

    def _parts(self, names: list[str], rows: range, steps: range) -> Iterator[tuple[range, slice]]:
        """Cut steps into parts, whole chunks of bounded size; yield each with its place."""
        sizes = [self.chunk(name) for name in names]
        chunk = max((time for _, time in sizes), default=1)
        step_bytes = sum(
            -(-len(rows) // size) * size * self._leaves[name].step_bytes
            for name, (size, _) in zip(names, sizes, strict=True)
        )
        size = chunk * max(1, _PART_BYTES // max(chunk * step_bytes, 1))
        for _, _, inside in cut(steps, size):
            yield steps[inside], inside
        if not steps:
            yield steps, slice(0)

    def _read_here(
        self, names: list[str], rows: range, steps: range, agents: Mapping[str, slice]
    ) -> dict[str, NumpyArray]:
        """Read as `read` does, all at once."""
        maps, known = self._view() if self._map_pays(names, rows, steps) else self._fetched
        fresh = known.in_steps(names, rows, steps) if known else None
        checks = fresh.checks if fresh else {}
        found = {
            name: maps[name].read(rows, steps, agents.get(name), checks.get(name))
            for name in names
            if name in maps
        }
        others = [name for name in names if name not in maps]
        if whole := [name for name in others if name in checks]:
            assert known is not None
            fetch = partial(self._fetch_whole, known, whole, rows, steps, agents)
            found |= self._store.attempt(fetch)
        if others := [name for name in others if name not in checks]:
            found |= self._store.attempt(lambda: self._fetch(others, rows, steps, agents))
        if known and fresh:
            known.mark_sound(fresh)
        return {name: found[name] for name in names}

    def windows(
        self,
        names: Iterable[str],
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        length: int,
    ) -> dict[str, NumpyArray]:
        """Gather W windows ``(W, length, ...)`` of some arrays, each from a row and a start."""

        def read(name: str, mapped: MappedArray | None, places: WindowPlaces | None) -> NumpyArray:
            if mapped is None or places is None:
                return self._gather(name, rows, starts, length)
            return mapped.windows_at(places)

        return self._in_windows(list(names), rows, starts, length, read)

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

        def read(name: str, mapped: MappedArray | None, places: WindowPlaces | None) -> None:
            if mapped is None or places is None:
                put_steps(self._gather(name, rows, starts, length), index, out[name], at)
            else:
                mapped.window_steps_at(places, index, out[name], at)

        self._in_windows(list(out), rows, starts, length, read)

    def _in_windows(
        self,
        names: list[str],
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        length: int,
        read: Callable[[str, MappedArray | None, WindowPlaces | None], Any],
    ) -> dict[str, Any]:
        """Return what a function reads of each array, after the chunks of windows were compared.

        The function is given the array's name and, if the array is mapped, the map and the places
        of the windows in it.
        """
        self._check_names(names)
        if self._store.driver.is_remote:
            self._open_together(names)
            self._store.driver.prefetch(self._window_keys(names, rows, starts, length))
        maps, checks = self._view()
        if checks and (fresh := checks.in_windows(names, rows, starts, length)):
            self._compare(maps, checks, fresh)
        before = _usage()
        if self._cold:
            self.prefetch(names, rows, starts, length)
        asked = _usage()
        found, places = {}, _places_of(maps, names, rows, starts, length)
        for name in names:
            if name in maps:
                found[name] = read(name, maps[name], places[maps[name].chunk_size])
            else:
                found[name] = self._store.attempt(partial(read, name, None, None))
        has_read, has_waited = asked[0] > before[0], _usage()[1] > asked[1]
        self._cold = has_read or has_waited
        return found

    def prefetch(
        self,
        names: Iterable[str],
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        length: int,
    ) -> None:
        """Ask the disk to read windows in the background; does nothing for unmapped arrays.

        Chunks that have not been compared with their checksums are read whole.
        """
        names = list(names)
        self._check_names(names)
        maps, checks = self._view()
        fresh = checks.in_windows(names, rows, starts, length) if checks else None
        for name in names:
            if fresh and name in maps and name in fresh.chunks:
                maps[name].prefetch_chunks(fresh.chunks[name])
            elif name in maps:
                maps[name].prefetch(rows, starts, length)

    def _compare(self, maps: Mapping[str, MappedArray], checks: Checks, fresh: Fresh) -> None:
        """Compare chunks; on a cold disk, many are requested at once."""
        here = {name: maps[name] for name in fresh.chunks if name in maps}
        others = [
            (name, x) for name, some in fresh.chunks.items() if name not in maps for x in some
        ]
        if others:
            self._store.attempt(lambda: deque(self._chunks(checks, others), 0))
        for name, mapped in here.items():
            places = fresh.chunks[name]
            step = max(1, _RELEASE_BYTES // mapped.chunk_bytes)
            for begin in range(0, len(places), step):
                some = places[begin : begin + step]
                if self._cold:
                    mapped.prefetch_chunks(some)
                for place in some:
                    fresh.checks[name].compare(*place, mapped.chunk(*place))
                mapped.region.release()
        checks.mark_sound(fresh)

    def _map_pays(self, names: Iterable[str], rows: range, steps: range) -> bool:
        """Whether the map exists, or the reads so far took as long as making it would."""
        if self._mapped is not None or self._for_forks is not None:
            return True
        self._chunks_read += self._count(names, len(rows), len(steps))
        return self._chunks_read * _KEYS_A_CHUNK >= self._count(
            self._leaves, self._rows, self._length
        )

    def _count(self, names: Iterable[str], rows: int, steps: int) -> int:
        """Return the number of chunks of some arrays that this many rows and steps fill."""
        sizes = (self.chunk(name) for name in names)
        return sum(-(-rows // size[0]) * -(-steps // size[1]) for size in sizes)

    def _fetch(
        self, names: Iterable[str], rows: range, steps: range, agents: Mapping[str, slice]
    ) -> dict[str, NumpyArray]:
        """Read through TensorStore, a bounded number of pieces at once."""
        found, pieces = {}, []
        for name in names:
            index = (slice(rows.start, rows.stop, rows.step), *_agents(agents.get(name)))
            array = self.open(name)[(index[0], slice(steps.start, steps.stop), *index[1:])]
            found[name] = np.empty(array.shape, array.dtype.numpy_dtype)
            for span, inside in self._pieces(name, found[name], steps):
                pieces.append((found[name][:, inside], array[:, span]))
        largest = max((target.nbytes for target, _ in pieces), default=0)
        depth = depth_of(largest, _IN_FLIGHT_BYTES)
        for (target, piece), read in ahead(pieces, lambda piece: piece[1].read(), depth):
            target[...] = self._finish(piece, read)
        return found

    def _fetch_whole(
        self,
        checks: Checks,
        names: Iterable[str],
        rows: range,
        steps: range,
        agents: Mapping[str, slice],
    ) -> dict[str, NumpyArray]:
        """Read whole chunks through TensorStore, compare them, and select what was requested."""
        found: dict[str, NumpyArray] = {}
        parts = {}
        for name in names:
            select, leaf = _agents(agents.get(name)), self._leaves[name]
            shape = np.empty((0, *leaf.shape))[(slice(None), *select)].shape[1:]
            found[name] = np.empty((len(rows), len(steps), *shape), leaf.dtype)
            chunk_rows, chunk_steps = self.chunk(name)
            for number, times, to_steps in cut(steps, chunk_steps):
                for block, inside, to_rows in cut(rows, chunk_rows):
                    target = found[name][to_rows, to_steps]
                    parts[name, ChunkPlace(block, number)] = target, (inside, times, *select)
        for key, chunk in self._chunks(checks, parts):
            target, source = parts[key]
            target[...] = chunk[source]
        return found

    def _chunks(
        self, checks: Checks, chunks: Iterable[tuple[str, ChunkPlace]]
    ) -> Iterator[tuple[tuple[str, ChunkPlace], NumpyArray]]:
        """Read whole chunks through TensorStore, several at once; compare those that are new."""
        chunks = list(chunks)

        def again(key: tuple[str, ChunkPlace]) -> NumpyArray:
            return np.ascontiguousarray(read(key)())

        def read(key: tuple[str, ChunkPlace]) -> Any:
            name, (block, number) = key
            array, (rows, steps) = self.open(name), self.chunk(name)
            here = array[block * rows : (block + 1) * rows, number * steps : (number + 1) * steps]
            return here.read().result

        sizes = {name: math.prod(self.chunk(name)) for name, _ in chunks}
        bytes_of = (self._leaves[name].step_bytes * size for name, size in sizes.items())
        for key, result in ahead(chunks, read, depth_of(max(bytes_of, default=0))):
            chunk = np.ascontiguousarray(self._store.driver.finish(result, partial(again, key)))
            if checks.is_fresh(*key):
                chunk = checks.verified(*key, chunk, partial(again, key))
            yield key, chunk

    def _pieces(self, name: str, out: NumpyArray, steps: range) -> Iterator[tuple[slice, slice]]:
        """Cut steps at the ends of chunks; yield the interval of steps, and that of ``out``."""
        _, chunk = self.chunk(name)
        step_bytes = max(out[:, :1].nbytes, 1)
        size = chunk * max(1, _IN_FLIGHT_BYTES // (4 * step_bytes * chunk))
        start = steps.start
        while start < steps.stop:
            stop = min(steps.stop, (start // size + 1) * size)
            yield slice(start, stop), slice(start - steps.start, stop - steps.start)
            start = stop

    def _finish(self, array: ts.TensorStore, read: ts.Future[NumpyArray]) -> NumpyArray:
        """Return the result of a read of an array that was started."""
        return self._store.driver.finish(read.result, lambda: array.read().result())

    def _gather(
        self, name: str, rows: NDArray[np.int64], starts: NDArray[np.int64], length: int
    ) -> NumpyArray:
        array, pairs = self.open(name), zip(rows.tolist(), starts.tolist(), strict=True)
        parts = [array[row, start : start + length] for row, start in pairs]
        with ts.Batch() as batch:  # a chunk of several windows is read and decoded once
            reads = [part.read(batch=batch) for part in parts]
        shape = (length, *self._leaves[name].shape)
        windows = [self._finish(part, read) for part, read in zip(parts, reads, strict=True)]
        return np.stack(windows) if windows else np.empty((0, *shape), self._leaves[name].dtype)


def open_arrays(
    vault: Description, episodes: Callable[[], Episodes], checked: bool, mapped: bool
) -> Arrays:
    """Open the arrays of a vault."""
    if vault.manifest:
        check_documents(vault.store, vault.manifest.schema)
    if not (checked and vault.manifest and vault.manifest.schema.codec == "raw"):
        return Arrays(vault, None, mapped)
    # A forged length must not make the checks, which hold state for each chunk, take much memory.
    check_own_length(vault, vault.manifest.schema)
    return Arrays(vault, checks_of(vault, episodes), mapped)


def _places_of(
    maps: Mapping[str, MappedArray],
    names: Iterable[str],
    rows: NDArray[np.int64],
    starts: NDArray[np.int64],
    length: int,
) -> dict[tuple[int, int], WindowPlaces]:
    """Return the places of windows in arrays by the size of their chunks."""
    found: dict[tuple[int, int], WindowPlaces] = {}
    for name in names:
        if name in maps and maps[name].chunk_size not in found:
            found[maps[name].chunk_size] = maps[name].window_places(rows, starts, length)
    return found


def _usage() -> tuple[int, int]:
    """Return the blocks that this thread read from disk so far, and its major page faults."""
    usage = resource.getrusage(_THREAD)
    return usage.ru_inblock, usage.ru_majflt


def _agents(agents: slice | None) -> tuple[slice, ...]:
    return () if agents is None else (agents,)
