"""The gate for foreign data: what fits the spec becomes records, and faults have one treatment.

=======================================================  =======================================
fault                                                    treatment
=======================================================  =======================================
a shape, kind, range or mask that is not that of the     refused
spec, or flags other than 0 and 1
NaN or infinity in an observation, a state or a reward   the episode is cut off before the step;
                                                         the rest is left out and counted
a next observation that the following step lacks         the episode is cut off, and counted
a final view that is the first of the next episode       the final view is unknown, and counted
an action that the mask forbids                          kept, and left out of batches
numbers above 2**24 that lose digits                     a warning names the column
=======================================================  =======================================

``on_invalid`` "raise" also refuses the second and the third; "keep" stores values that are not
finite, which never enter a batch.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Literal, NamedTuple

import numpy as np

from offmarl import gate
from offmarl.errors import InvalidValueError, ShapeError
from offmarl.types import (
    ArraySpec,
    EnvSpec,
    FinalObservations,
    Transition,
    View,
    flatten_tree,
    map_tree,
)
from offmarl.vault.format import encoding, layout, values
from offmarl.vault.format.compat import is_finite, views_are_finite
from offmarl.vault.format.layout import NumpyArray
from offmarl.vault.format.values import RecordPosition

_FLAGS = ("terminals", "truncations", "infos.legals", "infos.alive")

Treatment = Literal["cut", "raise", "keep"]
"""The treatment of steps that are not finite."""


class ImportedRow(NamedTuple):
    """Steps of one row, the final views in them, and where the recording cut episodes off."""

    steps: Transition
    finals: FinalObservations | None = None
    cut: NumpyArray | bool = False
    """``(1, T)``"""
    after: View | None = None
    """The views after all steps, ``(1, T, ...)``, in place of ``finals``."""


Tally = Counter[str]
"""Numbers of steps, of ends, and of the `FAULTS` of `format.compat` that were not refused."""


def to_steps(arrays: Mapping[str, NumpyArray], spec: EnvSpec, start: int = 0) -> Transition:
    """Return columns ``(1, T, ...)`` as steps; arrays that a layout lacks are filled in.

    ``start`` is the number of the first step, for messages. A number that does not fit its type
    raises `InvalidValueError`, and an array of another shape `ShapeError`.
    """
    leaves = layout.leaves(spec)
    fitted = {
        name: _fit(name, array, leaves[name], start)
        for name, array in arrays.items()
        if name in leaves
    }
    return encoding.from_disk(fitted, spec)


def _fit(name: str, array: NumpyArray, leaf: layout.Leaf, start: int) -> NumpyArray:
    shape = array.shape[2:]
    if name == layout.POLICY_IDS and not shape:  # one for all agents
        array = np.broadcast_to(array[..., None], (*array.shape, *leaf.shape))
    elif gate.without_ones(shape) != gate.without_ones(leaf.shape):
        raise ShapeError(f"{name} has shape {shape} in each step, and must have {leaf.shape}.")
    dtype = np.dtype(bool) if name in _FLAGS else leaf.dtype
    if (wrong := gate.misfits(array, dtype)) is not None:
        at = np.argwhere(wrong)[0]
        must = "must be 0 or 1" if name in _FLAGS else f"does not fit into the vault's {dtype}"
        raise InvalidValueError(
            f"{name} has the value {array[tuple(at)]} at step {start + at[1]}, which {must}."
        )
    gate.warn_of_lost_digits(name, array, leaf.dtype)
    return array.reshape(*array.shape[:2], *leaf.shape)


def admit(
    records: Iterable[ImportedRow], spec: EnvSpec, treatment: Treatment, tally: Tally
) -> Iterator[ImportedRow]:
    """Yield the records without faults, and count these; refuse columns of different steps."""
    skipping = False
    nonempty = (record for record in records if record.steps.last.size)
    for record, following in pairwise(chain(nonempty, [None])):
        if record is not None:
            admitted, skipping = _admit(record, following, spec, treatment, tally, skipping)
            if admitted is not None:
                yield admitted
    if tally["steps_left_out"] == tally["steps"]:
        raise InvalidValueError("the data has no steps, or none before one that is not finite.")
    if tally["steps"] > 1 and not tally["ends"]:
        tally["steps_without_end"] = tally["steps"]
    if 2 * tally["ends_without_flag"] > tally["steps"]:
        raise InvalidValueError(
            f"{tally['ends_without_flag']:,} of {tally['steps']:,} next observations are not those "
            "of the next step: these columns are not of the same steps. Leave the next "
            "observations out, or give them in the order of the steps."
        )


def _admit(
    record: ImportedRow,
    following: ImportedRow | None,
    spec: EnvSpec,
    treatment: Treatment,
    tally: Tally,
    skipping: bool,
) -> tuple[ImportedRow | None, bool]:
    """Return the sound part of a record, and whether the rest of its last episode is left out."""
    steps, count = record.steps, record.steps.last.shape[1]
    begins = None if following is None else map_tree(lambda x: x[:, :1], following.steps)
    bad, bad_next = ~is_finite(steps)[0], begins is not None and not is_finite(begins).all()
    place = RecordPosition(tally["steps"], "of the data")
    if treatment == "raise":
        values.check(encoding.to_disk(steps), spec, place=place)
    if treatment != "cut":
        bad, bad_next = np.zeros_like(bad), False
    jumps, resets = _compare(record, begins, spec)
    if treatment == "cut":  # the step before one that is left out has no known next view
        jumps &= ~np.append(bad[1:], bad_next)
    if treatment == "raise" and jumps.any():
        raise InvalidValueError(
            f"step {tally['steps'] + int(jumps.argmax())} leads to another observation than that "
            "of the next step, and has no flag of an end: give the flags, or cut the episodes "
            "there."
        )
    if bad.any() and not tally["episodes_cut"]:
        first = next(values.find(encoding.to_disk(steps), spec, place=place))
        warnings.warn(f"{first.message} The episode is cut off before it.", stacklevel=4)
    ends = steps.last[0] | jumps
    segment = np.cumsum(ends) - ends
    first_bad = np.full(segment[-1] + 1, count)
    np.minimum.at(first_bad, segment[bad], np.flatnonzero(bad))
    tally["episodes_cut"] += int((first_bad[skipping:] < count).sum())
    first_bad[:1] = np.where(skipping, 0, first_bad[:1])
    keep = np.arange(count) < first_bad[segment]
    goes_on = keep & ~ends
    cut = goes_on & np.append(bad[1:], bad_next) | jumps & keep
    cut[-1] |= goes_on[-1] and following is None
    tally["steps"] += count
    tally["steps_left_out"] += int((~keep).sum())
    tally["ends_without_flag"] += int((jumps & keep).sum())
    tally["final_views_of_resets"] += int((resets & keep).sum())
    tally["ends"] += int(ends.sum())
    still = not ends[-1] and bool(first_bad[-1] < count)
    return _kept(record, keep, cut, resets, treatment, tally), still


def _kept(
    record: ImportedRow,
    keep: NumpyArray,
    cut: NumpyArray,
    resets: NumpyArray,
    treatment: Treatment,
    tally: Tally,
) -> ImportedRow | None:
    """Return some of a record's steps, with ends where they are cut, and the sound final views."""
    if not keep.any():
        return None
    steps = record.steps
    # Where both flags of an agent are set, it terminated.
    truncated = (steps.truncated | cut[None, :, None]) & ~steps.terminated
    steps = steps._replace(truncated=truncated, last=(steps.terminated | truncated).all(-1))
    finals = record.finals
    if record.after is not None:
        time: NumpyArray = np.flatnonzero(steps.last[0] & ~resets)
        view = map_tree(lambda x: x[0, time], record.after)
        finals = FinalObservations(np.zeros_like(time), time, view)
    if finals is not None:
        sound = views_are_finite(finals.view, 1)
        if treatment != "cut":  # the writer refuses or keeps them
            sound[:] = True
        tally["final_views_left_out"] += int((record.steps.last[0, finals.time] & ~sound).sum())
        mask = keep[finals.time] & sound
        time = (np.cumsum(keep) - 1)[finals.time[mask]]
        view = map_tree(lambda x: x[mask], finals.view)
        finals = FinalObservations(np.zeros_like(time), time, view)
    cut = (cut | np.broadcast_to(record.cut, (1, len(cut)))[0])[None]
    if not keep.all():
        steps, cut = map_tree(lambda x: x[:, keep], steps), cut[:, keep]
    return ImportedRow(steps, finals, cut)


def _compare(
    record: ImportedRow, begins: Transition | None, spec: EnvSpec
) -> tuple[NumpyArray, NumpyArray]:
    """Return the mask of views that differ from the next step's, and that of resets."""
    last = record.steps.last[0]
    none: NumpyArray = np.zeros_like(last)
    if record.after is None:
        return none, none
    after, before = record.after, record.steps.view
    differs = none.copy()
    for fields, leaves in (
        ("observation", spec.observation_leaves),
        ("state", spec.state_leaves if spec.state == "native" and spec.state_size else {}),
    ):
        for name, leaf in leaves.items():
            y, x = (flatten_tree(getattr(view, fields))[name][0] for view in (after, before))
            alive = _alive(before, fields, leaf)
            differs[:-1] |= ~_all(_same(y[:-1], x[1:]) | ~alive[1:])
            if begins is not None:
                first = flatten_tree(getattr(begins.view, fields))[name][0]
                same = _same(y[-1:], first) | ~_alive(begins.view, fields, leaf)
                differs[-1:] |= ~_all(same)
    ends: NumpyArray = np.flatnonzero(last & ~differs)
    ends = ends[ends < len(last) - (begins is None)]
    changes = [
        ~_all(_same(x[0, ends], y[0, ends]))
        for x, y in zip(
            *(flatten_tree(v.observation).values() for v in (after, before)), strict=True
        )
    ]
    resets = none.copy()
    resets[ends] = np.any(changes, 0)
    return differs & ~last, resets


def _alive(view: View, fields: str, leaf: ArraySpec) -> NumpyArray:
    """Return the mask of agents whose entries of a leaf count, in a shape that broadcasts to it."""
    alive = view.alive[0]
    if fields == "state":
        return np.ones((len(alive), *(1 for _ in leaf.shape)), bool)
    agents = alive[:, list(leaf.agents)] if leaf.agents else alive
    return agents.reshape(*agents.shape, *(1 for _ in leaf.shape))


def _same(x: NumpyArray, y: NumpyArray) -> NumpyArray:
    """Whether entries are equal; NaN equals NaN."""
    same: NumpyArray = x == y
    return same if same.all() else same | ((x != x) & (y != y))  # noqa: PLR0124 - NaN


def _all(flags: NumpyArray) -> NumpyArray:
    """Reduce flags ``(T, ...)`` to ``(T,)``."""
    reduced: NumpyArray = flags.all(tuple(range(1, flags.ndim)))
    return reduced
