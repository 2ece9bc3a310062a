"""Slices, windows, episodes and percentiles against NumPy, for vaults of every kind."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offmarl import vault
from offmarl.errors import VaultError
from offmarl.types import map_tree
from offmarl.vault import Dataset
from offmarl.vault.format import encoding, layout
from tests.children import python

from .experience import SPEC, assert_same, make, steps, written
from .test_stock import append_with_stock, to_stock

ROWS, STEPS = 3, 70
DATA, FINALS = make(rows=ROWS, steps=STEPS)
KINDS = ("raw", "mapped", "zstd", "stock")
PER_AGENT = {name for name, leaf in layout.leaves(SPEC).items() if leaf.shape[:1] == (2,)}


@pytest.fixture(scope="module")
def vaults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    """The same steps in chunks of 16 steps, of 64, compressed, and as stock has them."""
    from flashbax.vault import Vault as StockVault

    root = tmp_path_factory.mktemp("reading") / "data.vlt"
    for kind, codec, chunk_steps in (
        ("raw", "raw", 16),
        ("mapped", "raw", 64),
        ("zstd", "zstd", 16),
    ):
        written(root / kind, (DATA, FINALS), chunk_steps=chunk_steps, codec=codec)
    stock = StockVault("data.vlt", to_stock(steps(DATA, 0, 1)), str(root.parent), "stock")
    append_with_stock(stock, DATA)
    return {kind: vault.open_vault(root / kind) for kind in KINDS}


ascending = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 2))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(
    span=st.tuples(st.integers(0, STEPS), st.integers(0, STEPS)),
    rows=ascending,
    agents=ascending,
    names=st.sets(st.sampled_from(sorted(layout.leaves(SPEC)))),
    length=st.integers(1, STEPS),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_slice_and_any_window(
    kind: str,
    vaults: dict[str, Dataset],
    span: tuple[int, int],
    rows: tuple[int, int, int],
    agents: tuple[int, int, int],
    names: set[str],
    length: int,
    seed: int,
) -> None:
    found, whole = vaults[kind], encoding.to_disk(DATA)
    start, stop = sorted(span)
    read = found.read(start, stop, slice(*rows), names, slice(*agents))
    assert read.keys() == names
    for name, array in read.items():
        expected = whole[name][slice(*rows), start:stop]
        expected = expected[:, :, slice(*agents)] if name in PER_AGENT else expected
        np.testing.assert_array_equal(array, expected)
        assert array.dtype == found.leaves[name].dtype
    rng = np.random.default_rng(seed)
    row, time = rng.integers(0, ROWS, 5), rng.integers(0, STEPS - length + 1, 5)
    found.prefetch(row, time, length, names)
    for name, array in found.windows(row, time, length, names).items():
        expected = [whole[name][r, t : t + length] for r, t in zip(row, time, strict=True)]
        np.testing.assert_array_equal(array, expected)
    windows = [np.s_[r, t : t + length] for r, t in zip(row, time, strict=True)]
    expected = map_tree(lambda x: np.stack([x[window] for window in windows]), DATA)
    assert_same(found.window_transitions(row, time, length), expected)
    assert found.windows([], [], length, ["rewards"])["rewards"].shape == (0, length, 2)
    part = slice(start - STEPS, stop)  # as Python has it
    np.testing.assert_array_equal(found[part].reward, DATA.reward[:, part])


def test_what_lies_in_one_chunk_is_not_copied(vaults: dict[str, Dataset]) -> None:
    first = vaults["mapped"].read(0, 10)["observations"]
    again = vaults["mapped"].read(5, 10)["observations"]
    assert np.shares_memory(first, again)
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 0


def test_by_episode(vaults: dict[str, Dataset]) -> None:
    found = vaults["mapped"]
    table = found.episodes
    each = list(found)
    assert len(found) == len(each) == len(table.row)
    assert sum(len(one.transition.last) for one in each) == ROWS * STEPS
    for number, (transition, final) in enumerate(each):
        row, start = table.row[number], table.start[number]
        span = slice(start, start + table.length[number])
        assert_same(transition, map_tree(lambda x, at=(row, span): x[at], DATA))
        assert_same(found.episode(number - len(each)).transition, transition)
        ended = np.flatnonzero((FINALS.row == row) & (FINALS.time == span.stop - 1))
        if len(ended):
            np.testing.assert_array_equal(final.observation, FINALS.view.observation[ended[0]])
        else:
            assert final is None
    for last in (found[-1], found[np.int64(len(each) - 1)]):
        np.testing.assert_array_equal(last.transition.reward, each[-1].transition.reward)
    assert vaults["stock"].episode(0).final is None
    for place in (len(each), -len(each) - 1):
        with pytest.raises(VaultError, match=rf"episode {place} was requested, and .* has"):
            found.episode(place)


def test_by_percentile(vaults: dict[str, Dataset]) -> None:
    found = vaults["raw"]
    assert found.percentiles(0, 100) == (0, STEPS)
    cuts = [found.percentiles(low, low + 25) for low in (0, 25, 50, 75)]
    assert [stop for _, stop in cuts[:-1]] == [start for start, _ in cuts[1:]]
    for low, high in ((-1, 50), (0, 101), (60, 40), (float("nan"), 50)):
        with pytest.raises(VaultError, match="give two in order from 0 to 100"):
            found.percentiles(low, high)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda v: v.read(0, STEPS + 1), f"steps 0 to {STEPS + 1} were requested"),
        (lambda v: v.read(5, 3), "steps 5 to 3 were requested"),
        (lambda v: v.read(rows=slice(None, None, -1)), "rows are read in ascending order"),
        (lambda v: v.read(agents=slice(None, None, -1)), "agents are read in ascending order"),
        (lambda v: v.read(leaves=["reward"]), "no array named 'reward'"),
        (lambda v: v.windows([0], [0], 3, ["reward"]), "no array named 'reward'"),
        (lambda v: v.windows([0], [0], 0), "at least 1 step"),
    ],
)
def test_what_is_not_there(ask, message: str, vaults: dict[str, Dataset]) -> None:
    with pytest.raises(VaultError, match=message):
        ask(vaults["mapped"])


def test_many_chunks_before_the_map_pays(tmp_path: Path) -> None:
    """A look at the beginning of a large vault does not go through all of its keys."""
    path = tmp_path / "data.vlt"
    transition, _ = make(rows=1, steps=1024)
    found = written(path, (transition, None), chunk_steps=8)
    np.testing.assert_array_equal(found[:5].reward, transition.reward[:, :5])
    assert not found._arrays._is_mapped
    np.testing.assert_array_equal(found[:].reward, transition.reward)
    assert found._arrays._is_mapped


READING = ("dataset", "format", "read", "storage", "transform", "transform.episode_set")
"""Rooms, and modules of other rooms, that reading needs."""


def test_reading_loads_reading(vaults: dict[str, Dataset]) -> None:
    """Neither writing, verifying, transforming nor JAX; nor do digests and lists load JAX."""
    code = """
import sys, offmarl
offmarl.open(sys.argv[1])[1:3]
assert "jax" not in sys.modules
print(*(name for name in sys.modules if name.startswith("offmarl.")))
found = offmarl.vault.open_vault(sys.argv[1])
found.digest(), found.episodes, list(offmarl.vault.list_vaults(sys.argv[1]))
assert "jax" not in sys.modules
"""
    loaded = python("-c", code, next(iter(vaults.values())).path).split()
    inside = {name.removeprefix("offmarl.vault.") for name in loaded if ".vault." in name}
    others = [name for name in inside if name.partition(".")[0] not in READING[1:4]]
    assert {*others} <= {*READING}
    assert len(loaded) <= 44
