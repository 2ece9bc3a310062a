"""offmarl's environments with PettingZoo's API, and PettingZoo's read as arrays."""

import warnings
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

import offmarl
from offmarl import envs
from offmarl.errors import InvalidValueError, OptionError, ShapeError

pytest.importorskip("pettingzoo", reason="needs pip install 'offmarl[pettingzoo]'")

import gymnasium

with warnings.catch_warnings():  # where pygame is installed, PettingZoo's tests import its games
    warnings.simplefilter("ignore", DeprecationWarning)
    from pettingzoo.test import parallel_api_test, parallel_seed_test

from offmarl.envs.base import Wrapper
from offmarl.envs.translator import Translator

from ..programs.pettingzoo import Duel


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "classic/bridge",
        "swarm/coverage-3:time_limit=9",
        pytest.param("jaxmarl/smax/3m", marks=pytest.mark.nightly),
        pytest.param("jaxmarl/mpe/simple_world_comm_v3", marks=pytest.mark.nightly),
        pytest.param("jumanji/connector:grid_size=6,num_agents=3", marks=pytest.mark.nightly),
    ],
)
def test_the_api_test_passes(name):
    if name.startswith(("jaxmarl", "jumanji")):
        pytest.importorskip("jaxmarl")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(envs.to_pettingzoo(name), num_cycles=60)
        parallel_seed_test(lambda: envs.to_pettingzoo(name), num_cycles=20)


def test_steps_are_those_of_the_environment():
    env = envs.make("classic/bridge")
    wrapped = envs.to_pettingzoo(env)
    observations, _ = wrapped.reset(seed=3)
    reset_key, key = jax.random.split(jax.random.key(3))
    state, timestep = env.reset(reset_key)
    rng, step = np.random.default_rng(0), jax.jit(env.step)
    while wrapped.agents:
        action = jax.numpy.asarray(rng.integers(5, size=2))
        step_key, key = jax.random.split(key)
        state, timestep = step(step_key, state, action)
        joint = dict(zip(wrapped.possible_agents, action.tolist(), strict=True))
        observations, rewards, terminations, truncations, _ = wrapped.step(joint)
        for i, agent in enumerate(wrapped.possible_agents):
            view = observations[agent]
            np.testing.assert_array_equal(view["observation"], timestep.view.observation[i])
            np.testing.assert_array_equal(view["action_mask"], timestep.view.legal_actions[i])
            assert rewards[agent] == timestep.reward[i]
            assert terminations[agent] == timestep.terminated[i]
            assert truncations[agent] == timestep.truncated[i]
        np.testing.assert_array_equal(wrapped.state(), timestep.view.state)
    assert timestep.last


def test_misuse_is_explained():
    env = envs.to_pettingzoo("classic/xor:time_limit=2")
    with pytest.raises(OptionError, match="call reset first"):
        env.state()
    env.reset(seed=0)
    with pytest.raises(OptionError, match="no action for agent_1"):
        env.step({"agent_0": 0})
    for wrong in (2, 0.0, [1], [[1], [1, 0]], "up"):
        with pytest.raises(OptionError, match=r"classic/xor\S*: agent_1 has .* Discrete\(2\)"):
            env.step({"agent_0": 0, "agent_1": wrong})
    swarm = envs.to_pettingzoo("swarm/coverage-2:action=continuous")
    swarm.reset(seed=0)
    for wrong in (np.zeros(1), [[0.0], [0.0, 0.0]], ["up", "down"]):
        with pytest.raises(OptionError, match=r"agent_1 has the actions Box"):
            swarm.step({"agent_0": np.zeros(2), "agent_1": wrong})
    for _ in range(2):
        env.step({"agent_0": 0, "agent_1": 1})
    assert env.agents == []
    with pytest.raises(OptionError, match="no episode has started"):
        env.step({})


def test_any_environment_is_read_as_arrays():
    env = Duel()
    observations, infos = env.reset(seed=1)
    translator = Translator(env, time_limit=5)
    spec = translator.spec
    assert (spec.name, spec.num_agents, spec.num_actions, spec.time_limit) == ("", 2, 4, 5)
    assert spec.agents == ("knight", "squire")
    assert (spec.observation_sizes, spec.action_sizes) == ((6, 3), (4, 2))
    assert spec.state == "native"
    view = translator.view(observations, infos, [True, True], env.state())
    np.testing.assert_array_equal(view.observation[0, :6], observations["knight"].ravel())
    np.testing.assert_array_equal(view.observation[1], [0, 1, 0, 0, 0, 0])  # 1 of 3, one-hot
    assert view.legal_actions.tolist() == [[True, False, True, True], [True, True, False, False]]
    assert translator.joint({"knight": 2, "squire": 11}).tolist() == [2, 1]
    with pytest.raises(InvalidValueError, match=r"the action of knight is .* from 0 to 3"):
        translator.joint({"knight": [[1], [1, 2]], "squire": 11})
    both = translator.by_agent(np.array([3, 0]), ["knight", "squire"])
    assert both == {"knight": 3, "squire": 10}


@pytest.mark.parametrize("names", [("squire", "knight"), ("squire", "page"), None])
def test_agents_have_the_order_of_the_same_names(names):
    env = Duel()
    translator = Translator(env, like=replace(Translator(env).spec, agents=names))
    swapped = names == ("squire", "knight")
    assert translator.spec.agents == (names if swapped else ("knight", "squire"))
    view = translator.view(*env.reset(), [True, True], env.state())
    ours = Translator(env).view(*env.reset(), [True, True], env.state())
    assert np.array_equal(view.observation, ours.observation[::-1] if swapped else ours.observation)
    assert translator.joint({"knight": 2, "squire": 11}).tolist() == [1, 2][:: 1 if swapped else -1]


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (gymnasium.spaces.Box(-1, 1, (2,)), "of both kinds"),
        (gymnasium.spaces.MultiDiscrete([2, 2]), "actions of squire are of MultiDiscrete"),
        (gymnasium.spaces.Box(-np.inf, np.inf, (2,)), "finite bounds"),
    ],
)
def test_actions_that_no_array_holds_are_refused(space, message):
    env = Duel()
    env.reset()
    env.action_space = lambda agent: gymnasium.spaces.Discrete(4) if agent == "knight" else space
    with pytest.raises(ShapeError, match=message):
        Translator(env)


def test_an_agent_that_is_truncated_alone_did_not_terminate():
    class Leaves(Wrapper):
        spec = property(lambda self: self.env.spec)  # Python 3.12 looks for it in the class

        def step(self, key, state, action):
            state, step = self.env.step(key, state, action)
            leaves = np.array([False, True])
            view = step.next_view._replace(alive=~leaves)
            return state, step._replace(truncated=leaves, next_view=view)

    env = envs.to_pettingzoo(Leaves(envs.make("classic/bridge")))
    env.reset(seed=0)
    _, _, terminations, truncations, _ = env.step({"agent_0": 0, "agent_1": 0})
    assert terminations == {"agent_0": False, "agent_1": False}
    assert truncations == {"agent_0": False, "agent_1": True}
    assert env.agents == ["agent_0"]


def test_an_agent_that_dies_and_is_still_rewarded_stays():
    """As in SMAX, where what a dead agent's side does is still its own."""

    class Dies(Wrapper):
        spec = property(lambda self: self.env.spec)

        def step(self, key, state, action):
            state, step = self.env.step(key, state, action)
            view = step.next_view._replace(alive=np.array([True, False]))
            return state, step._replace(next_view=view, reward=np.ones(2, np.float32))

    env = envs.to_pettingzoo(Dies(envs.make("classic/bridge")))
    env.reset(seed=0)
    for _ in range(2):
        _, rewards, terminations, _, _ = env.step({"agent_0": 0, "agent_1": 0})
        assert rewards == {"agent_0": 1.0, "agent_1": 1.0} and not any(terminations.values())
    assert env.agents == ["agent_0", "agent_1"]


def test_a_policy_of_ours_acts():
    env = envs.to_pettingzoo("classic/bridge")
    calls = []

    def policy(observation, legal_actions, carry, key):
        calls.append(carry)
        assert observation.shape == (2, 8)
        assert legal_actions.shape == (2, 5)
        return np.array([3, 4]), len(calls)

    actor = envs.PettingZooPolicy(policy, env)
    observations, infos = env.reset(seed=0)
    assert actor(observations, infos) == {"agent_0": 3, "agent_1": 4}
    actor(observations, infos)
    actor.reset()
    actor(observations, infos)
    assert calls == [None, 1, None]


class Remembering:
    """A policy that records the arguments of each step."""

    def __init__(self):
        self.outcomes = []

    def __call__(self, observation, legal_actions, carry, key):
        return np.array([0, 0]), carry

    def after_step(self, carry, reward, done):
        self.outcomes.append((reward.tolist(), done.tolist()))
        return len(self.outcomes)


def test_a_policy_of_ours_is_given_its_rewards():
    policy, env = Remembering(), Duel()
    actor = envs.PettingZooPolicy(policy, env)
    observations, infos = env.reset()
    returned = []
    while env.agents:
        observations, *outcome, infos = env.step(actor(observations, infos))
        actor.after_step(*outcome)
        returned.append(outcome)
    rewards, _, truncations = returned[-1]
    assert "squire" not in rewards and truncations == {"knight": True}
    assert policy.outcomes[-1] == ([rewards["knight"], 0], [True, True])
    rewards, *_ = returned[0]
    assert policy.outcomes[0] == ([rewards["knight"], rewards["squire"]], [False, False])
    assert actor._carry == len(policy.outcomes)


def test_recorded_episodes_give_a_policy_its_rewards(tmp_path):
    policy = Remembering()
    make_policy = partial(envs.PettingZooPolicy, policy)
    offmarl.record_episodes(Duel, tmp_path / "duel.vlt", 2, make_policy)
    steps = offmarl.open(tmp_path / "duel.vlt")[:]
    assert [reward for reward, _ in policy.outcomes] == steps.reward[0].tolist()
