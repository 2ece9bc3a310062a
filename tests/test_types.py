"""Specs of leaves, their JSON and differences, and the helpers for trees."""

import copy
import dataclasses
import json
import pickle
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.errors import InvalidValueError, ShapeError
from offmarl.gate import fit
from offmarl.types import (
    DTYPES,
    ArraySpec,
    Discrete,
    EnvSpec,
    Sequence,
    SpecDict,
    View,
    flatten_tree,
    map_tree,
    spec_tree,
    unflatten_tree,
)

VECTOR = EnvSpec("x", 2, 5, 3, Discrete(4))
IMAGE = ArraySpec((8, 8, 3), "uint8")
TREE: Any = {"image": IMAGE, "camera": {"left": ArraySpec((2,), "bfloat16")}}
TYPED = EnvSpec("x", 2, 0, 3, Discrete(4), observation=TREE, extras={"cost": ArraySpec(())})


@pytest.mark.parametrize("spec", [VECTOR, TYPED])
def test_a_spec_survives_json_pickle_and_copy(spec: EnvSpec) -> None:
    """Static arguments under jit need equal hashes, too."""
    parsed = EnvSpec.from_json(json.loads(json.dumps(spec.to_json())))
    for same in (parsed, pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert same == spec
        assert hash(same) == hash(spec)


@pytest.mark.parametrize("name", ["agents", "kinds", "teams", "action_sizes"])
def test_no_entries_in_json_are_those_of_none(name: str) -> None:
    spec = EnvSpec("", 2, observation_size=1, state_size=1, action=Discrete(2))
    empty = dataclasses.replace(spec, **{name: ()})
    assert EnvSpec.from_json(json.loads(json.dumps(empty.to_json()))) == spec


def test_the_json_of_vectors_is_that_of_older_versions() -> None:
    """Vaults of vectors must stay the same byte for byte."""
    assert json.dumps(VECTOR.to_json()) == (
        '{"name": "x", "num_agents": 2, "observation_size": 5, "state_size": 3, "action": '
        '{"discrete": 4}, "time_limit": null, "reward": "team", "state": "native", "agents": null, '
        '"observation_sizes": null, "action_sizes": null, "teams": null, "kinds": null}'
    )


def test_a_float32_vector_has_one_description() -> None:
    """Describing it as a leaf or by its size gives equal specs."""
    described = EnvSpec("x", 2, 0, 0, Discrete(4), None, "team", "native")
    by_leaf = EnvSpec(
        "x", 2, 0, 0, Discrete(4), observation=ArraySpec((5,)), global_state=ArraySpec((3,))
    )
    assert by_leaf == VECTOR != described
    assert by_leaf.is_vector
    assert not TYPED.is_vector


def test_leaves_and_sizes_follow_from_the_trees() -> None:
    """Paths are ordered by name, and sizes count all entries."""
    assert list(TYPED.observation_leaves) == ["camera.left", "image"]
    assert TYPED.observation_size == 8 * 8 * 3 + 2
    assert VECTOR.observation_leaves == {"": ArraySpec((5,))}
    assert VECTOR.state_leaves == {"": ArraySpec((3,))}
    view = TYPED.view_spec
    assert view.observation["image"] == ArraySpec((2, 8, 8, 3), "uint8")
    assert view.state == ArraySpec((3,))
    assert str(view.alive) == "bool (2,)"


def test_leaves_of_some_agents() -> None:
    """The axis of agents has their number, and they must exist."""
    leaf = ArraySpec((7,), agents=(1,))
    spec = EnvSpec("x", 2, 0, 0, Discrete(4), observation={"lidar": leaf, "image": IMAGE})
    assert spec.is_per_agent
    assert not TYPED.is_per_agent
    assert spec.view_spec.observation["lidar"].shape == (1, 7)
    assert EnvSpec.from_json(spec.to_json()) == spec
    with pytest.raises(ShapeError, match="lidar is of agent 1, and there are 1"):
        EnvSpec("x", 1, 0, 0, Discrete(4), observation={"lidar": leaf})


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (VECTOR, VECTOR, ""),
        (TYPED, TYPED, ""),
        (VECTOR, EnvSpec("", 3, 5, 3, Discrete(4)), "num_agents (2, not 3)"),
        (VECTOR, EnvSpec("", 2, 6, 3, Discrete(4)), "observation (float32 (5,), not float32 (6,))"),
        (
            VECTOR,
            EnvSpec("", 2, 5, 4, Discrete(4)),
            "global_state (float32 (3,), not float32 (4,))",
        ),
        (
            VECTOR,
            EnvSpec("", 2, 5, 3, Discrete(3)),
            "action (Discrete(num_actions=4), not Discrete(num_actions=3))",
        ),
        (VECTOR, TYPED, "observation (float32 (5,), not absent)"),
        (TYPED, VECTOR, "observation.camera.left (bfloat16 (2,), not absent)"),
        (
            TYPED,
            EnvSpec("", 2, 0, 3, Discrete(4), observation={**TREE, "image": ArraySpec((8, 8, 3))}),
            "observation.image (uint8 (8, 8, 3), not float32 (8, 8, 3))",
        ),
        (
            TYPED,
            EnvSpec("", 2, 0, 3, Discrete(4), observation=TREE),
            "extras.cost (float32 (), not absent)",
        ),
    ],
)
def test_differences_name_the_leaf(one: EnvSpec, other: EnvSpec, expected: str) -> None:
    """Only what is recorded counts, not the name."""
    assert one.difference(other) == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shape": (2,), "dtype": "float64"}, "'float64' is no type of a leaf"),
        ({"shape": (-1,)}, "negative"),
        ({"shape": (2,), "agents": (1, 0)}, "in ascending order"),
        ({"shape": (2,), "agents": ()}, "in ascending order"),
        ({"shape": (2,), "agents": (-1, 0)}, "negative"),
    ],
)
def test_invalid_leaves_are_refused(wrong: dict[str, Any], message: str) -> None:
    """The error says what is wrong."""
    with pytest.raises(ShapeError, match=message):
        ArraySpec(**wrong)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param(
            {"dtype": ["uint8"]},
            "observation: camera: left: .* is no type of a leaf",
            marks=pytest.mark.untyped,
        ),
        ({"shape": ["a"]}, "observation: camera: left: .* does not describe an array"),
        ({"more": 1}, "observation: camera: left: .* does not describe an array"),
    ],
)
def test_damaged_specs_name_the_leaf(changed: dict[str, Any], message: str) -> None:
    """The reader of a damaged file learns which leaf is wrong, not what Python raised."""
    tree = {"camera": {"left": ArraySpec((2,), "uint8")}}
    data = EnvSpec("", 1, 0, 0, Discrete(2), observation=tree).to_json()
    data["observation"]["camera"]["left"].update(changed)
    with pytest.raises(ShapeError, match=message):
        EnvSpec.from_json(data)


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"extras": ArraySpec(())}, "give a dict of ArraySpec by name"),
        ({"extras": {"cost": {"of": ArraySpec(())}}}, "arrays, not trees"),
        ({"extras": {"cost": ArraySpec((), agents=(0,))}}, "have no `agents`"),
        ({"global_state": {"map": ArraySpec((2,), agents=(0,))}}, "states have no `agents`"),
    ],
)
def test_extras_are_named_arrays_and_states_of_all(wrong: dict[str, Any], message: str) -> None:
    """A spec that is no dict has no name for its array."""
    with pytest.raises(ShapeError, match=message):
        EnvSpec("", 1, 2, 2, Discrete(2), **wrong)


@pytest.mark.parametrize(
    "wrong", [{}, {"a.b": IMAGE}, {"": IMAGE}, {"a/b": IMAGE}, {"a": {}}, 3, None]
)
def test_invalid_trees_are_refused(wrong: Any) -> None:
    """Names must not contain the separators of paths and of keys on disk."""
    with pytest.raises(ShapeError):
        spec_tree(wrong)


def test_deep_json_is_refused() -> None:
    """A forged schema cannot exhaust the stack."""
    deep: Any = IMAGE.to_json()
    for _ in range(1000):
        deep = {"a": deep}
    with pytest.raises(ShapeError, match="deeper than 8"):
        spec_tree(deep)


@pytest.mark.parametrize("name", DTYPES)
def test_types_are_those_of_numpy_and_jax(name: str) -> None:
    """The names are those of JAX's dtypes."""
    spec = ArraySpec((2, 3), name)
    assert spec.numpy_dtype == getattr(jnp, name)
    assert spec.num_bytes == 6 * getattr(jnp, name).dtype.itemsize
    assert str(spec) == f"{name} (2, 3)"


def test_trees_are_mapped_as_in_jax() -> None:
    """Dictionaries, records and None are nodes."""
    arrays: Any = {"b": np.arange(3), "a": {"c": np.ones(2)}}
    view: Any = View(arrays, None, jnp.zeros(1), jnp.zeros(2))
    ours, theirs = map_tree(lambda x: x + 1, view), jax.tree.map(lambda x: x + 1, view)
    chex.assert_trees_all_equal(ours, theirs)
    assert str(jax.tree.structure(ours)) == str(jax.tree.structure(theirs))
    both = map_tree(lambda x, y: x + y, arrays, arrays)
    np.testing.assert_array_equal(both["a"]["c"], [2, 2])


def test_trees_are_flattened_and_rebuilt() -> None:
    """A bare array has the empty path."""
    assert flatten_tree(1) == {"": 1}
    flat = flatten_tree({"b": 1, "a": {"d": 2, "c": 3}})
    assert list(flat.items()) == [("a.c", 3), ("a.d", 2), ("b", 1)]
    assert unflatten_tree(flat) == {"a": {"c": 3, "d": 2}, "b": 1}
    assert unflatten_tree({"": 1}) == 1
    assert flatten_tree({"b": 1}, "x") == {"x.b": 1}


def test_views_of_a_sequence_are_cut_in_every_leaf() -> None:
    """The same code serves NumPy and traced arrays, with any number of axes in front."""
    slots: Any = np.arange(2 * 4).reshape(2, 4, 1)
    observation: Any = {"image": np.arange(2 * 4 * 3).reshape(2, 4, 1, 3), "speed": slots}
    view = View(observation, slots, slots, slots)
    fields: Any = dict.fromkeys(Sequence._fields[1:]) | {"mask": np.ones((2, 3), bool)}
    sequence = Sequence(view, **fields)
    np.testing.assert_array_equal(sequence.view_t.observation["image"], observation["image"][:, 1:])
    cut = jax.jit(lambda x: x.view_tm1)(sequence)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[:, :-1]), cut, view)


def test_specs_are_mappings() -> None:
    """A `SpecDict` compares with dictionaries, and its order does not matter."""
    assert SpecDict({"b": IMAGE, "a": IMAGE}) == {"a": IMAGE, "b": IMAGE}
    assert hash(SpecDict({"b": IMAGE, "a": IMAGE})) == hash(SpecDict({"a": IMAGE, "b": IMAGE}))


@pytest.mark.parametrize("number", [-(2**31), 2**31 - 1, 70_000])
def test_whole_numbers_that_would_become_infinite_do_not_fit(number):
    with pytest.raises(InvalidValueError, match=f"{number}.*does not fit into float16"):
        fit(np.full(2, number, np.int32), ArraySpec((2,), "float16"), "the height")
    assert fit(np.full(2, number, np.int32), ArraySpec((2,)), "the height").dtype == np.float32
