"""Proximal policy optimisation against numbers computed by hand, and on the probes."""

from dataclasses import asdict, replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from offmarl import envs, load_policy
from offmarl.distributions import categorical
from offmarl.errors import OptionError
from offmarl.networks import (
    Moments,
    make_network,
    observation_encoder,
    view_encoder,
)
from offmarl.programs import hyperparameters, registry
from offmarl.programs.learning import ppo
from offmarl.programs.learning.ppo import (
    ActorCritic,
    Networks,
    RolloutWindows,
    State,
    actor_config,
)
from offmarl.programs.program import structure
from offmarl.programs.registry import origin_of
from offmarl.types import Discrete, EnvSpec
from recorders import ippo, mappo
from tests.rollouts import steps_of, view_of
from tests.runs import write_policy

from .learning import GUIDED, Given, OneStep, begun, learn, train

SPEC = EnvSpec("", 2, 1, 1, Discrete(2))
BOTH = pytest.mark.parametrize("recorder", [mappo, ippo], ids=["mappo", "ippo"])


NOTHING = ActorCritic((), ())


def views(alive, numbers=None):
    """Views ``(*b, 2, ...)`` without information, or whose state and observations are numbers."""
    alive = jnp.asarray(alive)
    numbers = jnp.zeros(alive.shape[:-1]) if numbers is None else numbers
    return view_of(SPEC, numbers, alive=alive)


def steps(view, reward, terminated, last):
    """Steps ``(T, E, ...)`` whose action is 0."""
    flags = jnp.broadcast_to(last[..., None], terminated.shape) & ~terminated
    fields = {"view": view, "reward": reward, "terminated": terminated, "truncated": flags}
    return steps_of(SPEC, last, **fields)


class ValuesOf(Networks):
    """Networks of which only the critic is used: a function of the view."""

    def value(self, params, carry, view, first):
        return self.critic_input(view), ()

    def next_value(self, params, carries, view):
        return self.critic_input(view)


def networks_of(value):
    return ValuesOf(None, None, None, value, (0, 0))


def state_of(params=NOTHING, moments=None, carry=(), optimiser=()):
    """A state of which only these fields are used."""
    return State(params, optimiser, moments or Moments.zero(1), None, carry, None, None)


# ---------------------------------------------------------------------------------- advantages


@pytest.mark.parametrize(("reward", "second"), [("team", [7.0, 6.0, 4.0]), ("individual", [1.0])])
def test_an_agent_that_is_done_contributes_to_what_its_team_still_gets(reward, second):
    # Agent 2 is done in the first of three steps, agent 1 in the last. Values are 0, γ = λ = 1.
    terminated = jnp.array([[[False, True]], [[False, True]], [[True, True]]])
    alive = jnp.array([[[True, True]], [[True, False]], [[True, False]]])
    pay = jnp.broadcast_to(jnp.array([1.0, 2.0, 4.0])[:, None, None], (3, 1, 2))
    batch = steps(views(alive), pay, terminated, terminated.all(-1))
    state = state_of()
    hyper = hyperparameters(mappo.Args(gamma=1.0, gae_lambda=1.0))
    networks = networks_of(lambda view: jnp.zeros(view.alive.shape))
    spec = replace(SPEC, reward=reward)
    estimates = ppo.estimate(networks, hyper, spec, state, batch, pay, batch.view)
    np.testing.assert_allclose(estimates.advantage[:, 0, 0], [7.0, 6.0, 4.0])
    np.testing.assert_allclose(estimates.advantage[: len(second), 0, 1], second)
    np.testing.assert_array_equal(estimates.advantage, estimates.target)


REWARD = jnp.array([[[1.0, 2.0]], [[0.0, 1.0]], [[2.0, 0.0]], [[1.0, 0.0]]])
LAST = jnp.array([[False], [True], [False], [False]])
NOBODY = jnp.zeros((4, 1, 2), bool)


def expected_advantages(values, next_values):
    """Return the advantages for γ = 1/2, λ = 1/4, where the second of four steps is truncated."""
    delta = REWARD[:, 0] + 0.5 * np.array(next_values)[:, None] - np.array(values)[:, None]
    return np.array([delta[0] + delta[1] / 8, delta[1], delta[2] + delta[3] / 8, delta[3]])


def test_values_are_scaled_and_bootstrap_from_the_true_next_view():
    # Normalised values of views are 0.5, 1, 2, 3, those of next views 1, 4, 3, 5; mean 1, std 2.
    alive = jnp.ones((4, 1, 2), bool)
    batch = steps(views(alive, [[0.5], [1.0], [2.0], [3.0]]), REWARD, NOBODY, LAST)
    networks = networks_of(lambda view: jnp.broadcast_to(view.state, view.alive.shape))
    moments = Moments(jnp.array([1e6]), jnp.array([1.0]), jnp.array([4e6]))
    state = state_of(moments=moments)
    hyper = hyperparameters(mappo.Args(gamma=0.5, gae_lambda=0.25))
    after = views(alive, [[1.0], [4.0], [3.0], [5.0]])
    estimates = ppo.estimate(networks, hyper, SPEC, state, batch, batch.reward, after)
    expected = expected_advantages([2, 3, 5, 7], [3, 9, 7, 11])
    np.testing.assert_allclose(estimates.advantage[:, 0], expected, rtol=1e-5)
    scaled = expected + np.array([[2.0], [3], [5], [7]])
    np.testing.assert_allclose(estimates.target[:, 0], scaled, rtol=1e-5)
    np.testing.assert_array_equal(estimates.value[:, 0, 0], [0.5, 1, 2, 3])


def test_values_in_an_episode_that_goes_on_are_those_of_the_next_steps():
    batch = steps(views(~NOBODY, [[0.5], [1.0], [2.0], [3.0]]), REWARD, NOBODY, ~LAST & LAST)
    networks = networks_of(lambda view: jnp.broadcast_to(view.state, view.alive.shape))
    after = views(~NOBODY, [[9.0], [9.0], [9.0], [5.0]])  # of which only the last is valued
    hyper = hyperparameters(mappo.Args(gamma=0.5, gae_lambda=0.0))
    estimates = ppo.estimate(networks, hyper, SPEC, state_of(), batch, REWARD, after)
    change = 0.5 * np.array([1.0, 2, 3, 5]) - np.array([0.5, 1, 2, 3])
    np.testing.assert_allclose(estimates.advantage, REWARD + change[:, None, None])


@pytest.mark.parametrize("lag", [None, 0.0])
def test_an_agent_with_a_reward_of_its_own_that_is_truncated_alone(lag):
    # Agent 1 is truncated in the second of four steps and then absent. All values are right.
    absent = jnp.arange(4)[:, None, None] > jnp.array([1, 9])
    batch = steps(views(~absent), jnp.where(absent, 0.0, 1.0), NOBODY, ~LAST & LAST)
    batch = batch._replace(truncated=absent.at[1, :, 0].set(True))
    networks = networks_of(lambda view: jnp.full(view.alive.shape, 10.0))
    hyper = hyperparameters(mappo.Args(gamma=0.9, gae_lambda=1.0))
    ratio = None if lag is None else jnp.zeros((4, 1, 2))
    spec = replace(SPEC, reward="individual")
    result = ppo.estimate(networks, hyper, spec, state_of(), batch, batch.reward, batch.view, ratio)
    np.testing.assert_allclose(jnp.where(absent, 0.0, result.advantage), 0.0, atol=1e-5)
    np.testing.assert_allclose(result.target, 10.0, rtol=1e-6)


class Sum:
    """A critic with memory, whose value is the sum of an episode's observations so far."""

    def apply(self, _params, *args, method="__call__"):
        if method == "__call__":
            carry, inputs = args
            return carry + inputs, carry + inputs
        inputs, first, carry = args
        sums = []
        for observation, begins in zip(inputs, first, strict=True):
            carry = jnp.where(begins[:, None, None], 0, carry) + observation
            sums.append(carry)
        return jnp.stack(sums), jnp.stack(sums)


def test_a_critic_with_memory_at_a_truncation():
    # Observations 1, 2 | 3, 4; final ones 10 and 20. The memory before the first step is 100.
    alive = jnp.ones((4, 1, 2), bool)
    batch = steps(views(alive, [[1], [2], [3], [4]]), REWARD, NOBODY, LAST)
    after = views(alive, [[2], [10], [4], [20]])
    networks = Networks(None, None, Sum(), lambda view: view.observation, (0, 0))
    before = jnp.full((1, 2, 1), 100.0)
    state = state_of(carry=before)
    hyper = hyperparameters(mappo.Args(gamma=0.5, gae_lambda=0.25))
    estimates = ppo.estimate(networks, hyper, SPEC, state, batch, batch.reward, after)
    np.testing.assert_array_equal(estimates.value[:, 0, 0], [101, 103, 3, 7])
    expected = expected_advantages([101, 103, 3, 7], [103, 113, 7, 27])
    np.testing.assert_allclose(estimates.advantage[:, 0], expected, rtol=1e-5)


# ---------------------------------------------------------------------------------- the loss


ALIVE = jnp.array([[[True, True]], [[True, False]]])
PROBABILITIES = jnp.array([[[0.5, 0.25]], [[1.0, 1e-9]]])
A = np.sqrt(1.5)


@pytest.mark.parametrize(
    ("options", "policy", "value"),
    [
        # Ratios 1, 2 (clipped; its advantage is 0) and 1/2; advantages -A, 0, A. Errors 0, 2, 0,
        # 2.
        ({}, -(-A + 0 + 0.5 * A) / 3, 0.5 * (4 + 4) / 4),
        # Old values 0.5, -1, 1, 1.1 and ε = 0.2: clipped to 0.7, -0.8, 1, 1; errors 0.3, 3.8, 0, 2.
        ({"clip_value": True}, A / 6, 0.5 * (0.09 + 3.8**2 + 0 + 4) / 4),
        # Beyond 1: error - 1/2.
        ({"huber": 1.0}, A / 6, (1.5 + 1.5) / 4),
        # Ratio 2 is clipped to 1.2.
        ({"normalise_advantages": False}, -(1 + 1.2 * 2 + 0.5 * 3) / 3, 1.0),
    ],
)
def test_the_loss_of_a_minibatch_by_hand(options, policy, value):
    # A window of two steps of two agents; the last agent is dead in the second step: it has a
    # value, but no action.
    networks = Networks(Given(), categorical, Given(), lambda view: view, (0, 0))
    params = ActorCritic(jnp.zeros((2, 1, 2, 2)), jnp.ones((2, 1, 2, 1)))
    batch = RolloutWindows(
        view=views(ALIVE),
        first=jnp.zeros((2, 1), bool),
        action=jnp.zeros((2, 1, 2), int),
        behaviour_log_prob=jnp.log(PROBABILITIES),
        advantage=jnp.array([[[1.0, 2.0]], [[3.0, 1e6]]]),
        value=jnp.array([[[0.5, -1.0]], [[1.0, 1.1]]]),
        target=jnp.array([[[1.0, 3.0]], [[1.0, -1.0]]]),
    )
    args = mappo.Args(clip=0.2, value_weight=0.5, **options)
    total, metrics = ppo.loss(
        params, networks, args, hyperparameters(args), jnp.float32(0.01), batch, NOTHING
    )
    np.testing.assert_allclose(metrics["policy_loss"], policy, rtol=1e-5)
    np.testing.assert_allclose(metrics["value_loss"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["entropy"], np.log(2), rtol=1e-6)
    kl = (0 + (1 - np.log(2)) + (-0.5 + np.log(2))) / 3
    np.testing.assert_allclose(metrics["kl"], kl, rtol=1e-5)
    np.testing.assert_allclose(total, policy + 0.5 * value - 0.01 * np.log(2), rtol=1e-5)


# ---------------------------------------------------------------------------------- teams


def test_advantages_are_normalised_within_each_team():
    # The first two agents are a team, and the third opposes them. One entry does not count.
    advantage = jnp.array([[1.0, 3.0, -100.0], [5.0, 1e6, 300.0]])
    counts = jnp.array([[True, True, True], [True, False, True]])
    networks = networks_of(None)._replace(teams=(0, 0, 1))
    result = ppo.normalise(advantage, counts, networks)
    spread = np.sqrt(8 / 3)
    expected = [[-2 / spread, 0, -1], [2 / spread, 0, 1]]
    np.testing.assert_allclose(result[counts], np.array(expected)[counts], rtol=1e-5)


def test_targets_are_normalised_by_the_moments_of_each_team():
    # Values of the first team had mean 10 and deviation 2 over four targets; the second team has
    # none so far. Targets are 10 and 40 | 1 and 7.
    moments = Moments(jnp.array([4.0, 0]), jnp.array([10.0, 0]), jnp.array([16.0, 0]))
    networks = networks_of(None)._replace(teams=(0, 1))
    target = jnp.array([[[10.0, 1.0]], [[40.0, 7.0]]])
    estimates = ppo.StepEstimates(target, target, jnp.zeros((2, 1, 2)), ())
    alive = jnp.ones((2, 1, 2), bool)
    after, result = ppo.normalise_targets(networks, state_of(moments=moments), estimates, alive)
    mean, std = np.array([15, 4]), np.sqrt([(16 + 450 + 15**2 * 4 * 2 / 6) / 6, 9])
    np.testing.assert_allclose(after.moments.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(after.moments.std, std, rtol=1e-6)
    np.testing.assert_allclose(result.target * std + mean, target, rtol=1e-6)
    assert result.advantage is estimates.advantage and result.value is estimates.value


RIVALS = OneStep(
    EnvSpec("rivals", 2, 1, 1, Discrete(2), reward="individual", teams=(1, 0), time_limit=1),
    lambda action: jnp.array([1.0, -100.0]) * action,
)


@BOTH
def test_opposing_teams_have_scales_of_their_own(recorder):
    args = recorder.Args(num_envs=4, num_steps=8, minibatches=1, hidden=4)
    ((after, batch, _),) = updates(args, moments=None, env=RIVALS)
    assert after.moments.mean.shape == (2,)  # in the order of the teams' numbers
    action = batch.action[0]
    expected = -100.0 * action[:, 1].mean(), 1.0 * action[:, 0].mean()
    np.testing.assert_allclose(after.moments.mean, expected, rtol=1e-5)
    targets = batch.target[0]
    np.testing.assert_allclose(targets.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(targets.std(0), 1, rtol=1e-4)


# ---------------------------------------------------------------------------------- the update

STALE = Moments(jnp.array([10.0]), jnp.array([3.0]), jnp.array([40.0]))


def updates(args, count=1, moments=STALE, env="probe/two-step"):
    """Return the states after each of some updates, with the windows and carries learned from."""
    structures = []

    def learn(networks, args, hyper, state, batch, carry, progress, key):
        leaves, tree = jax.tree.flatten((batch, carry))
        structures.append(tree)
        return state, {f"{number:03}": leaf for number, leaf in enumerate(leaves)}  # in order

    recorder = mappo if isinstance(args, mappo.Args) else ippo
    env = envs.make(env) if isinstance(env, str) else env
    program, state, hyper = begun(recorder, args, env)
    if moments is not None:
        state = state._replace(moments=moments)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "learn", learn)
        update = jax.jit(program.stages[0].update)
        for number in range(1, count + 1):
            state, metrics = update(state, None, jax.random.key(number), hyper)
            leaves = [metrics[name] for name in sorted(metrics) if name.isdecimal()]
            results.append((state, *structures[0].unflatten(leaves)))
    return results


def networks_for(recorder, args, spec):
    """Return the networks that a recorder trains."""
    config, central = actor_config(spec, args), recorder is mappo
    encoder = (view_encoder if central else observation_encoder)(spec, args.hidden)
    sees = "view" if central else "observation"
    critic = make_network(config, spec, 1, encoder, sees=sees)
    actor = make_network(config, spec, spec.num_actions, None)
    see = (lambda view: view) if central else (lambda view: view.observation)
    return Networks(actor, categorical, critic, see, (0,) * spec.num_agents)


def test_values_are_estimated_by_stale_moments_and_learned_by_new_ones():
    args = mappo.Args(num_envs=2, num_steps=4, minibatches=1, hidden=4)
    ((after, batch, _),) = updates(args)
    steps = after.capture.buffer.experience.transition
    assert batch.first.shape == (1, 8)  # feed-forward networks learn from single steps
    moments = after.moments
    target = batch.target * moments.std + moments.mean
    chex.assert_trees_all_close(moments, STALE.update(target, batch.view.alive), rtol=1e-5)
    assert abs(moments.mean - STALE.mean) > 0.1
    # The values of the critic are those of before, on which advantages are based.
    value = batch.value * STALE.std + STALE.mean
    np.testing.assert_allclose(target, batch.advantage + value, atol=1e-5)
    # In the order of time, then of environments, as they were recorded.
    states = steps.view.state.swapaxes(0, 1).reshape(1, 8, 5)
    np.testing.assert_array_equal(batch.view.state, states)
    assert int(after.iteration) == 1


@pytest.mark.parametrize(
    ("recorder", "share", "length"),
    [
        pytest.param(mappo, True, None, marks=pytest.mark.slow),
        (mappo, False, 4),
        pytest.param(ippo, True, 4, marks=pytest.mark.slow),
    ],
)
def test_windows_start_from_the_memory_that_acting_had(recorder, share, length):
    # Episodes of three steps in rollouts of eight: the second one begins inside an episode, and
    # windows of four do, too. Where the memory is wrong, so are the log-probabilities.
    args = recorder.Args(
        num_envs=3,
        num_steps=8,
        minibatches=1,
        hidden=8,
        network="recurrent",
        length=length,
        share_parameters=share,
    )
    _, (after, batch, carry), (third, *_) = updates(args, 3, env="probe/memory")
    # The third rollout ends with an episode, which the critic forgets.
    np.testing.assert_array_equal(third.critic_carry, 0)
    networks = networks_for(recorder, args, envs.make("probe/memory").spec)
    assert batch.first.shape == ((4, 6) if length else (8, 3))
    assert jnp.abs(carry.actor).max() > 0.01  # inside an episode
    log_prob = jax.jit(networks.evaluate)(after.params, carry, batch, batch.first)[0]
    np.testing.assert_allclose(log_prob, batch.behaviour_log_prob, rtol=0, atol=2e-7)
    blank = ActorCritic(*jax.tree.map(jnp.zeros_like, carry))
    forgotten = jax.jit(networks.evaluate)(after.params, blank, batch, batch.first)[0]
    assert jnp.abs(forgotten - batch.behaviour_log_prob).max() > 1e-5
    # The same holds for the critic's values, and for its memory after the rollout.
    values, carries = jax.jit(networks.value)(after.params, carry, batch.view, batch.first)
    np.testing.assert_allclose(values, batch.value, rtol=0, atol=1e-6)
    ended = after.rollout.env_state.time == 0
    np.testing.assert_array_equal((after.critic_carry == 0).all((1, 2)), ended)
    running = np.flatnonzero(~np.asarray(ended))
    expected = carries[-1, -3:][running]
    np.testing.assert_allclose(after.critic_carry[running], expected, atol=1e-6)


def test_each_epoch_takes_the_windows_in_an_order_of_its_own(monkeypatch):
    # Nine windows in four minibatches of two: each epoch leaves one of them out. The loss tells
    # which are in a minibatch, and the optimiser writes that down.
    monkeypatch.setattr(
        ppo,
        "loss",
        lambda params, networks, args, hyper, entropy, batch, carry: (
            params.actor @ batch.advantage[0, :, 0],
            {"loss": batch.advantage.sum()},
        ),
    )

    def write(grads, noted, params=None):
        place, log = noted
        return ActorCritic(jnp.ones(2), ()), (place + 1, log.at[place].set(grads.actor))

    optimiser = optax.GradientTransformation(lambda _: None, write)
    blank = jnp.zeros((1, 9, 2))
    numbers = jnp.broadcast_to(jnp.arange(9.0)[:, None], (1, 9, 2))
    batch = RolloutWindows(
        views(jnp.ones((1, 9, 2), bool)),
        jnp.zeros((1, 9), bool),
        blank.astype(int),
        blank,
        numbers,
        blank,
        blank,
    )
    log = jnp.array(0), jnp.full((12, 2), -1.0)
    state = state_of(ActorCritic(jnp.zeros(2), ()), optimiser=log)
    args = mappo.Args(epochs=3, minibatches=4)
    monkeypatch.setattr(ppo, "clipped_adam", lambda *_, **__: optimiser)
    after, metrics = ppo.learn(
        networks_of(None),
        args,
        hyperparameters(args),
        state,
        batch,
        NOTHING,
        jnp.float32(0),
        jax.random.key(0),
    )
    count, log = after.optimiser
    assert int(count) == 12
    np.testing.assert_array_equal(after.params.actor, [12, 12])
    epochs = np.asarray(log).reshape(3, 8)
    for epoch in epochs:
        assert len({*epoch.tolist()} & {*range(9)}) == 8
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    np.testing.assert_allclose(metrics["loss"], 2 * log.sum() / 12, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "rate", "weight"),
    [
        ({}, 7e-4, 0.01),
        ({"schedule": "linear"}, 1.75e-4, 0.01),
        ({"entropy_schedule": "linear"}, 7e-4, 0.0025),
    ],
)
def test_the_step_size_and_the_entropy_bonus_after_three_quarters(
    monkeypatch, options, rate, weight
):
    values = {}

    def loss(params, networks, args, hyper, entropy, batch, carry):
        values["entropy"] = entropy
        return params.actor.sum(), {}

    def adam(learning_rate, max_grad_norm, *, eps, separately):
        values.update(rate=learning_rate, norm=max_grad_norm, separately=separately)
        return optax.sgd(0.0)

    monkeypatch.setattr(ppo, "loss", loss)
    monkeypatch.setattr(ppo, "clipped_adam", adam)
    args = mappo.Args(minibatches=1, epochs=1, clip_separately=True, **options)
    batch = RolloutWindows(None, jnp.zeros((1, 4), bool), *[None] * 5)
    params = ActorCritic(jnp.zeros(2), ())
    state = state_of(params, optimiser=optax.sgd(0.0).init(params))
    with jax.disable_jit():
        ppo.learn(
            networks_of(None),
            args,
            hyperparameters(args),
            state,
            batch,
            NOTHING,
            jnp.float32(0.75),
            jax.random.key(0),
        )
    np.testing.assert_allclose([values["rate"], values["entropy"]], [rate, weight], rtol=1e-5)
    assert values["separately"] and values["norm"] == 0.5


# ---------------------------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("fraction", "wanted"), [(None, [3, 6]), (1.0, [18, 21]), (0.5, [3, 6]), (0.75, [13, 16])]
)
def test_rewards_are_scaled_with_what_is_left_of_shaped_ones(fraction, wanted):
    """Halfway, a fraction of 1 leaves a half of the shaped reward, ¾ a third, and ½ nothing."""
    args = ippo.Args(reward_scale=3.0, shaped_rewards=fraction)
    reward, shaping = jnp.array([[[1.0, 2.0]]]), jnp.full((1, 1, 2), 10.0)
    halfway = hyperparameters(args), reward, shaping, jnp.float32(0.5)
    result, metrics = ppo.learned_reward(args, *halfway)
    np.testing.assert_allclose(result[0, 0], wanted, rtol=1e-6)
    assert list(metrics) == ([] if fraction is None else ["shaping_weight"])


@pytest.mark.slow
def test_shaped_rewards_fade_out_and_are_not_recorded():
    args = ippo.Args(
        num_envs=2,
        num_steps=2,
        total_steps=8,
        minibatches=1,
        hidden=4,
        reward_scale=2.0,
        shaped_rewards=1.0,
        normalise_values=False,
    )
    results = updates(args, 2, moments=None, env=GUIDED)
    for (after, batch, _), weight in zip(results, (1.0, 0.5), strict=True):
        np.testing.assert_array_equal(jnp.stack(after.moments), 0)  # values are not normalised
        reward = batch.advantage + batch.value  # of episodes of one step
        expected = 2.0 * (1 + weight * np.array([0, 10]) * batch.action[0])
        np.testing.assert_allclose(reward[0], expected, rtol=1e-5)
        np.testing.assert_array_equal(after.capture.buffer.experience.transition.reward, 1)


def test_a_policy_that_learned_from_shaped_rewards_is_built_without_its_environment(tmp_path):
    args, spec = ippo.Args(shaped_rewards=0.5, hidden=4), GUIDED.spec
    _, file, sha256 = origin_of(registry.load("recorder", "ippo").make)
    record = {"kind": "recorder", "program": "ippo", "file": file, "sha256": sha256}
    record |= {"args": {**asdict(args), "out": None}}
    write_policy(tmp_path / "run", actor_config(spec, args), spec, [0], **record)
    assert load_policy(tmp_path / "run").spec == spec


# ---------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minibatches": 9}, "8 windows to learn from, which cannot be divided into 9"),
        ({"network": "recurrent", "minibatches": 3}, "are 2 windows .* divided into 3"),
        ({"length": 2}, "--length 2 is for recurrent networks"),
        ({"network": "recurrent", "length": 3}, "--num-steps 4 is not divisible .* --length 3"),
        ({"shaped_rewards": 0.5}, "probe/match has no shaped rewards"),
        ({"share_parameters": False, "critic": "pooled"}, "one critic that all agents share"),
    ],
)
def test_arguments_that_do_not_fit_together(options, message):
    env = envs.make("probe/match")
    args = mappo.Args(**({"num_envs": 2, "num_steps": 4, "minibatches": 2} | options))
    with pytest.raises(OptionError, match=message):
        mappo.make(env.spec, structure(args), env)


@BOTH
def test_by_default_every_step_of_an_update_is_in_a_minibatch(recorder):
    args = recorder.Args()
    assert args.num_envs * args.num_steps % args.minibatches == 0


# ---------------------------------------------------------------------------------- learning

SMALL = {"num_envs": 16, "num_steps": 18, "total_steps": 12_000, "learning_rate": 5e-3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recorder", "network"),
    [
        (mappo, "recurrent"),
        (ippo, "feedforward"),
        pytest.param(mappo, "feedforward", marks=pytest.mark.nightly),
        pytest.param(ippo, "recurrent", marks=pytest.mark.nightly),
    ],
)
def test_values_and_policies_of_the_two_step_probe(recorder, network):
    # The best policy chooses 1 at first. The values are then γ at the start and 1 afterwards.
    args = recorder.Args(env="probe/two-step", network=network, gamma=0.9, hidden=32, **SMALL)
    env, _, state = train(recorder, args)
    networks, start = networks_for(recorder, args, env.spec), env.reset(jax.random.key(0))
    later = env.step(jax.random.key(0), start[0], jnp.ones(2, int))[1].next_view
    views = jax.tree.map(lambda *leaves: jnp.stack(leaves)[:, None], start[1].view, later)
    memory = (networks.actor.initial_carry(2), networks.critic.initial_carry(2))
    carry = ActorCritic(*jax.tree.map(lambda leaf: leaf[None], memory))
    first, actions = jnp.zeros((2, 1), bool), jnp.ones((2, 1, 2), int)
    steps = steps_of(env.spec, first, action=actions, view=views)
    log_prob, _, _ = networks.evaluate(state.params, carry, steps, first)
    assert (jnp.exp(log_prob[0]) > 0.9).all()
    values, _ = networks.value(state.params, carry, views, first)
    values = values[:, 0] * state.moments.std + state.moments.mean
    np.testing.assert_allclose(values, [[0.9, 0.9], [1, 1]], atol=0.06)


@pytest.mark.nightly
@pytest.mark.parametrize("network", ["feedforward", "recurrent"])
@pytest.mark.parametrize("probe", ["one-step", "two-step", "observation", "match", "memory"])
@BOTH
def test_the_optimum_of_a_probe(recorder, probe, network):
    env = envs.make(f"probe/{probe}")
    args = recorder.Args(env=env.spec.name, network=network, hidden=32, **SMALL)
    greedy, sampled = learn(recorder, args)
    if (probe, network) == ("memory", "feedforward"):  # it cannot remember its cue
        assert greedy < 0.7
    else:
        assert greedy == env.optimal_return and sampled > 0.9
