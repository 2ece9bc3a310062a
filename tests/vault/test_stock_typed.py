"""Images, trees and extras: stock flashbax reads ours, and we read stock's."""

import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import VaultLayoutError
from offmarl.types import ArraySpec, Discrete, unflatten_tree

from .experience import assert_same, make
from .test_stock import EXTRA, IMAGE, TYPED, to_stock, write_stock

SPECS = pytest.mark.parametrize("spec", [TYPED, IMAGE, EXTRA], ids=["tree", "image", "extra"])


@SPECS
def test_a_stock_vault_is_read_as_a_dataset(tmp_path, spec):
    transition, _ = make(spec, rows=2, steps=30)
    dataset = write_stock(tmp_path / "stock.vlt" / "a", to_stock(transition))
    assert dataset.spec.observation == spec.observation
    assert dataset.spec.global_state == spec.global_state
    assert dataset.spec.extras == spec.extras
    assert_same(dataset.transitions(), transition)
    checked = vault.verify(dataset.path, deep=True)
    assert checked.sound and not checked.other_layout
    copied = vault.recode(dataset, tmp_path / "ours.vlt")
    assert copied.native and copied.digest() == dataset.digest()
    assert_same(copied.transitions(), transition)


def stock_of(path, leaves):
    tree = unflatten_tree({name: jnp.asarray(array) for name, array in leaves.items()})
    return write_stock(path, tree)


PLAIN = {"actions": np.ones((1, 10, 2), np.int32), "rewards": np.ones((1, 10, 2), np.float32)}


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        (np.zeros((1, 10, 2, 6, 6, 3), np.uint8), ArraySpec((6, 6, 3), "uint8")),
        (np.zeros((1, 10, 2, 6), np.int32), ArraySpec((6,), "int32")),
        (np.zeros((1, 10, 2, 3, 4), np.float32), ArraySpec((3, 4))),
        (np.zeros((1, 10, 2, 6), np.float32), None),
        (np.zeros((1, 10, 2, 6), np.uint32), None),
    ],
)
def test_the_types_of_a_stock_vault_are_kept(tmp_path, observation, expected):
    dataset = stock_of(tmp_path / "s.vlt" / "a", {**PLAIN, "observations": observation})
    assert dataset.spec.observation == expected
    dtype = expected.numpy_dtype if expected else np.float32
    steps = dataset.transitions()
    assert steps.view.observation.dtype == dtype
    assert steps.view.observation.shape == observation.shape
    size = observation[0, 0].size if expected is None else 0
    assert steps.view.state.shape == (1, 10, size)
    assert dataset.spec.action == Discrete(2)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("observations.image", np.zeros((1, 10, 3, 4), np.uint8), "observations.image is of 3"),
        ("observations.my image", np.zeros((1, 10, 2, 4), np.uint8), "cannot name a leaf"),
        ("observations.none", np.zeros((1, 10), np.uint8), "with an axis of agents"),
        (
            "rewards",
            np.zeros((1, 10, 3), np.float32),
            r"rewards has the shape \(3,\), and not \(2,\)",
        ),
        ("infos.alive", np.zeros((1, 10, 2, 2), np.float32), "infos.alive has the shape"),
    ],
)
def test_leaves_of_another_layout_are_named(tmp_path, name, array, message):
    leaves = {**PLAIN, "observations.a": np.zeros((1, 10, 2, 4), np.float32), name: array}
    dataset = stock_of(tmp_path / "s.vlt" / "a", leaves)
    with pytest.raises(VaultLayoutError, match=message):
        dataset.spec  # noqa: B018
    checked = vault.verify(dataset.path, deep=True)
    assert checked.sound and "one by one with read" in checked.other_layout
    np.testing.assert_array_equal(dataset.read()[name], array)


def test_padding_is_read_as_zeros_in_floats_only(tmp_path):
    speed = np.full((1, 10, 2, 3), -np.inf, np.float32)
    image = np.full((1, 10, 2, 4), 255, np.uint8)
    leaves = {**PLAIN, "observations.speed": speed, "observations.image": image}
    dataset = stock_of(tmp_path / "s.vlt" / "a", leaves)
    assert "padded observations" in dataset.quirks
    observation = dataset.transitions().view.observation
    assert not observation["speed"].any() and (observation["image"] == 255).all()
