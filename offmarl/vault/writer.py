"""Appending to vaults.

Steps are gathered to whole chunks, and a commit writes finished chunks, the episode table and the
new length in one atomic transaction. The length covers whole appended records only: a finished
chunk may hold the beginning of a record whose end is still in memory, and those steps are not there
yet. So whatever happens, a vault holds its first so many records and nothing else.
"""

import os
import warnings
from collections.abc import Mapping
from pathlib import PurePath
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from offmarl.errors import ShapeError, VaultError, VaultFormatError
from offmarl.types import EnvSpec, Finals, Transition
from offmarl.vault import layout, tables
from offmarl.vault.chunks import ChunkBuffer
from offmarl.vault.layout import Head, NumpyArray
from offmarl.vault.listing import locate
from offmarl.vault.reader import Vault
from offmarl.vault.store import Store, WriterLock
from offmarl.vault.tables import Signals

Rows = bool | np.ndarray[Any, np.dtype[np.bool_]]
"""A flag for each row, or one for all of them."""


class _Record(NamedTuple):
    """What one appended record adds to the vault's tables, and the head that counts it in."""

    head: Head
    ended: tables.Table
    finals: NumpyArray
    running: tables.Table


class _Commit(NamedTuple):
    """A commit that the disk may still be working on."""

    done: "ts.Future[None]"
    records: list[_Record]
    staged: dict[str, bytes]
    fence: tuple[str, ...]
    """Keys that nobody can append without changing, once it is done."""


class Writer:
    """The one writer of a vault; made by `create` and `resume`, closed as a context manager.

    Any thread may use it, inside a running event loop too, but only one at a time.
    """

    def __init__(self, path: PurePath, lock: WriterLock):
        vault = Vault(path)
        if vault.own is None:
            raise VaultFormatError(
                f"{path} was not written by offmarl, so nothing can be appended to it: copy its "
                "data to a vault of ours first."
            )
        self.path = path
        self._lock = lock
        self._store = Store(path)
        self._schema, self._head, _, self._running, self._provenance, _ = vault.own
        self._tip = self._head
        self._pending: list[_Record] = []
        self._annotated = False
        self._buffer = ChunkBuffer(self._schema, self._head.length)
        self._buffer.restore(vault.read(self._buffer.tail.start, self._head.length))
        self._under_way: _Commit | None = None
        self._fence = self._stamps(self._fence_keys())
        self._closed = False
        if vault.length > self._head.length:
            self._adopt(vault)
        else:
            self._buffer.verify(self._store)

    @property
    def spec(self) -> EnvSpec:
        """The environment's sizes."""
        return self._schema.spec

    @property
    def length(self) -> int:
        """Committed steps of each row."""
        return self._head.length

    def chunks(self, run: str) -> int:
        """Return how many chunks of a run are committed."""
        return self._head.runs.get(run, 0)

    def append(
        self,
        transition: Transition,
        finals: Finals | None = None,
        *,
        run: str = "",
        chunk: int | None = None,
        cut: Rows = False,
        wait: bool = True,
    ) -> None:
        """Add steps to every row.

        All is copied before the call returns. Where the disk has no room the steps stay in memory
        and `flush` tries again: they must not be appended twice.

        Parameters
        ----------
        transition
            Arrays ``(rows, T, ...)``, any T.
        finals
            The views that the episodes which ended here ended with. The next view at the end of an
            episode without one is unknown.
        run, chunk
            Who appends, and which of its records this is, counted from 0; by default the next. A
            record that is there already is skipped, so a command can be run again. An episode never
            goes on from one run to another.
        cut
            Rows in which the recording, not the environment, ended an episode at the last step.
        wait
            Whether to wait for the disk where chunks are full. Otherwise what goes wrong there is
            raised by the next call, and what was written is not kept in the page cache: for
            recordings, whose data is read much later.

        Raises
        ------
        ShapeError
            The arrays have other shapes or types than the vault's, or contradict one another.
        VaultError
            An earlier record of the run is missing, the writer is closed, or the commit failed.
        """
        self._check_open()
        done = self._tip.runs.get(run, 0)
        if chunk is not None and chunk < done:
            return
        if chunk is not None and chunk > done:
            raise VaultError(
                f"chunk {chunk} of run {run!r} does not follow: {self.path} has the first {done}. "
                f"Append chunk {done} next."
            )
        if self._buffer.tail.stop != self._tip.length:
            raise VaultError(
                f"an append to {self.path} was interrupted: close the writer, which keeps what was "
                "appended before, and resume the vault."
            )
        tip = self._tip._replace(run=run, runs={**self._tip.runs, run: done + 1})
        self._accept(transition, finals, tip, fresh=run != self._tip.run, cut=cut)
        if self._buffer.staged:
            self._commit()
            if wait:
                self._settle()
            else:
                self._store.drop_pages()

    def annotate(self, provenance: Mapping[str, Any]) -> None:
        """Merge a JSON object into the provenance, with the next commit."""
        layout.dump_json(dict(provenance))
        self._provenance = {**self._provenance, **provenance}
        self._annotated = True

    def flush(self) -> None:
        """Commit everything: when this returns, all that was appended is durable."""
        self._check_open()
        self._settle()
        if self._pending:
            self._buffer.stage_tail()
        if self._pending or self._annotated:
            self._commit()
            self._settle()

    def close(self) -> None:
        """Flush, and let others write; again does nothing."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self.release()

    def release(self) -> None:
        """Let others write; what is not flushed is given up."""
        self._closed = True
        if self._under_way is not None:
            self._under_way.done.exception()  # waits: nobody else may write before
        self._lock.release()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(
        self,
        transition: Transition,
        finals: Finals | None,
        tip: Head,
        *,
        fresh: bool,
        cut: Rows = False,
    ) -> None:
        """Take steps into the buffer, and what follows from them into the tables.

        Where ``fresh``, the steps begin new episodes, whatever was running.
        """
        arrays = layout.to_disk(transition)
        layout.check_transition(arrays, self._schema)
        signals = layout.signals_of(arrays)
        _check_last(transition, signals)
        begin, stop = tip.length, tip.length + signals.reward.shape[1]
        lost, running = self._running[:0], self._running
        if fresh:
            lost = running[running["length"] > 0]
            running = tables.none_running(len(running), self.spec.num_agents, begin)
        ended, running = tables.scan(running, begin, signals)
        ended = _mark_cut(ended, stop, np.broadcast_to(cut, len(running)))
        ended, views = self._with_finals(ended, finals, tip)
        ended = np.concatenate([lost, ended])
        _warn_of_length(self.path, begin, stop)
        self._running = running
        self._tip = tip._replace(
            length=stop,
            episodes=tip.episodes + len(ended),
            finals=tip.finals + len(views),
            total_return=tip.total_return + float(ended["returns"].mean(-1).sum()),
        )
        self._pending.append(_Record(self._tip, ended, views, running))
        self._buffer.put(arrays)

    def _with_finals(
        self, ended: tables.Table, finals: Finals | None, tip: Head
    ) -> tuple[tables.Table, NumpyArray]:
        """Return the ended episodes with their final views' numbers, and the views packed."""
        if finals is None:
            return ended, np.zeros(0, layout.view_dtype(self.spec))
        views = layout.pack_view(finals.view, self.spec)
        row, time = np.asarray(finals.row), np.asarray(finals.time)
        if not row.shape == time.shape == views.shape:
            raise ShapeError(
                f"{len(views)} final views came with rows {row.shape} and times {time.shape}: give "
                "one of each for every view."
            )
        return tables.attach_finals(ended, tip.length, row, time, tip.finals), views

    def _adopt(self, vault: Vault) -> None:
        """Take in what a stock program appended, as episodes of unknown policies."""
        start = self._head.length
        unverified = (*self._head.unverified, (start, vault.length))
        for begin, stop in vault.blocks(start=start):
            steps = vault.transitions(begin, stop)
            unknown: NumpyArray = np.full_like(steps.policy_id, -1)
            steps = steps._replace(policy_id=unknown)
            tip = self._tip._replace(run=None, unverified=unverified)
            self._accept(steps, None, tip, fresh=begin == start)
        self.flush()

    def _commit(self) -> None:
        """Start to write what is staged, and the tables up to the last record staged whole."""
        self._settle()
        through = self._buffer.through
        ready = [record for record in self._pending if record.head.length <= through]
        staged = self._buffer.staged
        with self._store.errors():
            done = self._store.commit(staged | self._tables(ready), self._fence)
        self._under_way = _Commit(done, ready, staged, self._fence_keys())
        self._buffer.staged = {}
        self._annotated = False

    def _settle(self) -> None:
        """Wait for the commit under way, if there is one, and enter it in the books."""
        if self._under_way is None:
            return
        commit = self._under_way
        with self._store.errors():
            try:
                commit.done.result()
            finally:
                # An interrupt does not stop a commit: wait, so that our books agree with the disk.
                failed = commit.done.exception() is not None
                self._under_way = None
                if failed:
                    self._buffer.staged = commit.staged | self._buffer.staged
                    self._annotated = True
                else:
                    self._committed(commit)

    def _tables(self, ready: list[_Record]) -> dict[str, bytes]:
        writes = {}
        if self._annotated:
            writes[layout.PROVENANCE_KEY] = layout.dump_json(self._provenance)
        if ready:
            head = ready[-1].head
            writes[layout.INDEX_KEY] = layout.encode_index(head.length)
            writes[layout.HEAD_KEY] = layout.dump_json(head._asdict())
            writes[layout.RUNNING_KEY] = ready[-1].running.tobytes()
            ended = np.concatenate([record.ended for record in ready])
            finals = np.concatenate([record.finals for record in ready])
            if len(ended):
                writes[layout.episodes_key(self._head.episodes)] = ended.tobytes()
            if len(finals):
                writes[layout.finals_key(self._head.finals)] = finals.tobytes()
        return writes

    def _committed(self, commit: _Commit) -> None:
        if commit.records:
            self._pending = self._pending[len(commit.records) :]
            self._head = commit.records[-1].head
        self._fence = self._stamps(commit.fence)

    def _fence_keys(self) -> tuple[str, ...]:
        return (layout.INDEX_KEY, self._buffer.last_key())

    def _stamps(self, keys: tuple[str, ...]) -> dict[str, bytes]:
        """Return the generations of keys that nobody can append without changing."""
        return {key: self._store.stamp(key) for key in keys}

    def _check_open(self) -> None:
        if self._closed:
            raise VaultError(f"the writer of {self.path} is closed: resume the vault to go on.")


def _check_last(transition: Transition, signals: Signals) -> None:
    if not np.array_equal(signals.last, np.asarray(transition.last)):
        raise ShapeError(
            "`last` must be true exactly where every agent terminated or was truncated: programs "
            "that read the vault find the ends of episodes by those."
        )


def _mark_cut(ended: tables.Table, stop: int, cut: NumpyArray) -> tables.Table:
    """Tell truncations by the recording, at the block's end, from those by the environment."""
    at_end = ended["start"] + ended["length"] == stop
    if not np.isin(np.flatnonzero(cut), ended["row"][at_end]).all():
        raise ShapeError(
            "a row was said to be cut where its episode goes on: set `truncated` and `last` at its "
            "last step, and give its final view."
        )
    truncated = ended["cause"] == tables.TRUNCATED
    ended["cause"][at_end & truncated & cut[ended["row"]]] = tables.CUT
    return ended


def _warn_of_length(path: PurePath, begin: int, stop: int) -> None:
    if begin <= layout.MAX_STOCK_LENGTH < stop:
        warnings.warn(
            f"{path} grows past {layout.MAX_STOCK_LENGTH} steps a row: offmarl goes on, but stock "
            "flashbax will see no further. Record more rows, or several vaults.",
            stacklevel=4,
        )


def resume(path: str | os.PathLike[str]) -> Writer:
    """Open a vault of ours to append to it.

    Raises
    ------
    VaultLockedError
        Another writer has it open; the message names the process.
    VaultFormatError
        It was not written by offmarl, or is damaged.
    """
    found = locate(path)
    lock = WriterLock(found)
    try:
        return Writer(found, lock)
    except BaseException:
        lock.release()
        raise
