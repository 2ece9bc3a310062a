"""`--normalise`: training on normalised batches equals training on a normalised vault."""

import dataclasses
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import offmarl
from offmarl import envs, programs, vault
from offmarl.errors import OptionError
from offmarl.programs import record_policy, registry
from offmarl.programs.program import Hyperparameters, Program, Stage
from offmarl.programs.runs.dataset import DatasetStatistics, MeanAndStd, read
from offmarl.programs.runs.normalisation import make_program, normalised
from offmarl.types import ArraySpec, Policy, Sequence
from tests.vault.experience import SPEC, make

ENV = "probe/two-step"
KEY, NO_HYPER = jax.random.key(0), Hyperparameters({})
SMALL = {"updates": 6, "eval_every": 6, "batch_size": 4, "length": 3, "hidden": 8}


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
        pytest.param("qmix_cql", ("observation", "state", "reward"), marks=pytest.mark.nightly),
    ],
)
def test_training_equals_that_on_a_normalised_vault(random_data, tmp_path, name, what):
    run = train(name, random_data(ENV), tmp_path / "run", normalise=what)
    kept = read(run / "dataset.npz")
    assert set(kept) == {"reward_std" if w == "reward" else f"{w}_moments" for w in what}

    def normalise(steps):
        columns = {c: w for w in what for c in (w, f"final.{w}") if c in steps and w != "reward"}
        found = {c: standardised(kept[f"{w}_moments"], steps[c]) for c, w in columns.items()}
        if "reward" in what:
            found["reward"] = steps["reward"] * np.float32(1 / kept["reward_std"])
        return found

    mapped = vault.map(random_data(ENV), tmp_path / "mapped.vlt", normalise)
    plain = train(name, mapped.path, tmp_path / "plain")
    ours, theirs = (offmarl.load_policy(one) for one in (run, plain))
    chex.assert_trees_all_close(ours.params, theirs.params, rtol=1e-4, atol=1e-6)

    seen = mapped.transitions().view.observation[0, :1]
    before = offmarl.open(random_data(ENV)).transitions().view.observation[0, :1]
    key = jax.random.key(0)
    for one, other in zip(before, seen, strict=True):
        np.testing.assert_array_equal(ours(one, key=key)[0], theirs(other, key=key)[0])


@pytest.mark.slow
def test_what_is_recorded_and_evaluated_uses_the_statistics(random_data, tmp_path):
    run = train("bc", random_data(ENV), tmp_path / "run", normalise=("observation",), env=ENV)
    policy = offmarl.load_policy(run, greedy=True)
    env = envs.make(ENV)
    record_policy(env, policy.policy, policy.params, tmp_path / "v.vlt", steps=64, num_envs=4)
    steps = offmarl.open(tmp_path / "v.vlt").transitions()
    (mean, std) = read(run / "dataset.npz")["observation_moments"]
    params, network = policy.params, registry.load("baseline", "bc")
    plain = network.make(env.spec, network.Args(vault=run, **SMALL), DatasetStatistics(None))
    act = plain.policy(True)
    seen, legal = steps.view.observation[0, 0], steps.view.legal_actions[0, 0]
    seen = jnp.asarray((seen - mean) / std)
    action, *_ = act.act(params, act.initial_carry(), seen, jnp.asarray(legal), KEY)
    np.testing.assert_array_equal(action, steps.action[0, 0])


# ---------------------------------------------------------------------------------- the wrapper


def statistics(**arrays):
    return DatasetStatistics(None, {k: np.asarray(v, np.float32) for k, v in arrays.items()})


def echo():
    """A program that returns what it is given."""
    policy = Policy(
        tuple,
        lambda params, carry, observation, legal, key: (observation, legal, carry),
        log_prob=lambda params, carry, observation, legal, action: (observation, carry),
        after_step=lambda carry, reward, done: reward,
    )
    return Program(
        lambda key, hyper: (),
        (Stage(lambda state, batch, key, hyper: (batch, {})),),
        policy=lambda greedy: policy,
        policy_params=lambda state: state,
    )


def sequence(**changes):
    dataset_steps, _ = make(SPEC, rows=2, steps=5)
    t = dataset_steps
    masks = [t.terminated, t.truncated, t.behaviour_log_prob, *([t.last] * 3)]
    batch = Sequence(t.view, t.action, t.reward, *masks, return_to_go=t.reward)
    return batch._replace(**changes)


def test_each_part_is_normalised_alone():
    batch = sequence()
    moments = {"observation_moments": [[1, 2, 3], [2, 2, 4]], "state_moments": [[1] * 5, [3] * 5]}
    kept = statistics(**moments, reward_std=4.0, returns=[0, 2])
    for what in ("observation", "state", "reward", "return"):
        program = normalised(echo(), (what,), kept)
        found, _ = program.stages[0].update((), batch, KEY, NO_HYPER)
        scale = {"reward": 0.25, "return": 1.0}.get(what, 1.0)
        np.testing.assert_array_equal(found.reward, batch.reward * scale)
        np.testing.assert_array_equal(found.return_to_go, batch.reward * scale)
        expected = batch.view.observation
        if what == "observation":
            expected = (expected - np.float32([1, 2, 3])) / np.float32([2, 2, 4])
        np.testing.assert_allclose(found.view.observation, expected, rtol=1e-6)
        state = (batch.view.state - 1) / 3 if what == "state" else batch.view.state
        np.testing.assert_allclose(found.view.state, state, rtol=1e-6)
        policy = program.policy(True)
        seen = policy.act((), (), batch.view.observation[0, 0], None, None)[0]
        np.testing.assert_allclose(seen, expected[0, 0], rtol=1e-6)
        assert policy.after_step((), np.float32(2), None) == 2 * scale


def test_images_stay_as_they_are():
    image = np.arange(8, dtype=np.uint8).reshape(2, 4)
    kept = statistics(
        **{"observation.image_moments": [0, 1], "observation.speed_moments": [[2.0], [4.0]]}
    )
    policy = normalised(echo(), ("observation",), kept).policy(True)
    seen, *_ = policy.act((), (), {"image": image, "speed": np.ones((2, 1), np.float32)}, 0, 0)
    assert seen["image"] is image
    np.testing.assert_allclose(seen["speed"], np.full((2, 1), -0.25))


def test_moments_of_trees_leave_whole_numbers_alone(tmp_path):
    spec = dataclasses.replace(
        SPEC, observation={"image": ArraySpec((2, 2, 1), "uint8"), "speed": ArraySpec((3,))}
    )
    with vault.create(tmp_path / "a.vlt", spec, rows=2) as writer:
        writer.append(*make(spec, steps=30))
    data = vault.open_vault(tmp_path / "a.vlt")
    found = DatasetStatistics(data, episodes=np.arange(len(data.episodes.row)))
    mean, std = found.observation_moments()
    assert (mean["image"], std["image"]) == (0, 1)
    alive = data.transitions().view.alive
    speed = data.transitions().view.observation["speed"][alive]
    np.testing.assert_allclose(mean["speed"], speed.mean(0), rtol=1e-5)
    np.testing.assert_allclose(std["speed"], speed.std(0), rtol=1e-5)
    again = DatasetStatistics(None, found.used).observation_moments()
    assert isinstance(again, MeanAndStd)
    np.testing.assert_array_equal(again.mean["speed"], mean["speed"])


def test_a_run_stores_nothing_in_its_dataset(tmp_path):
    with vault.create(tmp_path / "a.vlt", SPEC, rows=2) as writer:
        writer.append(*make(SPEC, steps=30))
    data = vault.open_vault(tmp_path / "a.vlt")
    before = {p: p.read_bytes() for p in data.path.rglob("*") if p.is_file()}
    computed = DatasetStatistics(data).observation_moments()
    assert before == {p: p.read_bytes() for p in data.path.rglob("*") if p.is_file()}
    data.statistics()  # stores them
    used = DatasetStatistics(vault.open_vault(data.path)).observation_moments()
    for a, b in zip(computed, used, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_one_scale_for_rewards():
    with pytest.raises(OptionError, match="one of reward and return"):
        normalised(echo(), ("reward", "return"), statistics(reward_std=1.0, returns=[1.0]))
    kept = statistics(returns=[3.0, 3.0])  # returns that do not vary
    program = normalised(echo(), ("return",), kept)
    found, _ = program.stages[0].update((), sequence(), KEY, NO_HYPER)
    np.testing.assert_array_equal(found.reward, sequence().reward)
    args = programs.Args(vault=Path())
    given = echo()
    assert make_program(lambda *_: given, SPEC, args, None) is given
