"""`--normalise`: training on normalised batches equals training on a normalised vault."""

import dataclasses
from pathlib import Path
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import offmarl
from offmarl import programs, vault
from offmarl.errors import RunError
from offmarl.programs import registry
from offmarl.programs.program import UNIT, Hyperparameters, Program, Stage
from offmarl.programs.runs.dataset import DatasetStatistics, MeanAndStd, read
from offmarl.programs.runs.normalisation import SCALE, normalise_as_asked
from offmarl.teams import teams_of
from offmarl.types import ArraySpec, Policy, Sequence
from offmarl.vault.format.tables import Episodes
from tests.vault.experience import SPEC, make, written

ENV = "probe/two-step"
METRICS = {"q_tot": jnp.float32(3.0), "td_loss": jnp.float32(3.0)}
KEY, NO_HYPER = jax.random.key(0), Hyperparameters()
SMALL = {"updates": 6, "eval_every": 6, "batch_size": 4, "length": 3, "hidden": 8}


def normalise_program(program, inputs, data, scale_rewards=False):
    args = programs.ValueArgs(Path(), normalise=inputs, scale_rewards=scale_rewards)
    return normalise_as_asked(args, program, data)


def train(name, data, out, **options):
    program = registry.load("baseline", name)
    options = {**SMALL, "env": "none", **options}
    return program.main(program.Args(vault=data, out=out, **options))


def standardised(moments, array):
    mean, std = moments
    return (array - mean) / std


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("bc", ("observation",)),
        pytest.param("qmix_cql", ("observation", "state"), marks=pytest.mark.nightly),
    ],
)
def test_training_equals_that_on_a_normalised_vault(random_data, tmp_path, name, what):
    run = train(name, random_data(ENV), tmp_path / "run", normalise=what)
    arrays = read(run / "dataset.npz")
    assert set(arrays) - {"return_scale"} == {f"{w}_moments" for w in what}

    def normalise(steps):
        columns = {c: w for w in what for c in (w, f"final.{w}") if c in steps}
        return {c: standardised(arrays[f"{w}_moments"], steps[c]) for c, w in columns.items()}

    mapped = vault.map(random_data(ENV), tmp_path / "mapped.vlt", normalise)
    plain = train(name, mapped.path, tmp_path / "plain")
    ours, theirs = (offmarl.load_policy(path) for path in (run, plain))
    chex.assert_trees_all_close(ours.params, theirs.params, rtol=1e-4, atol=1e-6)

    after = mapped.transitions().view.observation[0, :1]
    before = offmarl.open(random_data(ENV)).transitions().view.observation[0, :1]
    key = jax.random.key(0)
    for raw, scaled in zip(before, after, strict=True):
        np.testing.assert_array_equal(ours(raw, key=key)[0], theirs(scaled, key=key)[0])


# ---------------------------------------------------------------------------------- the wrapper


def statistics(**arrays):
    return DatasetStatistics(None, {k: np.asarray(v, np.float32) for k, v in arrays.items()})


def echo():
    """A program that returns its arguments."""
    policy = Policy(
        tuple,
        lambda params, carry, observation, legal, key: (observation, legal, carry),
        log_prob=lambda params, carry, observation, legal, action: (observation, carry),
        after_step=lambda carry, reward, done: reward,
    )
    return Program(
        lambda key, hyper: (),
        (Stage(lambda state, batch, key, hyper: (batch, METRICS)),),
        policy=lambda greedy: policy,
        policy_params=lambda state: state,
    )


def sequence(**changes):
    dataset_steps, _ = make(SPEC, rows=2, steps=5)
    t = dataset_steps
    masks = [t.terminated, t.truncated, t.behaviour_log_prob, *([t.last] * 3)]
    batch = Sequence(t.view, t.action, t.reward, *masks, return_to_go=t.reward)
    return batch._replace(**changes)


@pytest.mark.parametrize("what", ["observation", "state", "rewards"])
def test_each_part_is_normalised_alone(what):
    batch = sequence()
    moments = {"observation_moments": [[1, 2, 3], [2, 2, 4]], "state_moments": [[1] * 5, [3] * 5]}
    data = statistics(**moments, return_scale=5.0)
    scaled = what == "rewards"
    program = normalise_program(echo(), () if scaled else (what,), data, scale_rewards=scaled)
    scale = UNIT / 5.0 if scaled else 1.0
    result, metrics = program.stages[0].update(
        (), batch, KEY, Hyperparameters(**{SCALE: jnp.float32(scale)})
    )
    np.testing.assert_array_equal(result.reward, batch.reward * scale)
    np.testing.assert_array_equal(result.return_to_go, batch.reward * scale)
    assert metrics == {"q_tot": 3.0 / scale, "td_loss": 3.0}
    expected = batch.view.observation
    if what == "observation":
        expected = (expected - np.float32([1, 2, 3])) / np.float32([2, 2, 4])
    np.testing.assert_allclose(result.view.observation, expected, rtol=1e-6)
    state = (batch.view.state - 1) / 3 if what == "state" else batch.view.state
    np.testing.assert_allclose(result.view.state, state, rtol=1e-6)
    policy = program.policy(True)
    observation = policy.act((), (), batch.view.observation[0, 0], None, None)[0]
    np.testing.assert_allclose(observation, expected[0, 0], rtol=1e-6)
    assert policy.after_step((), np.float32(2), None) == 2 * scale


def test_data_of_other_scales_share_what_is_compiled():
    program = echo()
    policy = program.policy(True)._replace(after_step=None)
    program = program._replace(policy=lambda _greedy: policy)
    sources = (statistics(return_scale=x, observation_moments=[[1.0], [2.0]]) for x in (5.0, 8.0))
    first, second = (
        normalise_program(program, ("observation",), x, scale_rewards=True) for x in sources
    )
    assert first.stages[0] is second.stages[0]
    plain = normalise_program(program, (), statistics(return_scale=5.0), scale_rewards=True)
    assert plain.policy(True) is policy  # which other programs have, too
    third = statistics(observation_moments=[[1.0], [3.0]])
    assert normalise_program(program, ("observation",), third).stages[0] is not first.stages[0]


def test_a_blind_program_sees_nothing_in_training_and_acting():
    batch = sequence()
    program = normalise_as_asked(programs.Args(Path(), blind=True), echo(), statistics())
    out, _ = program.stages[0].update((), batch, KEY, NO_HYPER)
    assert not out.view.observation.any() and batch.view.observation.any()
    np.testing.assert_array_equal(out.view.legal_actions, batch.view.legal_actions)
    seen, legal, _ = program.policy(True).act((), (), batch.view.observation[0, 0], 7, None)
    assert not seen.any() and seen.shape == batch.view.observation[0, 0].shape and legal == 7


def test_images_stay_as_they_are():
    image = np.arange(8, dtype=np.uint8).reshape(2, 4)
    data = statistics(
        **{"observation.image_moments": [0, 1], "observation.speed_moments": [[2.0], [4.0]]}
    )
    policy = normalise_program(echo(), ("observation",), data).policy(True)
    seen, *_ = policy.act((), (), {"image": image, "speed": np.ones((2, 1), np.float32)}, 0, 0)
    assert seen["image"] is image
    np.testing.assert_allclose(seen["speed"], np.full((2, 1), -0.25))


def test_moments_of_trees_leave_whole_numbers_alone(tmp_path):
    spec = dataclasses.replace(
        SPEC, observation={"image": ArraySpec((2, 2, 1), "uint8"), "speed": ArraySpec((3,))}
    )
    data = written(tmp_path / "a.vlt", make(spec, steps=30), spec=spec)
    source = DatasetStatistics(data, episodes=np.arange(len(data.episodes.row)))
    mean, std = source.observation_moments()
    assert (mean["image"], std["image"]) == (0, 1)
    alive = data.transitions().view.alive
    speed = data.transitions().view.observation["speed"][alive]
    np.testing.assert_allclose(mean["speed"], speed.mean(0), rtol=1e-5)
    np.testing.assert_allclose(std["speed"], speed.std(0), rtol=1e-5)
    again = DatasetStatistics(None, source.used).observation_moments()
    assert isinstance(again, MeanAndStd)
    np.testing.assert_array_equal(again.mean["speed"], mean["speed"])


def test_numbers_of_agents_are_pooled_as_vectors_are(tmp_path):
    """Agent 0 holds 0 and 2, and agent 1 10 and 12: what tells them apart is kept."""
    spec = dataclasses.replace(
        SPEC, observation={"number": ArraySpec(()), "vector": ArraySpec((1,))}
    )
    data = written(tmp_path / "a.vlt", make(spec, steps=30), spec=spec)
    view = data.transitions().view
    values = view.observation["number"][view.alive].astype(float)
    moments = DatasetStatistics(data).observation_moments()
    for statistic, of_all in zip(moments, (values.mean(), values.std()), strict=True):
        assert statistic["number"].shape == () and statistic["vector"].shape == (1,)
        assert statistic["number"] == pytest.approx(of_all, rel=1e-4)


@pytest.mark.parametrize(
    "moments", [[[0.0], [0.0]], [[np.nan], [1.0]], [[0.0], [np.inf]], [[1.0]], [["0"], ["1"]]]
)
def test_moments_that_are_none_are_refused(tmp_path, moments):
    np.savez(tmp_path / "dataset.npz", observation_moments=np.array(moments))
    with pytest.raises(RunError, match="damaged"):
        read(tmp_path / "dataset.npz")


def test_a_run_stores_nothing_in_its_dataset(tmp_path):
    data = written(tmp_path / "a.vlt", make(SPEC, steps=30))
    before = {p: p.read_bytes() for p in data.path.rglob("*") if p.is_file()}
    computed = DatasetStatistics(data).observation_moments()
    assert before == {p: p.read_bytes() for p in data.path.rglob("*") if p.is_file()}
    data.statistics()  # stores them
    used = DatasetStatistics(vault.open_vault(data.path)).observation_moments()
    chex.assert_trees_all_close(computed, used, rtol=1e-6)


def test_only_programs_that_learn_values_scale_rewards():
    program = echo()
    assert normalise_as_asked(programs.Args(vault=Path()), program, None) is program
    args = programs.ValueArgs(vault=Path())
    assert normalise_as_asked(args, program, statistics(return_scale=1.0)) is not program
    args = programs.ValueArgs(vault=Path(), scale_rewards=False)
    assert normalise_as_asked(args, program, None) is program


def of_returns(returns, complete=True, teams=None):
    """A dataset of episodes with these returns, ``(M, agents)``."""
    returns = np.asarray(returns, float)
    count = np.zeros(len(returns), int)
    cause = np.full(len(returns), "terminated" if complete else "cut off")
    teams = teams_of(dataclasses.replace(SPEC, num_agents=returns.shape[1], teams=teams))
    table = Episodes(count, count, count, returns, count > 0, count > 0, cause, count, count, teams)
    return mock.Mock(vault.Dataset, episodes=table)


@pytest.mark.parametrize(
    ("data", "scale"),
    [
        (of_returns([[1, 3], [-4, -6], [2, 2]]), 5.0),  # the mean over agents; negative ones, too
        (of_returns([[7, 7], [7, 7]]), 7.0),  # constant ones
        (of_returns([[7, -7.0001], [2, 2]]), 3.50005),  # opposed ones, whose mean is no return
        (of_returns([[0, 0]]), 1.0),
        (of_returns(np.zeros((0, 2))), 1.0),
        (of_returns([[1, 1], [np.inf, 0]]), 1.0),
        (of_returns([[1, 1], [9, 9]], complete=False), 9.0),  # better than none
        (of_returns([[3, -3], [1, 2]], teams=(0, 1)), 3.0),  # the teams' do not cancel out
    ],
)
def test_the_scale_of_returns(data, scale):
    source = DatasetStatistics(data)
    assert source.return_scale() == scale
    assert DatasetStatistics(None, source.used).return_scale() == scale
    part = DatasetStatistics(data, episodes=np.arange(len(data.episodes.row))[:1])
    assert part.return_scale() <= scale
