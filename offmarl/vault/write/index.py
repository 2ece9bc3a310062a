"""The records that appended steps add to a vault's tables."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from offmarl.errors import ShapeError, VaultError
from offmarl.types import EnvSpec, FinalObservations, Transition
from offmarl.vault.format import encoding, layout, tables
from offmarl.vault.format.layout import Head, NumpyArray

Cut = bool | np.ndarray[Any, np.dtype[np.bool_]]
"""A flag for the last step of all rows or of each, or for every step ``(rows, T)``."""


class IndexRecord(NamedTuple):
    """The episodes and final views that a record adds, and the vault's head after it."""

    head: Head
    episodes: tables.Table
    finals: NumpyArray
    running: tables.Table


def is_appended(path: object, run: str, chunk: int | None, done: int) -> bool:
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


def record_of(
    transition: Transition,
    arrays: Mapping[str, NumpyArray],
    finals: FinalObservations | None,
    tip: Head,
    running: tables.Table,
    spec: EnvSpec,
    *,
    fresh: bool,
    cut: Cut = False,
) -> IndexRecord:
    """Return the record of steps ``(rows, T, ...)`` that are appended."""
    lost = running[:0]
    signals = encoding.signals_of(arrays)
    if not np.array_equal(signals.last, np.asarray(transition.last)):
        raise ShapeError(
            "`last` must be true exactly where every agent terminated or was truncated: programs "
            "that read the vault find the ends of episodes by those."
        )
    begin, stop = tip.length, tip.length + signals.reward.shape[1]
    if fresh:
        lost = running[running["length"] > 0]
        running = tables.none_running(len(running), running.dtype, begin)
    episodes, running = tables.scan(running, begin, signals)
    episodes = _mark_cut(episodes, begin, _cut_steps(cut, signals.last.shape))
    episodes, views = _with_finals(episodes, finals, tip, spec)
    episodes = np.concatenate([lost, episodes])
    head = tip._replace(
        length=stop,
        episodes=tip.episodes + len(episodes),
        finals=tip.finals + len(views),
        total_return=tip.total_return + float(episodes["returns"].mean(-1).sum()),
    )
    return IndexRecord(head, episodes, views, running)


def tables_of(records: Sequence[IndexRecord], before: Head) -> dict[str, bytes]:
    """Return the keys and values that add records to the tables of a vault."""
    if not records:
        return {}
    head, *_, running = records[-1]
    writes = {
        layout.INDEX_KEY: layout.encode_index(head.length),
        layout.HEAD_KEY: layout.dump_json(head._asdict()),
        layout.RUNNING_KEY: running.tobytes(),
    }
    episodes = np.concatenate([record.episodes for record in records])
    finals = np.concatenate([record.finals for record in records])
    if len(episodes):
        writes[layout.episodes_key(before.episodes)] = episodes.tobytes()
    if len(finals):
        writes[layout.finals_key(before.finals)] = finals.tobytes()
    return writes


def _with_finals(
    episodes: tables.Table, finals: FinalObservations | None, tip: Head, spec: EnvSpec
) -> tuple[tables.Table, NumpyArray]:
    """Return the ended episodes with their final views' numbers, and the views packed."""
    if finals is None:
        return episodes, np.zeros(0, encoding.view_dtype(spec))
    views = encoding.pack_view(finals.view, spec)
    row, time = np.asarray(finals.row), np.asarray(finals.time)
    if not row.shape == time.shape == views.shape:
        raise ShapeError(
            f"{len(views)} final views came with rows {row.shape} and times {time.shape}: give "
            "one of each for every view."
        )
    return tables.attach_finals(episodes, tip.length, row, time, tip.finals), views


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


def _mark_cut(episodes: tables.Table, begin: int, cut: NumpyArray) -> tables.Table:
    """Mark the truncations that the recording made."""
    is_cut = cut[episodes["row"], episodes["start"] + episodes["length"] - 1 - begin]
    if is_cut.sum() != cut.sum():
        raise ShapeError(
            "a row is marked as cut at a step that does not end its episode: set `truncated` and "
            "`last` at that step, and give its final view."
        )
    episodes["cause"][is_cut & (episodes["cause"] == tables.TRUNCATED)] = tables.CUT
    return episodes
