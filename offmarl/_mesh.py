"""Work that is divided over the devices of a mesh, inside functions that JAX traces.

A program that runs on several devices is traced in the context of a mesh
(`jax.sharding.use_abstract_mesh`) with the axis `DATA`. Environments, episodes and the windows of a
batch are divided along it. Without a mesh, the functions here change nothing.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

T = TypeVar("T")

DATA = "data"
"""The axis of a mesh along which environments, episodes and batches are divided."""

spec: Any = PartitionSpec  # untyped
"""``spec(*axes)``: how the axes of an array are divided over those of a mesh."""

constrain: Any = jax.lax.with_sharding_constraint  # untyped
"""``constrain(tree, shardings)``: how arrays are divided, under jit."""


def shards(count: int) -> int:
    """Return the number of devices that ``count`` entries are divided over.

    It is 1 without a mesh, inside of `by_shards`, and where the entries cannot be divided evenly:
    every device then has all of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    size = mesh.shape[DATA] if DATA in mesh.auto_axes else 1
    return size if count % size == 0 else 1


def by_shards(
    function: Callable[..., T], count: int, in_specs: tuple[Any, ...], out_specs: Any
) -> Callable[..., T]:
    """Return a function that each device applies to its part of ``count`` entries.

    The devices exchange nothing. So an entry has the same bits on any number of devices, as far as
    the compiler's code for an entry does not depend on the number of entries.
    """
    if shards(count) == 1:
        return function
    axes = set(jax.sharding.get_abstract_mesh().auto_axes)
    divided: Callable[..., T] = jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False
    )
    return divided


def divide(tree: T, axis: int = 0) -> T:
    """Divide arrays over the devices along an axis, such as that of a batch's windows.

    What is computed from them is then divided, too, and the compiler adds the sums over devices.
    """

    def divide_leaf(leaf: Any) -> Any:
        if shards(leaf.shape[axis]) == 1:
            return leaf
        return constrain(leaf, spec(*[None] * axis, DATA))

    divided: T = jax.tree.map(divide_leaf, tree)
    return divided
