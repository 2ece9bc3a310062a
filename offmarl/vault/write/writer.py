"""Appending to vaults.

Steps are gathered into whole chunks. A commit writes finished chunks, the episode table and the new
length in one atomic transaction, while further steps are gathered. The length covers only whole
records. A finished chunk may hold the beginning of a record whose end is still in memory; these
steps are not counted yet. If a process dies, the vault therefore holds the first records that were
appended, each whole.
"""

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, NoReturn

import numpy as np

from offmarl.errors import VaultError, VaultFormatError, VaultFullError
from offmarl.types import EnvSpec, FinalObservations, Transition
from offmarl.vault.format import compat, encoding, layout, values
from offmarl.vault.format.layout import NumpyArray
from offmarl.vault.format.values import OnInvalid, RecordPosition
from offmarl.vault.read.manifest import Manifest
from offmarl.vault.read.open import locate
from offmarl.vault.read.reader import Reader
from offmarl.vault.storage.files import WriterLock, conflict_error, errors_of
from offmarl.vault.storage.store import Directory, Pending, Store
from offmarl.vault.write import index
from offmarl.vault.write.chunks import ChunkBuffer, Value
from offmarl.vault.write.compaction import reclaim, tidy

_COMMIT_BYTES = 2**25
"""Size of the full chunks that start a commit while no other is in progress."""
_MOST_COMMIT_BYTES = 2**27
"""Size at which an append waits for the commit in progress, and starts another."""
_COMMIT_PARTS = 64
"""The size that starts a commit is at least this part of the data: large vaults have few files."""
_COMMIT_SECONDS = 5.0
"""Maximum time that full chunks wait for a commit; limits what a killed recording loses."""


class _Commit(NamedTuple):
    """A commit that may not have finished."""

    done: Pending
    records: list[index.IndexRecord]
    staged: dict[str, Value]
    annotated: bool


class Writer:
    """The only writer of a vault, a context manager; `create` and `resume` return one.

    Any thread may use it, also inside a running event loop, but only one thread at a time.
    """

    def __init__(
        self, store: Store, lock: WriterLock, manifest: Manifest, on_invalid: OnInvalid = "raise"
    ):
        self.path = store.path
        self._lock = lock
        self._on_invalid = on_invalid
        self.store = store
        self._schema = manifest.schema
        self._head = self._tip = manifest.head
        self._running = manifest.running
        self._provenance = manifest.provenance
        self._pending: list[index.IndexRecord] = []
        self._annotated = False
        self._buffer = ChunkBuffer(self._schema, self._head.length)
        self._buffer.restore(self.store)
        self._under_way: _Commit | None = None
        self._committed_at = time.monotonic()
        self._fence = self._stamps(manifest.stock_length)
        self._closed = False

    @property
    def spec(self) -> EnvSpec:
        """The environment's sizes."""
        return self._schema.spec

    @property
    def rows(self) -> int:
        """Parallel environments."""
        return self._schema.rows

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
        finals: FinalObservations | None = None,
        *,
        run: str = "",
        chunk: int | None = None,
        cut: index.Cut = False,
    ) -> None:
        """Add steps to every row.

        The arrays are copied before the call returns, and are written in large commits in the
        background; they are durable after `flush`. If the disk is full, a later call raises
        `VaultFullError`, the steps stay in memory, and `flush` tries again: do not append them
        twice.

        Parameters
        ----------
        transition
            Arrays ``(rows, T, ...)``, any T. It has the leaves of `EnvSpec.observation`,
            `EnvSpec.global_state` and `EnvSpec.extras`.
        finals
            The final views of episodes that end in these steps. If an episode has none, the view
            after its last step is unknown.
        run
            Name of the run that appends. An episode never spans two runs.
        chunk
            Number of the record in the run, from 0; by default the next. A record that exists
            already is skipped, so that a program can be run again.
        cut
            Marks episodes that the recording, and not the environment, ended: a flag for the last
            step, one for all rows or ``(rows,)``, or flags for all steps ``(rows, T)``.

        Raises
        ------
        ShapeError
            The record has other leaves than the vault, or arrays of other shapes or kinds, or they
            contradict one another. Wider numbers, such as float64 and int64, are cast.
        InvalidValueError
            A value is invalid: NaN or infinity (but an unknown log-probability is NaN), an action
            outside the action space, a flag other than 0 and 1, a positive log-probability of a
            discrete action. The message names the first. Values of extras are not checked.
        VaultError
            An earlier record of the run is missing, the writer is closed, or a commit failed.
        """
        self._check_open()
        done = self._tip.runs.get(run, 0)
        if index.is_appended(self.path, run, chunk, done):
            return
        if self._buffer.length != self._tip.length:
            raise VaultError(
                f"an append to {self.path} was interrupted: close the writer, which keeps what was "
                "appended before, and resume the vault."
            )
        tip = self._tip._replace(run=run, runs={**self._tip.runs, run: done + 1})
        self._accept(transition, finals, tip, fresh=run != self._tip.run, cut=cut)
        if self._is_commit_due():
            self._commit()

    def annotate(self, provenance: Mapping[str, Any]) -> None:
        """Merge a JSON object into the provenance, with the next commit."""
        layout.dump_json(dict(provenance))
        self._provenance = {**self._provenance, **provenance}
        self._annotated = True

    def flush(self) -> None:
        """Commit everything. When this returns, all appended steps are durable."""
        self._check_open()
        self._await_commit()
        if self._pending or self._annotated:
            self._commit(tail=bool(self._pending))  # an annotation alone leaves the tail as it is
            self._await_commit()

    def close(self) -> None:
        """Flush, reclaim much unused space, and release the lock. Idempotent.

        A flush writes the unfinished chunk, which the next one replaces. If a sixth of the vault's
        files is such unused space, and more than 1 MB, the data is written again; data of more than
        4 GB is left to `compact`.

        Raises
        ------
        VaultFullError
            The disk is full: the writer stays open and keeps the steps in memory. Free some space
            and close it again, or call `release` to discard them.
        VaultError
            The commit failed for another reason; the writer is closed.
        """
        if self._closed:
            return
        try:
            self.flush()
            with suppress(VaultError):  # the data is durable; a later close or compact tries again
                reclaim(self.store)
        except VaultFullError:
            raise
        except BaseException:
            self.release()
            raise
        self.release()

    def discard(self) -> None:
        """Remove the vault if it is on this machine and holds no steps, and release the lock."""
        self._settle()
        if not self._tip.length and isinstance(self.store, Directory):
            shutil.rmtree(self.store.path, ignore_errors=True)
            with suppress(OSError):
                self.store.directory.parent.rmdir()  # unless there are others
        self.release()  # last, so that no other writer loses its steps

    def release(self) -> None:
        """Release the lock without flushing; steps that were not flushed are lost."""
        self._closed = True
        self._settle()  # no other writer may start before
        self._lock.release()

    def _settle(self) -> None:
        """Wait for the commit in progress, whether it succeeds or fails."""
        if self._under_way is not None:
            self._under_way.done.exception()

    def __reduce__(self) -> NoReturn:
        """Refuse pickling: another process does not hold the lock."""
        raise VaultError(
            f"the writer of {self.path} cannot be pickled: call offmarl.vault.join in each process."
        )

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        except VaultFullError as error:
            steps = self._tip.length - self._head.length
            lost = f"the last {steps} steps of each row were" if steps else "the annotation was"
            raise VaultFullError(
                f"{error} The writer's block has ended, so {lost} not written."
            ) from error
        finally:
            self.release()

    def _accept(
        self,
        transition: Transition,
        finals: FinalObservations | None,
        tip: layout.Head,
        *,
        fresh: bool,
        cut: index.Cut = False,
    ) -> None:
        """Add steps to the buffer, and their episodes to the tables."""
        arrays, problems = self._checked(transition, finals)
        record = index.record_of(
            transition, arrays, finals, tip, self._running, self.spec, fresh=fresh, cut=cut
        )
        quirks = compat.recorded_quirks(self._provenance)
        if new_quirks := values.warn(problems, quirks):
            self.annotate({"quirks": [*quirks, *new_quirks]})
        self._tip, self._running = record.head, record.running
        self._pending.append(record)
        self._buffer.put(arrays)

    def _checked(
        self, transition: Transition, finals: FinalObservations | None
    ) -> tuple[dict[str, NumpyArray], list[values.Invalid]]:
        """Check shapes and values, and return the arrays to store and the problems to warn of."""
        position = f" at step {self._tip.length} of {self.path}"
        arrays = encoding.fit(transition, self._schema, position)
        place = RecordPosition(self._tip.length, "of the vault")
        problems = [*values.find(arrays, self.spec, finals, place)]
        if self._on_invalid == "raise":
            values.refuse(problems)
        return values.cast(arrays, self._schema.leaves, place, self._on_invalid), problems

    def _is_commit_due(self) -> bool:
        """Whether to commit the full chunks: they take much memory, or have waited for long."""
        staged = self._buffer.staged_bytes
        is_idle = self._under_way is None or self._under_way.done.done()
        waited = time.monotonic() - self._committed_at
        most = max(_COMMIT_BYTES, self._buffer.full_bytes // _COMMIT_PARTS)
        most = min(most, _MOST_COMMIT_BYTES) if is_idle else _MOST_COMMIT_BYTES
        return staged >= most or (staged > 0 and waited > _COMMIT_SECONDS)

    def _adopt(self, vault: Reader) -> None:
        """Adopt the steps that a stock program appended, as episodes of unknown policies.

        Invalid values, on disk already, are kept. One commit adopts all: the index never falls.
        """
        self._on_invalid, on_invalid = "keep", self._on_invalid
        start = self._head.length
        unverified = (*self._head.unverified, (start, vault.length))
        for begin, stop in vault.blocks(start=start):
            steps = vault.transitions(begin, stop)
            unknown: NumpyArray = np.full_like(steps.policy_id, -1)
            steps = steps._replace(policy_id=unknown)
            tip = self._tip._replace(run=None, unverified=unverified)
            self._accept(steps, None, tip, fresh=begin == start)
        self.flush()
        self._on_invalid = on_invalid

    def _commit(self, tail: bool = False) -> None:
        """Start a commit of the full chunks, and of the tables up to their last whole record.

        With ``tail``, the commit also has the unfinished chunk, and so every record.
        """
        self._await_commit()
        through = self._buffer.length if tail else self._buffer.through
        ready = [record for record in self._pending if record.head.length <= through]
        staged = self._buffer.staged
        writes: dict[str, Value] = staged | (self._buffer.tail() if tail else {})
        writes |= index.tables_of(ready, self._head)
        if self._annotated:
            writes[layout.PROVENANCE_KEY] = layout.dump_json(self._provenance)
        with errors_of(self.path):
            done = self.store.commit(writes, self._fence)
        self._under_way = _Commit(done, ready, staged, self._annotated)
        self._buffer.staged = {}
        self._annotated = False
        self._committed_at = time.monotonic()

    def _await_commit(self) -> None:
        """Wait for the commit in progress, if there is one, and record its outcome."""
        if self._under_way is None:
            return
        commit = self._under_way
        with errors_of(self.path):
            try:
                commit.done.result()
            finally:
                # An interrupt does not stop a commit: wait, so that memory and disk agree.
                failed = commit.done.exception() is not None
                self._under_way = None
                if failed:
                    self._buffer.staged = commit.staged | self._buffer.staged
                    self._annotated |= commit.annotated
                else:
                    self._committed(commit)

    def _committed(self, commit: _Commit) -> None:
        if commit.records:
            self._pending = self._pending[len(commit.records) :]
            self._head = commit.records[-1].head
        self._fence = self._stamps(min(self._head.length, layout.MAX_STOCK_LENGTH))

    def _stamps(self, stock_length: int) -> dict[str, bytes]:
        """Return the generations of keys that every append changes."""
        chunk = self._head.length // self._schema.chunk_steps
        keys = (layout.INDEX_KEY, self._schema.chunk_key("rewards", 0, chunk))
        (stored_index, *_), stamps = self.store.stamps(keys)
        if layout.decode_index(stored_index) != stock_length:
            raise conflict_error(self.path)
        return dict(zip(keys, stamps, strict=True))

    def _check_open(self) -> None:
        if self._closed:
            raise VaultError(f"the writer of {self.path} is closed: resume the vault to continue.")


def manifest_of(vault: Reader) -> Manifest:
    """Return the manifest of a vault; `VaultFormatError` if offmarl did not write it."""
    if vault.manifest is None:
        raise VaultFormatError(
            f"{vault.path} was not written by offmarl, so nothing can be appended to it: make a "
            "vault of it with `offmarl cat` first."
        )
    return vault.manifest


def resume(path: str | os.PathLike[str], *, timeout: float = 0.0) -> Writer:
    """Open a vault of offmarl to append to it.

    Parameters
    ----------
    path
        The vault; see `open_vault`.
    timeout
        Seconds to wait while another writer has it open.

    Raises
    ------
    VaultLockedError
        Another writer has it open; the message names the process.
    VaultFormatError
        It was not written by offmarl, or is damaged.
    """
    store = locate(path)
    with ExitStack() as stack:
        lock = store.lock(timeout)
        stack.callback(lock.release)
        tidy(store)
        vault = Reader(store)
        writer = Writer(store, lock, manifest_of(vault))
        stack.callback(writer.release)  # waits for a commit of an adoption that failed
        if vault.length > writer.length:
            writer._adopt(vault)
        stack.pop_all()
        return writer
