"""Windows: which steps they hold, how often, and the fields of each step."""

from collections.abc import Iterator

import chex
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offmarl.errors import OptionError, ShapeError
from offmarl.replay import WindowReader, Windows, device, load, packing
from offmarl.replay.gathering import read_slots
from offmarl.replay.rings import SlotRings
from offmarl.types import Sequence, View

from .memory import MemorySource, at

CHUNK = 64
"""Windows unpacked at once, so that tables of all sizes share one compiled program."""


@st.composite
def sources(drawn: st.DrawFn) -> MemorySource:
    """Rows of equally many steps; the last episode of each is cut where the row ends."""
    lengths = drawn(st.lists(st.lists(st.integers(1, 15), min_size=1, max_size=6), min_size=1))
    lengths = lengths[:3]
    size = max(sum(row) for row in lengths)
    lengths = [[*row, size - sum(row)] if sum(row) < size else row for row in lengths]
    count = sum(map(len, lengths))
    return MemorySource(lengths, tuple(drawn(st.sets(st.integers(0, count - 1)))))


def all_windows(source: MemorySource, windows: Windows, episodes=None) -> Sequence:
    """Return the windows that start at each slot, ``(R, T, ...)``."""
    reader = WindowReader(source, windows, episodes)
    lengths = source.episodes.length if episodes is None else source.episodes.length[episodes]
    count = int((lengths + 1).sum())
    parts = []
    for first in range(0, count, CHUNK):
        parts.append(reader.arrays((first + np.arange(CHUNK)) % count))
    return jax.tree.map(lambda *x: np.concatenate(x)[:count], *parts)


def slots_of(source: MemorySource, episodes=None) -> Iterator[tuple[int, int, bool]]:
    """Yield the episode and the time of each slot of the ring, and whether it is a step."""
    for episode in range(len(source.episodes.length)) if episodes is None else episodes:
        length = source.episodes.length[episode]
        yield from ((episode, time, time < length) for time in range(length + 1))


@settings(max_examples=25)
@given(sources(), st.sampled_from([0, 3]))
def test_every_step_is_in_every_slot_once(source: MemorySource, burn_in: int) -> None:
    """So each step is exactly equally likely, alone and at each distance from a window's start."""
    batch = all_windows(source, Windows(1, 5 - burn_in, burn_in))
    number = batch.episode * 1000 + batch.time
    steps = np.sort([1000 * e + t for e, t, is_step in slots_of(source) if is_step])
    assert not batch.mask[:, :burn_in].any()
    for slot in range(burn_in, 5):
        np.testing.assert_array_equal(np.sort(number[:, slot][batch.mask[:, slot]]), steps)


@settings(max_examples=25)
@given(sources(), st.booleans())
def test_windows_hold_the_data(source: MemorySource, odd_only: bool) -> None:
    table = source.episodes
    episodes = np.arange(1, len(table.length), 2) if odd_only else np.arange(len(table.length))
    if not len(episodes):
        return
    batch = all_windows(source, Windows(1, 5), episodes)
    slots = np.array([*slots_of(source, episodes)])
    ring = (np.arange(len(slots))[:, None] + np.arange(6)) % len(slots)
    episode, time, is_step = slots[ring].transpose(2, 0, 1)
    np.testing.assert_array_equal(batch.episode, episode)
    np.testing.assert_array_equal(batch.time, time)
    np.testing.assert_array_equal(batch.mask, is_step[:, :-1])
    np.testing.assert_array_equal(batch.first, time == 0)
    mask, known = batch.mask, table.final[episode] >= 0
    at = table.row[episode], table.start[episode] + np.minimum(time, table.length[episode] - 1)
    for name in ("action", "reward", "terminated", "truncated", "behaviour_log_prob"):
        expected = getattr(source.steps, name)[at][:, :-1]
        np.testing.assert_array_equal(getattr(batch, name)[mask], expected[mask])
    for name in View._fields:
        values, final = (getattr(view, name) for view in (source.steps.view, source.finals))
        of_step = is_step.reshape(*is_step.shape, *(1,) * (values.ndim - 2))
        expected = np.where(of_step, values[at], final[episode])
        valid = is_step.astype(bool) | known
        np.testing.assert_array_equal(getattr(batch.view, name)[valid], expected[valid])
    unknown = ~is_step.astype(bool) & ~known
    assert batch.view.legal_actions[unknown].all() and batch.view.alive[unknown].all()
    assert not batch.view.observation[unknown].any() and not batch.view.state[unknown].any()
    is_last = time == table.length[episode] - 1
    over = source.steps.terminated[at].all(-1)
    np.testing.assert_array_equal(batch.next_known[mask], (~is_last | known | over)[:, :-1][mask])


def test_short_episodes_with_gaps_are_read_in_little_memory(monkeypatch) -> None:
    sizes: list[int] = []
    window_fields = MemorySource.window_fields

    def noted(self, rows, starts, length, *arguments):
        sizes.append(len(starts) * length)
        window_fields(self, rows, starts, length, *arguments)

    monkeypatch.setattr(MemorySource, "window_fields", noted)
    source, windows = MemorySource([[1] * 2000] * 2), Windows(1, 5)
    table = SlotRings(source, windows, np.arange(0, 4000, 2), None).members[0].table
    count, most = table.num_slots, 2**16
    parts = [*read_slots(table, windows, count, most)]
    slots = np.concatenate([slots for slots, _ in parts])
    np.testing.assert_array_equal(np.unique(slots[slots < count]), np.arange(count))
    step_bytes = sum(x.nbytes for x in parts[0][1].values()) // len(parts[0][0])
    assert max(sizes) * step_bytes < 1.5 * most


@pytest.mark.slow
def test_a_device_gets_parts_of_few_sizes(monkeypatch) -> None:
    """Each size is compiled, and with gaps between episodes, parts have many numbers of slots."""
    sizes: list[int] = []
    pack = packing.pack

    def noted(fields, layout, count):
        sizes.append(count)
        return pack(fields, layout, count)

    monkeypatch.setattr(packing, "pack", noted)
    monkeypatch.setattr(device, "_READ_BYTES", 2**19)
    rng = np.random.default_rng(0)
    source, windows = MemorySource([[*rng.integers(1, 8, 16_000)]]), Windows(1, 5)
    episodes = np.flatnonzero(rng.random(16_000) < 0.7)
    replay = device.load(source, windows, episodes)
    assert len(sizes) > 12 and len(set(sizes)) < 5
    slots = np.arange(0, replay.num_slots, 50)
    expected = WindowReader(source, windows, episodes).arrays(slots)
    chex.assert_trees_all_equal(at(replay, slots), expected)


@settings(max_examples=25)
@given(sources(), st.sampled_from([1.0, 0.5]))
def test_returns_to_go(source: MemorySource, discount: float) -> None:
    batch = all_windows(source, Windows(1, 5, return_to_go=discount))
    table, follows = source.episodes, {}
    for episode, (row, start, length, _) in enumerate(zip(*table, strict=True)):
        value = np.zeros(2)
        for time in reversed(range(length)):
            value = source.steps.reward[row, start + time] + discount * value
            follows[episode, time] = value
    for window, slot in np.argwhere(batch.mask):
        expected = follows[int(batch.episode[window, slot]), int(batch.time[window, slot])]
        np.testing.assert_allclose(batch.return_to_go[window, slot], expected, rtol=1e-6)


@pytest.mark.parametrize("lengths", [[[1, 1, 1]], [[2, 1], [3]], [[9, 1, 2], [4, 8]]])
def test_the_device_holds_the_same_windows(lengths: list[list[int]]) -> None:
    """Also where a window is longer than all the data."""
    source, windows = MemorySource(lengths, without_final=(0,)), Windows(1, 6, 3, 0.9)
    replay = load(source, windows)
    result = at(replay, np.arange(replay.num_slots))
    chex.assert_trees_all_equal(result, all_windows(source, windows))


def test_sizes_that_cannot_be() -> None:
    for sizes in ({"batch_size": 0}, {"length": 0}, {"burn_in": -1}):
        with pytest.raises(ShapeError, match="cannot be drawn"):
            Windows(**sizes)
    with pytest.raises(OptionError, match=r"cannot be discounted by 1\.5"):
        Windows(return_to_go=1.5)
    source = MemorySource([[3, 4]])
    refused = pytest.raises(OptionError, match="episodes 0 to 1")
    for episodes in ([2], [-1], []):
        with refused:
            WindowReader(source, Windows(), np.array(episodes, int))
    with pytest.raises(OptionError, match="named twice"):
        WindowReader(source, Windows(), np.array([1, 1]))
