"""Observation spaces of Gymnasium as specs of arrays, and back.

A space becomes an array or a tree of arrays. Boxes keep their shape and data type, except that
float64 becomes float32, and wider integers int32. Dict and Tuple spaces become dictionaries, whose
Discrete spaces are one-hot booleans. A space that is not in a tree and has no axes is a float32
vector: a Box of one axis of floats, or the one-hot vector of discrete values.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
    """Return the specs of the arrays that `reader` makes of the values of a space, a `SpecTree`."""
    if isinstance(space, _GROUPS):
        found = _map(lambda parts: {x: y for x, (_, y) in parts.items()}, _leaf_spec, space)
        return spec_tree(found)
    return _bare_spec(space)


def reader(space: spaces.Space[Any]) -> Callable[[Any, str], Any]:
    """Return a function that reads values of a space as arrays, as `spec_of` describes them.

    It takes a value, and what it is for messages, and raises `InvalidValueError` if the value is
    not in the space: nothing is rounded, wrapped around or reshaped.
    """
    if isinstance(space, _GROUPS):
        return _map(_group_reader, lambda leaf: partial(_read, leaf, _leaf_spec(leaf)), space)
    return partial(_read, space, _bare_spec(space))


def flat_reader(space: spaces.Space[Any]) -> Callable[[Any, str], np.ndarray]:
    """Return a function as that of `reader`, which reads a value as one float32 vector."""
    read = reader(space)

    def read_flat(value: Any, what: str) -> np.ndarray:
        return np.concatenate([x.ravel().astype(np.float32) for x in _leaves(read(value, what))])

    return read_flat


def _leaves(tree: Any) -> Iterator[np.ndarray]:
    """Yield the arrays of a tree in the order of the space."""
    for part in tree.values() if isinstance(tree, dict) else ():
        yield from _leaves(part)
    if not isinstance(tree, dict):
        yield tree


def _group_reader(parts: dict[str, tuple[Any, Callable[[Any, str], Any]]]) -> Any:
    """Return the reader of a Dict or a Tuple space from those of its parts."""
    keys = {key for key, _ in parts.values()}

    def read(value: Any, what: str) -> dict[str, Any]:
        by_number = isinstance(value, tuple | list) or np.ndim(value) > 0
        names = range(len(value)) if by_number else value if isinstance(value, Mapping) else ()
        if set(names) != keys:
            found = ", ".join(map(str, names)) or f"{value!r:.60}"
            raise InvalidValueError(f"{what} has {found}, and must have {_listed(keys)}.")
        return {name: own(value[key], f"{what}, {key}") for name, (key, own) in parts.items()}

    return read


def _listed(keys: set[Any]) -> str:
    return ", ".join(sorted(map(str, keys)))


def common(trees: Sequence[Any]) -> Any:
    """Return the smallest specs that the padded arrays of all agents fit into; None for none."""
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


def _map(group: Callable[[dict[str, tuple[Any, Any]]], Any], leaf: Any, space: Any) -> Any:
    """Apply functions to the spaces in Dict and Tuple spaces, and to these.

    ``leaf`` takes a space, and ``group`` the keys and the results of the parts, by their names.
    """
    if not isinstance(space, _GROUPS):
        return leaf(space)
    items = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    parts = {_name(key): (key, _map(group, leaf, part)) for key, part in items}
    if len(parts) < len(space.spaces):
        raise ShapeError(
            f"the names of {space} are not distinct as names of leaves, of letters, digits, _ "
            "and -: rename them in a wrapper."
        )
    return group(parts)


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


def _read(space: spaces.Space[Any], spec: ArraySpec, value: Any, what: str) -> np.ndarray:
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        array = fit(value, spec, what)
        low, high = getattr(space, "low", 0), getattr(space, "high", 1)
        if array.dtype.kind in "iu" and ((array < low) | (array > high)).any():
            raise InvalidValueError(f"{what} is not in {space}.")
        return array
    if isinstance(space, spaces.Discrete) and np.size(value) == 1:
        value = np.asarray(value).item()
    try:
        inside = space.contains(value)
    except (TypeError, ValueError, OverflowError):
        inside = False
    if not inside:
        raise InvalidValueError(f"{what} is {value!r:.60}, which is not in {space}.")
    return np.asarray(flatten(space, value)).reshape(spec.shape).astype(spec.numpy_dtype)
