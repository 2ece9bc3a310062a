"""The records that appended steps add to a vault's tables."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from offmarl.errors import ShapeError, VaultError
from offmarl.types import EnvSpec, FinalObservations, Transition
from offmarl.vault import encoding, layout, tables
from offmarl.vault.faults import Fault
from offmarl.vault.layout import Head, NumpyArray
from offmarl.vault.manifest import Parts
from offmarl.vault.reader import Reader
from offmarl.vault.tables import Signals, Table

Cut = bool | np.ndarray[Any, np.dtype[np.bool_]]
"""A flag for the last step of all rows or of each, or for every step ``(rows, T)``."""


class Record(NamedTuple):
    """The episodes and final views that a record adds, and the vault's head after it."""

    head: Head
    ended: tables.Table
    finals: NumpyArray
    running: tables.Table


def is_there(path: object, run: str, chunk: int | None, done: int) -> bool:
    """Return whether a record is among those that a run has appended."""
    if not isinstance(run, str) or (chunk is not None and chunk < 0):
        raise VaultError(
            f"{path} cannot append chunk {chunk!r} of run {run!r}: a run's name is text, and its "
            "chunks are counted from 0."
        )
    if chunk is not None and chunk > done:
        raise VaultError(
            f"chunk {chunk} of run {run!r} does not follow: {path} has the first {done}. Append "
            f"chunk {done} next."
        )
    return chunk is not None and chunk < done


def account(
    transition: Transition,
    arrays: Mapping[str, NumpyArray],
    finals: FinalObservations | None,
    tip: Head,
    running: tables.Table,
    spec: EnvSpec,
    *,
    fresh: bool,
    cut: Cut = False,
) -> Record:
    """Return the record of steps ``(rows, T, ...)`` that are appended."""
    lost = running[:0]
    signals = encoding.signals_of(arrays)
    _check_last(transition, signals)
    begin, stop = tip.length, tip.length + signals.reward.shape[1]
    if fresh:
        lost = running[running["length"] > 0]
        running = tables.none_running(len(running), spec.num_agents, begin)
    ended, running = tables.scan(running, begin, signals)
    ended = _mark_cut(ended, begin, _cut_steps(cut, signals.last.shape))
    ended, views = _with_finals(ended, finals, tip, spec)
    ended = np.concatenate([lost, ended])
    head = tip._replace(
        length=stop,
        episodes=tip.episodes + len(ended),
        finals=tip.finals + len(views),
        total_return=tip.total_return + float(ended["returns"].mean(-1).sum()),
    )
    return Record(head, ended, views, running)


def tables_of(records: Sequence[Record], before: Head) -> dict[str, bytes]:
    """Return the keys and values that add records to the tables of a vault."""
    if not records:
        return {}
    head, *_, running = records[-1]
    writes = {
        layout.INDEX_KEY: layout.encode_index(head.length),
        layout.HEAD_KEY: layout.dump_json(head._asdict()),
        layout.RUNNING_KEY: running.tobytes(),
    }
    ended = np.concatenate([record.ended for record in records])
    finals = np.concatenate([record.finals for record in records])
    if len(ended):
        writes[layout.episodes_key(before.episodes)] = ended.tobytes()
    if len(finals):
        writes[layout.finals_key(before.finals)] = finals.tobytes()
    return writes


def warn_of_length(path: object, begin: int, stop: int) -> None:
    """Warn where a vault grows longer than stock programs can see."""
    if begin <= layout.MAX_STOCK_LENGTH < stop:
        warnings.warn(
            f"{path} grows past {layout.MAX_STOCK_LENGTH} steps a row: offmarl continues, but "
            "stock flashbax will not see the steps after that. Record more rows, or several "
            "vaults.",
            stacklevel=4,
        )


def _with_finals(
    ended: tables.Table, finals: FinalObservations | None, tip: Head, spec: EnvSpec
) -> tuple[tables.Table, NumpyArray]:
    """Return the ended episodes with their final views' numbers, and the views packed."""
    if finals is None:
        return ended, np.zeros(0, encoding.view_dtype(spec))
    views = encoding.pack_view(finals.view, spec)
    row, time = np.asarray(finals.row), np.asarray(finals.time)
    if not row.shape == time.shape == views.shape:
        raise ShapeError(
            f"{len(views)} final views came with rows {row.shape} and times {time.shape}: give "
            "one of each for every view."
        )
    return tables.attach_finals(ended, tip.length, row, time, tip.finals), views


def _check_last(transition: Transition, signals: Signals) -> None:
    if not np.array_equal(signals.last, np.asarray(transition.last)):
        raise ShapeError(
            "`last` must be true exactly where every agent terminated or was truncated: programs "
            "that read the vault find the ends of episodes by those."
        )


def _cut_steps(cut: Cut, shape: tuple[int, int]) -> NumpyArray:
    """Return a flag for every step, ``(rows, T)``."""
    if np.shape(cut) == shape:
        return np.asarray(cut, bool)
    if np.shape(cut) not in ((), shape[:1]):
        raise ShapeError(
            f"`cut` has shape {np.shape(cut)}: give one flag, one for each of {shape[0]} rows, or "
            f"one for each step, {shape}."
        )
    steps: NumpyArray = np.zeros(shape, bool)
    steps[:, -1] = cut
    return steps


def _mark_cut(ended: tables.Table, begin: int, cut: NumpyArray) -> tables.Table:
    """Mark which truncations are by the recording."""
    is_cut = cut[ended["row"], ended["start"] + ended["length"] - 1 - begin]
    if is_cut.sum() != cut.sum():
        raise ShapeError(
            "a row is marked as cut at a step that does not end its episode: set `truncated` and "
            "`last` at that step, and give its final view."
        )
    ended["cause"][is_cut & (ended["cause"] == tables.TRUNCATED)] = tables.CUT
    return ended


_MAX_FAULTS = 100


def reindex(vault: Reader, stop: int, known: Table) -> tuple[Table, Table]:
    """Find the episodes in the first ``stop`` steps of each row."""
    given_up = known[(known["cause"] == tables.OPEN) & (_ends(known) < stop)]
    running = tables.none_running(vault.rows, vault.spec.num_agents)
    found = [known[:0]]
    names = [name for name in (*layout.SIGNALS, layout.POLICY_IDS) if name in vault.leaves]
    for begin, end in vault.blocks(names):
        if begin < stop:
            arrays = vault.read(begin, min(end, stop), leaves=names)
            signals = _with_ends(encoding.signals_of(arrays), given_up, begin)
            ended, running = tables.scan(running, begin, signals)
            found.append(ended)
    ended = np.concatenate(found)
    ended["cause"] = np.where(_among(ended, given_up), tables.OPEN, ended["cause"])
    cut = known[known["cause"] == tables.CUT]
    by_limit = ended["cause"] == tables.TRUNCATED
    ended["cause"] = np.where(by_limit & _among(ended, cut), tables.CUT, ended["cause"])
    return ended, running


def differences(vault: Reader, own: Parts) -> Iterator[Fault]:
    """Yield the differences between the episode table and the steps."""
    table, head = own.table, own.head
    if table is None or head is None:
        return
    ended, running = reindex(vault, head.length, table[: head.episodes])
    found, kept = (_sorted(x) for x in (np.concatenate([ended, running]), table))
    found = found[found["length"] > 0]
    if len(found) != len(kept):
        yield Fault(f"the steps have {len(found)} episodes, and the table has {len(kept)}")
        return
    names = [name for name in found.dtype.names or () if name != "final"]
    same = [_equal(found[name], kept[name]) for name in names]
    for episode in np.flatnonzero(~np.all(same, axis=0))[:_MAX_FAULTS].tolist():
        wrong = ", ".join(
            name for name, equal in zip(names, same, strict=True) if not equal[episode]
        )
        yield Fault(
            f"the episode table and the steps differ in its {wrong}",
            episodes=(episode,),
        )


def _equal(a: Table, b: Table) -> Table:
    equal = (a == b) | ((a != a) & (b != b))  # noqa: PLR0124 - NaN
    return equal.all(tuple(range(1, equal.ndim)))


def _sorted(table: Table) -> Table:
    return table[np.lexsort((table["start"], table["row"]))]


def _ends(table: Table) -> Table:
    return table["start"] + table["length"] - 1


def _with_ends(signals: Signals, given_up: Table, begin: int) -> Signals:
    """Return the signals with an end added where an episode was abandoned."""
    time = _ends(given_up) - begin
    here = (time >= 0) & (time < signals.reward.shape[1])
    terminated = signals.terminated.copy()
    terminated[given_up["row"][here], time[here]] = True
    return signals._replace(terminated=terminated)


def _among(table: Table, others: Table) -> Table:
    """Return the mask of the episodes of a table that are also in another."""
    known = set(zip(others["row"].tolist(), _ends(others).tolist(), strict=True))
    mine = zip(table["row"].tolist(), _ends(table).tolist(), strict=True)
    return np.fromiter((end in known for end in mine), bool, len(table))
