"""Observation spaces of Gymnasium as specs of arrays, and back.

A space becomes an array or a tree of arrays. Boxes keep their shape and data type, except that
float64 becomes float32, and wider integers int32. Dict and Tuple spaces become dictionaries, whose
Discrete spaces are one-hot booleans. A space that is not in a tree and has no axes is a float32
vector: a Box of one axis of floats, or the one-hot vector of discrete values.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import flatdim, flatten

from offmarl.errors import InvalidValueError, ShapeError
from offmarl.gate import fit
from offmarl.types import DTYPES, ArraySpec, SpecTree, flatten_tree, map_tree, spec_tree

_GROUPS = spaces.Dict | spaces.Tuple
_INT32 = np.iinfo(np.int32)


def spec_of(space: spaces.Space[Any]) -> Any:
    """Return the specs of the arrays that `read` makes of the values of a space, a `SpecTree`.

    Raises
    ------
    ShapeError
        Two names of a Dict space are equal but for characters that a leaf's name cannot have.
    """
    if isinstance(space, _GROUPS):
        return spec_tree(_map(_leaf_spec, space))
    return _bare_spec(space)


def read(space: spaces.Space[Any], value: Any, what: str = "the observation") -> Any:
    """Return a value of a space as arrays, of the shapes and types of `spec_of`.

    Parameters
    ----------
    space, value
        The space, and what should be in it.
    what
        Names the value in messages.

    Raises
    ------
    InvalidValueError
        The value does not fit the space: nothing is rounded, wrapped around or reshaped.
    """
    if isinstance(space, _GROUPS):

        def leaf_of(leaf: Any, name: str, part: Any) -> np.ndarray:
            return _read(leaf, part, _leaf_spec(leaf), name)

        return _map(leaf_of, space, what, value)
    return _read(space, value, _bare_spec(space), what)


def read_flat(space: spaces.Space[Any], value: Any, what: str) -> np.ndarray:
    """Return a value of a space as one float32 vector; `InvalidValueError` as for `read`."""
    parts: list[np.ndarray] = []

    def add(leaf: Any, name: str, x: Any) -> None:
        parts.append(_read(leaf, x, _leaf_spec(leaf), name).ravel().astype(np.float32))

    _map(add, space, what, value)
    return np.concatenate(parts)


def common(trees: Sequence[Any]) -> Any:
    """Return the smallest specs, a `SpecTree`, that the arrays of all agents fit into once padded.

    Returns
    -------
    None if no padding makes them equal: their names, data types or numbers of axes differ.
    """
    flat = [flatten_tree(tree) for tree in trees]
    kinds = {tuple((p, s.dtype, len(s.shape)) for p, s in leaves.items()) for leaves in flat}
    if len(kinds) > 1:
        return None

    def largest(*leaves: ArraySpec) -> ArraySpec:
        return ArraySpec(tuple(map(max, *(leaf.shape for leaf in leaves))), leaves[0].dtype)

    return trees[0] if len(trees) == 1 else map_tree(largest, *trees)


def to_space(spec: SpecTree) -> spaces.Space[Any]:
    """Return the space of the arrays that a spec describes."""
    if isinstance(spec, ArraySpec):
        return _box(spec)
    return spaces.Dict({name: to_space(part) for name, part in spec.items()})


def as_value(spec: SpecTree, arrays: Any) -> Any:
    """Return arrays as a value of the space that `to_space` returns."""
    if isinstance(spec, ArraySpec):
        space = to_space(spec)
        return np.asarray(arrays).astype(space.dtype)
    return {name: as_value(part, arrays[name]) for name, part in spec.items()}


def _box(spec: ArraySpec) -> spaces.Space[Any]:
    if spec.dtype == "bool":
        return spaces.MultiBinary(spec.shape)
    if "float" in spec.dtype:
        dtype: Any = np.float32 if spec.dtype == "bfloat16" else np.dtype(spec.dtype)
        return spaces.Box(-np.inf, np.inf, spec.shape, dtype)
    limits = np.iinfo(spec.dtype)
    return spaces.Box(limits.min, limits.max, spec.shape, np.dtype(spec.dtype).type)


def _map(
    function: Callable[..., Any], space: spaces.Space[Any], what: str = "", *values: Any
) -> Any:
    """Apply a function to the spaces in Dict and Tuple spaces.

    With ``values``, the function also takes the name of each part for messages, and its value.
    """
    if isinstance(space, spaces.Dict):
        items: list[tuple[Any, Any]] = list(space.spaces.items())
    elif isinstance(space, spaces.Tuple):
        items = list(enumerate(space.spaces))
    else:
        return function(space, what, *values) if values else function(space)
    for value in values:
        names = _keys(value)
        if names is None or set(names) != {key for key, _ in items}:
            found = type(value).__name__ if names is None else f"has {', '.join(map(str, names))}"
            raise InvalidValueError(
                f"{what} {found}, and must have {', '.join(str(key) for key, _ in items)}."
            )
    found_parts = {
        _name(key): _map(function, part, f"{what}, {key}", *(value[key] for value in values))
        for key, part in items
    }
    if len(found_parts) < len(items):
        raise ShapeError(
            f"the names of {space} are not distinct as names of leaves, of letters, digits, _ "
            "and -: rename them in a wrapper."
        )
    return found_parts


def _keys(value: Any) -> list[Any] | None:
    """Return the names of the parts of a value; None if it has none."""
    if isinstance(value, Mapping):
        return list(value)
    return list(range(len(value))) if isinstance(value, tuple | list | np.ndarray) else None


def _name(name: Any) -> str:
    return re.sub(r"[^\w-]", "_", str(name))[:64]


def _bare_spec(space: spaces.Space[Any]) -> ArraySpec:
    """Return the spec of a space that is not in a tree."""
    spec = _leaf_spec(space)
    keeps_shape = isinstance(space, spaces.Box) or len(spec.shape) > 1
    return spec if keeps_shape else ArraySpec((flatdim(space),))


def _leaf_spec(space: spaces.Space[Any]) -> ArraySpec:
    """Return the spec of a space that is one array."""
    if isinstance(space, spaces.Box):
        return ArraySpec(space.shape, _dtype(space))
    if isinstance(space, spaces.MultiBinary):
        return ArraySpec(space.shape, "bool")
    is_discrete = isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    return ArraySpec((flatdim(space),), "bool" if is_discrete else "float32")


def _dtype(space: spaces.Box) -> str:
    """Return the data type to store a Box in."""
    name = np.dtype(space.dtype).name
    if name in DTYPES:
        return name
    if np.dtype(space.dtype).kind not in "iu":
        return "float32"
    fits = _INT32.min <= space.low.min(initial=0) and space.high.max(initial=0) <= _INT32.max
    return "int32" if fits else "float32"


def _read(space: spaces.Space[Any], value: Any, spec: ArraySpec, what: str) -> np.ndarray:
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return fit(value, spec, what)
    if isinstance(space, spaces.Discrete) and np.size(value) == 1:
        value = np.asarray(value).item()
    try:
        inside = space.contains(value)
    except (TypeError, ValueError, OverflowError):
        inside = False
    if not inside:
        raise InvalidValueError(f"{what} is {value!r:.60}, which is not in {space}.")
    return np.asarray(flatten(space, value)).reshape(spec.shape).astype(spec.numpy_dtype)
