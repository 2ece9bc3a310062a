"""Carries out plans: examines the sources, selects, copies, and records the lineage."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from offmarl.errors import VaultError
from offmarl.terminal import Advance, Progress
from offmarl.types import FinalObservations, Transition, View, map_tree
from offmarl.vault.format.layout import Codec, NumpyArray
from offmarl.vault.format.tables import CAUSES, CUT, OPEN
from offmarl.vault.read.reader import Reader, common_spec
from offmarl.vault.transform import lineage
from offmarl.vault.transform.lineage import LineageSource, Named
from offmarl.vault.transform.plan import StrPath, TransformPlan
from offmarl.vault.transform.selection import Pieces
from offmarl.vault.write.creation import create_whole
from offmarl.vault.write.writer import Writer

Remap = Callable[[NumpyArray], NumpyArray]
"""Translates policy ids of a source into those of the new vault."""

Copy = Callable[[Reader, Pieces, Writer, Remap, Advance], None]
"""Appends pieces of a vault to another, as `copy_pieces` does."""

Replace = Callable[[int, int, Transition, NumpyArray, View], tuple[Transition, View]]
"""Changes the steps between two times, ``(rows, T, ...)``, and the final views of some episodes,
given by their numbers."""

BLOCK_BYTES = 2**25
"""Approximate size of the data that is read at once."""


def execute(
    plan: TransformPlan,
    path: StrPath,
    progress: Progress,
    sources: Sequence[LineageSource] | None = None,
    *,
    copy: "Copy | None" = None,
    named: Sequence[Named] | None = None,
) -> None:
    """Make the vault that was planned; invalid values of the sources are kept.

    ``sources`` are those that were examined before; ``copy`` is used in place of `copy_pieces`;
    ``named`` are the origins whose ids policies get, by default the origins of the pieces.
    """
    vaults = plan.vaults
    with create_whole(
        path,
        plan.spec or common_spec(vaults),
        rows=vaults[0].rows if plan.keeps_rows else 1,
        codec=codec_of(vaults, plan.codec),
        chunk_steps=plan.chunk_steps,
        expected_steps=(vaults[0].length or None) if plan.keeps_rows else None,
        on_invalid="keep",
    ) as writer:
        if sources is None:
            sources = examine_all(vaults, progress)
        selections = [*zip(sources, plan.select(sources, None), strict=True)]
        if plan.keeps_rows:
            copy, named = copy or copy_rows, sources[0].named
        warn_of_late(selections)
        if named is None:
            named = lineage.merge_origins(selections)
        with progress(plan.operation, steps_of(selections, plan.keeps_rows)) as advance:
            for source, pieces in selections:
                remap: Remap = partial(lineage.remap, source=source.named, target=named)
                remap = keep_policy_ids if plan.keeps_rows else remap
                (copy or copy_pieces)(source.vault, pieces, writer, remap, advance)
        provenance = lineage.provenance_of(plan.operation, plan.described(), selections, named)
        writer.annotate({**provenance, **plan.provenance})


def examine_all(vaults: Sequence[Reader], progress: Progress) -> list[LineageSource]:
    """Compute the digests of vaults and find their origins."""
    with progress("digest", sum(vault.num_steps for vault in vaults)) as advance:
        return [lineage.examine(vault, advance) for vault in vaults]


def steps_of(selections: Sequence[tuple[LineageSource, Pieces]], may_be_empty: bool = False) -> int:
    """Return the number of steps taken; `VaultError` if there are none."""
    steps = sum(pieces.steps for _, pieces in selections)
    if not steps and not may_be_empty:
        names = ", ".join(str(source.vault.path) for source, _ in selections)
        raise VaultError(f"no steps of {names} are left: an empty vault is not written.")
    return steps


def warn_of_late(selections: Sequence[tuple[LineageSource, Pieces]]) -> None:
    """Warn of ends of episodes without their beginning: no flag in a vault tells them."""
    late = 0
    for source, pieces in selections:
        table, episode = source.vault.episodes, pieces.episode
        begins_late = pieces.start > table.start[episode]
        whole_end = pieces.stop == table.start[episode] + table.length[episode]
        late += int((begins_late & whole_end & table.complete[episode]).sum())
    if late:
        warnings.warn(
            f"Episodes without their beginning that keep their end: {late:,}. They count as "
            "complete, with the returns of the steps that are left.",
            stacklevel=3,
        )


def keep_policy_ids(ids: NumpyArray) -> NumpyArray:
    """Keep policy ids, where rows are kept."""
    return ids


def join_rows(
    blocks: Sequence[Reader],
    path: StrPath,
    provenance: Callable[[Reader], Mapping[str, Any]],
    progress: Progress,
    codec: Codec | None = None,
    chunk_steps: int | None = None,
    remap: Remap = keep_policy_ids,
) -> None:
    """Join vaults with the same number of rows, one after the other in time.

    No episode may span two of them.
    """
    with create_whole(
        path,
        common_spec(blocks),
        rows=blocks[0].rows,
        codec=codec_of(blocks, codec),
        chunk_steps=chunk_steps,
        on_invalid="keep",
    ) as writer:
        with progress("join", sum(block.num_steps for block in blocks)) as advance:
            for block in blocks:
                copy_rows(block, None, writer, remap, advance)
        writer.flush()
        writer.annotate(provenance(Reader(writer.store)))


def codec_of(vaults: Sequence[Reader], codec: Codec | None) -> Codec:
    """Return the codec of a new vault; by default that of the first of its sources."""
    first = vaults[0].manifest
    return codec or (first.schema.codec if first else "raw")


# ---------------------------------------------------------------------------------- copying


class _Window(NamedTuple):
    """A part of a vault that is read at once, and the pieces inside it."""

    rows: slice
    begin: int
    stop: int
    pieces: Pieces
    ends: NumpyArray
    """Mask of the pieces that end here."""


def copy_pieces(
    vault: Reader, pieces: Pieces, writer: Writer, remap: Remap, advance: Advance
) -> None:
    """Append pieces of a vault to a row of another, end to end.

    A piece that stops before the end of its episode is cut: truncated, with the next view as its
    final view. So is an episode that is still open at the end of the data, without a final view.
    """
    for window in _windows(vault, pieces):
        steps, finals, cut = _gather(vault, window)
        steps = steps._replace(policy_id=remap(steps.policy_id))
        writer.append(steps, finals, cut=cut)
        advance(steps.last.size)


def copy_rows(
    vault: Reader,
    _: Pieces | None,
    writer: Writer,
    remap: Remap,
    advance: Advance,
    replace: Replace | None = None,
) -> None:
    """Append a vault to one with as many rows; only the steps that ``replace`` returns change."""
    table = vault.episodes
    ends = table.start + table.length
    is_open = table.cause == CAUSES[OPEN]
    # Data after an open episode was recorded by another run.
    breaks = np.unique(ends[is_open])
    edges = sorted({0, *(stop for _, stop in vault.blocks()), *breaks.tolist()})
    for begin, stop in pairwise(edges):
        steps = vault.transitions(begin, stop)
        steps = steps._replace(policy_id=remap(steps.policy_id))
        episodes = np.flatnonzero((ends > begin) & (ends <= stop) & ~is_open)
        row: NumpyArray = table.row[episodes]
        time: NumpyArray = ends[episodes] - 1 - begin
        cut: NumpyArray = np.zeros(steps.last.shape, bool)
        cut[row, time] = table.cause[episodes] == CAUSES[CUT]
        has_final = table.final[episodes] >= 0
        views = vault.final_views(table.final[episodes][has_final])
        if replace is not None:
            steps, views = replace(begin, stop, steps, episodes[has_final], views)
        finals = FinalObservations(row[has_final], time[has_final], views)
        number = np.searchsorted(breaks, begin, side="right") % 2
        writer.append(steps, finals, run=f"copy {number}", cut=cut)
        advance(steps.last.size)


def _windows(vault: Reader, pieces: Pieces) -> Iterator[_Window]:
    """Iterate over the rows that have pieces; short rows are read together."""
    rows = vault.episodes.row[pieces.episode]
    row_bytes = vault.length * sum(leaf.step_bytes for leaf in vault.leaves.values())
    group = max(1, BLOCK_BYTES // max(row_bytes, 1))
    times = [(0, vault.length)] if row_bytes <= BLOCK_BYTES else list(vault.blocks(rows=1))
    for first in np.unique(rows // group) * group:
        low, high = np.searchsorted(rows, [first, first + group])
        of_rows = Pieces(*(column[low:high] for column in pieces))
        for begin, stop in times:
            inside = (of_rows.start < stop) & (of_rows.stop > begin)
            if not inside.any():
                continue
            parts = Pieces(*(column[inside] for column in of_rows))
            start, end = np.maximum(parts.start, begin), np.minimum(parts.stop, stop)
            row = vault.episodes.row[parts.episode]
            yield _Window(
                slice(int(row[0]), int(row[-1]) + 1),
                int(start.min()),
                int(end.max()),
                Pieces(parts.episode, start, end),
                parts.stop <= stop,
            )


def _gather(vault: Reader, window: _Window) -> tuple[Transition, FinalObservations, NumpyArray]:
    """Return a window's pieces end to end ``(1, T, ...)``, final views, and the mask of cuts."""
    pieces, ends, table = window.pieces, window.ends, vault.episodes
    episode = pieces.episode[ends]
    goes_on = pieces.stop[ends] < table.start[episode] + table.length[episode]
    unended = goes_on | (table.cause[episode] == CAUSES[OPEN])

    # If the episode continues after the piece, the view of the next step is the final view.
    stop = max(window.stop, *(pieces.stop[ends][goes_on] + 1).tolist(), 0)
    block = vault.transitions(window.begin, stop, window.rows)
    place = table.row[pieces.episode] - window.rows.start
    first = place * block.last.shape[1] + pieces.start - window.begin
    before = np.cumsum(pieces.length) - pieces.length
    steps = _take(block, np.repeat(first - before, pieces.length) + np.arange(pieces.steps))

    last = (before + pieces.length - 1)[ends]
    truncated, is_last = steps.truncated.copy(), steps.last.copy()
    truncated[0, last[unended]] = ~steps.terminated[0, last[unended]]
    is_last[0, last[unended]] = True
    cut: NumpyArray = np.zeros(is_last.shape, bool)
    cut[0, last] = unended | (table.cause[episode] == CAUSES[CUT])

    has_final = ~goes_on & (table.final[episode] >= 0)
    stored_views = vault.final_views(table.final[episode[has_final]])
    after = (first + pieces.length)[ends][goes_on]
    next_views = map_tree(lambda field: _flat(field)[after], block.view)
    time: NumpyArray = np.concatenate([last[has_final], last[goes_on]])
    row: NumpyArray = np.zeros_like(time)
    views = map_tree(lambda *pair: np.concatenate(pair), stored_views, next_views)
    finals = FinalObservations(row, time, views)
    return steps._replace(truncated=truncated, last=is_last), finals, cut


def _take(steps: Transition, index: NumpyArray) -> Transition:
    """Return steps ``(1, T, ...)`` of ``(rows, time, ...)`` by their number."""
    # An interval without gaps is a view, not a copy.
    gapless = index[-1] - index[0] + 1 == len(index)
    selection = slice(index[0], index[-1] + 1) if gapless else index
    part: Transition = map_tree(lambda field: _flat(field)[selection][None], steps)
    return part


def _flat(field: NumpyArray) -> NumpyArray:
    rows, time, *rest = field.shape
    return field.reshape(rows * time, *rest)
