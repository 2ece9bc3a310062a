"""Reading vaults: ours, and those that stock flashbax wrote."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from offmarl.errors import VaultError, VaultFormatError
from offmarl.types import Discrete, EnvSpec, Transition, View
from offmarl.vault import layout, tables
from offmarl.vault.layout import Head, Leaf, NumpyArray, Schema
from offmarl.vault.location import Location
from offmarl.vault.store import METADATA, Store, load_json

_BLOCK_BYTES = 2**25
"""About how much is in memory at once where a whole vault is gone through."""

_EVERY_ROW = slice(None)


class Own(NamedTuple):
    """Our own keys, all of one commit."""

    schema: Schema
    head: Head
    running: tables.Table
    provenance: dict[str, Any]
    stock_length: int
    """The length that stock programs see."""

    @property
    def length(self) -> int:
        """Steps of each row, those that a stock program appended included."""
        return self.head.whole_length(self.stock_length)

    @property
    def unverified(self) -> tuple[tuple[int, int], ...]:
        """Intervals of steps that a stock program appended, adopted or not."""
        begin = self.head.length
        return self.head.unverified + (((begin, self.length),) if begin < self.length else ())


class Vault:
    """A vault as it was when it was opened; made by `open_vault`.

    Attributes
    ----------
    path
        Its directory; one in an archive or at a URL is written in the same way.
    own
        Our own keys; None in a foreign vault.
    leaves
        Disk name to the data type and the shape of a single step.
    rows, length
        The first two axes of every array: environments, and time steps of each.
    provenance
        Where the data comes from; JSON.
    unverified
        Intervals of steps, ``((start, stop), ...)``, that a stock program appended.
    """

    def __init__(self, path: PurePath, checked: bool = False):
        self.path = path
        self._store = Store(path)
        self._checked = checked
        metadata = read_metadata(self._store.location)
        self.own = read_own(self._store)
        if self.own:
            self._describe(self.own, metadata)
        else:
            self._describe_foreign(metadata)

    def _describe(self, own: Own, metadata: Mapping[str, Any]) -> None:
        expected = layout.metadata(own.schema)
        if any(metadata.get(key) != expected[key] for key in layout.STOCK_KEYS):
            raise VaultFormatError(
                f"{self.path / METADATA} contradicts the vault's own schema, so one of them was "
                "changed or damaged: copy the vault again from where it came from."
            )
        self.leaves = layout.leaves(own.schema.spec)
        self.rows, self.length = own.schema.rows, own.length
        self.provenance = own.provenance
        self.unverified = own.unverified

    def _describe_foreign(self, metadata: Mapping[str, Any]) -> None:
        self.leaves, self.rows = layout.read_metadata(metadata)
        for name, leaf in self.leaves.items():
            self._check_array(name, leaf)
        self.length = int(self._store.array(layout.INDEX_PREFIX).read().result()[0])
        self.provenance = {key: metadata[key] for key in metadata if key not in layout.STOCK_KEYS}
        self.unverified = ()

    def _check_array(self, name: str, leaf: Leaf) -> None:
        array = self._store.array(layout.prefix_of(name))
        found = Leaf(array.dtype.numpy_dtype, array.shape[2:])
        if found != leaf or array.shape[0] != self.rows:
            raise VaultFormatError(
                f"{self.path}: {METADATA} says that {name} has {self.rows} rows of {leaf.dtype} "
                f"{leaf.shape}, and its array has {array.shape[0]} of {found.dtype} {found.shape}."
            )

    @property
    def native(self) -> bool:
        """Whether it has an episode table, final views and provenance of ours."""
        return self.own is not None

    @property
    def name(self) -> str:
        """The dataset's name: that of the directory above, without ``.vlt``."""
        return self.path.parent.name.removesuffix(".vlt")

    @property
    def uid(self) -> str:
        """What tells it from the dataset's other vaults."""
        return self.path.name

    @property
    def num_steps(self) -> int:
        """Recorded transitions in all rows."""
        return self.rows * self.length

    @property
    def num_bytes(self) -> int | None:
        """Bytes that its files take; None where finding out would mean reading them."""
        location = self._store.location
        if not location.is_directory:
            return None
        return sum(file.stat().st_size for file in location.directory.rglob("*") if file.is_file())

    @cached_property
    def spec(self) -> EnvSpec:
        """The environment's sizes; in a foreign vault, what its arrays tell of them."""
        if self.own:
            return self.own.schema.spec
        spec = layout.spec_of(self.leaves)
        if spec.action == Discrete(0):
            spec = dataclasses.replace(spec, action=Discrete(self._highest_action() + 1))
        return spec

    def _highest_action(self) -> int:
        blocks = (self.read(*b, leaves=["actions"]) for b in self.blocks(["actions"]))
        return max((int(block["actions"].max()) for block in blocks), default=0)

    @cached_property
    def episodes(self) -> tables.Episodes:
        """Every episode, by row and start; those that run on at the end of the data too."""
        return tables.to_episodes(np.concatenate(list(self._tables())))

    def _tables(self) -> Iterator[tables.Table]:
        if self.own is None:
            yield from self._scan(tables.none_running(self.rows, self.spec.num_agents))
            return
        head, running = self.own.head, self.own.running
        dtype = tables.dtype(self.spec.num_agents)
        yield read_table(self._store, layout.EPISODES_PREFIX, head.episodes, dtype)
        yield running[running["length"] > 0]
        if head.length < self.length:
            nobody = tables.none_running(self.rows, self.spec.num_agents, head.length)
            yield from self._scan(nobody)

    def _scan(self, running: tables.Table) -> Iterator[tables.Table]:
        """Find the episodes of steps whose table nobody kept."""
        found = [name for name in layout.SIGNALS if name in self.leaves]
        for begin, stop in self.blocks(found, int(running["start"][0])):
            signals = layout.signals_of(self.read(begin, stop, leaves=found))
            ended, running = tables.scan(running, begin, signals)
            yield ended
        yield running[running["length"] > 0]

    @cached_property
    def finals(self) -> View:
        """The views that episodes ended with, ``(F, ...)``; `Episodes.final` points here."""
        count = self.own.head.finals if self.own else 0
        dtype = layout.view_dtype(self.spec)
        return layout.unpack_view(read_table(self._store, layout.FINALS_PREFIX, count, dtype))

    def final_views(self, numbers: NumpyArray) -> View:
        """Read some of the final views, ``(len(numbers), ...)``, without holding all in memory.

        Parameters
        ----------
        numbers
            Which, as `Episodes.final` counts them; none may be -1.
        """
        dtype = layout.view_dtype(self.spec)
        if not self.own or self.own.head.finals * dtype.itemsize <= _BLOCK_BYTES:
            return View(*(field[numbers] for field in self.finals))
        views: NumpyArray = np.empty(len(numbers), dtype)
        block = np.searchsorted(self._finals_blocks, numbers, side="right") - 1
        for one in np.unique(block):
            first = self._finals_blocks[one]
            (data,) = self._store.get_all([layout.finals_key(int(first))])
            here = block == one
            views[here] = np.frombuffer(data, dtype)[numbers[here] - first]
        return layout.unpack_view(views)

    @cached_property
    def _finals_blocks(self) -> NumpyArray:
        """The number of the first final view in each block of them."""
        prefix = layout.FINALS_PREFIX
        return np.array([int(key.removeprefix(prefix)) for key in self._store.keys(prefix)])

    def read(
        self,
        start: int = 0,
        stop: int | None = None,
        rows: slice = _EVERY_ROW,
        leaves: Iterable[str] | None = None,
    ) -> dict[str, NumpyArray]:
        """Read arrays as they are on disk.

        Parameters
        ----------
        start, stop
            The time steps; all by default.
        rows
            The environments.
        leaves
            Disk names; all by default.

        Returns
        -------
        dict
            Disk name to array ``(B, T, ...)``.

        Raises
        ------
        VaultError
            There are no such steps or arrays, or they cannot be read.
        """
        stop = self.length if stop is None else stop
        if not 0 <= start <= stop <= self.length:
            raise VaultError(
                f"steps {start} to {stop} were asked for, and {self.path} has steps 0 to "
                f"{self.length}."
            )
        arrays = {name: self._array(name) for name in (self.leaves if leaves is None else leaves)}
        rows = slice(*rows.indices(self.rows))
        with self._store.errors():
            reads = {name: x[rows, start:stop].read() for name, x in arrays.items()}
            return {name: np.asarray(read.result()) for name, read in reads.items()}

    def transitions(
        self, start: int = 0, stop: int | None = None, rows: slice = _EVERY_ROW
    ) -> Transition:
        """Read steps as records ``(B, T, ...)``; what a foreign vault lacks is filled in.

        Everything is legal and everybody alive where the vault does not tell, the state is all
        observations, log-probabilities are NaN and policies -1.
        """
        known = [name for name in layout.leaves(self.spec) if name in self.leaves]
        return layout.from_disk(self.read(start, stop, rows, known), self.spec)

    def __getitem__(self, steps: slice) -> Transition:
        """Return the transitions of a slice of time, with Python's rules for slices."""
        start, stop, stride = steps.indices(self.length)
        if stride != 1:
            raise VaultError(f"steps are read one after the other, not every {stride}th.")
        return self.transitions(start, max(start, stop))

    def blocks(
        self, leaves: Iterable[str] | None = None, start: int = 0, rows: int | None = None
    ) -> Iterator[tuple[int, int]]:
        """Cut time into intervals that fit in memory and end where chunks do.

        ``rows`` is how many will be read at once; all by default.
        """
        names = list(self.leaves if leaves is None else leaves)
        step_bytes = (rows or self.rows) * sum(self.leaves[name].step_bytes for name in names)
        chunk = max(self._arrays.chunk(name)[1] for name in names)
        size = chunk * max(1, _BLOCK_BYTES // (step_bytes * chunk))
        while start < self.length:
            stop = min(self.length, (start // size + 1) * size)
            yield start, stop
            start = stop

    def digest(self) -> str:
        """Return the SHA-256 of the logical content; see `offmarl.vault.digest`."""
        from offmarl.vault.digest import digest

        return digest(self)


def read_metadata(location: Location) -> dict[str, Any]:
    """Return the content of ``metadata.json``."""
    file = location.path / METADATA
    try:
        data = location.read(METADATA)
    except (OSError, ValueError) as error:
        raise VaultFormatError(f"{file} cannot be read: {error}.") from error
    return load_json(data or b"", str(file))


def read_own(store: Store) -> Own | None:
    """Return our own keys, or None where there are none."""
    data = store.get_json(layout.SCHEMA_KEY)
    if data is None:
        return None
    schema = Schema.from_json(data)
    # A writer may commit between two reads; the head tells, because every commit changes it.
    while True:
        (head,) = store.get_all([layout.HEAD_KEY])
        own = _read_own(store, schema, Head.from_json(load_json(head, layout.HEAD_KEY)))
        if store.get(layout.HEAD_KEY) == head:
            return own


def _read_own(store: Store, schema: Schema, head: Head) -> Own:
    index, running, provenance = store.get_all(
        [layout.INDEX_KEY, layout.RUNNING_KEY, layout.PROVENANCE_KEY]
    )
    dtype = tables.dtype(schema.spec.num_agents)
    own = Own(
        schema=schema,
        head=head,
        running=np.frombuffer(running, dtype),
        provenance=load_json(provenance, layout.PROVENANCE_KEY),
        stock_length=layout.decode_index(index),
    )
    if own.length < head.length:
        raise VaultFormatError(
            f"{store.path} had {head.length} steps a row, and its index was set back to "
            f"{own.stock_length}: a program that does not know our lock wrote over it while it was "
            "being recorded."
        )
    return own


def read_table(store: Store, prefix: str, count: int, dtype: np.dtype[Any]) -> NumpyArray:
    """Return the first ``count`` records of a table that is kept in blocks."""
    keys = [key for key in store.keys(prefix) if int(key.removeprefix(prefix)) < count]
    data = b"".join(store.get_all(keys))
    if len(data) != count * dtype.itemsize:
        raise VaultFormatError(
            f"{store.path} has lost a part of {prefix}: of {count * dtype.itemsize} bytes "
            f"{len(data)} are there."
        )
    return np.frombuffer(data, dtype)
