"""MAPPO's own functions against numbers computed by hand."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from offmarl import envs
from offmarl.distributions import categorical
from offmarl.errors import OptionError
from offmarl.networks import Moments
from offmarl.programs import hyperparameters
from offmarl.programs.program import structure
from offmarl.types import Discrete, EnvSpec, Transition, View
from recorders import mappo

SPEC = EnvSpec("", 2, 1, 1, Discrete(2))


def seen(alive: jax.Array) -> View:
    """Views ``(T, E, ...)`` in which there is nothing to see but who is alive."""
    lead = alive.shape[:-1]
    legal = jnp.ones((*lead, 2, 2), bool)
    return View(jnp.zeros((*lead, 2, 1)), jnp.zeros((*lead, 1)), legal, alive)


@pytest.mark.parametrize(("reward", "second"), [("team", [7.0, 6.0, 4.0]), ("individual", [1.0])])
def test_an_agent_that_is_gone_has_its_part_in_what_its_team_still_gets(reward, second):
    # Agent 2 is done in the first of three steps, agent 1 in the last. Values are 0, γ = λ = 1.
    terminated = jnp.array([[[False, True]], [[False, True]], [[True, True]]])
    alive = jnp.array([[[True, True]], [[True, False]], [[True, False]]])
    blank, pay = jnp.zeros((3, 1, 2)), jnp.array([1.0, 2.0, 4.0])
    transitions = Transition(
        seen(alive),
        jnp.zeros((3, 1, 2), int),
        jnp.broadcast_to(pay[:, None, None], (3, 1, 2)),
        terminated,
        jnp.zeros((3, 1, 2), bool),
        terminated.all(-1),
        blank,
        jnp.zeros((3, 1), int),
    )
    networks = SimpleNamespace(value=lambda _params, view: jnp.zeros(view.alive.shape))
    state = SimpleNamespace(params=None, moments=Moments.zero())
    hyper = hyperparameters(mappo.Args(gamma=1.0, gae_lambda=1.0))
    spec = replace(SPEC, reward=reward)
    found, target = mappo.advantages(networks, hyper, spec, state, transitions, transitions.view)
    np.testing.assert_allclose(found[:, 0, 0], [7.0, 6.0, 4.0])
    np.testing.assert_allclose(found[: len(second), 0, 1], second)
    np.testing.assert_array_equal(found, target)


def test_the_loss_of_a_minibatch_by_hand():
    # Two steps of two agents, the last of which is dead in the second: it has a value, no action.
    outputs = jnp.zeros((2, 2, 2))
    networks = mappo.Networks(
        actor=SimpleNamespace(apply=lambda *_: (outputs, ())),
        head=categorical,
        critic=SimpleNamespace(apply=lambda *_: (jnp.ones((2, 2, 1)), ())),
    )
    alive = jnp.array([[True, True], [True, False]])
    batch = mappo.Batch(
        view=seen(alive),
        action=jnp.zeros((2, 2), int),
        behaviour_log_prob=jnp.log(jnp.array([[0.5, 0.25], [1.0, 1e-9]])),
        advantage=jnp.array([[1.0, 2.0], [3.0, 1e6]]),
        target=jnp.array([[1.0, 3.0], [1.0, -1.0]]),
    )
    hyper = hyperparameters(mappo.Args(clip=0.2, entropy=0.01))
    total, metrics = mappo.loss(mappo.Params((), ()), networks, hyper, batch)
    # Ratios 1, 2 (clipped: its advantage is 0) and 1/2; advantages -a, 0, a with a = √1.5.
    a = np.sqrt(1.5)
    np.testing.assert_allclose(metrics["policy_loss"], -(-a + 0 + 0.5 * a) / 3, rtol=1e-5)
    np.testing.assert_allclose(metrics["value_loss"], 0.5 * (0 + 4 + 0 + 4) / 4)
    np.testing.assert_allclose(metrics["entropy"], np.log(2), rtol=1e-6)
    np.testing.assert_allclose(total, a / 6 + 1.0 - 0.01 * np.log(2), rtol=1e-5)


def test_values_are_scaled_and_followed_to_the_true_next_view():
    # Two episodes in four steps, the first truncated in the second step. Values are normalised:
    # those of views are 0.5, 1, 2, 3, those of the views they led to 1, 4, 3, 5; mean 1, std 2.
    def view(numbers):
        number = jnp.array(numbers)[:, None]
        return seen(jnp.ones((4, 1, 2), bool))._replace(state=number[..., None])

    last = jnp.array([[False], [True], [False], [False]])
    flags = jnp.broadcast_to(last[..., None], (4, 1, 2))
    reward = jnp.array([[[1.0, 2.0]], [[0.0, 1.0]], [[2.0, 0.0]], [[1.0, 0.0]]])
    transitions = Transition(
        view([0.5, 1.0, 2.0, 3.0]),
        jnp.zeros((4, 1, 2), int),
        reward,
        jnp.zeros((4, 1, 2), bool),
        flags,
        last,
        jnp.zeros((4, 1, 2)),
        jnp.zeros((4, 1), int),
    )
    networks = SimpleNamespace(
        value=lambda scale, view: scale * jnp.broadcast_to(view.state, view.alive.shape)
    )
    moments = Moments(jnp.array(1e6), jnp.array(1.0), jnp.array(4e6))
    state = SimpleNamespace(params=jnp.array(1.0), moments=moments)
    hyper = hyperparameters(mappo.Args(gamma=0.5, gae_lambda=0.25))
    found, target = mappo.advantages(
        networks, hyper, SPEC, state, transitions, view([1.0, 4.0, 3.0, 5.0])
    )
    # Values 2, 3, 5, 7 and, of the next views, 3, 9, 7, 11. A truncated step bootstraps, and no
    # advantage comes back over the episode's end.
    delta = (
        reward[:, 0] + 0.5 * np.array([[3.0], [9], [7], [11]]) - np.array([[2.0], [3], [5], [7]])
    )
    wanted = np.array([delta[0] + delta[1] / 8, delta[1], delta[2] + delta[3] / 8, delta[3]])
    np.testing.assert_allclose(found[:, 0], wanted, rtol=1e-5)
    np.testing.assert_allclose(target[:, 0], wanted + np.array([[2.0], [3], [5], [7]]), rtol=1e-5)


STALE = Moments(jnp.array(10.0), jnp.array(3.0), jnp.array(40.0))


@pytest.fixture(scope="module")
def iteration():
    """What one iteration gives its parts: the arguments of `advantages` and of `learn`."""
    advantages, seen = mappo.advantages, []

    def called(*args):
        seen.append((args[3:], advantages(*args)))
        return seen[-1][1]

    def learn(networks, args, hyper, state, batch, key):
        return state, {"advantages": seen[-1], "batch": batch}

    args = mappo.Args(num_envs=2, num_steps=4, minibatches=1, hidden=4, max_grad_norm=0.5)
    env, hyper = envs.make("probe/two-step"), hyperparameters(args)
    program = mappo.make(env.spec, structure(args), env)
    before = jax.jit(program.init)(jax.random.key(0), hyper)._replace(moments=STALE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mappo, "advantages", called)
        patch.setattr(mappo, "learn", learn)
        after, found = jax.jit(program.stages[0].update)(before, None, jax.random.key(1), hyper)
    return after, found


def test_values_are_scaled_by_stale_moments_and_targets_by_new_ones(iteration):
    after, found = iteration
    (state, transitions, _), (advantage, target) = found["advantages"]
    jax.tree.map(np.testing.assert_array_equal, state.moments, STALE)
    wanted = STALE.update(target, transitions.view.alive)
    np.testing.assert_allclose(after.moments, wanted, rtol=1e-6)
    assert abs(wanted.mean - STALE.mean) > 0.1
    normalised = (target - wanted.mean) / wanted.std
    np.testing.assert_allclose(found["batch"].target, normalised.reshape(-1, 2), rtol=1e-5)
    np.testing.assert_array_equal(found["batch"].advantage, advantage.reshape(-1, 2))


def test_an_iteration_learns_from_its_own_steps_and_the_views_they_led_to(iteration):
    after, found = iteration
    (_, transitions, next_views), _ = found["advantages"]
    seen = transitions.view.state
    np.testing.assert_array_equal(found["batch"].view.state, seen.reshape(-1, 5))
    # What a step led to is the next row, but where the episode ended: there it is time 2, not 0.
    assert seen[:, 0, 0].tolist() == [0, 1, 0, 1]
    np.testing.assert_array_equal(next_views.state[..., 0], seen[..., 0] + 1)
    assert int(after.iteration) == 1


def test_each_epoch_goes_over_the_samples_in_an_order_of_its_own(monkeypatch):
    # Nine samples in four minibatches of two: each epoch leaves one of them out. The loss tells
    # which are in a minibatch, and the optimiser writes that down.
    monkeypatch.setattr(
        mappo,
        "loss",
        lambda params, networks, hyper, batch: (
            params @ batch.advantage[:, 0],
            {"loss": batch.advantage.sum()},
        ),
    )

    def write(grads, noted, params=None):
        place, log = noted
        return jnp.ones(2), (place + 1, log.at[place].set(grads))

    optimiser = optax.GradientTransformation(lambda _: None, write)
    blank = jnp.zeros((9, 2))
    batch = mappo.Batch(
        seen(jnp.ones((9, 2), bool)),
        jnp.zeros((9, 2), int),
        blank,
        jnp.broadcast_to(jnp.arange(9.0)[:, None], (9, 2)),
        blank,
    )
    state = mappo.State(jnp.zeros(2), (jnp.array(0), jnp.full((12, 2), -1.0)), *[None] * 4)
    args = mappo.Args(epochs=3, minibatches=4)
    monkeypatch.setattr(mappo, "clipped_adam", lambda *_, **__: optimiser)
    key, hyper = jax.random.key(0), hyperparameters(args)
    after, metrics = mappo.learn(None, args, hyper, state, batch, key)
    count, log = after.optimiser
    assert int(count) == 12
    np.testing.assert_array_equal(after.params, [12, 12])
    epochs = np.asarray(log).reshape(3, 8)
    for epoch in epochs:
        assert len({*epoch.tolist()} & {*range(9)}) == 8
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    np.testing.assert_allclose(metrics["loss"], 2 * log.sum() / 12)


@pytest.mark.parametrize("minibatches", [8, 9])
def test_there_are_enough_steps_for_the_minibatches(minibatches):
    args = mappo.Args(num_envs=2, num_steps=4, minibatches=minibatches, hidden=4)
    env = envs.make("probe/match")
    if minibatches == 8:
        mappo.make(env.spec, args, env)
    else:
        with pytest.raises(OptionError, match="cannot be divided into 9 minibatches"):
            mappo.make(env.spec, args, env)


def test_by_default_every_step_of_an_update_is_in_a_minibatch():
    args = mappo.Args()
    assert args.num_envs * args.num_steps % args.minibatches == 0
