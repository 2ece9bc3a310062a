"""One side of an adversarial environment, and policies composed of several."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs, vault
from offmarl.envs.conformance import EnvironmentConformance
from offmarl.envs.scripted import register_policy, scripted_policies, scripted_policy
from offmarl.envs.sides import Seat, TeamPolicy, compose, play_side
from offmarl.errors import OptionError, ShapeError, UnknownNameError
from offmarl.evaluation import evaluate
from offmarl.networks import PolicyConfig, init_policy, make_policy
from offmarl.programs import record_policy
from offmarl.teams import teams_of
from offmarl.types import Policy

from .rivals import Rivals

ENV = Rivals()
CATS, MICE = teams_of(ENV.spec)
EVERYONE = (0, 1, 2)
UNIFORM = make_policy(PolicyConfig("random"), ENV.spec)


def always(*actions):
    """A policy whose agents always do these actions."""

    def act(_params, carry, observation, legal_actions, _key):
        return jnp.array(actions, jnp.int32), -jnp.arange(1.0, 1 + len(actions)), carry

    def log_prob(_params, carry, observation, legal_actions, action):
        return jnp.where(action == jnp.array(actions), 0.0, -jnp.inf), carry

    return Policy(lambda: (), act, log_prob, draws=lambda _params: False)


CHANCE = {"cats": TeamPolicy(UNIFORM, (), EVERYONE), "mice": TeamPolicy(UNIFORM, (), EVERYONE)}
AS_CATS = play_side(ENV, "cats", {"mice": CHANCE["mice"]})
AS_MICE = play_side(ENV, "mice", {"cats": CHANCE["cats"]})


@pytest.mark.parametrize(
    ("actions", "cats", "mice"),
    # Cats earn their action plus the mouse's, the mouse minus the cats' sum; 4 steps.
    [((1, 0, 0), 4 * (1 + 0) / 2, -4), ((2, 1, 2), 4 * 3, -16), ((0, 0, 0), 0, 0)],
)
def test_each_team_has_a_return_of_its_own(actions, cats, mice):
    result = jax.jit(lambda key: evaluate(ENV, always(*actions), (), key, 2))(jax.random.key(0))
    np.testing.assert_array_equal(result.team_returns, [[cats, mice]] * 2)
    with pytest.raises(ShapeError, match="2 teams have no single return"):
        _ = result.returns


class TestSides(EnvironmentConformance):
    @pytest.fixture(
        params=[
            pytest.param(AS_CATS, id="cats", marks=pytest.mark.slow),
            pytest.param(AS_MICE, id="mice"),
        ]
    )
    def env(self, request):
        return request.param


@pytest.mark.parametrize("side", [AS_CATS, AS_MICE], ids=["cats", "mice"])
@pytest.mark.slow
def test_a_side_equals_the_environment_with_the_same_actions(side):
    """To the bit: the steps of all agents, as they are recorded, against the environment's own."""
    mine = np.array(side.team.agents)
    key = jax.random.key(5)
    state, first = side.reset(key)
    inner, timestep = ENV.reset(key)
    np.testing.assert_array_equal(first.view.observation, timestep.view.observation[mine])
    np.testing.assert_array_equal(first.view.state, timestep.view.state)
    theirs = np.array([agent for agent in EVERYONE if agent not in mine])
    for number in range(4):
        step_key = jax.random.fold_in(key, number)
        action = jnp.full(len(mine), number % 2)
        view = timestep.view
        after, step = side.step(step_key, state, action)
        packed = step.extras["others-003"]  # the others' actions
        joint = jnp.zeros(3, jnp.int32).at[mine].set(action).at[theirs].set(packed)
        inner, timestep = ENV.step(jax.random.split(step_key)[1], inner, joint)
        for name in ("reward", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(step, name), getattr(timestep, name)[mine])
        np.testing.assert_array_equal(step.view.observation, timestep.view.observation[mine])
        np.testing.assert_array_equal(step.extras["others-000"], view.observation[theirs])
        np.testing.assert_array_equal(step.extras["others-004"], timestep.reward[theirs])
        chex.assert_trees_all_equal(after.inner, inner)
        state = after


@pytest.mark.parametrize("side", [AS_CATS, AS_MICE], ids=["cats", "mice"])
@pytest.mark.slow
def test_recordings_of_a_side_hold_all_agents(side, tmp_path):
    policy = make_policy(PolicyConfig("random"), side.spec)
    path = tmp_path / "a.vlt" / "x"
    record_policy(side, policy, (), path, steps=40, num_envs=2)
    data = vault.open_vault(path)
    assert data.spec == ENV.spec
    assert vault.verify(path, deep=True).sound
    for number in range(len(data.episodes.row)):
        steps, end = data.episode(number)
        action, mouse = np.asarray(steps.action), steps.action[:, 1]
        cats = action[:, 0] + action[:, 2]
        expected = np.stack([action[:, 0] + mouse, -cats, action[:, 2] + mouse], 1)
        np.testing.assert_array_equal(steps.reward, expected)
        views = np.concatenate([steps.view.observation, end.observation[None]])
        np.testing.assert_array_equal(views[1:, :, 1], action)
        np.testing.assert_array_equal(views[..., 0], np.arange(len(views))[:, None] + np.zeros(3))
        mine = np.isin(EVERYONE, side.team.agents)
        assert (steps.policy_id[:, mine] == 0).all()
        assert (steps.policy_id[:, ~mine] == 1).all()
        np.testing.assert_allclose(steps.behaviour_log_prob, -np.log(3), rtol=1e-6)
    assert set(data.episodes.cause) <= {"terminated", "truncated", "cut"}
    returns = data.episodes.complete_team_returns
    assert set(returns) == {"cats", "mice"}


@pytest.mark.slow
def test_composed_policies_act_for_their_own_agents():
    config = PolicyConfig("recurrent", hidden=4)
    spec = ENV.spec
    params = init_policy(config, spec, jax.random.key(0))
    seats = [
        Seat(CATS.agents, always(1, 2), CATS.agents),
        Seat(MICE.agents, make_policy(config, spec), EVERYONE),
    ]
    policy = compose(spec, seats)
    _, first = ENV.reset(jax.random.key(1))
    view, key = first.view, jax.random.key(2)
    action, log_prob, carry = policy.act(
        ((), params), policy.initial_carry(), view.observation, view.legal_actions, key
    )
    assert action[jnp.array([0, 2])].tolist() == [1, 2]
    assert log_prob[jnp.array([0, 2])].tolist() == [-1.0, -2.0]
    alone = make_policy(config, spec)
    own_action, own_log_prob, own_carry = alone.act(
        params,
        alone.initial_carry(),
        view.observation,
        view.legal_actions,
        jax.random.split(key, 2)[1],
    )
    assert (action[1], log_prob[1]) == (own_action[1], own_log_prob[1])
    chex.assert_trees_all_equal(carry[1], own_carry)
    again, _ = policy.log_prob(
        ((), params), policy.initial_carry(), view.observation, view.legal_actions, action
    )
    np.testing.assert_allclose(again, [0, own_log_prob[1], 0], rtol=1e-5)
    assert policy.draws(((), params))
    assert not compose(spec, [Seat(EVERYONE, always(0, 0, 0), EVERYONE)]).draws(((),))


def test_memory_of_rewards_reaches_each_policy():
    def counts(agents):
        return Policy(
            lambda: jnp.zeros(agents),
            lambda params, carry, *_: (jnp.zeros(agents, jnp.int32), jnp.zeros(agents), carry),
            after_step=lambda carry, reward, done: jnp.where(done, -1.0, carry + reward),
        )

    seats = [Seat(CATS.agents, counts(2), CATS.agents), Seat(MICE.agents, counts(3), EVERYONE)]
    policy = compose(ENV.spec, seats)
    reward, done = jnp.array([1.0, 2.0, 3.0]), jnp.array([False, False, True])
    cats, mice = policy.after_step(policy.initial_carry(), reward, done)
    assert (cats.tolist(), mice.tolist()) == ([1, -1], [1, 2, -1])


@pytest.mark.parametrize(
    ("seats", "message"),
    [
        ([(0, 1), (1, 2)], r"the agents \[0, 1, 1, 2\] of 3: give each agent one"),
        ([(0, 3)], r"the agents \[0, 3\] of 3"),
    ],
)
def test_each_agent_has_one_policy(seats, message):
    with pytest.raises(ShapeError, match=message):
        compose(ENV.spec, [Seat(agents, UNIFORM, EVERYONE) for agents in seats])


def test_a_side_is_paid_by_its_team_after_its_death():
    class Together(Rivals):
        """One team, paid 1 a step."""

        @property
        def spec(self):
            return replace(super().spec, reward="team", teams=None, team_names=None)

        def step(self, key, state, action):
            after, timestep = super().step(key, state, action)
            return after, timestep._replace(reward=jnp.ones(3))

    env = Together()
    seat = TeamPolicy(make_policy(PolicyConfig("random"), env.spec), (), EVERYONE)
    side = play_side(env, "agent_1", {"agent_0,agent_2": seat})
    assert evaluate(side, always(2), (), jax.random.key(0), 2).returns.tolist() == [4.0] * 2


@pytest.mark.parametrize(
    ("team", "opponents", "error", "message"),
    [
        ("dogs", CHANCE, UnknownNameError, "no team or agent of rivals named 'dogs'.*cats, mice"),
        ("cats", {}, OptionError, "no policy acts for mice"),
        ("cats", CHANCE, OptionError, "cats is of the side that learns"),
    ],
)
def test_a_side_needs_opponents(team, opponents, error, message):
    with pytest.raises(error, match=message):
        play_side(ENV, team, opponents)


def test_one_team_has_no_sides():
    with pytest.raises(OptionError, match="these are all agents"):
        play_side(envs.make("probe/match"), "all", {})


def test_environments_offer_scripted_policies_by_name(tmp_path):
    assert list(scripted_policies(ENV)) == ["scripted"]
    view = ENV.reset(jax.random.key(0))[1].view
    act = (view.observation, view.legal_actions, jax.random.key(0))
    action, *_ = scripted_policy(ENV, "scripted").act((), (), *act)
    assert action.tolist() == [0, 1, 2]
    (tmp_path / "mine.py").write_text(
        "import jax.numpy as jnp\n"
        "from offmarl.types import Policy\n"
        "def lazy(env):\n"
        "    n = env.spec.num_agents\n"
        "    return Policy(tuple, lambda p, c, *_: (jnp.zeros(n, jnp.int32), jnp.zeros(n), c))\n"
        "def wrong(env):\n"
        "    return 3\n"
        "def broken(env):\n"
        "    return env.nothing\n"
    )
    action, *_ = scripted_policy(ENV, f"{tmp_path}/mine.py:lazy").act((), (), *act)
    assert action.tolist() == [0, 0, 0]
    for name, message in [
        (f"{tmp_path}/mine.py:wrong", "returned 3, which is not a policy"),
        (f"{tmp_path}/mine.py:broken", "cannot be created: .*nothing"),
    ]:
        with pytest.raises(OptionError, match=message):
            scripted_policy(ENV, name)
    with pytest.raises(UnknownNameError, match="scripted policy of rivals named 'clever'"):
        scripted_policy(ENV, "clever")


def test_scripted_policies_are_registered_for_a_family(monkeypatch):
    monkeypatch.setattr("offmarl.envs.scripted._registered", {})
    register_policy("probe/match", "first", lambda env: always(*(0,) * env.spec.num_agents))
    assert list(scripted_policies(envs.make("probe/match"))) == ["first"]
    assert list(scripted_policies(envs.make("probe/memory"))) == []
    assert list(scripted_policies(ENV)) == ["scripted"]
