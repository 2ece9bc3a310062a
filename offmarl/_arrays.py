"""Sizes, memory and kinds of arrays."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most ``most``, and at least 1."""
    return max(size for size in range(1, max(1, min(number, most)) + 1) if number % size == 0)


def as_items(array: NDArray[Any]) -> NDArray[Any]:
    """View a contiguous array ``(n, steps, ...)`` as ``(n * steps,)`` items.

    NumPy copies an item as one block, which takes less time than copying its numbers. Items have
    at least one byte: the array must not be empty.
    """
    size = array.dtype.itemsize * math.prod(array.shape[2:])
    return array.reshape(-1).view(f"V{size}")


def join_bytes(arrays: Iterable[NDArray[Any]], lead: int) -> NDArray[np.uint8]:
    """Join the bytes of each record: ``(*lead, ...)`` arrays to ``(*lead, bytes)``."""
    flat = (x.reshape(*x.shape[:lead], math.prod(x.shape[lead:])) for x in arrays)
    return np.concatenate([np.ascontiguousarray(x).view("u1") for x in flat if x.shape[-1]], -1)


def is_key(leaf: Any) -> bool:
    """Whether an array of JAX, or a shape, is one of random keys."""
    import jax  # reading vaults does without

    return bool(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key))
