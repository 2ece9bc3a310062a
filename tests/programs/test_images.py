"""Images and trees from recording to a policy that acts."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from gymnasium import spaces

import offmarl
from offmarl import envs, vault
from offmarl.envs.translator import Translator, common_specs, make_reader, spec_of
from offmarl.errors import ShapeError
from offmarl.networks import PolicyConfig, init_policy, make_policy
from offmarl.programs.runs.policy import LoadedPolicy
from offmarl.programs.runs.trained import _Blank
from offmarl.types import ArraySpec, Continuous, Discrete, EnvSpec

from .cameras import SIZE, Chase, chase
from .pettingzoo import Duel

TREE = EnvSpec(
    "tree",
    2,
    0,
    0,
    Discrete(3),
    observation={"camera": ArraySpec((3, 3, 1), "uint8"), "speed": ArraySpec((2,), "float16")},
)


def record(path, episodes, noise=0.0):
    """Record the chase; return the mean return of the behaviour."""
    random, returns = np.random.default_rng(0), []
    with offmarl.record(Chase(), path) as recorder:
        for seed in range(episodes):
            observations, _ = recorder.reset(seed=seed)
            returns.append(0.0)
            while recorder.env.agents:
                actions = chase(observations)
                for agent in actions:
                    if random.random() < noise:
                        actions[agent] = int(random.integers(5))
                observations, rewards, *_ = recorder.step(actions)
                returns[-1] += np.mean([*rewards.values()])
    return np.mean(returns)


def test_images_of_pettingzoo_stay_bytes(tmp_path):
    record(tmp_path / "chase.vlt", 2)
    data = vault.open_vault(tmp_path / "chase.vlt")
    assert data.spec.observation == ArraySpec((SIZE, SIZE, 3), "uint8")
    assert data.spec.state_size == 0
    steps = data[:]
    assert steps.view.observation.dtype == np.uint8
    env = Chase()
    observations, _ = env.reset(seed=0)
    for t in range(3):
        for i, agent in enumerate(env.possible_agents):
            np.testing.assert_array_equal(steps.view.observation[0, t, i], observations[agent])
        observations, *_ = env.step(chase(observations))
    last = env_after(0)
    np.testing.assert_array_equal(data.finals.observation[0, 0], last["red"])


def env_after(seed):
    """Return the last observations of an episode of the chase."""
    env = Chase()
    observations, _ = env.reset(seed=seed)
    while env.agents:
        observations, *_ = env.step(chase(observations))
    return observations


def test_a_recording_of_flat_images_is_appended_as_it_was(tmp_path):
    path = tmp_path / "chase.vlt"
    flat = Translator(reset(Chase()), like=EnvSpec("", 2, 1, 1, Discrete(2))).spec
    assert flat.is_vector and flat.observation_size == SIZE * SIZE * 3
    vault.create(path, flat, rows=1).close()
    with offmarl.record(Chase(), path, resume=True) as recorder:
        recorder.reset(seed=0)
        recorder.step({"red": 0, "blue": 0})
    observation = vault.open_vault(path)[:].view.observation
    assert observation.dtype == np.float32 and observation.max() == 255


def reset(env):
    env.reset(seed=0)
    return env


@pytest.mark.parametrize(
    ("space", "spec", "value", "expected"),
    [
        (spaces.Box(-1, 1, (2,), np.float64), ArraySpec((2,)), [0.5, 1], [0.5, 1]),
        (spaces.Discrete(3), ArraySpec((3,)), 1, [0, 1, 0]),
        (spaces.MultiBinary(2), ArraySpec((2,)), [1, 0], [1, 0]),
        (spaces.MultiBinary((1, 2)), ArraySpec((1, 2), "bool"), [[1, 0]], [[True, False]]),
        (spaces.Box(0, 9, (2,), np.int64), ArraySpec((2,), "int32"), [3, 9], [3, 9]),
        (spaces.Box(0, 2**40, (1,), np.int64), ArraySpec((1,)), [7], [7]),
    ],
)
def test_spaces_become_arrays(space, spec, value, expected):
    assert spec_of(space) == spec
    array = make_reader(space)(np.array(value), "it")
    assert (array.shape, array.dtype) == (spec.shape, spec.numpy_dtype)
    np.testing.assert_array_equal(array, expected)


def test_dicts_and_tuples_become_trees():
    inner = spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 255, (2, 2, 3), np.uint8)))
    space = spaces.Dict({"left eye": inner, "speed": spaces.Box(-1, 1, (1,), np.float16)})
    eye = {"0": ArraySpec((2,), "bool"), "1": ArraySpec((2, 2, 3), "uint8")}
    expected = replace(TREE, observation={"left_eye": eye, "speed": ArraySpec((1,), "float16")})
    assert spec_of(space) == expected.observation
    image = np.full((2, 2, 3), 7, np.uint8)
    tree = make_reader(space)({"left eye": (1, image), "speed": np.ones(1, np.float16)}, "it")
    assert tree["left_eye"]["0"].tolist() == [False, True]
    np.testing.assert_array_equal(tree["left_eye"]["1"], image)
    clash = spaces.Dict({"a b": spaces.Discrete(2), "a_b": spaces.Discrete(2)})
    with pytest.raises(ShapeError, match="not distinct"):
        spec_of(clash)


def test_agents_with_images_of_different_sizes_are_padded():
    small, large = ArraySpec((2, 5, 3), "uint8"), ArraySpec((4, 3, 3), "uint8")
    assert common_specs([small, large]) == ArraySpec((4, 5, 3), "uint8")
    assert common_specs([small, ArraySpec((4, 3), "uint8")]) is None
    assert common_specs([small, ArraySpec((2, 5, 3), "int8")]) is None
    assert Translator(reset(Duel())).spec.is_vector  # an image and a number


def loaded(spec):
    config = PolicyConfig("recurrent", hidden=4)
    params = init_policy(config, spec, jax.random.key(0))
    return LoadedPolicy(make_policy(config, spec, greedy=True), params, spec, "bc", False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"camera": np.zeros((2, 3, 2), np.uint8)}, r"camera .* must have \(2, 3, 3, 1\)"),
        ({"camera": np.zeros((2, 3, 3, 1), np.float32)}, "'camera' of type uint8, not float32"),
        ({"camera": np.zeros((2, 3, 3, 1), bool)}, "of type uint8, not bool.* scales them itself"),
        ({"camera": np.full((2, 3, 3, 1), 256)}, "camera .* 256 .* does not fit into uint8"),
        ({"sonar": np.zeros(2)}, "a dictionary of camera, speed, not on .* of camera, sonar"),
        (None, "a dictionary of camera, speed, not on one array"),
    ],
)
@pytest.mark.slow
def test_a_policy_says_which_observations_it_takes(change, message):
    policy = loaded(TREE)
    observation = {"camera": np.ones((2, 3, 3, 1), np.int64), "speed": np.ones((2, 2))}
    action, _ = policy(observation)
    assert action.shape == (2,)
    wrong = np.zeros((2, 5)) if change is None else observation | change
    with pytest.raises(ShapeError, match=message):
        policy(wrong)


def test_an_image_environment_of_ours_has_pettingzoos_api():
    env = envs.to_pettingzoo(_Blank(replace(TREE, action=Continuous(2))))
    observations, _ = env.reset(seed=0)
    assert env.observation_space("agent_0").contains(observations["agent_0"])
    assert observations["agent_0"]["camera"].dtype == np.uint8
    with pytest.raises(NotImplementedError, match="tree has no state"):
        env.state()
    again = Translator(env).spec
    assert again.observation == TREE.observation and again.state_size == 0


@pytest.mark.nightly
def test_a_clone_of_images_plays_as_its_data(tmp_path):
    behaviour = record(tmp_path / "chase.vlt", 150, noise=0.1)
    from offmarl.programs import registry

    baseline = registry.load("baseline", "bc")
    args = baseline.Args(
        vault=tmp_path / "chase.vlt", out=tmp_path / "bc", updates=600, length=12, env="none"
    )
    baseline.main(args)
    policy = offmarl.load_policy(tmp_path / "bc")
    returns = []
    for seed in range(1000, 1020):
        env = Chase()
        actor = envs.PettingZooPolicy(policy, env, seed=seed)
        observations, infos = env.reset(seed=seed)
        actor.reset()
        total = 0.0
        while env.agents:
            observations, rewards, *_, infos = env.step(actor(observations, infos))
            total += np.mean([*rewards.values()])
        returns.append(total)
    assert behaviour > 1.5
    assert np.mean(returns) > 0.8 * behaviour
