"""Cuts a vault into shards, each a vault of whole chunks, and joins them again.

A shard holds an interval of time of all rows. An episode that crosses into the next shard is open
at the end of the first one, and its rest is an episode of the second one. `join_shards` puts the
data files of shards together without copying them: the joined vault has the keys of the original.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offmarl.errors import VaultFormatError
from offmarl.vault import encoding, layout, tables
from offmarl.vault.commit import Contents
from offmarl.vault.dataset import Dataset
from offmarl.vault.drivers import Directory
from offmarl.vault.layout import METADATA, OWN_PREFIX, Head, NumpyArray, seal, unseal
from offmarl.vault.manifest import Manifest, foreign_grids, read_episodes, read_metadata
from offmarl.vault.metadata import Grid, own_grids, without_episodes
from offmarl.vault.store import OcdbtStore
from offmarl.vault.tables import Table

_BLOCK_RECORDS = 2**16
_COMMIT_BYTES = 2**26
"""Bytes of values that are committed together when shards are joined."""


class Value(NamedTuple):
    """A value to store, which is read when it is needed."""

    key: str
    size: int
    """Bytes."""
    read: Callable[[], bytes]


class Sharding:
    """How a vault is cut into shards.

    Parameters
    ----------
    dataset
        The vault.
    shard_bytes
        About how many bytes of chunks a shard has.

    Attributes
    ----------
    unit
        Steps that shards have multiples of: whole chunks of every array.
    intervals
        The interval of time of each shard.

    Raises
    ------
    VaultFormatError
        The vault's tree or the description of an array is damaged.
    """

    def __init__(self, dataset: Dataset, shard_bytes: int):
        self._dataset, own = dataset, dataset.manifest
        try:
            self._contents = contents = Contents.of(dataset.store)
        except (ValueError, OSError) as error:
            raise VaultFormatError(
                f"{dataset.path} cannot be read ({error}): run `offmarl verify`."
            ) from error
        if own:
            self._grids = [*own_grids(own.schema).values()]
        else:
            self._grids = foreign_grids(contents, read_metadata(contents.driver), [])
        self.unit = math.lcm(*(grid.chunks[1] for grid in self._grids))
        self.intervals = tuple(self._cut(shard_bytes))

    def _cut(self, shard_bytes: int) -> Iterator[range]:
        own = self._dataset.manifest
        # Steps that a stock program appended follow the others, so they are in the last shard.
        checked = own.head.length if own else self._dataset.length
        begin = size = 0
        for stop in range(self.unit, checked + 1, self.unit):
            size += sum(value.size for value in self._chunks(range(stop - self.unit, stop)))
            if size >= shard_bytes and stop < self._dataset.length:
                yield range(begin, stop)
                begin, size = stop, 0
        yield range(begin, self._dataset.length)

    @property
    def metadata(self) -> bytes:
        """The content of the vault's ``metadata.json``."""
        found = self._contents.driver.read(METADATA)
        if found is None:
            raise VaultFormatError(f"{self._dataset.path / METADATA} is missing.")
        return found

    def values(self, steps: range) -> list[Value]:
        """Return what the shard of an interval holds: its chunks, then the other values."""
        chunks = [*self._chunks(steps)]
        if len(self.intervals) == 1:
            return [*chunks, *self.small_values()]
        own = self._dataset.manifest
        if own is None:
            small = seal(self._foreign_keys(len(steps)))
        else:
            small = seal(_ShardManifest(self._dataset, own, self._table, steps).keys())
            chunks += self._checksums(steps, own.schema.chunk_steps)
        return [*chunks, *(Value(k, len(v), partial(bytes, v)) for k, v in small.items())]

    @cached_property
    def _table(self) -> Table:
        """The episodes, which are read once for all shards."""
        assert self._dataset.manifest
        return read_episodes(self._dataset.store, self._dataset.manifest)

    def small_values(self) -> list[Value]:
        """Return all values of the vault except its chunks."""
        documents = {f"{layout.prefix_of(grid.name)}.zarray" for grid in self._grids}
        prefixes = (OWN_PREFIX, layout.INDEX_PREFIX)
        keys = self._contents.tree.values
        return [
            self._value(key, key)
            for key in sorted(keys)
            if key in documents or key.startswith(prefixes)
        ]

    def _chunks(self, steps: range) -> Iterator[Value]:
        """Yield the chunks of an interval; those of the same rows and steps are together."""
        found = []
        for number, grid in enumerate(self._grids):
            size = grid.chunks[1]
            first, last = steps.start // size, -(-steps.stop // size)
            for chunk in range(first, last):
                here = grid.at(chunk, self._dataset.length)
                renamed = grid.at(chunk - first, layout.TIME_AXIS)
                for old, new in zip(here, renamed, strict=True):
                    if old.key in self._contents:
                        place = (chunk * size, old.rows[0], number)
                        found.append((*place, new.key, old.key))
        for *_, key, source in sorted(found):
            yield self._value(key, source)

    def _checksums(self, steps: range, chunk_steps: int) -> Iterator[Value]:
        first = steps.start // chunk_steps
        for number in range(first, -(-steps.stop // chunk_steps)):
            if (key := layout.checksums_key(number)) in self._contents:
                yield self._value(layout.checksums_key(number - first), key)

    def _value(self, key: str, source: str) -> Value:
        return Value(key, self._contents.size(source), partial(self._read, source))

    def _read(self, key: str) -> bytes:
        return self._contents.fetch(key)()

    def _foreign_keys(self, length: int) -> dict[str, bytes]:
        """Return the descriptions of arrays, and the index, of a shard of another program's."""
        keys = [f"{layout.prefix_of(grid.name)}.zarray" for grid in self._grids]
        index = self._contents.get_json(f"{layout.INDEX_PREFIX}.zarray")
        plain = {"compressor": None, "filters": None, "dtype": "<i4", "chunks": [1]}
        return {
            **{key: self._contents.get(key) for key in keys},
            f"{layout.INDEX_PREFIX}.zarray": layout.dump_json({**index, **plain}),
            layout.INDEX_KEY: layout.encode_index(length),
        }


class _ShardManifest:
    """The manifest of one shard of a vault of offmarl."""

    def __init__(self, dataset: Dataset, own: Manifest, table: Table, steps: range):
        self._dataset, self._own, self._table, self._steps = dataset, own, table, steps
        self._stop = min(steps.stop, own.head.length)

    def keys(self) -> dict[str, bytes]:
        """Return all keys except chunks and their checksums, without checksums of their own."""
        steps, own, (ended, running, numbers) = self._steps, self._own, self._episodes
        inside = [
            (max(a, steps.start) - steps.start, min(b, self._stop) - steps.start)
            for a, b in own.head.unverified
            if a < self._stop and b > steps.start
        ]
        head = Head(
            length=self._stop - steps.start,
            episodes=len(ended),
            finals=len(numbers),
            total_return=float(ended["returns"].mean(-1).sum()),
            unverified=tuple(inside),
        )
        found = without_episodes(own.schema, self._provenance, head, len(steps))
        found[layout.RUNNING_KEY] = running.tobytes()
        for first in range(0, len(ended), _BLOCK_RECORDS):
            block = ended[first : first + _BLOCK_RECORDS]
            found[layout.episodes_key(first)] = block.tobytes()
        if len(numbers):
            views = encoding.pack_view(self._dataset.final_views(numbers), own.schema.spec)
            found[layout.finals_key(0)] = views.tobytes()
        return found

    @property
    def _provenance(self) -> dict[str, Any]:
        steps = [self._steps.start, self._steps.stop]
        return {**self._own.provenance, "shard": {"steps": steps, "of": self._dataset.length}}

    @cached_property
    def _episodes(self) -> tuple[Table, Table, NumpyArray]:
        """The episodes that end in the shard, the unfinished ones, and the final views' numbers."""
        first, stop, table = self._steps.start, self._stop, self._table
        ends = table["start"] + table["length"]
        here = np.flatnonzero((table["start"] < stop) & (ends > first))
        found, ends = table[here].copy(), ends[here]
        whole = (found["start"] >= first) & (ends <= stop)
        goes_on = (ends > stop) | (found["cause"] == tables.OPEN)
        begin = np.maximum(found["start"], first)
        self._recount(found, begin, np.minimum(ends, stop), ~whole)
        found["length"] = np.minimum(ends, stop) - begin
        found["start"] = begin - first
        ended, open_ones = found[~goes_on], found[goes_on]
        running = tables.none_running(
            self._own.schema.rows, self._own.schema.spec.num_agents, stop - first
        )
        running[open_ones["row"]] = open_ones
        running["cause"], running["final"] = tables.OPEN, -1
        known = ended["final"] >= 0
        numbers = np.sort(ended["final"][known])
        ended["final"][known] = np.searchsorted(numbers, ended["final"][known])
        return ended, running, numbers

    def _recount(self, found: Table, begin: NumpyArray, end: NumpyArray, which: NumpyArray) -> None:
        """Compute the returns and policies of the parts of episodes that the shard holds."""
        for number in np.flatnonzero(which).tolist():
            row, start, stop = (int(x[number]) for x in (found["row"], begin, end))
            rows = slice(row, row + 1)
            rewards = self._dataset.read(start, stop, rows, ["rewards"])["rewards"][0]
            # A cumulative sum adds in the order of time, as `tables.scan` does.
            found["returns"][number] = np.cumsum(rewards, 0, dtype=np.float64)[-1]
            ids = self._dataset.read(start, start + 1, rows, [layout.POLICY_IDS])
            found["policy_id"][number] = encoding.first_agents(ids[layout.POLICY_IDS])[0, 0]


# ---------------------------------------------------------------------------------- joining


class DataFile(NamedTuple):
    """The chunks of a shard, in a data file of the vault that shards are joined to."""

    name: str
    """Path in the vault's directory."""
    first: int
    """First step of the shard in the joined vault."""
    places: Mapping[str, tuple[int, int]]
    """Offset and length of each value, by key."""


def join_shards(
    directory: Path,
    metadata: bytes,
    small: Iterable[tuple[str, bytes]],
    files: Sequence[DataFile],
) -> None:
    """Make a vault of the data files of shards, which are in its directory already."""
    driver = Directory(directory)
    store = OcdbtStore(driver)
    documents: dict[str, bytes] = {}
    waiting: dict[str, bytes] = {}
    for key, stored in small:
        waiting[key] = unseal(key, stored, directory)
        if key.endswith(".zarray"):
            documents[key] = stored
        if sum(map(len, waiting.values())) > _COMMIT_BYTES:
            store.commit(waiting, fence={}).result()
            waiting = {}
    store.commit(waiting, fence={}).result()
    grids = grids_of(documents)
    for file in files:
        entries = [
            (new, *place)
            for key, place in file.places.items()
            if (new := _joined_key(key, grids, file.first))
        ]
        store.adopt(file.name, entries)
    driver.write(METADATA, metadata)


def grids_of(documents: Mapping[str, bytes]) -> dict[str, Grid]:
    """Return the arrays of a vault by the prefix of their keys, given their ``.zarray``."""
    return {
        key.removesuffix(".zarray"): Grid.of(key, layout.load_json(value, key))
        for key, value in documents.items()
        if not key.startswith(layout.INDEX_PREFIX)
    }


def _joined_key(key: str, grids: Mapping[str, Grid], first: int) -> str | None:
    """Return the key of a shard's chunk in the joined vault; None for other keys."""
    if (cut := cut_chunk_key(key, grids)) is None:
        return None
    prefix, grid, index = cut
    index[1] += first // grid.chunks[1]
    return prefix + grid.separator.join(map(str, index))


def cut_chunk_key(key: str, grids: Mapping[str, Grid]) -> tuple[str, Grid, list[int]] | None:
    """Cut the key of a chunk into its array's prefix and the chunk's index; None for other keys.

    ``grids`` has the arrays by prefix.
    """
    prefix = key[: key.rfind("/") + 1]
    if prefix not in grids and "/" in key:
        # The separator of the index may be a slash, too.
        prefix = next((one for one in grids if one and key.startswith(one)), prefix)
    grid = grids.get(prefix)
    if grid is None:
        return None
    index = key.removeprefix(prefix).split(grid.separator)
    if len(index) != len(grid.shape) or not all(part.isdecimal() for part in index):
        return None
    return prefix, grid, [int(part) for part in index]
