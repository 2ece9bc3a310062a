"""Choices of episodes, by number or by a mask."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmarl.errors import OptionError


def episode_numbers(episodes: Any, count: int) -> NDArray[np.int64]:
    """Return the numbers of chosen episodes."""
    given = np.asarray(episodes if hasattr(episodes, "__array__") else [*episodes])
    if given.dtype == bool:
        if given.shape != (count,):
            raise OptionError(
                f"a mask of episodes has the shape {given.shape}: give a truth for each of the "
                f"{count} episodes, or their numbers."
            )
        return np.flatnonzero(given)
    if given.size and given.dtype.kind not in "iu":
        raise OptionError(
            f"episodes cannot be chosen by values of type {given.dtype}: give their numbers, or a "
            "truth for each."
        )
    return given.astype(np.int64)
