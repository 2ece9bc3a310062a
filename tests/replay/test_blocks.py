"""Passes over blocks: which windows make which batch."""

import itertools
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from threading import Event

import chex
import jax
import numpy as np
import pytest

import offmarl
from offmarl.errors import OptionError
from offmarl.replay import Windows, blocks, open_batches
from offmarl.replay.blocks import BlockReader, BlockTable
from offmarl.replay.fields import COMPUTED, fields_of
from offmarl.replay.orders import SLOT_BITS, BlockOrder
from offmarl.replay.priorities import Prioritised
from offmarl.replay.starts import Uniform
from offmarl.types import Discrete, EnvSpec, sum_bytes
from offmarl.vault import Dataset

from .test_device import write

SIZES = np.array([7, 3, 11, 5, 8, 2, 9, 4, 6, 10, 5, 7, 3, 4, 12, 6, 5, 8, 9, 4, 3, 2])


def windows_of(order: BlockOrder, steps: range) -> list[tuple[int, int]]:
    """Return the block and the slot in it of each window."""
    windows = []
    for window in np.concatenate([order.slots(step) for step in steps]).tolist():
        slot, blocks = window & (2**SLOT_BITS - 1), order.blocks(window >> SLOT_BITS)
        stops = np.cumsum(SIZES[blocks])
        number = int(np.searchsorted(stops, slot, side="right"))
        windows.append((int(blocks[number]), slot - int(stops[number] - SIZES[blocks[number]])))
    return windows


@pytest.mark.parametrize("batch", [1, 5, 32, 200])
def test_a_pass_has_each_window_once(batch: int) -> None:
    order = BlockOrder(SIZES, batch, seed=1, epochs=3)
    assert order.num_batches == 3 * -(-SIZES.sum() // batch)
    expected = [(block, slot) for block, size in enumerate(SIZES) for slot in range(size)]
    per = order.num_batches // 3
    passes = [windows_of(order, range(i * per, (i + 1) * per)) for i in range(3)]
    for epoch in passes:
        assert sorted(epoch) == expected
    assert passes[0] != passes[1] != passes[2], "each pass has another order"


def test_any_batch_is_the_same_without_those_before_and_in_later_releases() -> None:
    first, second = BlockOrder(SIZES, 8, seed=2), BlockOrder(SIZES, 8, seed=2)
    expected = [first.slots(step) for step in range(300)]
    for step in (299, 17, 130, 0):
        np.testing.assert_array_equal(second.slots(step), expected[step])
    assert (BlockOrder(SIZES, 8, seed=3).slots(0) != expected[0]).any()
    order = BlockOrder(SIZES, 4, seed=1, epochs=2, block_seed=5)
    blocks = [[15], [13, 21], [21, 4, 5, 14, 17, 6, 15, 20]]
    assert [order.blocks(buffer).tolist() for buffer in (0, 1, 5)] == blocks
    pairs = [[divmod(x, 2**SLOT_BITS) for x in order.slots(step)] for step in (5, 33, 40)]
    slots = [(2, [0, 16, 10, 7]), (4, [30]), (5, [25, 35, 26, 30])]
    assert pairs == [[(buffer, slot) for slot in of_batch] for buffer, of_batch in slots]


def test_the_batches_of_a_seed_are_those_that_it_has_alone(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dataset, "chunk_shape", (1, 10))  # many blocks, a few in the buffer
    monkeypatch.setattr(blocks, "BUFFER_BYTES", 2**14)
    keys, out = jax.random.split(jax.random.key(0), 2), []
    windows, steps = Windows(4, 5), range(0, 40, 20)
    for subset in (keys, keys[1:]):
        with open_batches(dataset, "blocks", windows, subset, steps, 10**8) as batches:
            out.append([jax.tree.map(lambda x: x[-1], part) for part in batches.data])
    assert len(out[0]) == 2
    chex.assert_trees_all_equal(*out)


def test_the_first_buffer_is_a_single_block() -> None:
    order = BlockOrder(SIZES, 8, seed=0)
    assert [len(order.blocks(i)) for i in range(8)] == [1, 2, 4, 8, 7, 8, 8, 6]


@pytest.mark.parametrize("per_buffer", [1, 3, 8])
def test_batches_without_an_end_are_those_of_the_passes(per_buffer: int) -> None:
    order = BlockOrder(SIZES, 8, seed=0, per_buffer=per_buffer)
    counts = [len(order.blocks(i)) for i in range(1, 60)]
    assert max(counts) == per_buffer
    assert all(len(order.slots(step)) == 8 for step in range(60))
    twice = BlockOrder(SIZES, 8, seed=0, epochs=2, per_buffer=per_buffer)
    sizes = [len(twice.blocks(i)) for i in range(100) if twice.has_buffer(i)]
    assert sum(sizes) == 2 * len(SIZES)
    total = int(SIZES.sum())
    flat = windows_of(order, range(-(-2 * total // 8)))[: 2 * total]
    expected = [(block, slot) for block, size in enumerate(SIZES) for slot in range(size)]
    assert sorted(flat[:total]) == sorted(flat[total:]) == expected


@pytest.mark.parametrize(("chunks", "per_buffer"), [(100, 8), (8, 8), (3, 3), (0.9, 1)])
def test_a_buffer_keeps_to_its_size_where_chunks_are_large(
    dataset: Dataset, chunks: float, per_buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block is a whole chunk at least, so a buffer has fewer of them."""
    monkeypatch.setattr(Dataset, "chunk_shape", (2, 16))
    rows, steps = dataset.chunk_shape
    windows, episodes = Windows(4, 5), dataset.episodes
    recorded = fields_of(dataset.spec, windows).items()
    size = rows * steps * sum_bytes({x: y for x, y in recorded if x not in COMPUTED})
    table = BlockTable(dataset, windows, None, int(chunks * size))
    assert table.per_buffer == per_buffer
    begins = episodes.row // rows, episodes.start // (steps * max(1, int(chunks / 8)))
    together: dict[tuple[int, int], list[int]] = {}
    for number, place in enumerate(zip(*begins, strict=True)):
        together.setdefault(place, []).append(number)
    members = [together[place] for place in sorted(together)]
    assert [table.of(np.array([block])).tolist() for block in range(len(members))] == members
    assert table.sizes.tolist() == [(episodes.length[numbers] + 1).sum() for numbers in members]


def test_a_reader_that_was_closed_reads_no_more(dataset: Dataset) -> None:
    windows, table = Windows(4, 5), BlockTable(dataset, Windows(4, 5))
    order = BlockOrder(table.sizes, 4, seed=0)
    reader = BlockReader(dataset, windows, order, table)
    assert reader.arrays(order.slots(0)).mask.shape == (4, 5)
    reader.close()
    reader.close()
    with pytest.raises(CancelledError):
        reader.arrays(order.slots(0))


def test_a_buffer_is_read_to_its_end_while_another_thread_moves_on(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a batch which is read again after an error, while the next one is under way."""
    monkeypatch.setattr(Dataset, "chunk_shape", (1, 10))
    windows = Windows(4, 5)
    table = BlockTable(dataset, windows, None, 2**14)
    order = BlockOrder(table.sizes, 4, seed=0, per_buffer=table.per_buffer)
    reader = BlockReader(dataset, windows, order, table)
    expected = reader.arrays(order.slots(0))
    late, window_fields, may_read = order.slots(40), Dataset.window_fields, Event()
    reader.arrays(late)
    assert 0 not in reader._buffers
    monkeypatch.setattr(
        Dataset, "window_fields", lambda *args: may_read.wait(60) and window_fields(*args)
    )
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(reader.arrays, order.slots(0))
        while 0 not in reader._buffers and not again.done():
            time.sleep(0.01)
        reader.arrays(late)
        may_read.set()
        chex.assert_trees_all_equal(again.result(), expected)
    reader.close()


def test_what_blocks_cannot_do(dataset: Dataset) -> None:
    windows, keys = Windows(4, 5), jax.random.split(jax.random.key(0), 1)
    leaves = fields_of(dataset.spec, windows).items()
    step_bytes = sum_bytes({x: leaf for x, leaf in leaves if x not in COMPUTED})
    longest = int(dataset.episodes.length.max()) * step_bytes
    BlockTable(dataset, windows, None, longest)
    with pytest.raises(OptionError, match=f"takes {longest:,} bytes, .* {longest - 1:,}: give a"):
        BlockTable(dataset, windows, None, longest - 1)
    with pytest.raises(OptionError, match="is a mixture"):
        offmarl.mix([dataset]).stream(4, 5, shuffle_buffer=2**20)
    with pytest.raises(OptionError, match="all steps are equally likely"):
        dataset.stream(4, 5, weights="length", shuffle_buffer=2**20)
    draws = Prioritised(Uniform(9), 0.5, 0.4, 11, 9, 2)
    for options in ({"draws": draws}, {"weights": (np.ones(len(dataset)),)}):
        batches = open_batches(dataset, "blocks", windows, keys, range(1), 10**8, **options)
        with pytest.raises(OptionError, match="weights or priorities"), batches:
            pass


@pytest.mark.parametrize(("epochs", "drop"), [(0, False), (1, True)])
def test_no_batch_is_an_error(epochs: int, drop: bool) -> None:
    with pytest.raises(OptionError, match="hold no batch of 1,000"):
        BlockOrder(SIZES, 1000, seed=0, epochs=epochs, drop_last=drop)
    with pytest.raises(OptionError, match="drop_last is for epochs"):
        BlockOrder(SIZES, 10, seed=0, drop_last=True)


def test_chosen_episodes_only(dataset: Dataset) -> None:
    episodes = np.arange(0, len(dataset), 2)
    table = BlockTable(dataset, Windows(4, 5), episodes, 2**20)
    assert sorted(table.of(np.arange(len(table.sizes)))) == episodes.tolist()
    numbers = set()
    with dataset.stream(
        4, 5, to="numpy", epochs=1, episodes=episodes, shuffle_buffer=2**20
    ) as stream:
        for batch in stream:
            numbers |= set(batch.episode.ravel().tolist())
    assert numbers == set(episodes.tolist())


def test_returns_to_go_and_the_ends_of_episodes(dataset: Dataset) -> None:
    """All fields of windows inside of an episode are those of other streams."""
    options = {"epochs": 1, "return_to_go": 0.9, "to": "numpy"}
    windows: dict[tuple[int, int], list] = {}
    for buffer in (None, 2**20):
        with dataset.stream(4, 5, shuffle_buffer=buffer, **options) as stream:
            for batch in stream:
                for i in range(len(batch.reward)):
                    episode, time = batch.episode[i], batch.time[i]
                    if episode[0] == episode[-1]:
                        fields = [x[i] for x in batch[1:] if isinstance(x, np.ndarray)]
                        values = [batch.view.observation[i], *fields]
                        windows.setdefault((int(episode[0]), int(time[0])), []).append(values)
    assert len(windows) > 50
    for pair in windows.values():
        for ours, theirs in itertools.zip_longest(*pair):
            np.testing.assert_array_equal(ours, theirs)


def test_steps_without_a_state(tmp_path: Path) -> None:
    spec = EnvSpec("", num_agents=2, observation_size=3, state_size=0, action=Discrete(2))
    write(tmp_path / "data.vlt", np.random.default_rng(0).random((2, 40)) < 0.2, spec)
    data = offmarl.open(tmp_path / "data.vlt")
    with data.stream(8, 5, shuffle_buffer=2**20, to="numpy", epochs=1) as stream:
        batches = [*stream]
    assert sum(batch.mask.sum() for batch in batches) > 0
    assert batches[0].view.state.shape[-1] == 0
