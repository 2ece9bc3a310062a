"""Reads a vault of any program as experience."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import PurePath
from threading import Lock
from typing import Any, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from offmarl._html import html_table
from offmarl.errors import OptionError, ShapeError, VaultError
from offmarl.teams import only_or_all, teams_of
from offmarl.terminal import number
from offmarl.types import EnvSpec, Episode, Transition, View, map_tree
from offmarl.vault.format import compat, encoding, layout, tables
from offmarl.vault.format.layout import NumpyArray
from offmarl.vault.format.windows import put_steps
from offmarl.vault.read import bounds
from offmarl.vault.read.arrays import Arrays
from offmarl.vault.read.manifest import (
    Description,
    Manifest,
    describe,
    first_of,
    read_episodes,
    read_pull_record,
    read_table,
)
from offmarl.vault.storage.store import Store, store_of

_BLOCK_BYTES = 2**25
"""Approximate size of a block when a whole vault is read block by block."""

_ALL = slice(None)


class Reader:
    """A vault as it was when it was opened: any interval, window or episode of it.

    It has no verbs: `offmarl.vault.Dataset`, which describes the attributes, adds them.
    """

    _mapped = True  # whether the files may be mapped into memory
    _final_bytes = 2**25  # up to which all final views are kept in memory

    def __init__(self, store: Store, checked: bool = True, time_limit: int | None = None):
        self.store, self.path = store, store.path
        self._checked, self._opening = checked, Lock()
        self._read_through: Arrays | None = None
        self._described = described = self._describe()
        self.manifest, self.unverified = described.manifest, described.unverified
        self.leaves, self.rows, self.length = described.leaves, described.rows, described.length
        if self.manifest and time_limit is not None:
            raise OptionError(f"{self.path} records how episodes end: leave the time limit out.")
        pulled = read_pull_record(store)
        limit = None if self.manifest else pulled.time_limit
        self.time_limit = limit if time_limit is None else time_limit
        self.provenance = {**described.provenance, **pulled.provenance}

    def _describe(self) -> Description:
        return describe(self.store)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path only: another process opens the vault again, as it is then."""
        return _open, (type(self), self.path, self._checked, self.time_limit)

    def __len__(self) -> int:
        return len(self.episodes.row)

    def __repr__(self) -> str:
        """Describe the dataset without reading any data."""
        text = f"{self.num_steps:,} steps in {self.rows} rows"
        if self.manifest:
            spec = self.manifest.schema.spec
            text = f"{spec.name or 'unknown environment'}, {spec.num_agents} agents, {text}"
        return f"<{type(self).__name__} {str(self.path)!r}: {text}>"

    def _repr_html_(self) -> str:
        facts: dict[str, Any] = {"steps": self.num_steps, "rows": self.rows}
        if self.manifest:  # to find the episodes of other vaults, all of the data is read
            spec, mean = self.spec, only_or_all(self.episodes.mean_returns)
            facts = {"environment": spec.name, "agents": spec.num_agents, **facts}
            facts |= {"episodes": len(self), "mean return": mean}
        return html_table((), ((name, number(x)) for name, x in facts.items()), str(self.path))

    @property
    def native(self) -> bool:
        """Whether offmarl wrote it: it has an episode table, final views and provenance."""
        return self.manifest is not None

    @property
    def name(self) -> str:
        """The dataset's name: that of the directory above, without ``.vlt``."""
        return self.path.parent.name.removesuffix(".vlt")

    @property
    def uid(self) -> str:
        """The name of the vault within the dataset."""
        return self.path.name

    @property
    def num_steps(self) -> int:
        """Recorded transitions in all rows."""
        return self.rows * self.length

    @property
    def num_bytes(self) -> int | None:
        """Bytes that its files take; None if finding out would mean reading them."""
        return self.store.num_bytes

    @property
    def is_remote(self) -> bool:
        """Whether it is on another machine, where windows from anywhere take a request each."""
        return self.store.is_remote

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """Rows and steps that are stored together: the largest of all arrays."""
        sizes = [self._arrays.chunk(name) for name in self.leaves]
        return max(rows for rows, _ in sizes), max(steps for _, steps in sizes)

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Descriptions of the data that is read without being compared with a checksum."""
        if self.manifest is None:
            return (
                "all arrays: a program other than offmarl wrote them, so at most their codec has "
                "checksums",
            )
        schema, begin = self.manifest.schema, self.manifest.head.length
        if schema.codec == "raw" and not self._checked:
            return ("all arrays: the vault was opened with checked=False",)
        if begin == self.length:
            return ()
        begin -= begin % schema.chunk_steps
        return (f"steps {begin} to {self.length - 1}: another program appended to them",)

    @cached_property
    def spec(self) -> EnvSpec:
        """The environment's sizes; inferred from the arrays if another program wrote the vault."""
        if self.manifest:
            return self.manifest.schema.spec
        return compat.infer_spec(self)

    @cached_property
    def quirks(self) -> tuple[str, ...]:
        """Deviations of another program's vault, which `transitions` and `episodes` correct.

        For a vault of offmarl: invalid values that it was imported with. `read` corrects nothing.
        `offmarl.vault.format.compat.MEANINGS` explains each.
        """
        if self.manifest:
            return compat.recorded_quirks(self.provenance)
        return compat.find_quirks(self, self._table)

    @cached_property
    def episodes(self) -> tables.Episodes:
        """Every episode, by row and start, including unfinished ones at the end of the data."""
        table = self._table
        cause = table["cause"].copy()
        cause[compat.ended_by_limit(table, self.time_limit)] = tables.TRUNCATED
        episodes = tables.to_episodes(table, teams_of(self.spec), cause)
        if self.manifest:  # its table is not read again, and large vaults have millions of episodes
            self.__dict__.pop("_table", None)
        return episodes

    @cached_property
    def sound_episodes(self) -> tables.Episodes | None:
        """The episodes up to their first step that is not finite; None if all steps are finite."""
        return compat.sound_episodes(self)

    @cached_property
    def illegal_steps(self) -> NumpyArray | None:
        """Number of steps of each episode with an illegal action of a living agent; None if zero.

        Batches leave out these steps.
        """
        return compat.illegal_steps(self)

    @property
    def policy_ids(self) -> tuple[int, ...]:
        """The known ids of the policies that acted, in ascending order."""
        return tuple(sorted({*np.unique(self.episodes.policy_ids).tolist()} - {-1}))

    @cached_property
    def _table(self) -> tables.Table:
        """Every episode, with its end as stored."""
        parts = [self._recorded(self.manifest)] if self.manifest else []
        start = self.manifest.head.length if self.manifest else 0
        if start < self.length or not self.manifest:
            agents = self.spec.num_agents
            record = self.manifest.schema.record if self.manifest else tables.dtype(agents, agents)
            parts += compat.infer_episodes(self, record, start)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @cached_property
    def _limited(self) -> NumpyArray:
        return compat.limited_steps(self, self._table)

    def _recorded(self, manifest: Manifest) -> tables.Table:
        """Return the episodes that offmarl wrote."""
        return read_episodes(self.store, manifest)

    @property
    def finals(self) -> View:
        """The views that episodes ended with, ``(F, ...)``; `Episodes.final` points here."""
        return self._finals.all

    def final_views(self, numbers: NumpyArray) -> View:
        """Read some of the final views, ``(len(numbers), ...)``, without holding all in memory.

        Parameters
        ----------
        numbers
            Numbers of the views, as in `Episodes.final`.

        Raises
        ------
        VaultError
            A number is out of range, such as the -1 of an episode without a final view.
        """
        numbers = np.asarray(numbers)
        count = self._finals.count
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < count:
            raise VaultError(
                f"final views {numbers.min()} to {numbers.max()} were requested, and {self.path} "
                f"has {count}, from 0: an episode whose `final` is -1 has none."
            )
        return self._finals.read(numbers)

    @cached_property
    def _finals(self) -> "FinalViews":
        return FinalViews(self)

    def read(
        self,
        start: int = 0,
        stop: int | None = None,
        rows: slice = _ALL,
        leaves: Iterable[str] | None = None,
    ) -> dict[str, NumpyArray]:
        """Read arrays as they are on disk. Only the requested data is read.

        Parameters
        ----------
        start, stop
            The time steps; all by default.
        rows
            The environments; all by default.
        leaves
            Disk names of the arrays; all by default.

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
        bounds.check_steps(self._described, start, stop)
        names = list(self.leaves if leaves is None else leaves)
        first, last = bounds.interval(rows, self.rows, "rows")
        return self._arrays.read(names, (first, last), (start, stop))

    def windows(
        self,
        rows: NumpyArray,
        starts: NumpyArray,
        length: int,
        leaves: Iterable[str] | None = None,
    ) -> dict[str, NumpyArray]:
        """Gather windows from anywhere, as they are on disk.

        Uncompressed vaults on this machine are read as fast as arrays in memory, even if they are
        larger than memory. For other vaults, whole chunks are read, and some of them kept.

        Parameters
        ----------
        rows, starts
            ``(W,)`` the environment and the first step of each window.
        length
            Steps in a window.
        leaves
            Disk names; all by default.

        Returns
        -------
        dict
            Disk name to array ``(W, length, ...)``.

        Raises
        ------
        VaultError
            There are no such steps or arrays, or they cannot be read.
        """
        names = list(self.leaves if leaves is None else leaves)
        rows, starts = bounds.windows(self._described, rows, starts, length)
        return self._arrays.windows(names, rows, starts, length)

    def percentiles(self, low: float, high: float) -> tuple[int, int]:
        """Return the interval of steps from one percentile of time to another.

        Raises
        ------
        VaultError
            They are outside [0, 100], or not in order.
        """
        if not 0 <= low <= high <= 100:
            raise VaultError(
                f"percentiles {low} to {high} were requested: give two in order from 0 to 100."
            )
        return round(self.length * low / 100), round(self.length * high / 100)

    def episode(self, number: SupportsIndex) -> Episode:
        """Read one episode.

        Parameters
        ----------
        number
            Its index in `episodes`; negative numbers count from the end.

        Raises
        ------
        VaultError
            There is no such episode, or it cannot be read.
        """
        table = self.episodes
        bounds.check_episode(number, len(table.row), self.path)
        row, start = int(table.row[number]), int(table.start[number])
        steps = self.transitions(start, start + int(table.length[number]), slice(row, row + 1))
        final = None
        if table.final[number] >= 0:
            final = _first(self.final_views(np.atleast_1d(table.final[number])))
        return Episode(_first(steps), final)

    def transitions(
        self, start: int = 0, stop: int | None = None, rows: slice = _ALL
    ) -> Transition:
        """Read steps as records ``(B, T, ...)``; arrays that a vault lacks are filled in.

        Without such arrays, all actions are legal, all agents are alive, the state is all
        observations if these are vectors, log-probabilities are NaN and policy ids -1.
        """
        names = [name for name in layout.leaves(self.spec) if name in self.leaves]
        steps = encoding.from_disk(self.read(start, stop, rows, names), self.spec)
        return steps if self.manifest else compat.normalise(steps, self._limited[rows, start:stop])

    def rewards(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """Read the rewards of an interval of time, ``(B, T, N)``, and nothing else."""
        rewards = self.read(start, stop, leaves=["rewards"])["rewards"]
        shape = *rewards.shape[:2], self.spec.num_agents
        return rewards.reshape(shape).astype(np.float32, copy=False)

    def window_transitions(self, rows: NumpyArray, starts: NumpyArray, length: int) -> Transition:
        """Gather windows as records ``(W, length, ...)``; see `windows` and `transitions`."""
        names = [name for name in layout.leaves(self.spec) if name in self.leaves]
        steps = encoding.from_disk(self.windows(rows, starts, length, names), self.spec)
        if self.manifest:
            return steps
        limited = self._limited[rows[:, None], starts[:, None] + np.arange(length)]
        return compat.normalise(steps, limited)

    def window_fields(
        self,
        rows: NumpyArray,
        starts: NumpyArray,
        length: int,
        index: NumpyArray,
        out: Mapping[str, NumpyArray],
        at: NumpyArray | None = None,
    ) -> None:
        """Gather windows as `window_transitions` does, and write some of their steps to arrays.

        Parameters
        ----------
        rows, starts, length
            As for `windows`.
        index
            ``(n, S)`` which steps to write, counted through all windows.
        out
            Contiguous arrays ``(m, S, ...)`` for the fields of transitions and views, named as in
            "reward" and "observation.image". If they have fewer than S steps, they take the first
            of each n.
        at
            ``(n,)`` where on the first axis of these; None for all, in order.
        """
        targets = {layout.disk_name_of(field): array for field, array in out.items() if array.size}
        if self.manifest and all(name in self.leaves for name in targets):
            rows, starts = bounds.windows(self._described, rows, starts, length)
            self._arrays.window_steps(rows, starts, length, index, targets, at)
            return
        arrays = encoding.to_disk(self.window_transitions(rows, starts, length))
        for name, array in targets.items():
            put_steps(arrays[name], index, array, at)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> Transition: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Episode | Transition:
        """Return an episode by its number, or the transitions of a slice of time, all rows."""
        if isinstance(index, slice):
            return self.transitions(*bounds.interval(index, self.length, "steps"))
        return self.episode(index)

    def blocks(
        self, leaves: Iterable[str] | None = None, start: int = 0, rows: int | None = None
    ) -> Iterator[tuple[int, int]]:
        """Cut time into intervals that fit in memory and end where chunks do.

        ``rows`` is the number of rows that are read at once; all by default.
        """
        names = self.leaves if leaves is None else leaves
        return self._arrays.blocks(names, start, rows or self.rows, _BLOCK_BYTES)

    def prepare_fork(self) -> None:
        """Let processes that are forked from this one read the dataset.

        TensorStore ends a forked process that calls it. After this call, forked processes read the
        vault through memory maps of its files, which they share. The datasets of
        `offmarl.replay.torch` call it themselves. It needs a directory on this machine: start
        processes that read an archive, a bucket or a web address with spawn.
        """
        if self.store.is_local:
            _ = self.episodes, None if self.manifest else self._limited
            self._finals.prepare_fork()
            self._arrays.prepare_fork()

    @property
    def _arrays(self) -> Arrays:
        if self._read_through is None:
            with self._opening:  # threads share it and its maps
                if self._read_through is None:
                    self._read_through = Arrays(
                        self._described, lambda: self.episodes, self._checked, self._mapped
                    )
        return self._read_through


class FinalViews:
    """The final views of a vault, which may not fit in memory."""

    def __init__(self, vault: Reader):
        self._vault, self._dtype = vault, encoding.view_dtype(vault.spec)
        self.count = vault.manifest.head.finals if vault.manifest else 0
        self._in_memory = self.count * self._dtype.itemsize <= vault._final_bytes

    def prepare_fork(self) -> None:
        """Read the data that forked processes need besides the blocks of views."""
        _ = self.all if self._in_memory else self._firsts

    @cached_property
    def all(self) -> View:
        """All final views, ``(F, ...)``."""
        values = self._vault._arrays.values
        table = read_table(values, layout.FINALS_PREFIX, self.count, self._dtype)
        return encoding.unpack_view(table)

    def read(self, numbers: NumpyArray) -> View:
        """Return the views of these numbers, ``(len(numbers), ...)``."""
        if self._in_memory:
            views: View = map_tree(lambda leaf: leaf[numbers], self.all)
            return views
        table: NumpyArray = np.empty(len(numbers), self._dtype)
        blocks = self._block_of(numbers)
        try:
            firsts = {block: int(self._firsts[block]) for block in np.unique(blocks).tolist()}
            self._vault.store.prefetch([*map(layout.finals_key, firsts.values())])
            for block, first in firsts.items():
                (data,) = self._vault._arrays.values.get_all([layout.finals_key(first)])
                mask = blocks == block
                table[mask] = np.frombuffer(data, self._dtype)[numbers[mask] - first]
        except (IndexError, ValueError) as error:
            lack = f"it has lost final views of {numbers.min()} to {numbers.max()}"
            raise layout.damage_error(self._vault.path, lack) from error
        return encoding.unpack_view(table)

    def in_block(self, key: str, numbers: NumpyArray) -> NumpyArray:
        """Return the mask of the numbers that are stored under a key; false for -1."""
        first = first_of(key, layout.FINALS_PREFIX)
        return (numbers >= 0) & (self._firsts[self._block_of(numbers)] == first)

    def _block_of(self, numbers: NumpyArray) -> NumpyArray:
        return np.searchsorted(self._firsts, numbers, side="right") - 1

    @cached_property
    def _firsts(self) -> NumpyArray:
        """The number of the first view in each block of views."""
        keys = self._vault.store.keys(layout.FINALS_PREFIX)
        return np.array([first_of(key, layout.FINALS_PREFIX) for key in keys])


def _open(kind: type[Reader], path: PurePath, checked: bool, time_limit: int | None) -> Reader:
    return kind(store_of(path), checked, time_limit)


def _first(record: Any) -> Any:
    """Drop the leading axis, of length one, of a record's arrays."""
    return map_tree(lambda leaf: leaf[0], record)


def common_spec(vaults: Sequence[Reader]) -> EnvSpec:
    """Return the spec of vaults that are joined or mixed."""
    first = max(vaults, key=lambda vault: (bool(vault.spec.name), bool(vault.spec.package)))
    limits = {vault.time_limit for vault in vaults} - {None}
    if len(limits) > 1:
        raise ShapeError(f"the vaults have different time limits: {', '.join(map(str, limits))}.")
    for vault in vaults:
        difference = vault.spec.difference(first.spec)
        if not difference and (vault.spec.name or not first.spec.name):
            difference = _other_settings(vault.spec, first.spec)
        if difference:
            raise ShapeError(
                f"{vault.path} cannot be joined with {first.path}: it differs in {difference}. "
                "Take vaults of one environment, with the same settings."
            )
    return first.spec


def _other_settings(spec: EnvSpec, other: EnvSpec) -> str:
    for setting in ("name", "time_limit", "reward", "state"):
        value, expected = getattr(spec, setting), getattr(other, setting)
        if value != expected:
            return f"{setting} ({value!r}, not {expected!r})"
    return ""
