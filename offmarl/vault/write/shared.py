"""Lets several processes append to one vault at once.

Each process gathers whole episodes in memory. It takes the vault's lock only for a commit, a few
milliseconds: it reads where the vault ends, appends there, and releases the lock. The vault is
therefore always as a single writer would have left it: without gaps, without incomplete episodes,
and with nothing to clean up after a process that died.
"""

import os
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from offmarl.errors import ShapeError, VaultConflictError, VaultError
from offmarl.types import EnvSpec, FinalObservations, Transition, map_tree
from offmarl.vault.format import encoding, tables, values
from offmarl.vault.format.layout import Head
from offmarl.vault.read.open import locate, place_of
from offmarl.vault.read.reader import Reader
from offmarl.vault.write.compaction import lock_and_tidy, reclaim
from offmarl.vault.write.index import Cut, is_appended, record_of
from offmarl.vault.write.writer import manifest_of, resume


class _Waiting(NamedTuple):
    transition: Transition
    finals: FinalObservations | None
    cut: Cut


class SharedWriter:
    """One of several writers of a vault, a context manager; `join` returns one.

    Any thread may use it, but only one thread at a time.
    """

    def __init__(self, vault: Reader, run: str, gather: int | None, timeout: float):
        manifest = manifest_of(vault)
        self.path = vault.path
        self.run = run
        self._schema = manifest.schema
        self._gather = gather or self._schema.chunk_steps
        self._timeout = timeout
        self._committed = manifest.head.runs.get(run, 0)
        self._unsure = False
        self._waiting: list[_Waiting] = []
        self._steps = 0
        self._closed = False

    @property
    def spec(self) -> EnvSpec:
        """The environment's sizes."""
        return self._schema.spec

    @property
    def rows(self) -> int:
        """Parallel environments."""
        return self._schema.rows

    def chunks(self) -> int:
        """Return the number of committed records of this run."""
        return self._committed

    def append(
        self,
        transition: Transition,
        finals: FinalObservations | None = None,
        *,
        chunk: int | None = None,
        cut: Cut = False,
    ) -> None:
        """Add whole episodes. The arrays are copied before the call returns.

        They are durable after `flush`, which `append` calls when enough steps are gathered. If the
        commit fails, the steps stay in memory, and the next call tries again: do not append them
        twice.

        Parameters
        ----------
        transition
            Arrays ``(rows, T, ...)``; an episode ends at the last step of every row. A single
            episode is ``(1, T, ...)``, in a vault of one row.
        finals
            The final views of the episodes.
        chunk
            Number of this record in the run, from 0; by default the next. A record that exists
            already is skipped.
        cut
            Marks episodes that the recording, and not the environment, ended, as in
            `Writer.append`.

        Raises
        ------
        ShapeError
            The arrays do not fit the vault or contradict one another, or an episode is unfinished
            at the end.
        InvalidValueError
            A value is invalid, as in `Writer.append`.
        VaultLockedError
            Another process kept the vault locked for too long.
        VaultError
            An earlier record of the run is missing, the writer is closed, or the commit failed.
        """
        self._check_open()
        if is_appended(self.path, self.run, chunk, self._committed + len(self._waiting)):
            return
        self._check(transition, finals, cut)
        self._waiting.append(map_tree(np.array, _Waiting(transition, finals, cut)))
        self._steps += self._waiting[-1].transition.last.shape[1]
        if self._steps >= self._gather:
            self.flush()

    def flush(self) -> None:
        """Commit everything. When this returns, all appended steps are durable."""
        self._check_open()
        if not self._waiting:
            return
        writer = resume(self.path, timeout=self._timeout)
        try:
            self._check_alone(writer.chunks(self.run))
            self._unsure = True
            for chunk, (transition, finals, cut) in enumerate(self._waiting, self._committed):
                writer.append(transition, finals, run=self.run, chunk=chunk, cut=cut)
            writer.flush()
        finally:
            writer.release()
        self._unsure = False
        self._committed += len(self._waiting)
        self._waiting, self._steps = [], 0

    def close(self) -> None:
        """Flush, reclaim much unused space, and refuse further steps. Idempotent."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        with suppress(VaultError):  # another writer has it open, which reclaims the space later
            store = locate(self.path)
            with lock_and_tidy(store):
                reclaim(store)

    def __enter__(self) -> "SharedWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, transition: Transition, finals: FinalObservations | None, cut: Cut) -> None:
        """Check a record when it is appended, before the lock is taken."""
        arrays = encoding.fit(transition, self._schema, f" for {self.path}")
        values.check(arrays, self.spec, finals)
        arrays = values.cast(arrays, self._schema.leaves)
        none = tables.none_running(self.rows, self._schema.record)
        record = record_of(transition, arrays, finals, Head(), none, self.spec, fresh=True, cut=cut)
        if record.running["length"].any():
            raise ShapeError(
                f"several writers append whole episodes to {self.path}: `last` must be true at the "
                "last step of every row. To cut an episode off there, set `truncated`, and give "
                "its final view and `cut`."
            )

    def _check_alone(self, chunks: int) -> None:
        """Raise `VaultError` if another writer uses the name of this run.

        A commit that failed may still have reached the disk, so there may be more records than
        this writer knows of.
        """
        most = self._committed + (len(self._waiting) if self._unsure else 0)
        if not self._committed <= chunks <= most:
            raise VaultConflictError(
                f"{self.path} has {chunks} records of run {self.run!r}, of which this writer "
                f"committed {self._committed}: give each writer a run name of its own."
            )

    def _check_open(self) -> None:
        if self._closed:
            raise VaultError(f"this writer of {self.path} is closed: join the vault again.")


def join(
    path: str | os.PathLike[str],
    run: str,
    *,
    gather: int | None = None,
    timeout: float = 60.0,
) -> SharedWriter:
    """Open a vault of offmarl to append to it together with other processes.

    Parameters
    ----------
    path
        A vault on this machine, which `create` made.
    run
        Name of this writer's records; each writer needs a name of its own. To take over from a
        writer that died, use its name: records that the vault already has are skipped.
    gather
        Steps of a row to gather before each commit; about a chunk by default.
    timeout
        Seconds to wait for the lock.

    Raises
    ------
    VaultFormatError
        It was not written by offmarl, or is damaged.
    VaultError
        It is in an archive or an object store, which have no locks.
    """
    if not place_of(path).is_local:
        raise VaultError(
            f"{path} cannot have several writers: only a directory on this machine can be locked. "
            "Write one vault per process, and join them with `offmarl cat`."
        )
    return SharedWriter(Reader(locate(path)), run, gather, timeout)
