"""Vaults of images, trees, types of all kinds and extras."""

import dataclasses
import json

import chex
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offmarl import vault
from offmarl.errors import InvalidValueError, ShapeError, VaultFormatError
from offmarl.testing import DriverConformance, entries
from offmarl.types import (
    DTYPES,
    ArraySpec,
    Continuous,
    Discrete,
    EnvSpec,
    flatten_tree,
    map_tree,
    spec_tree,
)
from offmarl.vault.format.layout import Schema, check_leaves
from tests.specs import image_spec, typed_spec

from .experience import SPEC, assert_same, concatenate, make, steps, whole_episodes, written

TYPED, IMAGE = typed_spec("test/typed"), image_spec("test/image")
SPECS = pytest.mark.parametrize("spec", [TYPED, IMAGE], ids=["tree", "image"])


def write(path, spec, parts, **options):
    return written(path, *parts, spec=spec, **{"chunk_steps": 8, **options})


def parts_of(spec, *lengths):
    return [make(spec, 2, length, seed=seed) for seed, length in enumerate(lengths)]


# ------------------------------------------------------------------------------- round trips

names = st.sampled_from(["image", "x", "camera-2", "Ünit_1"])
leaves = st.fixed_dictionaries(
    {"shape": st.lists(st.integers(1, 3), max_size=3), "dtype": st.sampled_from(DTYPES)}
)
trees = st.recursive(leaves, lambda tree: st.dictionaries(names, tree, min_size=1, max_size=3))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 3),
    st.sampled_from([Discrete(3), Continuous(2)]),
    trees,
    st.none() | trees,
    st.dictionaries(names, leaves, max_size=2),
    st.sampled_from(["raw", "zstd"]),
    st.integers(1, 9),
)
@pytest.mark.slow
def test_any_tree_of_leaves_is_read_back(
    tmp_path_factory, agents, action, observation, state, extras, codec, chunk_steps
):
    # The trees are JSON until here: checks of types at run time must not run inside strategies.
    extras = {name: spec_tree(leaf) for name, leaf in extras.items()}
    spec = EnvSpec("test/any", agents, 0, 4, action, None, observation=observation, extras=extras)
    spec = dataclasses.replace(spec, global_state=state, state_size=0 if agents == 2 else 4)
    path = tmp_path_factory.mktemp("v") / "any.vlt" / "a"
    parts = parts_of(spec, 5, 9)
    write(path, spec, parts[:1], codec=codec, chunk_steps=chunk_steps)
    with vault.resume(path) as writer:
        writer.append(*parts[1])
    dataset = vault.open_vault(path)
    transitions = concatenate([part for part, _ in parts])
    assert dataset.spec == spec
    DriverConformance().check(path, parts)
    chex.assert_trees_all_equal_dtypes(dataset.finals, parts[0][1].view)
    assert_same(dataset.transitions(3, 11), steps(transitions, 3, 11))
    first = map_tree(lambda x: x[0, : dataset.episodes.length[0]], transitions)
    assert_same(dataset.episode(0).transition, first)
    windows = dataset.window_transitions(np.array([1, 0]), np.array([2, 6]), 4)
    expected = map_tree(lambda x: np.stack([x[1, 2:6], x[0, 6:10]]), transitions)
    assert_same(windows, expected)
    assert vault.verify(path, deep=True).sound


# --------------------------------------------------------------------------------- the format


def test_leaves_have_names_and_types_on_disk(tmp_path):
    dataset = write(tmp_path / "v.vlt", TYPED, parts_of(TYPED, 4))
    types = {name: (leaf.dtype.name, leaf.shape) for name, leaf in dataset.leaves.items()}
    assert types["observations.camera.left"] == ("uint8", (2, 2, 3, 1))
    assert types["observations.camera.depth"] == ("float16", (2, 2, 3))
    assert types["observations.gear"] == ("int8", (2,))
    assert types["infos.state.map"] == ("bool", (3, 4))
    assert types["infos.state.wind"] == ("bfloat16", (2,))
    assert types["extras.cost"] == ("float32", ())
    assert types["extras.message"] == ("int16", (2, 5))
    image = write(tmp_path / "i.vlt", IMAGE, parts_of(IMAGE, 4))
    assert image.leaves["observations"] == (np.dtype("uint8"), (2, 8, 8, 3))
    assert "infos.state" not in image.leaves
    assert image.transitions().view.state.shape == (2, 4, 0)


@pytest.mark.parametrize("version", [3, 4])
def test_an_older_version_has_one_policy_for_all_agents(version):
    schema = Schema(SPEC, 2, 2, 8, "raw")
    data = json.loads(json.dumps(schema.to_json()))
    assert data["version"] == 5 and Schema.from_json(data) == schema
    older = Schema.from_json(data | {"version": version})
    assert older.to_json() == data | {"version": version}
    assert schema.record.itemsize - older.record.itemsize == 4 * (SPEC.num_agents - 1)


def test_leaves_of_some_agents_are_declared_not_stock_readable(tmp_path):
    tree = {"image": ArraySpec((2, 2), "uint8"), "l": ArraySpec((5,), agents=(0, 1, 3))}
    spec = dataclasses.replace(IMAGE, num_agents=4, observation=tree)
    parts = parts_of(spec, 20)
    dataset = write(tmp_path / "v.vlt", spec, parts)
    assert_same(dataset.transitions(), parts[0][0])
    assert dataset.leaves["observations.l"].shape == (3, 5)
    assert not dataset.manifest.schema.stock_readable
    metadata = json.loads((dataset.path / "metadata.json").read_text())
    assert metadata["offmarl"]["stock_readable"] is False


FORGED = {
    "a negative size": {"shape": [-1], "dtype": "uint8"},
    "no entry": {"shape": [0], "dtype": "uint8"},
    "no size": {"shape": ["a"], "dtype": "uint8"},
    "too many axes": {"shape": [1] * 40, "dtype": "uint8"},
    "too large": {"shape": [2**40], "dtype": "uint8"},
    "an object": {"shape": [2], "dtype": "O"},
    "a structure": {"shape": [2], "dtype": "u1,u1"},
    "too many bytes": {f"x{n}": {"shape": [2**24], "dtype": "uint8"} for n in range(40)},
    "too many leaves": {f"x{n}": {"shape": [1], "dtype": "uint8"} for n in range(300)},
    "an unknown agent": {"shape": [1], "dtype": "uint8", "agents": [0, 7]},
    "a path": {"../x": {"shape": [1], "dtype": "uint8"}},
    "nothing": {},
    "a number": 3,
    "another key": {"shape": [1], "dtype": "uint8", "order": "F"},
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_a_forged_schema_is_refused(forged):
    data = json.loads(json.dumps(Schema(IMAGE, 2, 2, 8, "raw").to_json()))
    data["spec"]["observation"] = forged
    with pytest.raises(VaultFormatError, match="schema is damaged"):
        Schema.from_json(data)


@pytest.mark.parametrize(
    "leaves",
    [
        lambda more: {f"x{n}": ArraySpec((1,), "uint8") for n in range(256 + more)},
        lambda more: {"x": ArraySpec((2**29 + more,), "uint8")},  # of each of two agents
        lambda more: {"x": ArraySpec((1,) * (15 + more), "uint8")},
    ],
)
def test_the_most_that_a_step_may_have(leaves):
    specs = [dataclasses.replace(IMAGE, observation=leaves(more)) for more in (0, 1)]
    check_leaves(specs[0])
    with pytest.raises(ShapeError, match="most"):
        check_leaves(specs[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, ""),
        ({"rows": 3}, ""),
        ({"chunk_steps": 2.0}, ""),
        ({"codec": "x"}, ""),
        ({"rows": None}, r" \(KeyError\('rows'\)\)"),
    ],
)
def test_a_schema_of_impossible_sizes_is_refused(change, message):
    data = Schema(IMAGE, 2, 2, 8, "raw").to_json() | change
    with pytest.raises(VaultFormatError, match=f"schema is damaged{message}"):
        Schema.from_json({name: value for name, value in data.items() if value is not None})


def test_images_take_the_bytes_of_the_data(tmp_path):
    """At most 1.05 times the raw bytes, with one final observation an episode."""
    spec = image_spec(shape=(32, 32, 3))
    parts = [whole_episodes(spec, 1, 64, seed=seed, end_every=16.0) for seed in range(4)]
    dataset = write(tmp_path / "v.vlt", spec, parts, chunk_steps=None)
    step_bytes = sum(leaf.step_bytes for leaf in dataset.leaves.values())
    raw = 256 * step_bytes + len(dataset.episodes.row) * spec.num_agents * 32 * 32 * 3
    files = [file for file in dataset.path.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 1.05 * raw


# -------------------------------------------------------------------------------------- checks


def spoilt(transition, leaf, value):
    """Change one entry of a leaf of the observation, at row 1, step 3."""
    observation = map_tree(np.copy, transition.view.observation)
    flatten_tree(observation)[leaf][1, 3, 1, ..., -1] = value
    return transition._replace(view=transition.view._replace(observation=observation))


@pytest.mark.parametrize("leaf", ["speed", "camera.depth"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused_in_floats(tmp_path, leaf, value):
    ((transition, finals),) = parts_of(TYPED, 6)
    with vault.create(tmp_path / "v.vlt", TYPED, rows=2) as writer:
        writer.append(transition, finals)
        message = rf"the observation.{leaf} of agent 1, entry .*2, in row 1, step 9 of the vault"
        with pytest.raises(InvalidValueError, match=message):
            writer.append(spoilt(transition, leaf, value), finals)


def with_extra(transition, name, array):
    extras = {**transition.extras, name: array}
    if array is None:
        del extras[name]
    return transition._replace(extras=extras)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("cost", np.zeros((2, 6, 2), np.float32), r"extras.cost: got float32 of shape \(2, 6, 2\)"),
        ("message", np.zeros((2, 6, 2, 5), np.float32), "extras.message: got float32"),
        ("light", np.zeros((2, 6, 3), np.int64), "extras.light: got int64"),
        ("cost", None, r"lack extras.cost"),
        ("new", np.zeros((2, 6)), r"have extras.new"),
    ],
)
def test_extras_that_change_half_way_are_refused(tmp_path, name, array, message):
    """The error names the leaf, the step and the vault."""
    ((transition, finals),) = parts_of(TYPED, 6)
    path = tmp_path / "v.vlt"
    with vault.create(path, TYPED, rows=2) as writer:
        writer.append(transition, finals)
        with pytest.raises(ShapeError, match=message) as caught:
            writer.append(with_extra(transition, name, array), finals)
        assert f"step 6 of {path / 'main'}" in str(caught.value)
    assert_same(vault.open_vault(path).transitions(), transition)


# ---------------------------------------------------------------------------------- transforms


@SPECS
def test_transforms_keep_leaves_and_extras(tmp_path, spec):
    ((transition, finals),) = [whole_episodes(spec, 2, 30)]
    dataset = write(tmp_path / "v.vlt", spec, [(transition, finals)])
    doubled = vault.cat([dataset, dataset], tmp_path / "two.vlt")
    assert doubled.spec == spec
    assert_same(doubled.transitions(0, 30), map_tree(lambda x: x[:1], transition))
    zipped = vault.recode(dataset, tmp_path / "z.vlt", codec="zstd")
    assert zipped.digest() == dataset.digest()
    part = vault.filter(dataset, "length >= p50", tmp_path / "part.vlt")
    numbers = np.flatnonzero(dataset.episodes.length >= np.median(dataset.episodes.length))
    lengths = dataset.episodes.length[numbers]
    assert part.num_steps == lengths.sum()
    assert_same(part.episode(0).transition, dataset.episode(int(numbers[0])).transition)
    chex.assert_trees_all_equal(part.episode(0).final, dataset.episode(int(numbers[0])).final)


def test_vaults_of_unlike_leaves_are_not_joined(tmp_path):
    other = dataclasses.replace(TYPED, extras={**TYPED.extras, "cost": ArraySpec((2,))})
    a = write(tmp_path / "a.vlt", TYPED, parts_of(TYPED, 9))
    b = write(tmp_path / "b.vlt", other, parts_of(other, 9))
    message = r"b.vlt.* differs in extras.cost \(float32 \(2,\), not float32 \(\)\)"
    with pytest.raises(ShapeError, match=message):
        vault.cat([a, b], tmp_path / "c.vlt")


@SPECS
def test_a_digest_covers_every_leaf(tmp_path, spec):
    ((transition, finals),) = parts_of(spec, 12)
    digests = {write(tmp_path / "v.vlt", spec, [(transition, finals)]).digest()}
    extras = {f"extras.{name}": name for name in spec.extras}
    for number, name in enumerate(spec.observation_leaves):
        leaf = spec.observation_leaves[name]
        fresh = entries(leaf.with_agents(2), (2, 12), np.random.default_rng(9))
        observation = map_tree(np.copy, transition.view.observation)
        flatten_tree(observation)[name][...] = fresh
        changed = transition._replace(view=transition.view._replace(observation=observation))
        digests.add(write(tmp_path / f"o{number}.vlt", spec, [(changed, finals)]).digest())
    for name in extras.values():
        fresh = entries(spec.extras[name], (2, 12), np.random.default_rng(9))
        changed = with_extra(transition, name, fresh)
        digests.add(write(tmp_path / f"{name}.vlt", spec, [(changed, finals)]).digest())
    assert len(digests) == 1 + len(spec.observation_leaves) + len(extras)
