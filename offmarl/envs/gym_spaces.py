"""Observation spaces of Gymnasium as specs of arrays, and back.

A space becomes an array or a tree of arrays. Boxes keep their shape and data type, except that
float64 becomes float32, and wider integers int32. Dict and Tuple spaces become dictionaries, whose
Discrete spaces are one-hot booleans. A space that is not in a tree and has no axes is a float32
vector: a Box of one axis of floats, or the one-hot vector of discrete values.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import flatdim, flatten

from offmarl.errors import ShapeError
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


def read(space: spaces.Space[Any], value: Any) -> Any:
    """Return a value of a space as arrays, of the shapes and types of `spec_of`."""
    if isinstance(space, _GROUPS):
        return _map(lambda leaf, part: _read(leaf, part, _leaf_spec(leaf)), space, value)
    return _read(space, value, _bare_spec(space))


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


def _map(function: Callable[..., Any], space: spaces.Space[Any], *values: Any) -> Any:
    """Apply a function to the spaces in Dict and Tuple spaces, and to the values that they hold."""
    if isinstance(space, spaces.Dict):
        items = space.spaces.items()
        found = {_name(k): _map(function, part, *(v[k] for v in values)) for k, part in items}
        if len(found) < len(items):
            raise ShapeError(
                f"the names of {space} are not distinct as names of leaves, of letters, digits, _ "
                "and -: rename them in a wrapper."
            )
        return found
    if isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
        return {str(i): _map(function, part, *(v[i] for v in values)) for i, part in parts}
    return function(space, *values)


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


def _read(space: spaces.Space[Any], value: Any, spec: ArraySpec) -> np.ndarray:
    keeps_shape = isinstance(space, spaces.Box | spaces.MultiBinary)
    array = np.asarray(value if keeps_shape else flatten(space, value))
    return array.reshape(spec.shape).astype(spec.numpy_dtype)
