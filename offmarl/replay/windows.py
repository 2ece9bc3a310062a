"""Where training windows may start."""

import numpy as np
from numpy.typing import NDArray


def window_starts(
    offsets: NDArray[np.int64], lengths: NDArray[np.int64], window: int
) -> NDArray[np.int64]:
    """List every index at which a window may start without crossing an episode's end.

    An episode shorter than the window has one start, its first step: the rest of that window is
    to be masked out.

    Parameters
    ----------
    offsets, lengths
        First index and number of steps of each episode, ``(M,)``.
    window
        Steps a window.

    Returns
    -------
    Start indices, episode by episode. Each window of the data is listed once, so drawing from
    them uniformly draws windows uniformly.
    """
    counts = np.where(lengths > 0, np.maximum(lengths - window, 0) + 1, 0)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    within = np.arange(counts.sum()) - first
    return np.repeat(offsets, counts) + within
