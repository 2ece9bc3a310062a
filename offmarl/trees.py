"""Specs of arrays, and helpers for trees of arrays: bare arrays, or nested dictionaries of them.

The helpers handle NumPy's and JAX's arrays alike, and do not import JAX.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from offmarl.errors import ShapeError

DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "int32",
    "bool",
)
"""Names of the data types that a leaf can have."""

_LEAF_NAME = re.compile(r"[\w-]{1,64}")
_MAX_DEPTH = 8


@dataclass(frozen=True)
class ArraySpec:
    """Shape and data type of one array: a leaf of an observation or of a state, or an extra.

    Parameters
    ----------
    shape
        Shape of one step. A leaf of an observation has it without the axis of agents.
    dtype
        One of `DTYPES`.
    agents
        Only for leaves of observations: the agents that have this leaf, in ascending order. Its
        axis of agents then has their number. None if all agents have it, as most programs expect.

    Raises
    ------
    ShapeError
        A size is negative, or the type is not one of `DTYPES`.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    agents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        shape = tuple(map(operator.index, self.shape))
        agents = None if self.agents is None else tuple(map(operator.index, self.agents))
        if self.dtype not in DTYPES:
            types = ", ".join(DTYPES)
            raise ShapeError(f"{self.dtype!r:.40} is no type of a leaf: use one of {types}.")
        if min(*shape, *(agents or ()), 0, 0) < 0:
            raise ShapeError(f"the shape {shape} or the agents {agents} have a negative number.")
        if agents is not None and (not agents or agents != tuple(sorted({*agents}))):
            raise ShapeError(f"agents are {agents}: name each one once, in ascending order.")
        set_fields(self, shape=shape, agents=agents)

    def __str__(self) -> str:
        """Describe the array, as in "uint8 (84, 84, 3)"."""
        only = "" if self.agents is None else f" of agents {', '.join(map(str, self.agents))}"
        return f"{self.dtype} {self.shape}{only}"

    @cached_property
    def size(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The data type in NumPy, little-endian."""
        if self.dtype == "bfloat16":
            import ml_dtypes  # few datasets have this type

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(self.dtype).newbyteorder("<")

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of one array."""
        return self.size * self.numpy_dtype.itemsize

    def with_agents(self, num_agents: int) -> ArraySpec:
        """Return the spec of all agents' leaves: with the axis of agents in front."""
        count = num_agents if self.agents is None else len(self.agents)
        return ArraySpec((count, *self.shape), self.dtype)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `spec_tree` reads back."""
        data = {"shape": list(self.shape), "dtype": self.dtype}
        return data if self.agents is None else {**data, "agents": list(self.agents)}


class SpecDict(Mapping[str, Any]):
    """A mapping of names to specs that is frozen, hashable and ordered by name.

    Names consist of letters, digits, ``_`` and ``-``.
    """

    def __init__(self, specs: Mapping[str, Any], _depth: int = 0):
        wrong = [
            name for name in specs if not (isinstance(name, str) and _LEAF_NAME.fullmatch(name))
        ]
        if wrong:
            raise ShapeError(
                f"{wrong[0]!r:.80} cannot name a leaf: use up to 64 letters, digits, _ and -."
            )
        if _depth > _MAX_DEPTH:
            raise ShapeError(f"specs are nested deeper than {_MAX_DEPTH} levels.")
        self._specs: dict[str, SpecTree] = {}
        for name in sorted(specs):
            try:
                self._specs[name] = spec_tree(specs[name], _depth + 1)
            except ShapeError as error:
                raise ShapeError(f"{name}: {error}") from error

    def __getitem__(self, name: str) -> SpecTree:
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __hash__(self) -> int:
        return hash(tuple(self._specs.items()))

    def __repr__(self) -> str:
        return f"SpecDict({self._specs})"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `spec_tree` reads back."""
        return {name: spec.to_json() for name, spec in self.items()}


SpecTree = ArraySpec | SpecDict
"""The leaves of an observation or a state: one array, or a (nested) dictionary of arrays."""


def spec_tree(given: Any, _depth: int = 0) -> SpecTree:
    """Read a tree of specs: an `ArraySpec`, a mapping, or the JSON of either.

    Raises
    ------
    ShapeError
        It is none of these, a name is invalid, or a mapping is empty.
    """
    if isinstance(given, ArraySpec | SpecDict):
        return given
    if isinstance(given, Mapping) and isinstance(given.get("shape"), list | tuple):
        fields: dict[str, Any] = {
            x: tuple(y) if isinstance(y, list) else y for x, y in given.items()
        }
        try:
            return ArraySpec(**fields)
        except (TypeError, ValueError) as error:
            raise ShapeError(
                f"{given!r:.80} does not describe an array: it needs a shape of whole numbers and "
                "a dtype, and may have agents."
            ) from error
    if isinstance(given, Mapping) and given:
        return SpecDict(given, _depth)
    raise ShapeError(
        f"{given!r:.80} does not describe arrays: use an ArraySpec, or a dict of them."
    )


def map_tree(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply a function to the leaves of trees of one structure, as `jax.tree.map` does.

    It does not import JAX. Mappings, NamedTuples and None are nodes; everything else is a leaf. A
    mapping becomes a dict.
    """
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return {x: map_tree(function, tree[x], *(other[x] for other in rest)) for x in tree}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tree(function, *nodes) for nodes in zip(tree, *rest, strict=True)))
    return function(tree, *rest)


def flatten_tree(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of an array or of nested mappings by their paths, such as "camera.left".

    The path of a bare array is "". ``prefix`` is put in front of every path.
    """
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    dot = f"{prefix}." if prefix else ""
    parts = (flatten_tree(tree[name], f"{dot}{name}") for name in sorted(tree))
    return {path: leaf for part in parts for path, leaf in part.items()}


def unflatten_tree(leaves: Mapping[str, Any]) -> Any:
    """Undo `flatten_tree` of a tree without a prefix."""
    if [*leaves] == [""]:
        return leaves[""]
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *groups, name = path.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = leaf
    return tree


def sum_bytes(leaves: Mapping[str, ArraySpec]) -> int:
    """Return the bytes that one array of each spec takes."""
    return sum(leaf.num_bytes for leaf in leaves.values())


def set_fields(frozen: Any, **fields: Any) -> None:
    """Set fields of a frozen dataclass, in its ``__post_init__``."""
    for name, value in fields.items():
        object.__setattr__(frozen, name, value)


def tree_text(tree: Any, size: int) -> str:
    """Return a tree's leaves as text; without any, ``size``, that of a vector."""
    leaves = flatten_tree(tree or {})
    return ", ".join(f"{path} {leaf}".strip() for path, leaf in leaves.items()) or f"{size:,}"


def leaf_difference(name: str, one: Any, other: Any) -> str:
    """Return the first leaf that differs, such as "extras.cost (float32 (), not absent)"."""
    ours, theirs = (flatten_tree(tree, name) if tree else {} for tree in (one, other))
    for path in [*ours, *theirs]:
        first, second = ours.get(path, "absent"), theirs.get(path, "absent")
        if first != second:
            return f"{path} ({first}, not {second})"
    return ""
