from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs, load_policy
from offmarl.errors import OptionError, RunError, ShapeError
from offmarl.evaluation import agreement, evaluate, log_likelihood, returns_by_team
from offmarl.networks import PolicyConfig, QParams, init_policy, make_policy
from offmarl.programs import LoadedPolicy
from offmarl.programs.runs.evaluate import with_actions
from offmarl.types import Continuous, Discrete, EnvSpec, Policy
from tests.rollouts import sequence
from tests.runs import write_policy

TWO = EnvSpec("", 2, 3, 1, Discrete(4))


def constant_policy(num_agents):
    def act(params, carry, observation, legal_actions, key):
        return jnp.full(num_agents, params, jnp.int32), jnp.zeros(num_agents), carry

    return Policy(lambda: (), act)


played = jax.jit(evaluate, static_argnums=(0, 1, 4))


def test_returns_and_lengths_of_whole_episodes():
    env = envs.make("probe/two-step")
    evaluation = played(env, constant_policy(2), jnp.array(1), jax.random.key(0), 5)
    assert evaluation.lengths.tolist() == [2] * 5
    assert len(set(evaluation.returns.tolist())) == 1


@pytest.mark.slow
def test_what_follows_an_episode_does_not_count():
    env, policy = envs.make("probe/match"), constant_policy(2)
    single = played(env, policy, jnp.array(1), jax.random.key(0), 3)
    several = replace_limit(envs.autoreset(env), 6)
    evaluation = played(several, policy, jnp.array(1), jax.random.key(0), 3)
    assert evaluation.lengths.tolist() == [1] * 3 and evaluation.ended.all()
    np.testing.assert_array_equal(evaluation.returns, single.returns)
    assert (single.returns > 0).all()


def replace_limit(env, time_limit):
    """An environment whose spec allows more time than its episodes ever take."""

    class Longer:
        spec = replace(env.spec, time_limit=time_limit)
        reset = env.reset
        step = env.step

    return Longer()


@pytest.mark.parametrize(("limit", "wrap"), [(1, lambda env: env), (3, envs.autoreset)])
def test_episodes_that_have_not_ended_have_no_returns(limit, wrap):
    env = envs.make("classic/xor:time_limit=4")
    short = replace_limit(wrap(env), limit)
    play = jax.vmap(partial(evaluate, short, constant_policy(2), num_episodes=3), (None, 0))
    evaluation = play(jnp.array(1), jax.random.split(jax.random.key(0), 2))
    with pytest.raises(ShapeError, match=f"6 of 6 .* classic/xor:.* not ended after {limit} steps"):
        returns_by_team(short.spec, evaluation)
    with pytest.raises(ShapeError, match="6 of 6 episodes"):
        evaluation.returns  # noqa: B018 - a property
    part = evaluation._replace(ended=evaluation.ended.at[0].set(True))
    with pytest.raises(ShapeError, match=r"^3 of 6 .*, the time_limit of its spec"):
        returns_by_team(short.spec, part)
    returns = returns_by_team(short.spec, evaluation._replace(ended=evaluation.ended | True))
    assert returns.shape == (2, 3, 1)


def test_without_a_time_limit_episodes_cannot_be_played_side_by_side():
    env = replace_limit(envs.make("probe/match"), None)
    with pytest.raises(ShapeError, match="no time limit"):
        evaluate(env, constant_policy(2), jnp.array(0), jax.random.key(0), 2)


# ---------------------------------------------------------------------------------- runs


@pytest.mark.parametrize(("kind", "head"), [("feedforward", "softmax"), ("recurrent", "q")])
@pytest.mark.slow
def test_a_policy_is_loaded_from_its_run_alone(tmp_path, kind, head):
    spec = envs.make("swarm/coverage-2").spec
    config = PolicyConfig(kind, head)
    params = write_policy(tmp_path / "run", config, spec, [3, 5])
    loaded = load_policy(tmp_path / "run", seed=5)
    chex.assert_trees_all_equal(loaded.params, jax.tree.map(lambda leaf: leaf[1], params))
    assert (loaded.name, loaded.spec) == ("test", spec)

    observation = np.ones((2, spec.observation_size), np.float32)
    action, carry = loaded(observation)
    again, _ = loaded(observation, np.ones((2, spec.action_size), bool), carry)
    assert action.shape == again.shape == (2,)
    only_last = np.arange(spec.action_size) == spec.action_size - 1
    action, _ = loaded(observation, np.tile(only_last, (2, 1)))
    assert action.tolist() == [spec.action_size - 1] * 2
    with pytest.raises(ShapeError, match=r"has shape \(1, 3\)"):
        loaded(np.ones((1, 3), np.float32))
    with pytest.raises(ShapeError, match=r"legal actions .* has shape \(2, 1\)"):
        loaded(observation, np.ones((2, 1), bool))
    assert len(repr(loaded)) < 100


def test_the_first_seed_is_the_default_and_others_are_named(tmp_path, monkeypatch):
    spec = envs.make("probe/match").spec
    params = write_policy(tmp_path / "run", PolicyConfig("feedforward"), spec, [3, 5])
    loaded = load_policy(tmp_path / "run")
    chex.assert_trees_all_equal(loaded.params, jax.tree.map(lambda leaf: leaf[0], params))
    with pytest.raises(RunError, match=r"no seed 4: its seeds are \[3, 5\]"):
        load_policy(tmp_path / "run", seed=4)
    monkeypatch.setattr("offmarl.replay.device.free_bytes", lambda: 9)
    with pytest.raises(OptionError, match="GB of memory"):  # no more is allocated than there is
        load_policy(tmp_path / "run")


@pytest.mark.parametrize(
    ("config", "greedy", "epsilon", "draws"),
    [
        (PolicyConfig("random"), False, None, True),
        (PolicyConfig("random"), True, None, True),
        (PolicyConfig("feedforward"), False, None, True),
        (PolicyConfig("recurrent"), True, None, False),
        (PolicyConfig("feedforward", "gaussian"), False, None, True),
        (PolicyConfig("feedforward", "gaussian"), True, None, False),
        (PolicyConfig("recurrent", "q"), False, 0.0, False),
        (PolicyConfig("recurrent", "q"), False, 0.1, True),
        (PolicyConfig("recurrent", "q"), True, 0.1, False),
    ],
)
def test_which_policies_draw_their_actions(config, greedy, epsilon, draws):
    params = () if epsilon is None else QParams((), jnp.array(epsilon))
    spec = EnvSpec("", 2, 3, 1, Continuous(1) if config.head == "gaussian" else Discrete(4))
    assert make_policy(config, spec, greedy).draws(params) is draws


@pytest.mark.slow
def test_a_policy_takes_its_best_actions_or_draws_them_by_a_key(tmp_path):
    spec = EnvSpec("", 200, 3, 1, Discrete(4))
    for name, greedy in (("online", False), ("offline", True)):
        write_policy(tmp_path / name, PolicyConfig("feedforward"), spec, [0], greedy=greedy)
    sampler, best = (load_policy(tmp_path / "online", greedy=x) for x in (False, True))
    observation = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    with pytest.raises(OptionError, match=r"without a key: .* key=key.* or .* greedy=True"):
        sampler(observation)
    first, again, other = (sampler(observation, key=jax.random.key(seed))[0] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert 100 < (first != other).sum() < 190  # 3 of 4, were it uniform
    np.testing.assert_array_equal(best(observation)[0], best(observation, key=jax.random.key(7))[0])
    assert not np.array_equal(first, best(observation)[0])
    for name, expected in (("online", True), ("offline", False)):
        assert not load_policy(tmp_path / name).stochastic
        assert load_policy(tmp_path / name, greedy=None).stochastic is expected


def test_a_policy_is_compiled_once(tmp_path):
    @chex.assert_max_traces(n=1)
    def act(params, carry, observation, legal_actions, key):
        return jnp.zeros(2, jnp.int32), jnp.zeros(2), carry

    loaded = LoadedPolicy(Policy(lambda: jnp.zeros(1), act), (), TWO, "test", stochastic=False)
    blank, carry = np.zeros((2, 3), np.float32), None
    for _ in range(3):
        _, carry = loaded(blank, carry=carry)


def test_a_policy_of_a_loop_is_given_its_rewards():
    """A return-to-go policy: it chooses 2 until it has been paid 3."""

    def act(params, carry, observation, legal_actions, key):
        return jnp.where(carry > 0, 2, 1), jnp.zeros(2), carry

    policy = Policy(
        lambda: jnp.full(2, 3.0),
        act,
        after_step=lambda carry, reward, done: jnp.where(done, 9.0, carry - reward),
    )
    loaded = LoadedPolicy(policy, (), TWO, "to_go", stochastic=False)
    blank, going, carry, actions = np.zeros((2, 3), np.float32), np.zeros(2, bool), None, []
    for reward in (1, 2, 0):
        action, carry = loaded(blank, carry=carry)
        actions.append(action.tolist())
        with pytest.raises(OptionError, match=r"the policy of to_go .*after_step\(carry, reward"):
            loaded(blank, carry=carry)
        with pytest.raises(ShapeError, match=r"reward .* shape \(3,\), and must have \(2,\)"):
            loaded.after_step(carry, np.ones(3), np.zeros(3, bool))
        carry = loaded.after_step(carry, np.array([reward, 0.0]), going)
        with pytest.raises(OptionError, match="has chosen no action since"):
            loaded.after_step(carry, np.zeros(2), going)
    assert actions == [[2, 2], [2, 2], [1, 2]]
    _, carry = loaded(blank, carry=carry)
    assert loaded.after_step(carry, np.zeros(2), ~going).tolist() == [9, 9]


def test_a_policy_that_remembers_no_rewards_keeps_its_carry():
    def act(params, carry, observation, legal_actions, key):
        return jnp.zeros(2, jnp.int32), jnp.zeros(2), carry + 1

    loaded = LoadedPolicy(Policy(lambda: jnp.zeros(()), act), (), TWO, "counts", stochastic=False)
    blank = np.zeros((2, 3), np.float32)
    _, carry = loaded(blank)
    assert loaded.after_step(carry, np.ones(2), np.zeros(2, bool)) is carry
    assert loaded(blank, carry=carry)[1] == 2


def test_a_directory_that_is_no_run(tmp_path):
    with pytest.raises(RunError, match=r"has no run.json"):
        load_policy(tmp_path)


def test_likelihood_is_that_of_what_living_agents_did():
    spec, config = EnvSpec("", 2, 1, 1, Discrete(3)), PolicyConfig("recurrent", hidden=4)
    params = jax.tree.map(jnp.zeros_like, init_policy(config, spec, jax.random.key(0)))
    params["params"]["head"]["bias"] = jnp.log(jnp.array([1.0, 2.0, 5.0]))
    alive = jnp.ones((1, 4, 2), bool).at[0, 1:, 1].set(False)
    legal = jnp.ones((1, 4, 2, 3), bool).at[0, 1, 0, 2].set(False)
    action, mask = [[[2, 0], [1, 0], [0, 0]]], jnp.array([[True, True, False]])
    episodes = sequence(action, spec, legal_actions=legal, alive=alive, mask=mask)
    # 5/8 and 1/8 in the first step; in the second one agent, and 2/3 of two legal actions.
    expected = np.log([5 / 8, 1 / 8, 2 / 3]).mean()
    policy = make_policy(config, spec)
    np.testing.assert_allclose(log_likelihood(policy, params, episodes), [expected], rtol=1e-6)
    with pytest.raises(OptionError, match="has no log_prob"):
        log_likelihood(constant_policy(2), params, episodes)


def test_agreement_counts_what_living_agents_did():
    def act(params, carry, observation, legal_actions, key):
        return jnp.full(observation.shape[:1], params), jnp.zeros(observation.shape[:1]), carry

    shape = (2, 4, 3)  # episodes, steps, agents
    alive = jnp.ones((2, 5, 3), bool).at[1, :, 2].set(False)
    action = jnp.zeros(shape, int).at[0, 0].set(1).at[1, :, 2].set(1)
    spec, mask = EnvSpec("", 3, 1, 1, Discrete(2)), jnp.arange(4) < jnp.array([[2], [4]])
    episodes = sequence(action, spec, alive=alive, mask=mask)
    view, blank = episodes.view, jnp.zeros(shape)
    result = agreement(Policy(tuple, act), jnp.array(0), episodes)
    np.testing.assert_array_equal(result, [0.5, 1.0])
    # An episode in which nobody ever acts has no agreement, and is left out.
    dead = episodes._replace(view=view._replace(alive=alive.at[0].set(False)))
    assert with_actions(episodes) is episodes
    np.testing.assert_array_equal(with_actions(dead).action, episodes.action[1:])
    with pytest.raises(OptionError, match="no agent has a choice in the held-out episodes"):
        with_actions(dead._replace(view=view._replace(alive=alive & False)))
    # Where one action is legal there is nothing to agree on: agent 0, and step 0 of all, is left.
    legal = view.legal_actions.at[0, 1:, 1:, 1].set(False)
    result = agreement(
        Policy(tuple, act), jnp.array(0), episodes._replace(view=view._replace(legal_actions=legal))
    )
    np.testing.assert_array_equal(result, [0.25, 1.0])
    continuous = episodes._replace(action=jnp.stack([blank, blank + 0.5], -1))
    policy = Policy(tuple, lambda p, carry, observation, *_: (jnp.zeros((3, 2)), None, carry))
    np.testing.assert_allclose(agreement(policy, None, continuous), [0.875, 0.875])
    for entry, expected in ((0, 0.75), (1, 1.0)):  # entries that agents lack do not count
        lacks = view._replace(legal_actions=view.legal_actions.at[..., entry].set(False))
        result = agreement(policy, None, continuous._replace(view=lacks))
        np.testing.assert_allclose(result, [expected, expected])


@pytest.mark.parametrize("count", [10**10, 10**14])
def test_episodes_that_no_memory_holds_are_refused(count):
    env = envs.make("probe/two-step")
    with pytest.raises(OptionError, match=rf"{count:,} episodes .* at least .* GB of memory"):
        evaluate(env, constant_policy(2), (), jax.random.key(0), count)
