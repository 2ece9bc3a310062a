"""Vaults of arrays in memory, with defaults for whatever is missing."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import offmarl
from offmarl import vault
from offmarl.errors import InvalidValueError, OptionError, ShapeError
from offmarl.types import ArraySpec, Continuous, Discrete, EnvSpec

from .experience import nan_at

T, N = 50, 3
RNG = np.random.default_rng(0)
ENDS = np.isin(np.arange(T), [9, 30])
ONE: dict[str, Any] = {
    "observations": RNG.normal(size=(T, 4)),
    "actions": RNG.integers(0, 3, T),
    "rewards": RNG.normal(size=T),
    "terminals": ENDS,
}
MANY: dict[str, Any] = {
    "observations": RNG.normal(size=(T, N, 4)).astype(np.float32),
    "actions": RNG.uniform(-1, 1, (T, N, 2)).astype(np.float32),
    "rewards": RNG.normal(size=(T, N)),
    "truncations": ENDS,
}
IMAGES = {
    "image": RNG.integers(0, 256, (T, N, 6, 6, 3), np.uint8),
    "place": {"x": RNG.normal(size=(T, N)).astype(np.float16)},
}


def after(array, ends=ENDS):
    """What follows each step: the next entry, or after an end one that occurs nowhere else."""
    following = np.roll(array, -1, 0)
    following[ends] = array[ends] ^ 255 if array.dtype == np.uint8 else array[ends] + 99
    return following


def test_observations_actions_rewards_and_ends_are_enough(tmp_path):
    dataset = offmarl.from_arrays(tmp_path / "a.vlt", **ONE)
    spec, steps = dataset.spec, dataset.transitions()
    assert (spec.num_agents, spec.observation_size, spec.action) == (1, 4, Discrete(3))
    assert (spec.state, spec.state_size, spec.reward) == ("concatenated", 4, "team")
    np.testing.assert_array_equal(
        steps.view.observation[0, :, 0], ONE["observations"].astype(np.float32)
    )
    np.testing.assert_array_equal(steps.view.state, steps.view.observation[:, :, 0])
    np.testing.assert_array_equal(steps.action[0, :, 0], ONE["actions"])
    np.testing.assert_array_equal(steps.reward[0, :, 0], ONE["rewards"].astype(np.float32))
    assert steps.view.legal_actions.all() and steps.view.alive.all()
    assert np.isnan(steps.behaviour_log_prob).all() and (steps.policy_id == -1).all()
    assert dataset.episodes.length.tolist() == [10, 21, 19]
    assert dataset.episodes.cause.tolist() == ["terminated", "terminated", "cut"]
    assert dataset.episodes.final.tolist() == [-1, -1, -1]
    assert vault.verify(dataset.path, deep=True).sound


def test_all_that_can_be_given(tmp_path):
    legal = RNG.random((T, N, 5)) < 0.8
    legal[..., 4] = True
    actions = legal.argmax(-1)
    all_ends = ENDS | np.roll(ENDS, 7)
    image, x = after(IMAGES["image"], all_ends), after(IMAGES["place"]["x"], all_ends)
    alive = RNG.random((T, N)) < 0.9
    dataset = vault.from_arrays(
        tmp_path / "a.vlt",
        observations=IMAGES,
        next_observations={"image": image, "place": {"x": x}},
        actions=actions,
        rewards=MANY["rewards"],
        terminals=ENDS,
        truncations=np.roll(ENDS, 7)[:, None].repeat(N, 1),
        states=np.arange(T * 2.0).reshape(T, 2),
        next_states=np.arange(T * 2.0).reshape(T, 2) + 2,
        legal_actions=legal,
        next_legal_actions=~legal,
        alive=alive,
        log_probs=np.full((T, N), -0.5),
        policy_ids=np.arange(T) // 25,
        extras={"cost": MANY["rewards"][:, 0], "wide": np.ones((T, 2, 2), np.int64)},
        provenance={"who": "us"},
        codec="zstd",
    )
    assert dataset.spec.observation_leaves == {
        "image": ArraySpec((6, 6, 3), "uint8"),
        "place.x": ArraySpec((), "float16"),
    }
    assert dataset.spec.extras == {"cost": ArraySpec(()), "wide": ArraySpec((2, 2), "int32")}
    steps, table = dataset.transitions(), dataset.episodes
    np.testing.assert_array_equal(steps.view.observation["image"][0], IMAGES["image"])
    np.testing.assert_array_equal(steps.policy_id[0, :, 2], np.arange(T) // 25)
    np.testing.assert_array_equal(steps.view.alive[0], alive)
    assert table.cause.tolist() == ["terminated", "truncated", "terminated", "truncated", "cut"]
    ends = table.start + table.length - 1
    np.testing.assert_array_equal(dataset.finals.observation["image"], image[ends])
    np.testing.assert_array_equal(dataset.finals.observation["place"]["x"], x[ends])
    np.testing.assert_array_equal(dataset.finals.state, np.stack([2 * ends + 2, 2 * ends + 3], 1))
    np.testing.assert_array_equal(dataset.finals.legal_actions, ~legal[ends])
    assert dataset.provenance["source"] == {"format": "arrays"}
    assert dataset.provenance["who"] == "us"


def test_arrays_are_read_in_blocks(tmp_path, monkeypatch):
    """Memory maps need no memory, and the blocks do not show."""
    arrays = {**MANY, "next_observations": after(MANY["observations"])}
    reference = vault.from_arrays(tmp_path / "a.vlt", **arrays)
    monkeypatch.setattr("offmarl.vault.convert.common.BLOCK_BYTES", 500)
    np.save(tmp_path / "o.npy", MANY["observations"])
    arrays["observations"] = np.load(tmp_path / "o.npy", mmap_mode="r")
    cut = vault.from_arrays(tmp_path / "b.vlt", **arrays)
    assert cut.digest() == reference.digest()
    assert len(reference.finals.alive) == 3


def test_densities_of_actions_follow_their_unit(tmp_path):
    """A uniform policy on [-10, 10]² has the density 1/400, and 1/4 on [-1, 1]²."""
    arrays = {**MANY, "actions": RNG.uniform(-10, 10, (T, N, 2)).astype("f4")}
    densities = {"action_bounds": (-10, 10), "log_probs": np.full((T, N), -np.log(400))}
    dataset = vault.from_arrays(tmp_path / "a.vlt", **arrays, **densities)
    np.testing.assert_allclose(dataset.transitions().behaviour_log_prob, -np.log(4), rtol=1e-6)


def test_team_rewards_of_several_agents(tmp_path):
    shared = {**MANY, "rewards": ONE["rewards"]}
    dataset = vault.from_arrays(tmp_path / "a.vlt", **shared, num_agents=N)
    assert (dataset.spec.num_agents, dataset.spec.reward) == (N, "team")
    assert (dataset.transitions().reward == dataset.transitions().reward[..., :1]).all()
    assert dataset.spec.action == Continuous(2)


def test_the_environment_is_checked(tmp_path):
    spec = EnvSpec("test/it", 1, 4, 4, Discrete(5), time_limit=21, state="concatenated")
    dataset = vault.from_arrays(tmp_path / "a.vlt", **ONE, num_actions=5, env_spec=spec)
    assert dataset.spec == spec
    with pytest.raises(ShapeError, match="differ in action"):
        vault.from_arrays(tmp_path / "b.vlt", **ONE, env_spec=spec)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("alive", np.ones((T, N), bool)),
        ("log_probs", np.zeros((T, N))),
        ("legal_actions", np.ones((T, N, 3), bool)),
        ("terminals", ENDS[:, None].repeat(N, 1)),
    ],
)
def test_any_array_of_agents_gives_their_number(tmp_path, name, array):
    actions = RNG.integers(0, 3, (T, N))
    arrays = {**MANY, "actions": actions, "rewards": ONE["rewards"], name: array}
    dataset = vault.from_arrays(tmp_path / "a.vlt", **arrays)
    assert (dataset.spec.num_agents, dataset.spec.observation_size) == (N, 4)


def test_one_agent_with_and_without_an_axis(tmp_path):
    vectors = {
        **ONE,
        "observations": MANY["observations"][:, 0, :2],
        "actions": MANY["actions"][:, 0],
    }
    axes = {name: vectors[name][:, None] for name in ("observations", "actions")}
    for number, arrays in enumerate((vectors, vectors | axes)):
        with pytest.raises(ShapeError, match=r"second axis of .*give num_agents"):
            vault.from_arrays(tmp_path / "a.vlt", **arrays)
        dataset = vault.from_arrays(tmp_path / f"{number}.vlt", **arrays, num_agents=1)
        assert (dataset.spec.observation_size, dataset.spec.action) == (2, Continuous(2))
        np.testing.assert_array_equal(
            dataset.transitions().view.observation[0, :, 0], vectors["observations"]
        )


def test_actions_of_dead_agents_may_be_missing(tmp_path):
    alive = np.arange(T) % 2 == 0
    actions = np.where(alive, ONE["actions"], -1)
    dataset = vault.from_arrays(tmp_path / "a.vlt", **(ONE | {"actions": actions}), alive=alive)
    np.testing.assert_array_equal(dataset.transitions().action[0, :, 0], actions.clip(0))


@pytest.mark.parametrize(
    ("base", "changed", "error", "message"),
    [
        (ONE, {"terminals": None}, OptionError, "give `terminals` or `truncations`"),
        (ONE, {"observations": ONE["observations"][:-1]}, ShapeError, "observations has 49 steps"),
        (ONE, {"rewards": []}, ShapeError, "observations has 50 steps, and rewards has 0"),
        (ONE, {"rewards": ONE["rewards"][:, None]}, ShapeError, r"observations has shape \(50, 4"),
        (ONE, {"observations": ["a"] * T}, ShapeError, "observations is <U1"),
        (ONE, {"observations": np.zeros(T, complex)}, ShapeError, "observations is complex128"),
        (ONE, {"observations": np.ma.ones((T, 4))}, InvalidValueError, r"observations is a masked"),
        (ONE, {"actions": ONE["actions"] * 1.0}, InvalidValueError, "actions .*give num_actions"),
        (ONE, {"observations": {}}, ShapeError, "observations: {} does not describe"),
        (ONE, {"observations": {"a.b": ENDS}}, ShapeError, "'a.b' cannot name a leaf"),
        (ONE, {"actions": np.zeros((T, 2, 2), int)}, ShapeError, r"actions have shape \(50, 2"),
        (ONE, {"actions": ONE["actions"] - 1}, InvalidValueError, "action of agent 0.*step"),
        (
            ONE,
            {"observations": nan_at(ONE["observations"], 33, 2), "on_invalid": "raise"},
            InvalidValueError,
            "the observation of agent 0, entry 2, in row 0, step 33",
        ),
        (
            ONE,
            {"observations": {"n": np.where(np.arange(T) == 7, 2**40, 1)}},
            InvalidValueError,
            "observations.n has the value 1099511627776 at step 7",
        ),
        (ONE, {"states": ONE["observations"], "next_observations": ONE["observations"]},
         OptionError, "`next_states` must have the leaves of `states`"),
        (MANY, {"action_bounds": (-1, 0, 1)}, OptionError, "give two, the lowest and the highest"),
        (MANY, {"action_bounds": ([-1] * 3, 1)}, OptionError, "each one finite number or 2, as"),
        (MANY, {"provenance": "ours"}, OptionError, "give a mapping, not 'ours'"),
        (ONE, {"next_observations": ONE["observations"][:, :2]}, ShapeError, "next obs"),
        (ONE, {"extras": {"x": np.zeros(9)}}, ShapeError, "extras.x has 9 steps"),
        (MANY, {"observations": {"a": ENDS}}, ShapeError, "observations.a has shape"),
        (MANY, {"rewards": np.zeros((T, N, 2))}, ShapeError, r"rewards has shape \(3, 2\) in each"),
        (MANY, {"observations": MANY["observations"].astype(ml_dtypes.float8_e5m2)}, ShapeError,
         "observations is float8_e5m2: vaults keep float32"),
        (MANY, {"num_agents": 2}, ShapeError, "the number of agents is 2"),
    ],
)  # fmt: skip
def test_errors_name_the_leaf_and_the_step(tmp_path, base, changed, error, message):
    with pytest.raises(error, match=message):
        vault.from_arrays(tmp_path / "a.vlt", **(base | changed))
    assert not list(tmp_path.rglob("*.json"))
