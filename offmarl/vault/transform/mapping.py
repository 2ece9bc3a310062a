"""Applies a function to the columns of a vault, which keeps its rows, chunks and episodes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np

from offmarl.errors import OptionError, VaultError
from offmarl.terminal import Progress
from offmarl.types import Transition, View, flatten_view
from offmarl.vault.format import encoding, layout
from offmarl.vault.format.layout import NumpyArray, Schema, column_of
from offmarl.vault.read.reader import Reader
from offmarl.vault.transform.columns import (
    FunctionResult,
    StepColumns,
    StepInterval,
    check_result,
    new_extras,
)
from offmarl.vault.transform.execute import copy_rows, examine_all, execute
from offmarl.vault.transform.function import Function, MapFunction, reward_formula
from offmarl.vault.transform.plan import (
    AnyVault,
    StrPath,
    TransformPlan,
    checked_function,
    open_checked,
    take_all,
)
from offmarl.vault.transform.selection import Unit
from offmarl.vault.write.creation import free_place

_PART_BYTES = 2**25
"""Approximate size of the steps of a part."""


def map_columns(
    source: AnyVault,
    path: StrPath,
    function: MapFunction | None,
    reward: str | None,
    by: Unit,
    seed: int,
    progress: Progress,
) -> None:
    """Write a vault with changed columns; see `offmarl.vault.map`."""
    mapper = checked_function(function, reward, seed)
    vault = open_checked(source)
    free_place(path)  # before anything slow
    (examined,) = examine_all([vault], progress)
    if mapper is None:
        assert reward is not None
        by, mapper = "steps", reward_formula(reward, examined)
    schema, changed, results = _start(vault, _schema_of(vault), mapper, by)
    copy = partial(copy_rows, replace=_Replaced(schema, changed, results))

    arguments = {
        "function": mapper.name,
        "sha256": mapper.sha256,
        **({"seed": mapper.seed} if mapper.is_random else {}),
        "columns": sorted(map(column_of, changed)),
        "by": by,
    }
    plan = TransformPlan(
        "map",
        [vault],
        take_all,
        arguments,
        schema.codec,
        schema.chunk_steps,
        schema.spec,
        keeps_rows=True,
    )
    execute(plan, path, progress, [examined], copy=copy)


def _schema_of(vault: Reader) -> Schema:
    """Return the schema of a vault with the same rows: the vault's own if offmarl wrote it all."""
    if vault.manifest and not vault.manifest.unverified:
        return vault.manifest.schema
    steps = layout.default_chunk_steps(vault.spec, vault.rows, vault.length)
    rows = layout.default_chunk_rows(vault.rows, steps)
    return Schema(vault.spec, vault.rows, rows, steps, "raw")


def _parts_of(vault: Reader, schema: Schema, by: Unit) -> Iterator[StepInterval]:
    """Yield the parts that a function is called for, in the order of time.

    Parts by steps are whole chunks of all rows that share them, so they do not depend on the
    memory or on the program that calls.
    """
    table = vault.episodes
    if by == "episodes":
        for number in np.lexsort((table.row, table.start)).tolist():
            row, start = int(table.row[number]), int(table.start[number])
            yield StepInterval(
                slice(row, row + 1), start, start + int(table.length[number]), number
            )
        return
    size = max(1, _PART_BYTES // schema.chunk_bytes) * schema.chunk_steps
    starts, groups = range(0, vault.length, size), range(0, vault.rows, schema.chunk_rows)
    for time, start in enumerate(starts):
        for group, first in enumerate(groups):
            rows = slice(first, first + schema.chunk_rows)
            yield StepInterval(
                rows, start, min(start + size, vault.length), group * len(starts) + time
            )


def _start(
    vault: Reader, schema: Schema, function: Function, by: Unit
) -> tuple[Schema, frozenset[str], Iterator[tuple[StepInterval, FunctionResult]]]:
    """Return the new vault's schema, the columns that a function changes, and all its results.

    The result for the first part, which is computed at once, determines them.
    """
    parts = _parts_of(vault, schema, by)
    first = next(parts, None)
    if first is None:
        raise VaultError(f"{vault.path} has no steps: an empty vault is not written.")
    steps = StepColumns(vault, first)
    returned = function(steps, first)
    extras = {**schema.spec.extras, **new_extras(returned, steps)}
    schema = replace(schema, spec=replace(schema.spec, extras=extras))
    layout.check_leaves(schema.spec)
    result = check_result(returned, steps, first, schema.leaves)

    def rest() -> Iterator[tuple[StepInterval, FunctionResult]]:
        for part in parts:
            steps = StepColumns(vault, part)
            yield part, check_result(function(steps, part), steps, part, schema.leaves)

    return schema, frozenset(result.arrays), chain([(first, result)], rest())


class _Replaced:
    """Replaces the steps of a vault by a function's results, which come in the order of time."""

    def __init__(
        self,
        schema: Schema,
        changed: frozenset[str],
        results: Iterator[tuple[StepInterval, FunctionResult]],
    ):
        self._schema, self._changed, self._results = schema, changed, results
        self._filled: NumpyArray = np.zeros(schema.rows, np.int64)
        self._waiting: list[tuple[StepInterval, FunctionResult]] = []

    def __call__(
        self, begin: int, stop: int, steps: Transition, episodes: NumpyArray, views: View
    ) -> tuple[Transition, View]:
        self._gather(stop)
        leaves = self._schema.leaves
        arrays = {x: array for x, array in encoding.to_disk(steps).items() if x in leaves}
        for name in self._changed:
            leaf = leaves[name]
            arrays[name] = np.empty((*steps.last.shape, *leaf.shape), leaf.dtype)
        finals = {name: view.copy() for name, view in flatten_view(views).items()}
        for part, result in self._waiting:
            span = slice(max(part.start, begin), min(part.stop, stop))
            for name, array in result.arrays.items():
                inside = array[:, span.start - part.start : span.stop - part.start]
                arrays[name][part.rows, span.start - begin : span.stop - begin] = inside
            if result.finals:
                _, targets, sources = np.intersect1d(episodes, result.ends, return_indices=True)
                for name, view in result.finals.items():
                    finals[name][targets] = view[sources]
        self._waiting = [entry for entry in self._waiting if entry[0].stop > stop]
        return encoding.from_disk(arrays, self._schema.spec), encoding.unflatten_view(finals)

    def _gather(self, stop: int) -> None:
        """Wait for the results of all rows up to a step."""
        while self._filled.min() < stop:
            part, result = next(self._results)
            if result.arrays.keys() != self._changed:
                returned, before = (
                    ", ".join(sorted(map(column_of, names))) or "nothing"
                    for names in (result.arrays, self._changed)
                )
                raise OptionError(
                    f"the function returned {returned} for steps {part.start} to {part.stop - 1}, "
                    f"and {before} before: return the same columns in every call."
                )
            self._filled[part.rows] = part.stop
            self._waiting.append((part, result))
