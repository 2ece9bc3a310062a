"""Moving pieces of vaults into a new one, a block at a time."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from offmarl.types import FinalObservations, Transition, View
from offmarl.vault.dataset import Vault
from offmarl.vault.layout import NumpyArray
from offmarl.vault.progress import Advance
from offmarl.vault.tables import CAUSES, CUT, OPEN
from offmarl.vault.transform.selection import Pieces
from offmarl.vault.writer import Writer

_BLOCK_BYTES = 2**25
"""About how much is read at once."""

Translate = Callable[[NumpyArray], NumpyArray]
"""From the ids of policies in a source to those in the vault that is made."""

Copy = Callable[[Vault, Pieces, Writer, Translate, Advance], None]
"""Appends pieces of a vault to another; `copy_pieces` does."""


class _Window(NamedTuple):
    """A part of a vault that is read at once, and the pieces in it, cut to its time."""

    rows: slice
    begin: int
    stop: int
    pieces: Pieces
    ends: NumpyArray
    """Which of the pieces end here."""


def copy_pieces(
    vault: Vault, pieces: Pieces, writer: Writer, translate: Translate, advance: Advance
) -> None:
    """Append pieces of a vault to a row of another, end to end.

    A piece that does not reach the end of its episode is cut off: truncated, with the next view as
    its final one. So is an episode that runs on at the end of the data, without a final view.

    Parameters
    ----------
    vault
        The source.
    pieces
        What to take.
    writer
        Of a vault with one row, and the sizes of the source.
    translate
        Gives policies their new ids.
    advance
        Told of the steps of every block.
    """
    for window in _windows(vault, pieces):
        steps, finals, cut = _gather(vault, window)
        steps = steps._replace(policy_id=translate(steps.policy_id))
        writer.append(steps, finals, cut=cut)
        advance(steps.last.size)


def copy_rows(vault: Vault, writer: Writer, advance: Advance) -> None:
    """Append all of a vault to one with as many rows, and change nothing."""
    found = vault.episodes
    ends = found.start + found.length
    is_open = found.cause == CAUSES[OPEN]
    # Where nobody ended an episode and the data goes on, another run began.
    breaks = np.unique(ends[is_open])
    for begin, stop in _cut_at(vault.blocks(), breaks.tolist()):
        steps = vault.transitions(begin, stop)
        here = np.flatnonzero((ends > begin) & (ends <= stop) & ~is_open)
        row: NumpyArray = found.row[here]
        time: NumpyArray = ends[here] - 1 - begin
        cut: NumpyArray = np.zeros(steps.last.shape, bool)
        cut[row, time] = found.cause[here] == CAUSES[CUT]
        known = found.final[here] >= 0
        finals = FinalObservations(
            row[known], time[known], vault.final_views(found.final[here][known])
        )
        run = np.searchsorted(breaks, begin, side="right") % 2
        writer.append(steps, finals, run=f"copy {run}", cut=cut)
        advance(steps.last.size)


def _cut_at(blocks: Iterator[tuple[int, int]], breaks: list[int]) -> Iterator[tuple[int, int]]:
    for begin, stop in blocks:
        edges = [begin, *(edge for edge in breaks if begin < edge < stop), stop]
        yield from pairwise(edges)


def _windows(vault: Vault, pieces: Pieces) -> Iterator[_Window]:
    """Go through the rows that pieces are of; several at once where they are short."""
    rows = vault.episodes.row[pieces.episode]
    row_bytes = vault.length * sum(leaf.step_bytes for leaf in vault.leaves.values())
    group = max(1, _BLOCK_BYTES // max(row_bytes, 1))
    times = [(0, vault.length)] if row_bytes <= _BLOCK_BYTES else list(vault.blocks(rows=1))
    for first in np.unique(rows // group) * group:
        low, high = np.searchsorted(rows, [first, first + group])
        of_rows = Pieces(*(column[low:high] for column in pieces))
        for begin, stop in times:
            inside = (of_rows.start < stop) & (of_rows.stop > begin)
            if inside.any():
                yield _window(vault, Pieces(*(x[inside] for x in of_rows)), begin, stop)


def _window(vault: Vault, pieces: Pieces, begin: int, stop: int) -> _Window:
    start = np.maximum(pieces.start, begin)
    end = np.minimum(pieces.stop, stop)
    row = vault.episodes.row[pieces.episode]
    return _Window(
        slice(int(row[0]), int(row[-1]) + 1),
        int(start.min()),
        int(end.max()),
        Pieces(pieces.episode, start, end),
        pieces.stop <= stop,
    )


def _gather(vault: Vault, window: _Window) -> tuple[Transition, FinalObservations, NumpyArray]:
    """Return a window's pieces end to end ``(1, T, ...)``, their final views, and where cut."""
    pieces, ends, found = window.pieces, window.ends, vault.episodes
    episode = pieces.episode[ends]
    goes_on = pieces.stop[ends] < found.start[episode] + found.length[episode]
    unended = goes_on | (found.cause[episode] == CAUSES[OPEN])

    # Where an episode goes on, the step after shows what the last one led to.
    stop = max(window.stop, *(pieces.stop[ends][goes_on] + 1).tolist(), 0)
    read = vault.transitions(window.begin, stop, window.rows)
    place = found.row[pieces.episode] - window.rows.start
    first = place * read.last.shape[1] + pieces.start - window.begin
    before = np.cumsum(pieces.length) - pieces.length
    steps = _take(read, np.repeat(first - before, pieces.length) + np.arange(pieces.steps))

    last = (before + pieces.length - 1)[ends]
    truncated, is_last = steps.truncated.copy(), steps.last.copy()
    truncated[0, last[unended]] = ~steps.terminated[0, last[unended]]
    is_last[0, last[unended]] = True
    cut: NumpyArray = np.zeros(is_last.shape, bool)
    cut[0, last] = unended | (found.cause[episode] == CAUSES[CUT])

    known = ~goes_on & (found.final[episode] >= 0)
    stored = vault.final_views(found.final[episode[known]])
    after = (first + pieces.length)[ends][goes_on]
    seen = View(*(_flat(field)[after] for field in read.view))
    time: NumpyArray = np.concatenate([last[known], last[goes_on]])
    row: NumpyArray = np.zeros_like(time)
    finals = FinalObservations(row, time, _join(stored, seen))
    return steps._replace(truncated=truncated, last=is_last), finals, cut


def _take(steps: Transition, index: NumpyArray) -> Transition:
    """Return steps ``(1, T, ...)`` of ``(rows, time, ...)`` by their number."""
    # A stretch without gaps is seen, not copied.
    gapless = index[-1] - index[0] + 1 == len(index)
    chosen = slice(index[0], index[-1] + 1) if gapless else index
    view, *rest = steps
    fields = [_flat(field)[chosen][None] for field in rest]
    return Transition(View(*(_flat(field)[chosen][None] for field in view)), *fields)


def _flat(field: NumpyArray) -> NumpyArray:
    return field.reshape(-1, *field.shape[2:])


def _join(a: View, b: View) -> View:
    joined: list[NumpyArray] = [np.concatenate(pair) for pair in zip(a, b, strict=True)]
    return View(*joined)
