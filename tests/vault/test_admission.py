"""Faults of foreign data: those refused, cut, left out, or only reported."""

import warnings

import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import InvalidValueError, OffmarlError, OptionError
from offmarl.vault.convert import common

from .experience import nan_at

T = 30
RNG = np.random.default_rng(0)
SEEN = RNG.normal(size=(T, 2, 3)).astype(np.float32)
ENDS = np.isin(np.arange(T), [9, 19, 29])


def arrays(**changed):
    return {
        "observations": SEEN,
        "actions": RNG.integers(0, 3, (T, 2)),
        "rewards": RNG.normal(size=(T, 2)),
        "terminals": ENDS,
    } | changed


def following(ends, led_to=99.0):
    """The next observations of episodes that end at these steps."""
    observations = np.roll(SEEN, -1, 0)
    observations[list(ends)] = led_to
    return observations


def made(tmp_path, **changed):
    return vault.from_arrays(tmp_path / "a.vlt", **arrays(**changed))


@pytest.fixture(params=[10**6, 60])
def block_bytes(request, monkeypatch):
    """Data in one block, and steps in blocks of their own."""
    monkeypatch.setattr(common, "BLOCK_BYTES", request.param)


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize(
    ("changed", "lengths", "causes"),
    [
        (
            {"observations": nan_at(SEEN, 12, 1, 0)},
            [10, 2, 10],
            ["terminated", "cut", "terminated"],
        ),
        ({"rewards": nan_at(np.ones((T, 2)), 29, 0)}, [10, 10, 9], ["terminated"] * 2 + ["cut"]),
        ({"states": nan_at(np.ones((T, 4)), 0, 3, value=-np.inf)}, [10, 10], ["terminated"] * 2),
        (
            {"observations": nan_at(SEEN, [1, 2, 15, 20])},
            [1, 5],
            ["cut", "cut"],
        ),
    ],
)  # fmt: skip
def test_episodes_are_cut_before_steps_that_are_not_finite(tmp_path, changed, lengths, causes):
    with pytest.warns(UserWarning, match="not finite|are left out|must be finite"):
        dataset = made(tmp_path, **changed)
    assert dataset.episodes.length.tolist() == lengths
    assert dataset.episodes.cause.tolist() == causes
    faults = dataset.provenance["faults"]
    assert faults["steps_left_out"] == T - sum(lengths)
    assert faults["episodes_cut"] == causes.count("cut") + (3 - len(lengths))
    assert vault.verify(dataset.path, deep=True).sound
    assert np.isfinite(dataset.transitions().view.observation).all()


@pytest.mark.parametrize("name", ["observations", "rewards", "states"])
def test_values_that_are_not_finite_are_refused_or_kept_on_request(tmp_path, name):
    changed = {"observations": SEEN, "rewards": np.ones((T, 2)), "states": np.ones((T, 2))}
    changed[name] = nan_at(changed[name], 4)
    with pytest.raises(InvalidValueError, match="step 4"):
        made(tmp_path, **changed, on_invalid="raise")
    with pytest.warns(UserWarning, match="It is kept"):
        dataset = made(tmp_path, **changed, on_invalid="keep")
    assert dataset.episodes.length.tolist() == [10] * 3
    assert "not finite" in dataset.quirks


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("flags", [[9], [19, 29], [29], []])
def test_ends_without_a_flag_show_in_the_next_observations(tmp_path, flags):
    led_to = following([9, 19, 29])
    flagged = np.isin(np.arange(T), flags)
    with pytest.warns(UserWarning, match="without a flag of an end"):
        data = made(tmp_path, terminals=flagged, next_observations=led_to)
    assert data.episodes.length.tolist() == [10] * 3
    ends = [9, 19, 29]
    assert data.episodes.cause.tolist() == ["terminated" if x in flags else "cut" for x in ends]
    np.testing.assert_array_equal(data.final_views(data.episodes.final).observation, led_to[ends])
    jumps = len({9, 19} - {*flags})
    assert data.provenance["faults"] == {"ends_without_flag": jumps}
    with pytest.raises(InvalidValueError, match="has no flag of an end"):
        vault.from_arrays(
            tmp_path / "b.vlt",
            **arrays(terminals=flagged, next_observations=led_to),
            on_invalid="raise",
        )


def test_final_views_that_begin_the_next_episode_are_unknown(tmp_path):
    """As of environments that reset in their own step; data without such a reset is as it was."""
    led_to = np.roll(SEEN, -1, 0)
    led_to[29] = 99.0
    with pytest.warns(UserWarning, match="count as unknown"):
        dataset = made(tmp_path, next_observations=led_to)
    assert (dataset.episodes.final >= 0).tolist() == [False, False, True]
    constant = vault.from_arrays(
        tmp_path / "b.vlt",
        **arrays(observations=np.ones_like(SEEN), next_observations=np.ones_like(SEEN)),
    )
    assert (constant.episodes.final >= 0).all()


def test_agents_that_are_gone_lead_nowhere(tmp_path):
    led_to, alive = following([9, 19, 29]), np.ones((T, 2), bool)
    led_to[3:6, 1] = np.nan
    alive[4:7, 1] = False
    dataset = made(tmp_path, next_observations=led_to, alive=alive)
    assert dataset.episodes.length.tolist() == [10] * 3


def test_next_observations_of_other_steps_are_refused(tmp_path):
    with pytest.raises(InvalidValueError, match="not of the same steps"):
        made(tmp_path, next_observations=SEEN[::-1])
    assert not (tmp_path / "a.vlt").exists()


def test_data_without_any_end_is_told(tmp_path):
    with pytest.warns(
        UserWarning, match="at no step have all agents a flag of an end: all 30 steps"
    ):
        dataset = made(tmp_path, terminals=np.zeros(T))
    assert dataset.episodes.cause.tolist() == ["cut"]


@pytest.mark.parametrize(
    ("terminated", "truncated", "cause"),
    [
        ([1, 1], [1, 1], "terminated"),
        ([1, 1], [1, 0], "terminated"),
        ([1, 0], [1, 1], "truncated"),
        ([0, 0], [1, 1], "truncated"),
        ([1, 0], [0, 1], "truncated"),
    ],
)
def test_an_agent_with_both_flags_terminated(tmp_path, terminated, truncated, cause):
    flags = {
        "terminals": ENDS[:, None] * np.array(terminated),
        "truncations": ENDS[:, None] * np.array(truncated),
    }
    dataset = made(tmp_path, **flags)
    assert set(dataset.episodes.cause.tolist()) == {cause}
    steps = dataset.transitions()
    assert not (steps.terminated & steps.truncated).any()
    np.testing.assert_array_equal(steps.terminated[0, 9], np.array(terminated, bool))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"actions": RNG.integers(0, 3, (T, 2)) + 0.5, "num_actions": 4}, "does not fit"),
        ({"actions": np.ones((T, 2, 1)), "num_actions": None}, "all are whole numbers"),
        ({"actions": np.full((T, 2), -1.0), "num_actions": None}, "all are whole numbers"),
        ({"actions": np.eye(3)[np.ones((T, 2), int)], "num_actions": None}, "if one-hot"),
        ({"actions": nan_at(np.ones((T, 2)), 3), "num_actions": 3}, "value nan at step 3"),
        ({"actions": np.full((T, 2, 1), 3.0), "action_bounds": (-2, 2)}, "must be from -1 to 1"),
        ({"legal_actions": np.full((T, 2, 3), 2)}, "infos.legals has the value 2 at step 0"),
        ({"legal_actions": np.zeros((T, 2, 3))}, "must be 1 for an action of an agent"),
        ({"terminals": ENDS * 3}, "terminals has the value 3 at step 9"),
        ({"alive": np.full((T, 2), -1)}, "infos.alive has the value -1"),
        ({"rewards": np.full((T, 2), 1e300)}, r"rewards has the value 1e\+300"),
        ({"log_probs": np.full((T, 2), -np.inf)}, "log-probability"),
        ({"policy_ids": np.full(T, 0.5)}, "infos.policy_ids has the value 0.5"),
    ],
)
def test_values_that_fit_nowhere_are_refused(tmp_path, changed, message):
    with pytest.raises(OffmarlError, match=message):
        made(tmp_path, **changed)
    assert not (tmp_path / "a.vlt").exists()


@pytest.mark.parametrize(
    ("actions", "options"),
    [
        (RNG.integers(0, 3, (T, 2)) * 1.0, {"num_actions": 3}),
        (RNG.integers(0, 2, (T, 2)) * 1.0, {"legal_actions": np.ones((T, 2, 3))}),
    ],
)
def test_whole_numbers_of_a_known_kind_are_discrete(tmp_path, actions, options):
    dataset = made(tmp_path, actions=actions, **options)
    assert dataset.spec.num_actions == 3
    np.testing.assert_array_equal(dataset.transitions().action[0], actions.astype(int))


def test_actions_are_scaled_from_their_bounds(tmp_path):
    actions = RNG.uniform(-2, 6, (T, 2, 2))
    dataset = made(tmp_path, actions=actions, action_bounds=([-2, -2], [6, 6]))
    np.testing.assert_allclose(dataset.transitions().action[0], actions / 4 - 0.5, atol=1e-6)
    assert dataset.provenance["action_bounds"] == [[-2, -2], [6, 6]]


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("observations", np.full((T, 2, 1), 2.0**24 + 1)),
        ("rewards", np.full((T, 2), 1.7e9 + 0.5)),
        ("extras", {"time": np.where(np.arange(T) == 3, np.nan, -(2.0**30) - 1)}),
        ("states", np.full((T, 2), 2.0**53)),
    ],
)
def test_lost_digits_are_told_with_the_column(tmp_path, name, array):
    exact = name == "states"  # a power of two keeps its digits
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        made(tmp_path, **{name: array})
    messages = [str(record.message) for record in records if "lose digits" in str(record.message)]
    assert len(messages) == (not exact)
    assert exact or messages[0].startswith(name)


def test_illegal_actions_are_kept_and_told(tmp_path):
    legal = np.ones((T, 2, 3), bool)
    actions = RNG.integers(0, 3, (T, 2))
    legal[[3, 7], 1, actions[[3, 7], 1]] = False
    with pytest.warns(UserWarning, match="must be legal by the recorded mask"):
        dataset = made(tmp_path, actions=actions, legal_actions=legal)
    assert dataset.quirks == ("illegal actions",)
    np.testing.assert_array_equal(dataset.transitions().action[0], actions)


@pytest.mark.filterwarnings("ignore:.*must be finite")
def test_nothing_sound_is_no_dataset(tmp_path):
    with pytest.raises(InvalidValueError, match="none before one that is not finite"):
        made(tmp_path, rewards=np.full((T, 2), np.nan))
    assert not (tmp_path / "a.vlt").exists()


@pytest.mark.parametrize(
    "bounds", [(2, -2), (0, 0), (-np.inf, np.inf), (np.nan, 1), (-1, [1, 2, 3]), ([-1], [1, 1, 1])]
)
def test_bounds_are_checked(tmp_path, bounds):
    with pytest.raises(OptionError, match="action_bounds are"):
        made(tmp_path, actions=np.zeros((T, 2, 2)), action_bounds=bounds)


@pytest.mark.usefixtures("unchecked_types")
def test_options_are_checked(tmp_path):
    with pytest.raises(OptionError, match="on_invalid is one of"):
        made(tmp_path, on_invalid="drop")
    with pytest.raises(OptionError, match="num_actions for discrete"):
        made(tmp_path, num_actions=3, action_bounds=(0, 2))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_final_views_that_are_not_finite_are_counted(tmp_path, value):
    led_to = following([9, 19, 29])
    led_to[9, 0, 1] = value
    with pytest.warns(UserWarning, match="1 final observations are not finite"):
        dataset = made(tmp_path, next_observations=led_to)
    assert (dataset.episodes.final >= 0).tolist() == [False, True, True]
    assert dataset.provenance["faults"] == {"final_views_left_out": 1}


def test_a_value_that_is_not_finite_is_told_once(tmp_path):
    """It is not also reported as an end without a flag."""
    observations, led_to = nan_at(SEEN, 12, 1, 0), nan_at(following([9, 19, 29]), 11, 1, 0)
    with pytest.warns(UserWarning, match="not finite|are left out|must be finite"):
        dataset = made(tmp_path, observations=observations, next_observations=led_to)
    assert dataset.provenance["faults"] == {"episodes_cut": 1, "steps_left_out": 8}
