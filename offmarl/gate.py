"""Fits numbers from outside to the shape and type that a spec gives them.

A number that its type cannot hold is refused. Nothing is rounded to a whole number, wrapped around,
reshaped into another order of axes, or made infinite.
"""

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmarl.errors import InvalidValueError
from offmarl.types import ArraySpec

_EXACT = 2**24
"""Up to here float32 holds every whole number."""


_LIMITS: dict[Any, tuple[Any, Any]] = {
    np.dtype(name): (info(name).min, info(name).max)
    for info, names in (
        (np.iinfo, ("int8", "uint8", "int16", "uint16", "int32")),
        (np.finfo, ("float16", "float32")),
    )
    for name in names
}
"""The lowest and the highest number of a type."""


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether a type is floating-point; bfloat16 is of kind "V" to NumPy."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def is_number(dtype: np.dtype[Any]) -> bool:
    """Whether values of a type are numbers or booleans."""
    return dtype.kind in "biuf" or is_float(dtype)


def misfits(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.bool_] | None:
    """Find the numbers that a type cannot hold; None if there are none.

    Fractions, NaN and numbers out of range do not fit whole numbers, and numbers other than 0 and 1
    no booleans. Finite numbers that would become infinite do not fit floats; lost digits do.
    """
    if np.can_cast(values.dtype, dtype, "safe") or not values.size:
        return None
    may_round = values.dtype.kind == "f" != dtype.kind
    if values.dtype.kind in "iuf" and dtype in _LIMITS and not may_round:
        low, high = _LIMITS[dtype]  # most data fits, which is quick to see
        if low <= np.fmin.reduce(values, axis=None) and np.fmax.reduce(values, axis=None) <= high:
            return None
    with np.errstate(all="ignore"):
        if is_float(dtype):
            wrong = np.isfinite(values) & ~np.isfinite(values.astype(dtype))
        elif dtype.kind == "b":
            wrong = (values != 0) & (values != 1)
        else:
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
            wrong = ~((values >= low) & (values <= high) & (values == np.trunc(values)))
    return wrong if wrong.any() else None


def warn_of_lost_digits(name: str, values: NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Warn, naming the array, where a float type rounds numbers above 2**24."""
    if not is_float(dtype) or np.can_cast(values.dtype, dtype, "safe"):
        return
    if not values.size or not np.fmax.reduce(np.abs(values), axis=None) > _EXACT:
        return
    large = values[np.abs(values) > _EXACT]
    with np.errstate(all="ignore"):
        lost = (large.astype(dtype).astype(values.dtype) != large).any()
    if lost:
        warnings.warn(
            f"{name} has numbers above {_EXACT:,}, which lose digits in {dtype}: subtract an "
            "offset or change the unit if they matter.",
            stacklevel=3,
        )


def fit(value: Any, leaf: ArraySpec, what: str) -> NDArray[Any]:
    """Return a value as an array of the shape and type of a spec; `InvalidValueError` otherwise.

    Axes of length 1 may be added or left out. NaN and infinity fit floats: the caller decides
    about them. ``what`` names the value in messages, such as "the observation of agent_0".
    """
    dtype = leaf.numpy_dtype
    try:
        array = np.asarray(value)
    except ValueError:  # nested lists of different lengths
        array = np.empty((), object)
    if array.dtype == dtype and array.shape == leaf.shape:
        return array
    if not is_number(array.dtype):
        raise InvalidValueError(
            f"{what} is {value!r:.60}, and must be {leaf.dtype} of shape {leaf.shape}."
        )
    if array.shape != leaf.shape and without_ones(array.shape) != without_ones(leaf.shape):
        raise InvalidValueError(f"{what} has shape {array.shape}, and must have {leaf.shape}.")
    array = array.reshape(leaf.shape)
    if (wrong := misfits(array, dtype)) is not None:
        at = tuple(np.argwhere(wrong)[0].tolist())
        entry = f" at {at[0] if len(at) == 1 else at}" if at else ""
        raise InvalidValueError(
            f"{what} has the value {array[at]!s}{entry}, which does not fit into {leaf.dtype}."
        )
    return array.astype(dtype, copy=False)


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without the axes of length 1."""
    return tuple(size for size in shape if size != 1)


def to_unit_range(action: Any, low: Any, high: Any) -> NDArray[np.float64]:
    """Scale continuous actions from their bounds to [-1, 1]; bounds of an entry may be equal."""
    scaled: NDArray[np.float64] = 2 * (action - low) / np.where(high > low, high - low, 1) - 1
    return scaled
