"""Invalid values: refused when appended, kept with a quirk by imports."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import InvalidValueError, ShapeError, VaultError
from offmarl.types import ArraySpec, EnvSpec

from .experience import CONTINUOUS, SPEC, assert_same, make, whole_episodes, written

NAMED = replace(SPEC, agents=("knight", "squire"))


def with_value(transition, name, index, value):
    """Put a value into the array of a record with this name."""
    of_view = name in transition.view._fields
    owner = transition.view if of_view else transition
    array = np.array(getattr(owner, name))
    if array.dtype == bool:
        array = array.astype(np.float32)
    if isinstance(value, int) and array.dtype == np.int32:
        array = array.astype(np.int64)
    if value == 1e300:
        array = array.astype(np.float64)
    array[index] = value
    if of_view:
        return transition._replace(view=transition.view._replace(**{name: array}))
    return transition._replace(**{name: array})


CASES = [
    (NAMED, "action", (1, 7, 0), 4, r"action of agent 0 \(knight\) in row 1, step 7 .* is 4: .* 3"),
    (NAMED, "action", (0, 2, 1), -1, r"action of agent 1 \(squire\) in row 0, step 2 .* is -1"),
    (SPEC, "action", (0, 0, 0), 2**40, "is 1099511627776"),
    (SPEC, "reward", (1, 3, 1), np.nan, r"reward of agent 1 in row 1, step 3 .* is nan: .* finite"),
    (SPEC, "reward", (1, 3, 1), 1e300, r"reward of agent 1 .* is 1e\+300: it must be finite"),
    (
        SPEC,
        "observation",
        (1, 9, 0, 2),
        np.inf,
        "observation of agent 0, entry 2, in row 1, step 9",
    ),
    (SPEC, "state", (0, 4, 3), -np.inf, "the state, entry 3, in row 0, step 4 .* is -inf"),
    (SPEC, "terminated", (0, 1, 1), 0.5, "termination of agent 1 in row 0, step 1 .* is 0.5"),
    (SPEC, "truncated", (0, 1, 1), np.nan, "truncation of agent 1 .* is nan: it must be 0 or 1"),
    (SPEC, "legal_actions", (0, 1, 1, 2), 2.0, "mask of legal actions of agent 1, entry 2,"),
    (SPEC, "alive", (0, 1, 1), -1.0, "alive mask of agent 1"),
    (SPEC, "behaviour_log_prob", (1, 5, 0), 0.1, "log-probability of agent 0 in row 1, step 5"),
    (SPEC, "behaviour_log_prob", (1, 5, 0), -np.inf, "is -inf: it must be 0 or below"),
    (SPEC, "policy_id", (1, 5, 0), -2, "policy id of agent 0 in row 1, step 5"),
    (CONTINUOUS, "action", (1, 5, 2, 1), 1.01, "action of agent 2, entry 1, .* from -1 to 1"),
    (CONTINUOUS, "action", (1, 5, 2, 1), np.nan, "action of agent 2"),
    (CONTINUOUS, "behaviour_log_prob", (0, 0, 0), np.inf, "log-probability of agent 0"),
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """An empty vault for each spec, which stays empty when records are refused."""
    by_spec = {}
    for number, spec in enumerate((SPEC, NAMED, CONTINUOUS)):
        by_spec[spec] = tmp_path_factory.mktemp("values") / f"{number}.vlt"
        vault.create(by_spec[spec], spec, rows=2).close()
    return by_spec


@pytest.mark.parametrize(("spec", "name", "index", "value", "message"), CASES)
def test_what_cannot_be_is_refused(paths, spec, name, index, value, message):
    transition, finals = make(spec)
    wrong = with_value(transition, name, index, value)
    with vault.resume(paths[spec]) as writer, pytest.raises(InvalidValueError, match=message):
        writer.append(wrong, finals)
    assert vault.open_vault(paths[spec]).length == 0


@pytest.mark.parametrize("name", ["observation", "state"])
def test_final_views_too(paths, name):
    transition, finals = make()
    values = np.array(getattr(finals.view, name))
    values[1, ..., 1] = np.nan
    wrong = finals._replace(view=finals.view._replace(**{name: values}))
    row, time = int(finals.row[1]), int(finals.time[1])
    message = rf"the final {name}.*, entry 1, in row {row}, step {time} .* is nan"
    with vault.resume(paths[SPEC]) as writer, pytest.raises(InvalidValueError, match=message):
        writer.append(transition, wrong)


def test_those_who_write_together_are_told_before_anything_waits(tmp_path):
    path = tmp_path / "a.vlt"
    vault.create(path, SPEC, rows=2).close()
    transition, finals = whole_episodes()
    with vault.join(path, "me") as writer:
        with pytest.raises(InvalidValueError, match="row 0, step 3 of the record"):
            writer.append(with_value(transition, "reward", (0, 3, 0), np.inf), finals)
        writer.append(transition, finals)
    assert_same(vault.open_vault(path)[:], transition)


@pytest.mark.parametrize(
    ("spec", "name", "value"),
    [
        (SPEC, "behaviour_log_prob", np.nan),
        (SPEC, "behaviour_log_prob", 1e-7),
        (SPEC, "reward", 3e38),  # the sum of many is not finite
        (SPEC, "policy_id", -1),
        (CONTINUOUS, "action", 1.000001),
        (CONTINUOUS, "behaviour_log_prob", 7.5),  # a density
    ],
)
def test_what_can_be_is_taken(tmp_path, spec, name, value):
    transition, finals = make(spec)
    changed = with_value(transition, name, np.s_[:], value)
    written(tmp_path / "a.vlt", (changed, finals), spec=spec)
    array = getattr(vault.open_vault(tmp_path / "a.vlt")[:], name)
    np.testing.assert_array_equal(array, getattr(changed, name).astype(array.dtype))


def test_illegal_actions_are_taken_but_not_those_of_others(tmp_path):
    """Agent 1 has two of the four actions; once it is dead it may be said to do anything."""
    spec = replace(SPEC, action_sizes=(4, 2))
    transition, finals = make(spec)
    alive = np.zeros_like(transition.view.alive)
    illegal = transition._replace(
        action=np.full_like(transition.action, 3),
        view=transition.view._replace(
            legal_actions=np.zeros_like(transition.view.legal_actions), alive=alive
        ),
    )
    lives = alive.copy()
    lives[1, 4, 1] = True
    all_legal = np.ones_like(transition.view.legal_actions)
    wrong = illegal._replace(view=illegal.view._replace(alive=lives, legal_actions=all_legal))
    with vault.create(tmp_path / "a.vlt", spec, rows=2) as writer:
        with pytest.raises(InvalidValueError, match=r"agent 1 in row 1, step 4 .* is 3"):
            writer.append(wrong, finals)
        writer.append(illegal, finals)
    assert (vault.open_vault(tmp_path / "a.vlt")[:].action == 3).all()


def test_wider_numbers_are_cast(tmp_path):
    transition, finals = make()
    wide = transition._replace(
        action=transition.action.astype(np.int64),
        reward=transition.reward.astype(np.float64),
        policy_id=transition.policy_id.astype(np.int64),
        view=transition.view._replace(state=transition.view.state.astype(np.float64)),
    )
    view = finals.view._replace(observation=finals.view.observation.astype(np.float64))
    with vault.create(tmp_path / "a.vlt", SPEC, rows=2) as writer:
        writer.append(wide, finals._replace(view=view))
        too_many = np.full(transition.policy_id.shape, 2**31, np.int64)
        with pytest.raises(
            InvalidValueError, match=r"2147483648 .*, which does not fit into the vault's int32"
        ):
            writer.append(wide._replace(policy_id=too_many), finals)
    dataset = vault.open_vault(tmp_path / "a.vlt")
    assert_same(dataset[:], transition)
    np.testing.assert_array_equal(dataset.finals.observation[0].dtype, np.float32)
    assert vault.verify(tmp_path / "a.vlt", deep=True).sound


# ------------------------------------------------------------------------------ what is kept


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A vault with a NaN reward in its second complete episode, and actions out of range."""
    path = tmp_path_factory.mktemp("kept") / "kept.vlt"
    transition, finals = whole_episodes(rows=1, steps=60)
    (_, second, *_) = np.flatnonzero(transition.last[0])
    transition = with_value(transition, "reward", (0, second, 1), np.nan)
    transition = with_value(transition, "action", (0, 0, 0), 9)
    with (
        pytest.warns(UserWarning) as records,
        vault.create(path, SPEC, rows=1, on_invalid="keep") as writer,
    ):
        writer.append(transition, finals)
        writer.append(transition, finals)
    assert len(records) == 2  # each once
    assert "the new vault records the quirk: some observations," in str(records[0].message)
    return vault.open_vault(path)


def test_a_vault_says_what_it_was_imported_with(kept):
    assert kept.quirks == ("not finite", "impossible actions")
    assert kept.provenance["quirks"] == ["not finite", "impossible actions"]
    assert kept.episodes.without_return == 2
    assert vault.verify(kept.path, deep=True).sound


def test_nobody_can_pass_off_something_else_as_a_quirk(tmp_path):
    path = tmp_path / "a.vlt"
    for number, noted in enumerate((["not finite", "\x1b[31m"], "not finite", {"a": 1}, 7)):
        path = tmp_path / f"{number}.vlt"
        vault.create(path, SPEC, rows=1, provenance={"quirks": noted}).close()
        expected = ("not finite",) if number == 0 else ()
        assert vault.open_vault(path).quirks == expected


def test_a_record_that_is_refused_leaves_no_quirk(tmp_path):
    steps, finals = make()
    wrong = with_value(steps, "reward", (0, 3, 0), np.nan)._replace(last=~steps.last)
    with vault.create(tmp_path / "a.vlt", SPEC, rows=2, on_invalid="keep") as writer:
        with pytest.raises(ShapeError, match="`last` must be true"):
            writer.append(wrong, finals)
        writer.append(steps, finals)
    assert vault.open_vault(tmp_path / "a.vlt").quirks == ()


def test_copies_keep_it_with_a_warning(kept, tmp_path):
    with pytest.warns(UserWarning) as records:
        dataset = vault.cat([kept], tmp_path / "b.vlt")
    assert any("reward of agent 1" in str(record.message) for record in records)
    assert dataset.quirks == kept.quirks
    assert dataset.digest() == kept.digest()


def test_percentiles_are_of_returns_that_there_are(kept, tmp_path):
    returns = kept.episodes.complete_returns
    middle = np.percentile(returns, 50)
    count = len(kept.episodes.row)
    with pytest.warns(UserWarning) as records:
        dataset = vault.filter(kept, "return >= p50 and index > 0", tmp_path / "b.vlt")
    assert any(f"2 of the {count} episodes of" in str(record.message) for record in records)
    later = kept.episodes.episode_returns[1:]
    np.testing.assert_array_equal(dataset.episodes.episode_returns, later[later >= middle])


def test_samples_by_return_leave_out_episodes_without_one(kept, tmp_path):
    with pytest.warns(UserWarning):  # of the action
        best = vault.sample(kept, tmp_path / "b.vlt", top=1.0)
    assert len(best.episodes.row) == kept.episodes.scored.sum()
    assert np.isfinite(best.episodes.returns).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        like = vault.sample(kept, tmp_path / "c.vlt", match_returns=True, episodes=4)
    assert np.isfinite(like.episodes.returns).all()


def test_columns_are_imported_as_they_are(kept, tmp_path):
    file = vault.export_dataset(kept, tmp_path / "a.npz", "numpy")
    with pytest.warns(UserWarning) as records:
        dataset = vault.import_dataset(file, tmp_path / "b.vlt", "numpy")
    assert any("action of agent 0 in row 0, step 0" in str(record.message) for record in records)
    assert (dataset.digest(), dataset.quirks) == (kept.digest(), kept.quirks)


def test_steps_of_other_programs_are_imported_as_they_are_on_request(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["o"], file["s"] = np.zeros((4, 2, 3)), np.zeros((4, 2, 3))
        file["a"], file["r"] = np.full((4, 2, 1), 1.5), np.ones((4, 1))
        file["d"] = np.array([0, 0, 0, 1.0])[:, None]
    with pytest.raises(InvalidValueError, match=r"action of agent 0, entry 0, .* is 1\.5"):
        vault.import_dataset(tmp_path / "a.h5", tmp_path / "a.vlt", "omiga")
    with pytest.warns(UserWarning, match="action of agent 0, entry 0, .* is 1.5"):
        dataset = vault.import_dataset(
            tmp_path / "a.h5", tmp_path / "a.vlt", "omiga", on_invalid="keep"
        )
    assert dataset.quirks == ("impossible actions",)


def test_what_stock_appended_is_adopted_as_it_is(tmp_path):
    from .test_stock import append_with_stock, open_stock

    path = tmp_path / "ours.vlt" / "a"
    written(path, make(), chunk_steps=16)
    theirs = with_value(make(seed=1)[0], "reward", (0, 3, 0), np.nan)
    append_with_stock(open_stock(path), theirs)
    with (
        pytest.warns(UserWarning, match="row 0, step 13 of the vault"),
        vault.resume(path) as writer,
    ):
        with pytest.raises(InvalidValueError):
            writer.append(theirs)
        writer.append(*make(seed=2))
    dataset = vault.open_vault(path)
    assert (dataset.quirks, dataset.length) == (("not finite",), 30)
    assert np.isnan(dataset[13:14].reward[0, 0, 0])


def test_a_foreign_vault_tells_that_returns_are_missing(tmp_path):
    from .test_stock import to_stock, write_stock

    transition = with_value(make(steps=40)[0], "reward", (0, 3, 0), np.nan)
    dataset = write_stock(tmp_path / "s.vlt" / "a", to_stock(transition))
    assert "not finite" in dataset.quirks
    assert isinstance(dataset.spec, EnvSpec)


def test_finite_extras_do_not_become_infinite(tmp_path):
    spec = replace(SPEC, extras={"cost": ArraySpec(())})
    steps, finals = make(spec)
    with vault.create(tmp_path / "a.vlt", spec, rows=2) as writer:
        writer.append(steps, finals)
        cost = steps.extras["cost"].astype(float)
        cost[0, 2], cost[1, 4] = np.inf, 1e300
        with pytest.raises(InvalidValueError, match=r"extras.cost has .*1e\+300 in row 1, step 14"):
            writer.append(steps._replace(extras={"cost": cost}), finals)
        writer.append(steps._replace(extras={"cost": np.full_like(cost, np.inf)}), finals)
    assert vault.open_vault(tmp_path / "a.vlt").length == 20


def test_impossible_values_are_no_damage(tmp_path, monkeypatch):
    """``verify --deep`` reports values written before they were checked; they are no damage."""
    transition, finals = make()
    transition.view.legal_actions[0, 1, 0] = False
    transition.view.alive[0, 1, 0] = True
    with monkeypatch.context() as before:
        before.setattr("offmarl.vault.format.values.find", lambda *_: iter(()))
        written(tmp_path / "a.vlt", (transition, finals))
    dataset = vault.verify(tmp_path / "a.vlt", deep=True)
    assert dataset.sound and "mask of legal actions of agent 0 in row 0, step 1" in dataset.notes[0]


def test_data_elsewhere_that_is_not_finite_is_pulled_first(tmp_path, monkeypatch):
    with (
        pytest.warns(UserWarning),
        vault.create(tmp_path / "a.vlt", SPEC, rows=2, on_invalid="keep") as writer,
    ):
        writer.append(with_value(make()[0], "reward", (0, 3, 0), np.nan))
    data = vault.open_vault(tmp_path / "a.vlt")
    monkeypatch.setattr(type(data), "is_remote", True)
    with pytest.raises(VaultError, match="pull it first"):
        data.replay(2, 2)
