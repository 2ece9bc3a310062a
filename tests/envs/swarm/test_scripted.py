"""Scripted controllers: legal with all options, and much better than random play."""

import jax
import jax.numpy as jnp
import pytest

from offmarl import envs
from offmarl._compiling import QUICKLY
from offmarl.evaluation import evaluate
from offmarl.networks import PolicyConfig, make_policy

KEY = jax.random.key(0)


def mean_return(env, policy):
    play = jax.jit(lambda key: evaluate(env, policy, (), key, 64), compiler_options=QUICKLY)
    return float(play(KEY).returns.mean())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "random", "scripted"),
    [
        ("swarm/coverage-3", 9.3, 20.1),
        ("swarm/coverage-8", 9.8, 20.5),
        ("swarm/search-4", 2.6, 16.2),
        ("swarm/delivery-4", 0.3, 16.0),
        ("swarm/pursuit-4-2", 1.1, 18.3),
        ("swarm/flock-5", -1.1, 13.4),
        ("swarm/hover-4", -1.0, 18.8),
        ("swarm/hover-4:control=motors", -0.9, 18.6),
    ],
)
def test_there_is_much_to_gain_by_looking(name, random, scripted):
    env = envs.make(name)
    uniform = make_policy(PolicyConfig("random"), env.spec)
    assert mean_return(env, uniform) == pytest.approx(random, abs=1.5)
    assert mean_return(env, env.scripted()) == pytest.approx(scripted, abs=1.5)


@pytest.mark.nightly
@pytest.mark.parametrize("dynamics", ["acceleration", "unicycle"])
@pytest.mark.parametrize("task", ["coverage-4", "delivery-4", "flock-4"])
def test_other_dynamics_are_mastered_too(task, dynamics):
    env = envs.make(f"swarm/{task}", dynamics=dynamics)
    uniform = make_policy(PolicyConfig("random"), env.spec)
    assert mean_return(env, env.scripted()) > mean_return(env, uniform) + 4


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("swarm/search-3:dims=3,comm=learned", marks=pytest.mark.nightly),
        "swarm/pursuit-3-2:evaders=learned,dynamics=unicycle,action=continuous,comm=learned",
    ],
)
def test_actions_are_legal(name):
    env = envs.make(name)
    policy = env.scripted()

    def first(key):
        view = env.reset(key)[1].view
        action, log_prob, _ = policy.act((), (), view.observation, view.legal_actions, key)
        return action, log_prob, view.legal_actions

    many = jax.jit(jax.vmap(first), compiler_options=QUICKLY)
    action, log_prob, legal = many(jax.random.split(KEY, 32))
    assert not log_prob.any()
    if action.ndim == 3:
        assert action.shape[-1] == env.spec.action_size
        assert (jnp.abs(action) <= 1 + 1e-6).all()
    else:
        assert jnp.take_along_axis(legal, action[..., None], -1).all()


def test_searchers_that_see_no_target_return_to_the_middle_height():
    env = envs.make("swarm/search-4:action=continuous,dims=3")
    height = jnp.array([0.8, 0.2, -0.2, -0.8])
    observation = jnp.zeros((4, env.spec.observation_size)).at[:, 2].set(height)
    legal = jax.jit(env.reset)(KEY)[1].view.legal_actions
    action, _, _ = jax.jit(env.scripted().act)((), (), observation, legal, KEY)
    assert (jnp.sign(action[:, 2]) == -jnp.sign(height)).all()
