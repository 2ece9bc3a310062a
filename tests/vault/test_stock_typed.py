"""Images, trees and extras: stock flashbax reads ours, and we read stock's."""

import dataclasses

import flashbax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flashbax.vault import Vault as StockVault

from offmarl import vault
from offmarl.errors import VaultLayoutError
from offmarl.testing import image_spec, typed_spec, write_stock
from offmarl.types import ArraySpec, Discrete, flatten_tree, unflatten_tree
from offmarl.vault.format import encoding

from .experience import SPEC, assert_same, concatenate, make

TYPED, IMAGE = typed_spec("test/typed"), image_spec("test/image")
EXTRA = dataclasses.replace(SPEC, extras={"cost": ArraySpec((), "float16")})
SPECS = pytest.mark.parametrize("spec", [TYPED, IMAGE, EXTRA], ids=["tree", "image", "extra"])


def open_stock(path):
    return StockVault(path.parent.name, rel_dir=str(path.parents[1]), vault_uid=path.name)


def record(path, spec, parts, codec="raw"):
    with vault.create(path, spec, rows=2, chunk_steps=16, codec=codec) as writer:
        for part in parts:
            writer.append(*part)
    return vault.open_vault(path)


@SPECS
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_stock_reads_and_samples(tmp_path, spec, codec):
    transition, finals = make(spec, rows=2, steps=40)
    path = tmp_path / "ours.vlt" / "a"
    found = record(path, spec, [(transition, finals)], codec)
    state = open_stock(path).read()
    read = flatten_tree(state.experience)
    assert read.keys() == found.leaves.keys()
    for name, array in found.read().items():
        np.testing.assert_array_equal(read[name], array)
        assert read[name].dtype == array.dtype
    buffer = flashbax.make_trajectory_buffer(
        add_batch_size=2,
        sample_batch_size=4,
        sample_sequence_length=5,
        period=1,
        min_length_time_axis=5,
        max_length_time_axis=40,
    )
    sample = flatten_tree(buffer.sample(state, jax.random.key(0)).experience)
    for name in ("rewards", *(x for x in found.leaves if x.startswith(("observ", "extras")))):
        windows = np.lib.stride_tricks.sliding_window_view(found.read()[name], 5, axis=1)
        windows = np.moveaxis(windows.reshape(-1, *windows.shape[2:]), -1, 1)
        for one in np.asarray(sample[name]):
            assert any(np.array_equal(window, one) for window in windows)


@SPECS
@pytest.mark.slow
def test_stock_appends_and_we_adopt(tmp_path, spec):
    path = tmp_path / "ours.vlt" / "a"
    ours, theirs = make(spec, steps=20), make(spec, steps=12, seed=1)
    found = record(path, spec, [ours])
    arrays = {name: array for name, array in encoding.to_disk(theirs[0]).items() if array.size}
    leaves = {x: jnp.asarray(array, found.leaves[x].dtype) for x, array in arrays.items()}
    tree = jax.tree.map(
        lambda x: jnp.concatenate([x, jnp.zeros_like(x[:, :1])], 1), unflatten_tree(leaves)
    )
    state = flashbax.buffers.trajectory_buffer.TrajectoryBufferState(
        experience=tree, current_index=jnp.array(12), is_full=jnp.array(False)
    )
    assert open_stock(path).write(state, source_interval=(0, 12)) == 12
    with vault.resume(path) as writer:
        assert writer.length == 32
    found = vault.open_vault(path)
    assert_same(found.transitions(0, 20), ours[0])
    unknown = np.full_like(theirs[0].policy_id, -1)
    assert_same(found.transitions(20), theirs[0]._replace(policy_id=unknown))
    assert vault.verify(path, deep=True).sound


@SPECS
def test_a_stock_vault_is_read_as_a_dataset(tmp_path, spec):
    transition, _ = make(spec, rows=2, steps=30)
    path = write_stock(tmp_path / "stock.vlt" / "a", transition)
    found = vault.open_vault(path)
    assert found.spec.observation == spec.observation
    assert found.spec.global_state == spec.global_state
    assert found.spec.extras == spec.extras
    assert_same(found.transitions(), transition)
    checked = vault.verify(path, deep=True)
    assert checked.sound and not checked.other_layout
    copied = vault.recode(found, tmp_path / "ours.vlt")
    assert copied.native and copied.digest() == found.digest()
    assert_same(copied.transitions(), transition)


def stock_of(path, leaves):
    experience = unflatten_tree({name: jnp.asarray(array) for name, array in leaves.items()})
    state = flashbax.buffers.trajectory_buffer.TrajectoryBufferState(
        experience=experience, current_index=jnp.array(0), is_full=jnp.array(True)
    )
    first = jax.tree.map(lambda x: x[:, :1], experience)
    stock = StockVault(path.parent.name, first, rel_dir=str(path.parents[1]), vault_uid=path.name)
    stock.write(state, source_interval=(0, 10))
    return vault.open_vault(path)


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
    found = stock_of(tmp_path / "s.vlt" / "a", {**PLAIN, "observations": observation})
    assert found.spec.observation == expected
    dtype = expected.numpy_dtype if expected else np.float32
    steps = found.transitions()
    assert steps.view.observation.dtype == dtype
    assert steps.view.observation.shape == observation.shape
    size = observation[0, 0].size if expected is None else 0
    assert steps.view.state.shape == (1, 10, size)
    assert found.spec.action == Discrete(2)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("observations.image", np.zeros((1, 10, 3, 4), np.uint8), "observations.image is of 3"),
        ("observations.my image", np.zeros((1, 10, 2, 4), np.uint8), "cannot name a leaf"),
        ("observations.none", np.zeros((1, 10), np.uint8), "with an axis of agents"),
    ],
)
def test_leaves_of_another_layout_are_named(tmp_path, name, array, message):
    leaves = {**PLAIN, "observations.a": np.zeros((1, 10, 2, 4), np.float32), name: array}
    found = stock_of(tmp_path / "s.vlt" / "a", leaves)
    with pytest.raises(VaultLayoutError, match=message):
        found.spec  # noqa: B018
    checked = vault.verify(found.path, deep=True)
    assert checked.sound and "one by one with read" in checked.other_layout
    np.testing.assert_array_equal(found.read()[name], array)


def test_padding_is_read_as_zeros_in_floats_only(tmp_path):
    speed = np.full((1, 10, 2, 3), -np.inf, np.float32)
    image = np.full((1, 10, 2, 4), 255, np.uint8)
    leaves = {**PLAIN, "observations.speed": speed, "observations.image": image}
    found = stock_of(tmp_path / "s.vlt" / "a", leaves)
    assert "padded observations" in found.quirks
    seen = found.transitions().view.observation
    assert not seen["speed"].any() and (seen["image"] == 255).all()


def test_the_tail_of_one_writer_follows_the_other(tmp_path):
    """A resumed vault keeps its version and leaves."""
    parts = [make(TYPED, steps=n, seed=n) for n in (9, 20)]
    record(tmp_path / "a.vlt" / "a", TYPED, parts[:1])
    with vault.resume(tmp_path / "a.vlt" / "a") as writer:
        writer.append(*parts[1])
    found = vault.open_vault(tmp_path / "a.vlt")
    assert found.manifest.schema.to_json()["version"] == 5
    assert_same(found.transitions(), concatenate([part for part, _ in parts]))
