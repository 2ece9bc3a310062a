import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs
from offmarl.networks import PolicyConfig, init_policy, make_policy
from offmarl.rollout import init_rollout, rollout
from offmarl.types import Policy
from tests.programs.learning import GUIDED


def counting_policy(num_agents):
    """Acts on the time since its episode began, which is its memory."""

    def act(params, carry, observation, legal_actions, key):
        action = jnp.full(num_agents, carry % 2, jnp.int32)
        return action, jnp.full(num_agents, carry, jnp.float32), carry + 1

    return Policy(lambda: jnp.zeros((), jnp.int32), act)


def random_rollout(name, num_envs=3, num_steps=60, seed=0):
    env = envs.autoreset(envs.make(name))
    policy = make_policy(PolicyConfig("random"), env.spec)
    state = init_rollout(env, policy, jax.random.key(seed), num_envs)
    play = jax.jit(lambda state, key: rollout(env, policy, (), state, key, num_steps, 4))
    return play(state, jax.random.key(seed + 1))


@pytest.mark.parametrize("name", ["classic/xor", "probe/match"])
def test_next_views_are_the_following_views_but_at_the_end_of_an_episode(name):
    _, transitions, next_views, _ = random_rollout(name)
    last = np.asarray(transitions.last)
    assert last.any()
    for view, following in zip(transitions.view, next_views, strict=True):
        same = ~last[:-1]
        np.testing.assert_array_equal(np.asarray(view)[1:][same], np.asarray(following)[:-1][same])


def test_episodes_end_where_the_environment_says():
    _, transitions, *_ = random_rollout("probe/two-step", num_steps=8)
    expected = np.tile([False, True], 4)
    np.testing.assert_array_equal(transitions.last, expected[:, None].repeat(3, axis=1))
    np.testing.assert_array_equal(transitions.terminated.all(-1), transitions.last)
    assert not transitions.truncated.any()
    assert (transitions.policy_id == 4).all()


@pytest.mark.slow
def test_memory_is_reset_with_the_episode_and_carried_between_rollouts():
    env = envs.autoreset(envs.make("probe/memory"))
    length = env.spec.time_limit
    policy = counting_policy(env.spec.num_agents)
    state = init_rollout(env, policy, jax.random.key(0), 2)
    counts = []
    for part in range(2):  # the cut is inside an episode
        state, transitions, *_ = rollout(env, policy, (), state, jax.random.key(part), length + 1)
        counts.append(np.asarray(transitions.behaviour_log_prob)[..., 0])
    expected = np.arange(2 * length + 2) % length
    np.testing.assert_array_equal(np.concatenate(counts), expected[:, None].repeat(2, axis=1))


def test_environments_differ_and_a_key_decides_everything():
    first, again = random_rollout("probe/match"), random_rollout("probe/match")
    chex.assert_trees_all_equal(first[1], again[1])
    action = np.asarray(first[1].action)
    assert (action[:, 0] != action[:, 1]).any()
    other = random_rollout("probe/match", seed=1)
    assert (action != np.asarray(other[1].action)).any()


def test_behaviour_log_probs_are_those_of_the_policy():
    env = envs.autoreset(envs.make("probe/match"))
    config = PolicyConfig("feedforward")
    policy = make_policy(config, env.spec)
    params = init_policy(config, env.spec, jax.random.key(0))
    state = init_rollout(env, policy, jax.random.key(1), 2)
    _, transitions, *_ = rollout(env, policy, params, state, jax.random.key(2), 5)
    uniform = np.log(1 / np.asarray(transitions.view.legal_actions.sum(-1)))
    np.testing.assert_allclose(transitions.behaviour_log_prob, uniform, atol=0.2)
    assert (transitions.policy_id == -1).all()


def test_other_data_recompile_nothing():
    env = envs.autoreset(envs.make("probe/match"))
    policy = make_policy(PolicyConfig("random"), env.spec)
    play = jax.jit(
        chex.assert_max_traces(
            lambda state, key, policy_id: rollout(env, policy, (), state, key, 4, policy_id), 1
        )
    )
    state = init_rollout(env, policy, jax.random.key(0), 2)
    for policy_id in range(3):
        state, *_ = play(state, jax.random.key(policy_id), policy_id)


def test_agents_may_have_policies_of_their_own():
    env = envs.autoreset(envs.make("probe/match"))
    policy = make_policy(PolicyConfig("random"), env.spec)
    state = init_rollout(env, policy, jax.random.key(0), 3)
    ids = jax.numpy.array([7, 2])
    _, transitions, *_ = rollout(env, policy, (), state, jax.random.key(0), 4, ids)
    np.testing.assert_array_equal(transitions.policy_id, np.broadcast_to([7, 2], (4, 3, 2)))


def test_shaped_rewards_are_returned_apart_and_not_recorded():
    env = envs.autoreset(GUIDED)
    assert envs.has_shaping(env) and not envs.has_shaping(envs.make("probe/match"))
    policy = make_policy(PolicyConfig("random"), env.spec)
    state = init_rollout(env, policy, jax.random.key(0), 3)
    play = jax.jit(lambda state: rollout(env, policy, (), state, jax.random.key(1), 4))
    _, transitions, _, shaping = play(state)
    np.testing.assert_array_equal(shaping, np.array([0, 10]) * transitions.action)
    assert len(np.unique(shaping)) == 2
    np.testing.assert_array_equal(transitions.reward, 1)


@pytest.mark.parametrize(
    ("name", "joined"),
    [
        ("jaxmarl/mpe/simple_spread_v3", True),
        ("jaxmarl/mpe/simple_tag_v3", False),  # observations of several sizes are padded
        ("swarm/coverage-3", False),
    ],
)
def test_a_state_of_all_observations_is_stored_once(name, joined):
    """A rollout returns the environment's own states, of which only these share memory."""
    env = envs.make(name)
    view = jax.jit(env.reset)(jax.random.key(0))[1].view
    again = env.spec.shared(view._replace(state=jnp.full_like(view.state, jnp.nan)))
    assert np.isnan(again.state).all() != joined
    chex.assert_trees_all_equal(env.spec.shared(view), view)
