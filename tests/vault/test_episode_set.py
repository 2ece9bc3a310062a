"""Views of some of a dataset's episodes, and the parts that a dataset is split into."""

from pathlib import Path

import chex
import jax
import numpy as np
import pytest

import offmarl
from offmarl import vault
from offmarl.errors import OptionError, VaultError
from offmarl.vault import Dataset
from tests.replay.memory import sample
from tests.replay.test_device import write


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("episodes") / "data.vlt"
    write(path, np.random.default_rng(0).random((3, 90)) < 0.15)
    return offmarl.open(path)


def test_a_view_holds_the_chosen_episodes(dataset: Dataset) -> None:
    part = dataset.subset([7, 2, 5])
    assert len(part) == 3 and part.numbers.tolist() == [2, 5, 7]
    for number, episode in zip(part.numbers, part, strict=True):
        chex.assert_trees_all_equal(episode, dataset[int(number)])
    chex.assert_trees_all_equal(part[-1], dataset[7])
    np.testing.assert_array_equal(part.episodes.returns, dataset.episodes.returns[[2, 5, 7]])
    assert part.episodes.mean_return != dataset.episodes.mean_return
    assert repr(part).startswith(f"<Subset: 3 of {len(dataset)} episodes of <Dataset ")
    with pytest.raises(VaultError, match=r"episode 3 was requested, and .* has 3"):
        part[3]


def test_a_view_draws_from_its_episodes_only(dataset: Dataset) -> None:
    part = dataset.subset([2, 5, 7])
    replay = part.replay(64, 5)
    assert set(np.unique(sample(replay, jax.random.key(0)).episode)) == {2, 5, 7}
    options = {"batch": 64, "length": 5, "to": "numpy"}
    with part.stream(**options) as stream, dataset.stream(**options, episodes=part.numbers) as same:
        chex.assert_trees_all_equal(next(stream), next(same))
    smaller = part.subset([2, 0])
    assert smaller.numbers.tolist() == [2, 7]
    windows = part.window_items(5, np.array([0, 2]))
    np.testing.assert_array_equal(windows[0].episode, smaller.window_items(5)[0].episode)
    assert len(windows) == dataset.episodes.length[[2, 7]].sum() + 2


def test_views_are_the_parts_that_split_writes(dataset: Dataset, tmp_path: Path) -> None:
    for number, arguments in enumerate(
        ({"validation": 0.3, "seed": 4}, {"fractions": (0.5, 0.3, 0.2)}, {})
    ):
        views = dataset.split(**arguments)
        written = vault.split(dataset, tmp_path / f"{number}.vlt", **arguments)
        assert [*views] == [*written]
        for name, view in views.items():
            returns = written[name].episodes.returns[:, 0]
            np.testing.assert_array_equal(np.sort(view.episodes.returns[:, 0]), np.sort(returns))
        numbers = np.concatenate([view.numbers for view in views.values()])
        np.testing.assert_array_equal(np.sort(numbers), np.arange(len(dataset)))
    train, held_out = dataset.hold_out(0.3)
    views = dataset.split(validation=0.3)
    np.testing.assert_array_equal(views["train"].numbers, train)
    np.testing.assert_array_equal(views["validation"].numbers, held_out)
    assert [len(part) for part in dataset.hold_out(1e-9)] == [len(dataset) - 1, 1]


def test_a_mask_chooses_what_its_numbers_do(dataset: Dataset) -> None:
    mask = np.arange(len(dataset)) % 3 == 1
    numbers = np.flatnonzero(mask)
    for choice in (mask, mask.tolist()):
        np.testing.assert_array_equal(dataset.subset(choice).numbers, numbers)
    np.testing.assert_array_equal(
        dataset.subset(numbers).subset([False, True] + [False] * (len(numbers) - 2)).numbers,
        numbers[1:2],
    )
    wholes = (dataset.whole_episodes(choice) for choice in (mask, numbers))
    chex.assert_trees_all_equal(*wholes)
    replays = (sample(dataset.replay(4, 2, x), jax.random.key(0)) for x in (mask, numbers))
    chex.assert_trees_all_equal(*replays)


@pytest.mark.untyped
def test_what_cannot_be_chosen(dataset: Dataset) -> None:
    with pytest.raises(OptionError, match=r"shape \(2,\): give a truth for each of the"):
        dataset.subset([True, False])
    with pytest.raises(OptionError, match="values of type float64"):
        dataset.whole_episodes(np.array([0.9, 1.9]))
    for wrong in ([], [-1], [10_000], [[0]]):
        with pytest.raises(OptionError, match=r"choose some of these"):
            dataset.subset(wrong)
    with pytest.raises(OptionError, match="named twice"):
        dataset.subset([3, 3])
    with pytest.raises(OptionError, match="choose some of these"):
        dataset.subset([3]).replay(8, 5, np.array([1]))
    with pytest.raises(OptionError, match="choose some of these"):
        dataset.step_probabilities(5, np.array([10_000]), weights="length")
