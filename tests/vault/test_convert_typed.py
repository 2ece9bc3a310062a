"""Images, trees and extras in the layouts of other projects, and back."""

import dataclasses

import numpy as np
import pytest
import zarr

from offmarl import vault
from offmarl.errors import ShapeError
from offmarl.types import ArraySpec, Discrete, EnvSpec
from tests.specs import image_spec, typed_spec

from .experience import CONTINUOUS, make, whole_episodes, written

TYPED, IMAGE = typed_spec("test/typed"), image_spec("test/image")
EXTRA = dataclasses.replace(IMAGE, extras={"cost": ArraySpec(()), "marks": ArraySpec((2,), "int8")})
NAMES = {"numpy": "data.npz", "zarr": "data.zarr", "minari": "data-v0", "pymarl": "data.npz"}

AXES = {
    "observations.camera.depth": ("time", "agent", None, None),
    "observations.gear": ("time", "agent"),
    "infos.state.wind": ("time", None),
    "extras.cost": ("time",),
    "finals.observation.speed": ("final", "agent", None),
    "finals.state.map": ("final", None, None),
}
"""Names of the axes of some arrays of `TYPED` in zarr."""


def record(path, spec):
    return written(path, whole_episodes(spec, steps=20), spec=spec, chunk_steps=16)


def there_and_back(source, tmp_path, monkeypatch, layout):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    path = NAMES[layout] if layout == "minari" else tmp_path / NAMES[layout]
    vault.export_dataset(source, path, layout)
    return vault.import_dataset(path, tmp_path / "back.vlt", layout)


@pytest.mark.parametrize("spec", [TYPED, EXTRA], ids=["tree", "image"])
@pytest.mark.parametrize("layout", ["numpy", "zarr", "minari"])
def test_all_leaves_survive(tmp_path, monkeypatch, layout, spec):
    if layout == "minari":
        pytest.importorskip("minari")
    source = record(tmp_path / "source.vlt", spec)
    back = there_and_back(source, tmp_path, monkeypatch, layout)
    assert back.spec == spec
    assert back.digest() == source.digest()
    if layout == "numpy":  # the types are those of the vault, but for bfloat16
        with np.load(tmp_path / NAMES[layout]) as file:
            for name, leaf in back.leaves.items():
                assert file[name].dtype.name == leaf.dtype.name.replace("bfloat16", "float32")
    if layout == "zarr" and spec is TYPED:
        group = zarr.open_group(tmp_path / NAMES[layout], mode="r")
        axes = {name: array.metadata.dimension_names for name, array in group.arrays()}
        assert AXES.items() <= axes.items()


def test_images_and_extras_in_episode_batches(tmp_path, monkeypatch):
    source = record(tmp_path / "source.vlt", EXTRA)
    back = there_and_back(source, tmp_path, monkeypatch, "pymarl")
    assert back.spec.observation == IMAGE.observation
    assert back.spec.extras == EXTRA.extras
    for number in range(len(back.episodes.row)):
        copy, original = back.episode(number).transition, source.episode(number).transition
        np.testing.assert_array_equal(copy.view.observation, original.view.observation)
        np.testing.assert_array_equal(copy.extras["marks"], original.extras["marks"])
        assert copy.view.observation.dtype == np.uint8


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TYPED, r"observations\.camera\.depth.*numpy, zarr or minari"),
        (
            EnvSpec("", 2, 3, 0, Discrete(4), global_state=ArraySpec((2, 2))),
            "the states are states",
        ),
        (CONTINUOUS, "is for discrete actions"),
    ],
)
def test_what_episode_batches_cannot_hold(tmp_path, spec, message):
    source = record(tmp_path / "source.vlt", spec)
    with pytest.raises(ShapeError, match=message):
        vault.export_dataset(source, tmp_path / "a.npz", "pymarl")


def test_episode_batches_of_recordings_that_were_cut_off(tmp_path):
    """Without a final view, that of the last step takes its place."""
    source = written(tmp_path / "a.vlt", make(rows=4, steps=30))
    table = source.episodes
    dropped = int(((table.final < 0) & ~table.terminated).sum())
    with (
        pytest.warns(UserWarning, match=f"{table.incomplete} episodes were cut off by their rec"),
        pytest.warns(UserWarning, match=f"lacks the last step, with its reward, of {dropped} epis"),
    ):
        out = vault.export_dataset(source, tmp_path / "a.npz", "pymarl")
    back = vault.import_dataset(out, tmp_path / "b.vlt", time_limit=99).episodes
    lengths = table.length - ((table.final < 0) & ~table.terminated)
    assert back.length.tolist() == lengths[lengths > 0].tolist()
    causes = np.where(table.terminated, "terminated", "truncated")
    assert table.incomplete and back.cause.tolist() == causes[lengths > 0].tolist()


def test_episode_batches_have_the_rewards_of_all_agents_unless_these_are_the_same(tmp_path):
    steps, finals = make(rows=2, steps=12)
    source = written(tmp_path / "a.vlt", (steps, finals))
    assert source.spec.reward == "team"  # although they differ
    with pytest.warns(UserWarning):
        out = vault.export_dataset(source, tmp_path / "a.npz", "pymarl")
    with np.load(out) as file:
        assert file["reward"].shape[-1] == source.spec.num_agents
    same = steps._replace(reward=np.ones_like(steps.reward))
    with pytest.warns(UserWarning):
        out = vault.export_dataset(
            written(tmp_path / "b.vlt", (same, finals)), tmp_path / "b.npz", "pymarl"
        )
    with np.load(out) as file:
        assert file["reward"].shape[-1] == 1


def test_columns_without_a_leaf_are_refused(tmp_path, refused):
    source = record(tmp_path / "source.vlt", TYPED)
    vault.export_dataset(source, tmp_path / "a.npz", "numpy")
    with np.load(tmp_path / "a.npz") as file:
        arrays = {name: file[name] for name in file.files}
    for name in ("observations.gear", "extras.cost", "finals.state.map"):
        np.savez(tmp_path / "b.npz", **{x: y for x, y in arrays.items() if x != name})
        refused(f"has no {name}", tmp_path / "b.npz", "numpy")
