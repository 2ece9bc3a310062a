"""Slices, windows, episodes and percentiles against NumPy, for vaults of every kind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offmarl import vault
from offmarl.errors import VaultError
from offmarl.types import map_tree
from offmarl.vault import Dataset
from offmarl.vault.format import encoding, layout
from offmarl.vault.read import arrays
from offmarl.vault.read.arrays import Arrays
from tests.children import python

from .experience import SPEC, assert_same, make, written
from .test_stock import to_stock, write_stock

ROWS, STEPS = 3, 70
DATA, FINALS = make(rows=ROWS, steps=STEPS)
KINDS = ("raw", "mapped", "zstd", "stock")


@pytest.fixture(scope="module")
def vaults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    """The same steps in chunks of 16 and of 64 steps, compressed, and as stock writes them."""
    root = tmp_path_factory.mktemp("reading") / "data.vlt"
    for kind, codec, chunk_steps in (
        ("raw", "raw", 16),
        ("mapped", "raw", 64),
        ("zstd", "zstd", 16),
    ):
        written(root / kind, (DATA, FINALS), chunk_steps=chunk_steps, codec=codec)
    write_stock(root / "stock", to_stock(DATA))
    return {kind: vault.open_vault(root / kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(
    span=st.tuples(st.integers(0, STEPS), st.integers(0, STEPS)),
    rows=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    names=st.sets(st.sampled_from(sorted(layout.leaves(SPEC)))),
    length=st.integers(1, STEPS),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_slice_and_any_window(
    kind: str,
    vaults: dict[str, Dataset],
    span: tuple[int, int],
    rows: tuple[int, int],
    names: set[str],
    length: int,
    seed: int,
) -> None:
    dataset, arrays = vaults[kind], encoding.to_disk(DATA)
    start, stop = sorted(span)
    block = dataset.read(start, stop, slice(*rows), names)
    assert block.keys() == names
    for name, array in block.items():
        expected = arrays[name][slice(*rows), start:stop]
        np.testing.assert_array_equal(array, expected)
        assert array.dtype == dataset.leaves[name].dtype
    rng = np.random.default_rng(seed)
    row, time = rng.integers(0, ROWS, 5), rng.integers(0, STEPS - length + 1, 5)
    for name, array in dataset.windows(row, time, length, names).items():
        expected = [arrays[name][r, t : t + length] for r, t in zip(row, time, strict=True)]
        np.testing.assert_array_equal(array, expected)
    windows = [np.s_[r, t : t + length] for r, t in zip(row, time, strict=True)]
    expected = map_tree(lambda x: np.stack([x[window] for window in windows]), DATA)
    assert_same(dataset.window_transitions(row, time, length), expected)
    assert dataset.windows([], [], length, ["rewards"])["rewards"].shape == (0, length, 2)
    part = slice(start - STEPS, stop)  # as Python has it
    np.testing.assert_array_equal(dataset[part].reward, DATA.reward[:, part])


def test_by_episode(vaults: dict[str, Dataset]) -> None:
    dataset = vaults["mapped"]
    table = dataset.episodes
    episodes = list(dataset)
    assert len(dataset) == len(episodes) == len(table.row)
    assert sum(len(episode.transition.last) for episode in episodes) == ROWS * STEPS
    for number, (transition, final) in enumerate(episodes):
        row, start = table.row[number], table.start[number]
        span = slice(start, start + table.length[number])
        assert_same(transition, map_tree(lambda x, at=(row, span): x[at], DATA))
        assert_same(dataset.episode(number - len(episodes)).transition, transition)
        matches = np.flatnonzero((FINALS.row == row) & (FINALS.time == span.stop - 1))
        if len(matches):
            np.testing.assert_array_equal(final.observation, FINALS.view.observation[matches[0]])
        else:
            assert final is None
    for last in (dataset[-1], dataset[np.int64(len(episodes) - 1)]):
        np.testing.assert_array_equal(last.transition.reward, episodes[-1].transition.reward)
    assert vaults["stock"].episode(0).final is None
    for place in (len(episodes), -len(episodes) - 1):
        with pytest.raises(VaultError, match=rf"episode {place} was requested, and .* has"):
            dataset.episode(place)


def test_by_percentile(vaults: dict[str, Dataset]) -> None:
    dataset = vaults["raw"]
    assert dataset.percentiles(0, 100) == (0, STEPS)
    cuts = [dataset.percentiles(low, low + 25) for low in (0, 25, 50, 75)]
    assert [stop for _, stop in cuts[:-1]] == [start for start, _ in cuts[1:]]
    for low, high in ((-1, 50), (0, 101), (60, 40), (float("nan"), 50)):
        with pytest.raises(VaultError, match="give two in order from 0 to 100"):
            dataset.percentiles(low, high)


def test_many_chunks_before_the_map_pays(tmp_path: Path) -> None:
    """A read of the first steps of a large vault does not list all of its keys."""
    path = tmp_path / "data.vlt"
    transition, _ = make(rows=1, steps=1024)
    dataset = written(path, (transition, None), chunk_steps=8)
    np.testing.assert_array_equal(dataset[:5].reward, transition.reward[:, :5])
    assert not dataset._arrays._is_mapped
    np.testing.assert_array_equal(dataset[:].reward, transition.reward)
    assert dataset._arrays._is_mapped


def test_decoded_chunks_are_kept_until_newer_ones_need_the_memory(
    vaults: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, decoded = vault.open_vault(vaults["zstd"].path), []
    decode = Arrays._decode

    def noted(self: Arrays, chunks: Any, place: Any, values: Any) -> Any:
        decoded.append(place.number)
        return decode(self, chunks, place, values)

    monkeypatch.setattr(Arrays, "_decode", noted)
    monkeypatch.setattr(arrays, "_CACHE_BYTES", 2 * 3 * 16 * dataset.leaves["rewards"].step_bytes)
    reads = [
        lambda start: dataset.windows([0], [start], 4, ["rewards"]),
        lambda start: dataset.read(start, start + 4, leaves=["rewards"]),
    ]
    for start, again in ((0, [0]), (16, [1]), (0, []), (32, [2]), (16, []), (0, [0])):
        for read in reads:
            read(start)
        assert decoded == again
        decoded.clear()
    dataset.read(48, 64, leaves=["rewards"])  # whole chunks are not kept
    dataset.windows([0], [32], 4, ["rewards"])
    assert decoded == [3]


READING = ("dataset", "format", "read", "storage", "transform", "transform.episode_set")
"""Rooms, and modules of other rooms, that reading needs."""


def test_reading_loads_reading(vaults: dict[str, Dataset]) -> None:
    """Neither writing, verifying, transforming nor JAX; nor do digests and lists load JAX."""
    code = """
import sys, offmarl
offmarl.open(sys.argv[1])[1:3]
assert "jax" not in sys.modules
print(*(name for name in sys.modules if name.startswith("offmarl.")))
dataset = offmarl.vault.open_vault(sys.argv[1])
dataset.digest(), dataset.episodes, list(offmarl.vault.list_vaults(sys.argv[1]))
assert "jax" not in sys.modules
"""
    modules = python("-c", code, next(iter(vaults.values())).path).split()
    inside = {name.removeprefix("offmarl.vault.") for name in modules if ".vault." in name}
    names = [name for name in inside if name.partition(".")[0] not in READING[1:4]]
    assert {*names} <= {*READING}
    assert len(modules) <= 44
