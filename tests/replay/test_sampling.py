"""Tables of valid window starts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offmarl.replay import window_starts


def test_by_hand() -> None:
    offsets, lengths = np.array([0, 5, 9]), np.array([5, 4, 2])
    # Three steps a window: three starts in the first episode, two in the second; the third is
    # shorter than the window and has its first step only.
    np.testing.assert_array_equal(window_starts(offsets, lengths, 3), [0, 1, 2, 5, 6, 9])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 12))
def test_every_window_of_every_episode_once_and_none_across_an_end(
    lengths: list[int], window: int
) -> None:
    ends = np.cumsum(lengths)
    offsets = ends - lengths
    starts = window_starts(offsets, np.array(lengths), window)
    expected = [
        start
        for offset, length in zip(offsets, lengths, strict=True)
        for start in range(offset, offset + max(length - window, 0) + 1)
    ]
    np.testing.assert_array_equal(starts, expected)
    covered = {step for start in starts for step in range(start, start + window)}
    assert covered >= set(range(int(ends[-1])))
