"""MATD3+BC, MADDPG+CQL and OMAR: losses by hand, and what they must ignore."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import norm, truncnorm, uniform

from baselines import bc, maddpg_cql, matd3_bc, omar
from offmarl._compiling import QUICKLY
from offmarl.errors import OptionError, ShapeError
from offmarl.programs import TD_ERRORS, hyperparameters
from offmarl.programs.learning.actor_critic import ActorCritics
from offmarl.programs.learning.offline_actor_critic import (
    Networks,
    conservative_critic_loss,
    conservative_loss,
    critic_loss,
    sample_actions,
)
from offmarl.types import Continuous, Discrete, EnvSpec, Sequence
from tests.programs.test_actor_critics import steps, value_of

from .building import build

GO = EnvSpec("go", 2, 1, 1, Continuous(1), reward="individual")
ALIVE = jnp.ones((3, 2), bool)
ACTION = jnp.full((3, 1, 2, 1), 0.25)


def fake_networks(spec: EnvSpec = GO, sees: str = "joint", values: Any = value_of) -> Networks:
    """Policies that act by tanh(p x), x the number of a view, and critics of known values."""

    def act(p: Any, x: Any, _first: Any, method: str) -> Any:
        assert method == "unroll_batch"
        return jnp.repeat(p * x, spec.action_size, axis=-1)

    actor = SimpleNamespace(apply=act)
    critics = SimpleNamespace(values=values, network=SimpleNamespace(sees=sees))
    return Networks(spec, None, actor, critics)


def hyper_of(module: Any, **options: Any) -> Any:
    return hyperparameters(module.Args(vault=Path(), **options))


# ---------------------------------------------------------------------------------- critics


@partial(jax.jit, static_argnums=0)
def losses(reward: Any, batch: Sequence) -> Any:
    spec = EnvSpec("go", 2, 1, 1, Continuous(1), reward=reward)
    hyper = hyper_of(matd3_bc, gamma=0.5, target_noise=0.0)
    target = ActorCritics(jnp.float32(0.0), (jnp.float32(1.0), jnp.float32(2.0)))
    critics, key = (jnp.float32(1.0), jnp.float32(3.0)), jax.random.key(0)
    return critic_loss(fake_networks(spec), hyper, critics, target, target, batch, key)


@pytest.mark.parametrize(
    ("reward", "ended", "targets", "counted"),
    [
        ("individual", True, [[2, 3], [2, 3], [7, 4]], [[1, 0], [1, 1], [1, 1]]),
        ("individual", False, [[2, 3], [2, 3], [7, 4]], [[1, 1], [1, 1], [1, 1]]),
        ("team", True, [[2, 3], [2, 3], [7, 8]], [[1, 1], [1, 1], [1, 1]]),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_critics_by_hand(reward, ended, targets, counted, known):
    # The target policies do nothing, and the smaller target value is the state itself. The second
    # step is truncated and bootstraps, if the view that it led to is known. At the first step the
    # second agent is dead: its values count if the reward continues.
    batch = steps(ACTION, alive_tm1=ALIVE.at[0, 1].set(False), alive_t=ALIVE)
    batch = batch._replace(next_known=batch.next_known.at[1].set(known))
    batch = batch._replace(weight=jnp.array([1.0, 2.0, 3.0]))
    batch = batch._replace(terminated=batch.terminated.at[0, 0, 1].set(ended))
    loss, metrics = losses(reward, batch)
    # The second agent's action counts for nothing where it is dead.
    joint = np.array([0.25, 0.5, 0.5])
    q = np.array([1.0, 2.0, 3.0]) * np.array([[1.0], [3.0]]) + joint
    errors = (q[..., None] - np.array(targets)) * np.array(counted) * [[1], [known], [1]]
    total = np.sum(np.array(counted) * [[1], [known], [1]])
    weighted = errors**2 * np.array([[1.0], [2.0], [3.0]])
    assert loss == pytest.approx(0.5 * weighted.sum() / total, rel=1e-6)
    assert metrics["td_loss"] == loss
    mean = (q[0][:, None] * np.array(counted)).sum() / np.sum(counted)
    assert metrics["q"] == pytest.approx(mean, rel=1e-6)
    np.testing.assert_allclose(metrics[TD_ERRORS][:, 0], abs(errors).max((0, 2)), rtol=1e-6)


def test_target_actions_are_smoothed_for_each_agent_alone():
    actions = []

    def values(params, view, action, own=None):
        actions.append(action)
        return value_of(params, view, action, own)

    batch = steps(0 * ACTION, alive_tm1=ALIVE, alive_t=ALIVE.at[0, 1].set(False))
    hyper = hyper_of(matd3_bc, target_noise=5.0, target_limit=0.25)
    critics = (jnp.float32(1.0),) * 2
    networks, target = fake_networks(values=values), ActorCritics(jnp.float32(0.0), critics)
    critic_loss(networks, hyper, critics, target, target, batch, jax.random.key(0))
    noise = np.asarray(actions[0])[:, 0, :, 0]
    assert abs(noise).max() == 0.25 and noise[0, 1] == 0  # dead
    assert (noise[1:, 0] != noise[1:, 1]).any()
    hyper = hyper_of(matd3_bc, target_noise=0.0)
    critic_loss(networks, hyper, critics, target, target, batch, jax.random.key(0))
    assert not np.asarray(actions[2]).any()


# ---------------------------------------------------------------------------------- penalty

WIDE = EnvSpec("wide", 2, 1, 1, Continuous(2), reward="individual")


def wide_batch() -> Sequence:
    """Steps in which the second agent lacks the second entry of actions, and dies in the last."""
    action = jnp.full((3, 1, 2, 2), 0.25)
    batch = steps(action, alive_tm1=ALIVE.at[2, 1].set(False), alive_t=ALIVE)
    legal = batch.view.legal_actions.at[:, :, 1, 1].set(False)
    terminated = batch.terminated.at[2].set(True)
    view = batch.view._replace(legal_actions=legal)
    return batch._replace(
        view=view, terminated=terminated, next_known=jnp.array([[1], [0], [1]]) > 0
    )


def test_samples_of_the_penalty_have_the_density_that_is_stated():
    batch, count, std = wide_batch(), 4000, 0.5
    means = np.array([0.9, -0.5])  # in the step and in the next
    action = jnp.broadcast_to(jnp.array(means)[:, None, None], (3, 2, 2, 2))
    sample = jax.jit(sample_actions, static_argnums=3, compiler_options=QUICKLY)
    drawn, log_density, valid = sample(jax.random.key(0), action, batch, count, std)
    acts = np.asarray(batch.view_tm1.legal_actions & batch.view_tm1.alive[..., None])
    kinds = [uniform(-1, 2)]
    kinds += [truncnorm((-1 - m) / std, (1 - m) / std, m, std) for m in means]
    samples = np.split(np.asarray(drawn), 3)
    for kind, draws, density in zip(kinds, samples, np.split(log_density, 3), strict=True):
        expected = np.where(acts, kind.logpdf(draws), 0.0).sum(-1)
        np.testing.assert_allclose(density, expected, rtol=1e-4, atol=2e-4)
        assert not draws[:, ~acts].any() and draws[:, acts].all()
        of_entries = draws[:, acts]
        assert (abs(of_entries) == 1).mean() < 1e-3  # the ends of the range are no atoms
        np.testing.assert_allclose(of_entries.mean(0), kind.mean(), atol=0.03)
        np.testing.assert_allclose(of_entries.std(0), kind.std(), atol=0.03)
        # Agents draw apart from one another, and so do entries.
        assert np.unique(of_entries.round(6)).size > 0.9 * of_entries.size
    # The next view of the second step is unknown; after the third, all agents have terminated.
    expected = np.ones((3 * count, 3, 1, 2), bool)
    expected[2 * count :, 1:] = False
    np.testing.assert_array_equal(valid, expected)
    ends = batch.terminated.at[2, 0, 0].set(False)  # one agent goes on
    later = sample(jax.random.key(0), action, batch._replace(terminated=ends), count, std)[2]
    np.testing.assert_array_equal(later[-2:, :, 0, 0], [[True, False, True]] * 2)


@pytest.mark.parametrize("sees", ["joint", "state"])
def test_the_penalty_of_each_critic_is_of_its_own_values(sees):
    # Values are the sums of the actions, 1 and 5 times.
    def values(scales, view, action, own=None):
        joint = action.sum((-2, -1))[..., None] if sees == "joint" else 0.0
        of_agent = jnp.broadcast_to(joint, action.shape[:-1]) if sees == "joint" else action.sum(-1)
        return jnp.stack([scale * of_agent for scale in scales])[..., None]

    batch, key = wide_batch(), jax.random.key(1)
    args = maddpg_cql.Args(vault=Path(), cql_samples=3, cql_weight=5.0)
    hyper, networks = hyperparameters(args), fake_networks(WIDE, sees, values)
    critics, actor = (jnp.float32(1.0), jnp.float32(5.0)), jnp.float32(0.3)
    target = ActorCritics(actor, critics)

    @partial(jax.jit, compiler_options=QUICKLY)
    def losses(key):
        penalty = conservative_loss(networks, args, hyper, critics, actor, batch, key)
        samples = sample_actions(key, networks.actions(actor, batch), batch, 3, hyper.cql_noise)
        inputs = networks, args, hyper, critics, target, target, batch, key
        return penalty, samples, conservative_critic_loss(*inputs)

    penalty, (action, density, valid), (loss, metrics) = losses(key)
    sums, density = np.asarray(action).sum(-1), np.asarray(density)
    data = np.array([[0.5, 0.25], [0.5, 0.25], [0.5, 0.0]])[:, None]
    if sees == "joint":
        sums, density, data = (np.broadcast_to(x.sum(-1, keepdims=True), x.shape)
                              for x in (sums, density, data))  # fmt: skip
    expected = 0.0
    for scale in (1.0, 5.0):
        logits = np.where(valid, scale * sums - density, -np.inf)
        gap = logsumexp(logits, axis=0) - scale * data
        expected += np.asarray(gap)[[0, 0, 1, 1, 2], 0, [0, 1, 0, 1, 0]].mean()
    assert penalty == pytest.approx(expected, rel=1e-5)
    expected = float(metrics["td_loss"] + 5 * metrics["cql_loss"])
    assert loss == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------------------------- policies

X = np.array([1.0, 1, 2, 2, 3])  # numbers of the views of live agents, below
POLICY = np.tanh(0.3 * X)


def gradient_of(loss: Any) -> tuple[float, dict[str, Any]]:
    """Return the gradient of a policy tanh(0.3 x) beside actions of 0.25."""
    batch = steps(ACTION, alive_tm1=ALIVE.at[2, 1].set(False), alive_t=ALIVE)
    critics = (jnp.float32(1.0), jnp.float32(-2.0))
    return jax.jit(jax.grad(loss, has_aux=True))(
        jnp.float32(0.3), critics, batch, jax.random.key(0)
    )


def test_the_policies_of_matd3_bc_by_hand():
    # The smaller value is -2 x + 0.25 + π, or without the dead agent's action -2 x + π, and is
    # always negative. If a gradient flowed through the mean size, that of the value would vanish.
    hyper = hyper_of(matd3_bc, alpha=2.0)
    gradient, metrics = gradient_of(partial(matd3_bc.actor_loss, fake_networks(), hyper))
    q = -2 * X + np.array([0.25] * 4 + [0.0]) + POLICY
    slope = X * (1 - POLICY**2)
    of_value = -2.0 * slope.mean() / abs(q).mean()
    assert gradient == pytest.approx(of_value + (2 * (POLICY - 0.25) * slope).mean(), rel=1e-5)
    imitation = ((POLICY - 0.25) ** 2).mean()
    assert metrics["policy_loss"] == pytest.approx(imitation + 2.0, rel=1e-5)  # -α q / |q|
    assert metrics["imitation_loss"] == pytest.approx(imitation, rel=1e-5)


def test_the_policies_of_maddpg_cql_by_hand():
    hyper = hyper_of(maddpg_cql, regularise=0.5)
    gradient, metrics = gradient_of(partial(maddpg_cql.actor_loss, fake_networks(), hyper))
    q = -2 * X + np.array([0.25] * 4 + [0.0]) + POLICY
    slope = X * (1 - POLICY**2)
    assert gradient == pytest.approx((slope * (POLICY - 1)).mean(), rel=1e-5)
    assert metrics["policy_loss"] == pytest.approx((0.5 * POLICY**2 - q).mean(), rel=1e-5)


@pytest.mark.parametrize("module", [maddpg_cql, matd3_bc, omar])
def test_squares_are_means_over_the_entries_that_live_agents_have(module: Any) -> None:
    """The second agent has no entry in the first step, and is dead in the last."""
    batch = steps(ACTION, alive_tm1=ALIVE.at[2, 1].set(False), alive_t=ALIVE)
    legal = batch.view.legal_actions.at[0, :, 1].set(False)
    batch = batch._replace(view=batch.view._replace(legal_actions=legal))
    inputs = jnp.float32(0.3), (jnp.float32(1.0), jnp.float32(-2.0)), batch, jax.random.key(0)

    def losses(**options: float) -> tuple[Any, dict[str, Any]]:
        hyper = hyper_of(module, **options)
        args = (omar.Args(vault=Path(), search_samples=2),) if module is omar else ()
        return module.actor_loss(fake_networks(), *args, hyper, *inputs)

    policy = np.tanh(0.3 * np.array([1.0, 2, 2, 3]))
    if module is matd3_bc:
        result, expected = losses()[1]["imitation_loss"], ((policy - 0.25) ** 2).mean()
    else:
        result = losses(regularise=2.0)[0] - losses(regularise=0.0)[0]
        expected = 2 * (policy**2).mean()
    assert result == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_policies_of_omar_imitate_what_the_search_finds(sign):
    # Values fall with the distance from ±0.8 by 10 per unit, so that the search finds better
    # actions; where the policy is at 0.8, it finds none.
    def values(scales, view, action, own):
        q = -10 * abs(own[..., 0] - sign * 0.8)
        return jnp.stack([q, q + 1.0])[..., None]

    args = omar.Args(vault=Path(), search_weight=0.75, regularise=0.5, search_samples=200)
    networks, hyper = fake_networks(values=values), hyperparameters(args)
    gradient, metrics = gradient_of(partial(omar.actor_loss, networks, args, hyper))
    best, slope = sign * 0.8, X * (1 - POLICY**2)
    of_value = 10 * np.sign(best - POLICY) * slope
    expected = 0.75 * 2 * (POLICY - best) * slope - 0.25 * of_value + 0.5 * 2 * POLICY * slope
    assert gradient == pytest.approx(expected.mean(), abs=0.02)
    assert metrics["found_better"] == 1.0


def test_the_policies_of_omar_stay_where_the_search_finds_nothing_better():
    def values(scales, view, action, own):
        q = -10 * (own[..., 0] - jnp.tanh(0.3 * view.state)) ** 2
        return jnp.stack([q, q + 1.0])[..., None]

    args = omar.Args(vault=Path(), search_weight=0.75, regularise=0.5, search_samples=20)
    networks, hyper = fake_networks(values=values), hyperparameters(args)
    gradient, metrics = gradient_of(partial(omar.actor_loss, networks, args, hyper))
    expected = 0.5 * 2 * POLICY * X * (1 - POLICY**2)  # of the squares alone
    assert gradient == pytest.approx(expected.mean(), rel=1e-5)
    assert metrics["found_better"] == 0.0


def test_the_search_by_hand():
    entries = jnp.array([[True, True], [True, False]])
    weights = np.array([[1.0, -2.0], [3.0, 5.0]])

    def values(samples: jax.Array) -> jax.Array:
        return (samples * weights).sum(-1)

    key = jax.random.key(3)
    action, q = omar.search(key, values, entries, 2, 4, 2.0)
    mean, std = np.zeros((2, 2)), np.full((2, 2), 2.0)
    for round_key in jax.random.split(key, 2):
        noise = np.asarray(jax.random.normal(round_key, (4, 2, 2)))
        samples = np.clip(mean + std * noise, -1, 1) * np.asarray(entries)
        scores = (samples * weights).sum(-1)
        share = np.exp(scores) / np.exp(scores).sum(0)
        mean = (share[..., None] * samples).sum(0)
        std = np.sqrt(((samples - mean) ** 2).mean(0))
    for agent in range(2):
        best = scores[:, agent].argmax()
        np.testing.assert_allclose(action[agent], samples[best, agent], rtol=1e-5)
        assert q[agent] == pytest.approx(scores[best, agent], rel=1e-5)
    assert action[1, 1] == 0


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (EnvSpec("go", 2, 1, 1, Discrete(3)), {"mse": True}),
        (EnvSpec("go", 2, 1, 1, Discrete(3)), {"tanh": True}),
        (GO, {"mse": True, "tanh": True}),
    ],
)
def test_options_of_bc_without_an_effect_are_refused(spec, options):
    with pytest.raises(OptionError, match="leave"):
        build(bc, spec, **options)


@pytest.mark.parametrize("loss", ["clipped", "tanh", "mse"])
def test_the_losses_of_cloning_by_hand(loss):
    # A network without weights, whose mean is 0.3. The first action lies at the end of the range.
    options = {} if loss == "clipped" else {loss: True}
    program, hyper = build(bc, GO, **options)
    state = jax.jit(program.init)(jax.random.key(0), hyper)
    params = jax.tree.map(jnp.zeros_like, state.params)
    network = params.network if loss == "mse" else params
    network["params"]["head"]["bias"] = jnp.array([0.3])
    action = jnp.array([[1.0, 0.5], [-0.5, 0.25], [0.0, 9.0]])[:, None, :, None]
    batch = steps(action, alive_tm1=ALIVE.at[2, 1].set(False), alive_t=ALIVE)
    _, metrics = jax.jit(program.stages[0].update)(
        state._replace(params=params), batch, jax.random.key(0), hyper
    )
    inside, std = np.array([0.5, -0.5, 0.25, 0.0]), np.log(2) + 0.01
    if loss == "clipped":
        scores = [norm.logsf(1, 0.3, std), *norm.logpdf(inside, 0.3, std)]
    elif loss == "tanh":  # 1 is taken for the number before it
        a = np.array([1 - 2.0**-24, *inside])
        scores = norm.logpdf(np.arctanh(a), 0.3, std) - np.log(1 - a**2)
    else:
        scores = -((np.tanh(0.3) - np.array([1.0, *inside])) ** 2)
    assert metrics["policy_loss"] == pytest.approx(-np.mean(scores), rel=1e-4)
    greedy = program.policy(True).act(
        params,
        program.policy(True).initial_carry(),
        jnp.ones((2, 1)),
        jnp.ones((2, 1), bool),
        jax.random.key(0),
    )[0]
    np.testing.assert_allclose(greedy, 0.3 if loss == "clipped" else np.tanh(0.3), rtol=1e-5)


@pytest.mark.parametrize("module", [matd3_bc, maddpg_cql, omar])
def test_discrete_actions_are_refused(module):
    with pytest.raises(ShapeError, match=rf"3 discrete actions, and {module.__name__[10:]} is for"):
        build(module, EnvSpec("pick", 2, 2, 2, Discrete(3)))


def test_joint_values_of_several_teams_are_refused():
    spec = EnvSpec("tag", 2, 2, 2, Continuous(1), reward="individual", teams=(0, 1))
    for module, options in ((maddpg_cql, {}), (matd3_bc, {"critic": "joint"})):
        with pytest.raises(OptionError, match="has 2 teams"):
            build(module, spec, **options)
    build(matd3_bc, spec)
    build(omar, spec)
