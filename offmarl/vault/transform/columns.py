"""The columns that a function of `offmarl.vault.map` reads and returns.

A column is an array of steps by its name in Python: a field of `offmarl.Transition` or
`offmarl.View`, such as ``reward`` or ``observation.image``, or an extra, ``extras.NAME``. The views
that episodes ended with are columns of their own, such as ``final.observation``.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from offmarl import gate
from offmarl.errors import InvalidValueError, OptionError, ShapeError, unknown_name
from offmarl.types import DTYPES, ArraySpec, EnvSpec, flatten_view
from offmarl.vault.format import encoding, layout, values
from offmarl.vault.format.layout import Leaf, NumpyArray, column_of, disk_name_of
from offmarl.vault.format.values import RecordPosition
from offmarl.vault.read.reader import Reader

FINAL = "final."
"""Prefix of the columns of the views that episodes ended with."""

_MASKS = frozenset({"legal_actions", "alive", "terminated", "truncated"})
"""Columns that are 0 or 1 on disk, and booleans in Python."""
_ENDS = frozenset({"terminated", "truncated"})


class StepInterval(NamedTuple):
    """Steps that a function gets in one call: the same interval of time of some rows."""

    rows: slice
    start: int
    stop: int
    number: int
    """Number of the call, which its random numbers depend on."""

    @property
    def lead(self) -> tuple[int, int]:
        """Rows and steps of each."""
        return self.rows.stop - self.rows.start, self.stop - self.start


class StepColumns(Mapping[str, Any]):
    """Steps of a vault, by column; each column is read when it is first used.

    All T steps of the columns come in the order of rows and then of time. Columns that begin with
    ``final.`` have the views that M of the episodes ended with.

    Attributes
    ----------
    vault
        The vault.
    spec
        The environment's sizes.
    """

    def __init__(self, vault: Reader, part: StepInterval):
        self.spec: EnvSpec = vault.spec
        self.vault, self._part = vault, part
        self._cache: dict[str, NumpyArray] = {}
        self._disk = {column_of(name): name for name in vault.leaves}

    def __repr__(self) -> str:
        return f"<Steps: {len(self.time)} steps of {', '.join(self)}>"

    def __iter__(self) -> Iterator[str]:
        yield from self._disk
        if len(self.ends):
            yield from (f"{FINAL}{name}" for name in self._finals)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return any(name == column for column in self)

    def __getitem__(self, name: str) -> Any:
        if name not in self._cache:
            array = self._read(name).view()
            array.flags.writeable = False  # a change in place would not reach the new vault
            self._cache[name] = array
        return self._cache[name]

    @cached_property
    def episode(self) -> Int[np.ndarray, "T"]:
        """Number of each step's episode in `Dataset.episodes`."""
        table, (rows, steps) = self.vault.episodes, self._part.lead
        begins = table.row * self.vault.length + table.start
        row = np.arange(self._part.rows.start, self._part.rows.stop)[:, None]
        step = row * self.vault.length + np.arange(self._part.start, self._part.stop)
        numbers: NumpyArray = np.searchsorted(begins, step, side="right") - 1
        return numbers.reshape(rows * steps)

    @cached_property
    def time(self) -> Int[np.ndarray, "T"]:
        """Steps of the episode before each step."""
        index = np.tile(np.arange(self._part.start, self._part.stop), self._part.lead[0])
        return index - self.vault.episodes.start[self.episode]

    @cached_property
    def ends(self) -> Int[np.ndarray, "M"]:
        """The step that each of the final views follows."""
        table = self.vault.episodes
        is_last = self.time == table.length[self.episode] - 1
        return np.flatnonzero(is_last & (table.final[self.episode] >= 0))

    def _read(self, name: str) -> Any:
        if name not in self:
            raise unknown_name("column", name, self)
        if name.startswith(FINAL):
            return self._finals[name.removeprefix(FINAL)]
        part, disk_name = self._part, self._disk[name]
        block = self.vault.read(part.start, part.stop, part.rows, [disk_name])[disk_name]
        array = block.reshape(math.prod(block.shape[:2]), *block.shape[2:])
        return array != 0 if name in _MASKS else array

    @cached_property
    def _finals(self) -> dict[str, NumpyArray]:
        numbers = self.vault.episodes.final[self.episode[self.ends]]
        flat = flatten_view(self.vault.final_views(numbers))
        return {name: view for name, view in flat.items() if name in self._disk}


# ---------------------------------------------------------------------------------- results


class FunctionResult(NamedTuple):
    """The checked result of a function for a part."""

    arrays: dict[str, NumpyArray]
    """Disk name to ``(rows, T, ...)``, of the vault's types."""
    finals: dict[str, NumpyArray]
    """Changed columns of the final views that follow `ends`, ``(M, ...)``."""
    ends: NumpyArray
    """The M episodes that end in the part and have a final view."""


def new_extras(returned: Any, steps: StepColumns) -> dict[str, ArraySpec]:
    """Return the specs of extras that a function returned and the vault does not have.

    Numbers of types that vaults do not have are stored in narrower ones: float64 as float32, and
    whole numbers as int32.
    """
    extras: dict[str, ArraySpec] = {}
    for name, value in returned.items() if isinstance(returned, Mapping) else ():
        if name.startswith(f"{layout.EXTRAS}.") and name not in steps:
            array = np.asarray(value)
            kind = array.dtype.name
            if kind not in DTYPES:
                kind = "float32" if array.dtype.kind == "f" else "int32"
            extras[name.removeprefix(f"{layout.EXTRAS}.")] = ArraySpec(array.shape[1:], kind)
    return extras


def check_result(
    returned: Any, steps: StepColumns, part: StepInterval, leaves: Mapping[str, Leaf]
) -> FunctionResult:
    """Check the result of a function, and convert it to the vault's types."""
    if not isinstance(returned, Mapping):
        raise OptionError(
            f"the function returned {type(returned).__name__}: return a dictionary of columns, "
            'such as {"reward": steps["reward"] / 10}.'
        )
    arrays: dict[str, NumpyArray] = {}
    finals: dict[str, NumpyArray] = {}
    for name, value in returned.items():
        if name.startswith(FINAL) and name in steps:
            like = steps[name]
            cast = _cast(name, value, like.shape, like.dtype, steps, steps.ends)
            finals[name.removeprefix(FINAL)] = cast
        elif name in _ENDS and name in steps and np.array_equal(np.asarray(value), steps[name]):
            continue  # the ends of episodes may be returned, but not moved
        elif name in _ENDS:
            raise OptionError(
                f"the function changes {name} of {place_of(steps)}, but map does not move the ends "
                "of episodes: cut episodes with `offmarl.vault.slice` or `offmarl.vault.filter`."
            )
        elif (disk_name := disk_name_of(name)) in leaves and column_of(disk_name) == name:
            arrays[disk_name] = _fit_leaf(name, value, leaves[disk_name], steps, part)
        elif name not in steps:  # other columns of other programs are not copied
            raise unknown_name("column", name, steps)
    _check_views(arrays, finals, steps)
    _follow(arrays, finals, steps.spec)
    _check_values(arrays, finals, steps, part)
    return FunctionResult(arrays, finals, steps.episode[steps.ends])


def _follow(arrays: dict[str, NumpyArray], finals: dict[str, NumpyArray], spec: EnvSpec) -> None:
    """Recompute a state that is all observations, if only these are changed."""
    is_changed = layout.STATE in arrays or "state" in finals
    if spec.state != "concatenated" or not spec.is_vector or is_changed:
        return
    mask: NumpyArray = np.ones((spec.num_agents, spec.observation_size), bool)
    if spec.state_size != mask.size and spec.observation_sizes:
        mask = np.arange(spec.observation_size) < np.array(spec.observation_sizes)[:, None]
    if mask.sum() == spec.state_size:
        if layout.OBSERVATIONS in arrays:
            arrays[layout.STATE] = arrays[layout.OBSERVATIONS][..., mask]
        if "observation" in finals:
            finals["state"] = finals["observation"][..., mask]


def _fit_leaf(
    name: str, value: Any, leaf: Leaf, steps: StepColumns, part: StepInterval
) -> NumpyArray:
    count = len(steps.time)
    dtype = np.dtype(bool) if name in _MASKS else leaf.dtype
    array = _cast(name, value, (count, *leaf.shape), dtype, steps, np.arange(count))
    return array.reshape(*part.lead, *leaf.shape)


def _cast(
    name: str,
    value: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    steps: StepColumns,
    at: NumpyArray,
) -> NumpyArray:
    array = np.asarray(value)
    place = f"for {place_of(steps)}"
    if array.shape != shape:
        raise ShapeError(
            f"{name}: the function returned shape {array.shape} {place}, and the vault needs "
            f"{shape}: one entry for each step, in the same shape."
        )
    if not encoding.can_cast(array.dtype, dtype):
        raise ShapeError(
            f"{name}: the function returned {array.dtype} {place}, and the vault has {dtype}: "
            f"convert the result with .astype({dtype.name!r})."
        )
    if (wrong := gate.misfits(array, dtype)) is not None:
        index = np.argwhere(wrong)[0].tolist()
        step = at[index[0]]
        raise InvalidValueError(
            f"{name}: the function returned {array[tuple(index)]!s} for step {steps.time[step]} of "
            f"episode {steps.episode[step]}, which does not fit into the vault's {dtype}."
        )
    return values.cast({name: array}, {name: Leaf(dtype, ())}, on_invalid="keep")[name]


def place_of(steps: StepColumns) -> str:
    """Return the numbers of the episodes that steps are of, for messages."""
    first, last = int(steps.episode[0]), int(steps.episode[-1])
    return f"episode {first}" if first == last else f"episodes {first} to {last}"


def _check_views(
    arrays: Mapping[str, NumpyArray], finals: Mapping[str, NumpyArray], steps: StepColumns
) -> None:
    """Raise `OptionError` if only one of a view's columns before and after an action is changed."""
    if not len(steps.ends):
        return
    changed = {column_of(name) for name in arrays}
    views = {name.removeprefix(FINAL) for name in steps if name.startswith(FINAL)}
    for name in sorted((changed & views) ^ finals.keys()):
        present, missing = (name, FINAL + name) if name in changed else (FINAL + name, name)
        raise OptionError(
            f"the function returned {present} and not {missing} for "
            f"{place_of(steps)}: the views that episodes end with must be changed like "
            "those before each step, so return both."
        )


def _check_values(
    arrays: Mapping[str, NumpyArray],
    finals: Mapping[str, NumpyArray],
    steps: StepColumns,
    part: StepInterval,
) -> None:
    """Raise `InvalidValueError` for the first invalid value."""
    place = RecordPosition(part.start, "of the vault", part.rows.start)
    faults = [x.message for x in values.find(arrays, steps.spec, place=place) if x.is_refused]
    faults += [
        f"{FINAL}{name} is not finite."
        for name, view in finals.items()
        if gate.is_float(view.dtype) and not np.isfinite(view).all()
    ]
    if faults:
        raise InvalidValueError(
            f"the function returned an invalid value for {place_of(steps)}: {faults[0]}"
        )
