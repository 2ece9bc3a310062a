"""Streams: the device's batches, from any step on, in little memory."""

import json
import pickle
import threading
import warnings
from itertools import count
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

import offmarl
from offmarl import vault
from offmarl.errors import OptionError, ShapeError, VaultError
from offmarl.replay import (
    Replay,
    WindowReader,
    Windows,
    device,
    open_batches,
    split_key,
)
from offmarl.replay.host import ahead, parts_ahead
from offmarl.replay.sampling import are_whole
from offmarl.replay.starts import Uniform, draw_on_host
from offmarl.testing import experience
from offmarl.types import Discrete, EnvSpec, Sequence, map_tree
from offmarl.vault import Dataset

from .memory import MemorySource, at, sample


@pytest.mark.parametrize(
    ("batch", "length", "options"),
    [
        (300, 5, {}),
        pytest.param(128, 1, {}, marks=pytest.mark.slow),
        pytest.param(128, 100, {"burn_in": 3, "return_to_go": 0.9}, marks=pytest.mark.slow),
    ],
)
def test_the_batches_of_the_device(dataset: Dataset, batch: int, length: int, options) -> None:
    """Of more windows than are gathered at once, and of windows longer than a row, too."""
    replay = dataset.replay(batch, length, **options)
    with dataset.stream(batch, length, seed=3, start=7, **options) as stream:
        for step in range(7, 12):
            key = jax.random.fold_in(jax.random.key(3), step)
            chex.assert_trees_all_equal(next(stream), sample(replay, key))
        assert stream.step == 12


def test_compressed_vaults_stream_the_same(dataset: Dataset, tmp_path: Path) -> None:
    assert dataset.manifest.schema.codec == "raw"
    copy = vault.recode(dataset, tmp_path / "zstd.vlt", codec="zstd")
    with copy.stream(8, 5, to="numpy") as compressed, dataset.stream(8, 5, to="numpy") as mapped:
        for _ in range(3):
            chex.assert_trees_all_equal(next(compressed), next(mapped))


def test_a_stream_goes_on_where_another_was(dataset: Dataset) -> None:
    with dataset.stream(4, 5, to="numpy", seed=1) as stream:
        batches = [next(stream) for _ in range(6)]
    with dataset.stream(4, 5, to="numpy", seed=1) as stream:
        for batch in batches[:2]:
            chex.assert_trees_all_equal(next(stream), batch)
        state = json.loads(json.dumps(stream.state()))
    with dataset.stream(4, 5, to="numpy", **state) as stream:
        for batch in batches[2:]:
            chex.assert_trees_all_equal(next(stream), batch)


def test_memory_bounds_what_is_gathered_ahead(dataset: Dataset) -> None:
    with pytest.raises(OptionError, match=r"10,000 bytes of memory are too few .* 3 are held"):
        dataset.stream(8, 5, memory=10_000)
    assert [parts_ahead(memory, 10, "a part", 5) for memory in (30, 49, 50, 999)] == [1, 2, 3, 5]
    with pytest.raises(OptionError, match="too few to stream: a part takes 10"):
        parts_ahead(29, 10, "a part", 5)
    under_way, most = [0], [0]
    lock = threading.Lock()

    def produce(number: int) -> int:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        return number

    for expected, number in enumerate(ahead(produce, range(50), 3)):
        assert number == expected
        with lock:
            under_way[0] -= 1
    assert most[0] <= 4


@pytest.mark.parametrize(
    ("batch", "room", "together"), [(8, 10**4, 32), (300, 10**4, 1), (8, 12, 3), (8, 3, 1)]
)
def test_small_batches_are_gathered_together_as_far_as_memory_allows(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, batch: int, room: int, together: int
) -> None:
    each_array, sizes = WindowReader.each_array, set()
    monkeypatch.setattr(
        WindowReader,
        "each_array",
        lambda x, starts: sizes.add(len(starts)) or each_array(x, starts),
    )
    memory = room * WindowReader(dataset, Windows(batch, 5)).batch_bytes
    with dataset.stream(batch, 5, to="numpy", memory=memory) as stream:
        next(stream)
    assert sizes == {together}


@pytest.mark.slow
def test_what_goes_wrong_in_a_thread_is_raised(dataset: Dataset) -> None:
    def produce(number: int) -> int:
        if number == 2:
            raise ShapeError("the third")
        return number

    results = ahead(produce, range(9), 4)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ShapeError, match="the third"):
        next(results)
    stream = dataset.stream(4, 5)
    next(stream)
    stream.close()
    stream.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("offmarl-stream")]


@pytest.mark.parametrize("shuffle_buffer", [None, 2**14])
def test_after_an_error_a_stream_reads_the_batch_again(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, shuffle_buffer: int | None
) -> None:
    monkeypatch.setattr(Dataset, "chunk_shape", (1, 10))
    options = {"seed": 3, "epochs": 1, "to": "numpy", "shuffle_buffer": shuffle_buffer}
    expected = [*dataset.stream(300, 5, **options)]
    gather, calls = Dataset.window_fields, count()

    def fail_second(*args: Any) -> Any:
        if next(calls) == 1:
            raise VaultError("a file is missing")
        return gather(*args)

    monkeypatch.setattr(Dataset, "window_fields", fail_second)
    batches = []
    with dataset.stream(300, 5, **options) as stream:
        with pytest.raises(VaultError, match="a file is missing"):
            batches.extend(stream)
        assert len(stream) == len(expected) - len(batches) > 0
        batches.extend(stream)
    chex.assert_trees_all_equal(batches, expected)


def test_windows_of_some_episodes_only(dataset: Dataset) -> None:
    numbers = np.flatnonzero(dataset.episodes.length % 2 == 0)
    replay = dataset.replay(16, 5, numbers)
    assert replay.num_slots == (dataset.episodes.length[numbers] + 1).sum()
    windows = at(replay, np.arange(replay.num_slots))
    assert set(np.unique(windows.episode)) == set(numbers)
    with dataset.stream(16, 5, to="numpy", seed=3, episodes=numbers) as stream:
        chex.assert_trees_all_equal(
            next(stream), sample(replay, jax.random.fold_in(jax.random.key(3), 0))
        )
    with pytest.raises(OptionError, match="named twice"):
        dataset.replay(16, 5, np.array([1, 1]))


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, float("nan")])
def test_fractions_that_cannot_be_held_out(dataset: Dataset, fraction: float) -> None:
    with pytest.raises(OptionError, match="cannot be held out"):
        dataset.hold_out(fraction)


def test_streams_that_cannot_be(dataset: Dataset) -> None:
    with pytest.raises(OptionError, match="too few to stream"):  # windows of gigabytes
        dataset.stream(4, 2**30)
    with pytest.raises(OptionError, match="jax or numpy or torch: 'keras' is none"):
        dataset.stream(16, 5, to="keras")


@pytest.mark.parametrize(("agents", "actions"), [(27, 36), (130, 2)])
def test_large_masks_and_actions_are_finished_too(
    tmp_path: Path, agents: int, actions: int
) -> None:
    spec = EnvSpec("", agents, observation_size=1, state_size=1, action=Discrete(actions))
    with vault.create(tmp_path / "a.vlt", spec, rows=1) as writer:
        writer.append(*experience(spec, rows=1, steps=30))
    dataset = offmarl.open(tmp_path / "a.vlt")
    expected = sample(dataset.replay(4, 5), jax.random.fold_in(jax.random.key(0), 0))
    with dataset.stream(4, 5) as stream:
        chex.assert_trees_all_equal(next(stream), expected)


def test_whole_episodes(dataset: Dataset) -> None:
    numbers = np.array([4, 0, 7])
    batch = dataset.whole_episodes(numbers)
    np.testing.assert_array_equal(batch.mask.sum(-1), dataset.episodes.length[numbers])
    for i, number in enumerate(numbers):
        episode = dataset.episode(int(number))
        length = dataset.episodes.length[number]
        np.testing.assert_array_equal(batch.action[i, :length], episode.transition.action)
        for slot in range(length, batch.mask.shape[1] + 1):  # the last view is repeated
            np.testing.assert_array_equal(batch.view.state[i, slot], episode.final.state)
    with pytest.raises(OptionError, match="choose some of these"):
        dataset.whole_episodes(np.array([10_000]))


def test_more_slots_than_32_bits_tell_apart() -> None:
    count = 3 * 2**40
    keys = jax.random.split(jax.random.key(0), (4, 5))
    draws = draw_on_host(Uniform(count), np.asarray(jax.random.key_data(keys)), 1000)
    assert draws.shape == (4, 5, 1000)
    assert 0 <= draws.min() < 2**33 < draws.max() < count
    np.testing.assert_allclose(draws.mean(), count / 2, rtol=0.02)


@pytest.mark.parametrize("kind", ["device", "stream"])
def test_feeds_give_every_seed_its_own_batches(dataset: Dataset, kind: str) -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    replay, memory = dataset.replay(4, 5), 50_000
    with open_batches(dataset, kind, Windows(4, 5), keys, range(13, 24, 6), memory) as feed:
        assert feed.updates == (6 if kind == "device" else 3)
        for first in range(12, 24, feed.updates):  # a piece begins at a multiple of its size
            data = next(feed.data)
            assert isinstance(data, Replay if kind == "device" else Sequence)
            for seed, index in np.ndindex(2, feed.updates) if kind == "stream" else ():
                key, _ = split_key(keys[seed], first + index)
                batch = jax.tree.map(lambda leaf, at=(seed, index): leaf[at], data)
                chex.assert_trees_all_equal(batch, sample(replay, key))


class LongSource(MemorySource):
    """One episode with more steps than an int32 can count: a short episode, repeated."""

    def __init__(self) -> None:
        super().__init__([[50]])
        self.length = 2**31
        self.episodes = self.episodes._replace(length=np.array([self.length]))

    def window_fields(self, rows, starts, length, index, out, at):
        return super().window_fields(rows, starts % 29, length, index, out, at)


def test_data_with_more_steps_than_a_device_can_index_is_streamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda: 2**60)
    source, keys = LongSource(), jax.random.split(jax.random.key(0), 1)
    with open_batches(source, "auto", Windows(4, 5), keys, range(0, 6, 6), 2**20) as feed:
        assert isinstance(next(feed.data), Sequence)
    with (
        pytest.raises(OptionError, match="stream the batches"),
        open_batches(source, "device", Windows(4, 5), keys, range(0, 6, 6), 2**20),
    ):
        pass


@pytest.mark.parametrize("to", ["jax", "numpy"])
def test_epochs_have_every_window_once(dataset: Dataset, to: str) -> None:
    count = len(dataset.window_items(5))
    with dataset.stream(64, 5, to=to, epochs=2) as stream:
        batches = [map_tree(np.asarray, batch) for batch in stream]
        assert len(stream) == 0
    assert len(batches) == 2 * -(-count // 64)
    for epoch in (batches[: len(batches) // 2], batches[len(batches) // 2 :]):
        begins = [np.stack([part.episode[:, 0], part.time[:, 0]], -1) for part in epoch]
        assert len(np.unique(np.concatenate(begins), axis=0)) == count
    with dataset.stream(64, 5, to=to, epochs=2, drop_last=True, start=4) as stream:
        assert len(stream) == 2 * (count // 64) - 4
        assert {len(batch.mask) for batch in stream} == {64}
    with pytest.raises(TypeError, match="without an end"), dataset.stream(64, 5, to=to) as stream:
        len(stream)
    with pytest.raises(OptionError, match="cannot start at -1"):
        dataset.stream(64, 5, to=to, start=-1)


def test_windows_by_number_for_grain(dataset: Dataset) -> None:
    grain = pytest.importorskip("grain")
    windows = pickle.loads(pickle.dumps(dataset.window_items(5)))
    assert isinstance(windows, grain.sources.RandomAccessDataSource)
    batches = [*grain.MapDataset.source(windows).shuffle(seed=0).batch(64)]
    begins = np.concatenate([np.stack([x.episode[:, 0], x.time[:, 0]], -1) for x in batches])
    assert len(np.unique(begins, axis=0)) == len(begins) == len(windows)
    assert type(batches[0]) is type(windows[0])
    chex.assert_trees_all_equal(
        windows.gather([3, -1]), jax.tree.map(lambda *x: np.stack(x), windows[3], windows[-1])
    )


@pytest.mark.parametrize("kind", ["device", "stream", "blocks"])
def test_steps_that_are_not_finite_or_illegal_are_in_no_batch(tmp_path, kind):
    """All other steps are unchanged, and none is missing."""
    length, episodes = 12, 4
    count = length * episodes
    rng = np.random.default_rng(0)
    ends = np.arange(count) % length == length - 1
    observations = rng.normal(size=(count, 2, 3))
    legal, actions = np.ones((count, 2, 4), bool), rng.integers(0, 4, (count, 2))
    observations[12 + 5, 1, 2] = np.nan  # episode 1 ends before its step 5
    observations[36, 0, 0] = np.inf  # nothing is left of episode 3
    legal[3, 0, actions[3, 0]] = legal[29, 1, actions[29, 1]] = False
    alive = np.ones((count, 2), bool)
    legal[31, 1, actions[31, 1]] = alive[31, 1] = False  # who is dead may do anything
    with pytest.warns(UserWarning):
        data = offmarl.from_arrays(
            tmp_path / "a.vlt",
            observations=observations,
            actions=actions,
            rewards=np.arange(count),
            truncations=ends,
            next_observations=np.where(ends[:, None, None], 9.0, np.roll(observations, -1, 0)),
            legal_actions=legal,
            next_legal_actions=legal,
            alive=alive,
            on_invalid="keep",
        )
    options = {"batch": 4, "length": 5}
    with pytest.warns(UserWarning) as records:
        if kind == "device":
            replay = data.replay(**options)
            batches = [sample(replay, jax.random.key(i)) for i in range(60)]
        elif kind == "stream":
            stream = data.stream(**options, to="numpy", seed=0)
            batches = [next(stream) for _ in range(60)]
        else:
            passes = {"to": "numpy", "epochs": 3, "shuffle_buffer": 10**6}
            batches = list(data.stream(**options, seed=0, **passes))
    counts = [str(record.message).partition("leave out ")[2] for record in records]
    assert counts == [
        "19 steps that are not finite or come after such a step.",
        "2 steps whose actions the mask forbids.",
    ]
    rewards = set()
    for batch in batches:
        assert np.isfinite(batch.view.observation).all()
        mask, reward = np.asarray(batch.mask), np.asarray(batch.reward)[..., 0]
        rewards |= {*reward[mask].astype(int).tolist()}
        allowed = np.take_along_axis(
            np.asarray(batch.view_tm1.legal_actions), np.asarray(batch.action)[..., None], -1
        )
        acts = mask[..., None] & np.asarray(batch.view_tm1.alive)
        assert allowed[..., 0][acts].all()
        last = mask & (reward == 16)
        assert not np.asarray(batch.next_known)[last].any()
    assert not are_whole(data).any()
    left_out = {3, 29, *range(17, 24), *range(36, 48)}
    assert rewards == {*range(count)} - left_out


@pytest.mark.parametrize(
    ("field", "value"),
    [("observations", np.nan), ("states", np.inf), ("rewards", -np.inf), ("actions", np.nan)],
)
def test_no_way_of_drawing_gives_what_is_not_finite(tmp_path, field, value):
    """The second episode begins with such a step, and the third holds one later."""
    rng, count = np.random.default_rng(0), 30
    arrays = {
        "observations": rng.normal(size=(count, 2, 3)),
        "states": rng.normal(size=(count, 4)),
        "rewards": rng.normal(size=(count, 2)),
        "actions": rng.uniform(-0.9, 0.9, (count, 2, 2)),
    }
    arrays[field][[10, 25]] = value
    ends = np.isin(np.arange(count), [9, 19, 29])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = offmarl.from_arrays(tmp_path / "a.vlt", **arrays, terminals=ends, on_invalid="keep")
        stream = data.stream(batch=8, length=4, to="numpy")
        batches = [sample(data.replay(batch=8, length=4), jax.random.key(0)), next(stream)]
        batches += data.stream(batch=4, length=4, to="numpy", epochs=1, shuffle_buffer=10**6)
        batches.append(data.whole_episodes(np.arange(3)))
    for source in (data, offmarl.mix([data])):
        assert are_whole(source).tolist() == [True, False, False]
    for batch in batches:
        fields = batch._replace(behaviour_log_prob=None) if hasattr(batch, "reward") else batch
        floats = [x for x in jax.tree.leaves(fields) if x.dtype.kind == "f"]
        assert floats and all(np.isfinite(x).all() for x in floats)
