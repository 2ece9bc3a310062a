"""MADDPG, MASAC and ISAC: losses by hand, delayed updates, and what they learn of the probes."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from offmarl import envs
from offmarl.distributions import categorical
from offmarl.networks import Critics, PolicyConfig, agent_head, as_vectors, make_critics
from offmarl.programs import hyperparameters
from offmarl.programs.learning import offline_actor_critic, soft_actor_critic
from offmarl.programs.learning.actor_critic import ActorCritics, init_learner, learn
from offmarl.types import Continuous, Discrete, EnvSpec, Sequence, View
from recorders import isac, maddpg, masac
from tests.rollouts import differ, sequence

from .learning import Dial, begun, returns_of, train

GO = EnvSpec("go", 2, 1, 1, Continuous(1), reward="individual")
PICK = EnvSpec("pick", 2, 1, 1, Discrete(2), reward="individual")


def steps(action: jax.Array, *, alive_tm1: jax.Array, alive_t: jax.Array) -> Sequence:
    """Three windows of one step: inside an episode, truncated, and with one agent terminated."""
    size = action.shape[-1] if action.ndim == 4 else 2
    return sequence(
        action,
        GO,
        jnp.array([[1.0, 2.0], [2.0, 4.0], [3.0, 8.0]]),
        legal_actions=jnp.ones((3, 2, 2, size), bool),
        alive=jnp.stack([alive_tm1, alive_t], 1),
        reward=jnp.array([[[1.0, 2.0]], [[0.0, 1.0]], [[3.0, 4.0]]]),
        terminated=jnp.zeros((3, 1, 2), bool).at[2, 0, 1].set(True),
        truncated=jnp.zeros((3, 1, 2), bool).at[1].set(True).at[2, 0, 0].set(True),
    )


ALIVE = jnp.ones((3, 2), bool)


# ---------------------------------------------------------------------------------- MADDPG


def value_of(scales, view, action, own=None):
    """c times the state, plus all actions, of which each agent's own may be another."""
    own = action if own is None else own
    joint = action.sum((-2, -1))[..., None] - action.sum(-1) + own.sum(-1)
    return jnp.stack([scale * view.state + joint for scale in scales])[..., None]


def without_memory(apply) -> SimpleNamespace:
    return SimpleNamespace(apply=apply, initial_carry=lambda _num_agents: ())


def maddpg_networks(spec: EnvSpec) -> maddpg.Networks:
    actor = without_memory(lambda scale, carry, observation: (scale * observation, carry))
    return maddpg.Networks(spec, actor, SimpleNamespace(values=value_of))


@pytest.mark.parametrize(
    ("reward", "targets", "counted"),
    [
        ("individual", [[3, 5], [2, 4], [10, 8]], [[1, 1], [1, 1], [1, 0]]),
        ("team", [[3, 5], [2, 4], [10, 12]], [[1, 1], [1, 1], [1, 1]]),
    ],
)
def test_the_critics_of_maddpg_by_hand(reward, targets, counted):
    # The target policies do nothing, and the smaller target value is the state itself. Rewards are
    # doubled. A truncated step bootstraps; so does, with a team reward, one in which only a part of
    # the team is done. The second agent is dead in the first step and in the last, where it has
    # terminated, too.
    spec = EnvSpec("go", 2, 1, 1, Continuous(1), reward=reward)
    dead = ALIVE.at[0, 1].set(False).at[2, 1].set(False)
    batch = steps(jnp.full((3, 1, 2, 1), 0.25), alive_tm1=dead, alive_t=ALIVE)
    hyper = hyperparameters(maddpg.Args(gamma=0.5, target_noise=0.0, reward_scale=2.0))
    target = ActorCritics(jnp.float32(0.0), (jnp.float32(1.0), jnp.float32(2.0)))
    critics = (jnp.float32(1.0), jnp.float32(3.0))
    loss, metrics = jax.jit(
        lambda critics: maddpg.critic_loss(
            maddpg_networks(spec), hyper, critics, None, target, batch, jax.random.key(0)
        )
    )(critics)
    q = np.array([[1.5, 2.5, 3.5], [3.5, 6.5, 9.5]])[..., None]
    errors = ((q - np.array(targets)) * np.array(counted)) ** 2
    assert loss == pytest.approx(0.5 * errors.sum() / np.sum(counted), rel=1e-6)
    assert metrics["q"] == pytest.approx((q[0] * counted).sum() / np.sum(counted), rel=1e-6)


class Sum:
    """A policy with memory, whose output is the sum of an episode's observations so far."""

    def initial_carry(self, num_agents):
        return jnp.zeros((num_agents, 1))

    def apply(self, scale, observations, first, method):
        assert method == "unroll_batch" and not first.any()
        return scale * observations.cumsum(1)


def test_policies_with_a_memory_remember_what_comes_before_in_the_window():
    # The views are numbered 1, 2 | 2, 4 | 3, 8, and the third window is burn-in only.
    batch = steps(jnp.full((3, 1, 2, 1), 0.25), alive_tm1=ALIVE, alive_t=ALIVE)
    batch = batch._replace(mask=batch.mask.at[2].set(False))
    networks = maddpg_networks(GO)._replace(actor=Sum())
    inputs = jnp.float32(0.1), batch
    for slots, sums in ((slice(None, -1), [1, 2, 3]), (slice(1, None), [3, 6, 11])):
        action, _ = networks.act(*inputs, slots, jax.random.key(0), jnp.float32(1.0))
        expected = np.tanh(0.1 * np.array(sums))[:, None, None, None] * np.ones((3, 1, 2, 1))
        np.testing.assert_allclose(action, expected, rtol=1e-6)
    hyper = hyperparameters(maddpg.Args(gamma=0.5, reward_scale=1.0))
    target = ActorCritics(jnp.float32(0.1), (jnp.float32(1.0),))
    loss, _ = maddpg.critic_loss(
        networks, hyper, (jnp.float32(1.0),), None, target, batch, jax.random.key(0)
    )
    # Q is the state and all actions.
    y = np.array([[1, 2], [0, 1]]) + 0.5 * (np.array([[2], [4]]) + 2 * np.tanh([[0.3], [0.6]]))
    errors = np.array([[1.5], [2.5]]) - y
    np.testing.assert_allclose(loss, 0.5 * (errors**2).mean(), rtol=1e-6)


def test_an_agent_that_is_truncated_alone_acts_in_its_last_view():
    """It is absent there, and what it would have done is valued, as the others' actions are."""
    batch = steps(jnp.zeros((3, 1, 2, 1)), alive_tm1=ALIVE, alive_t=ALIVE.at[0, 0].set(False))
    batch = batch._replace(truncated=batch.truncated.at[0, 0, 0].set(True))
    actions = []

    def values(params, view, action, own=None):
        actions.append(action)
        return value_of(params, view, action, own)

    def apply(output, observation, _first, **_):
        return jnp.full((*observation.shape[:-1], 1), output)

    actor = SimpleNamespace(apply=apply, initial_carry=lambda _: ())
    critics = SimpleNamespace(values=values)
    networks = offline_actor_critic.Networks(GO, PolicyConfig("feedforward"), actor, critics)
    hyper = hyperparameters(maddpg.Args(reward_scale=1.0, target_noise=0.0, target_limit=0.0))
    target = ActorCritics(jnp.float32(0.5), (jnp.float32(1.0),))
    arguments = networks, hyper, target.critics, target, target, batch
    offline_actor_critic.critic_loss(*arguments, jax.random.key(0))
    assert batch.acts_t[0].all() and (actions[0][0] == jnp.tanh(0.5)).all()


@pytest.mark.slow
def test_target_actions_are_smoothed_only_with_twin_critics():
    batch = steps(jnp.zeros((3, 1, 2, 1)), alive_tm1=ALIVE, alive_t=ALIVE)
    hyper = hyperparameters(
        maddpg.Args(gamma=0.5, reward_scale=1.0, target_noise=5.0, target_limit=0.25)
    )

    # The second agent lacks the entry of the third step.
    legal = batch.view.legal_actions.at[2, :, 1].set(False)
    batch = batch._replace(view=batch.view._replace(legal_actions=legal))

    def seen(count: int) -> list[float]:
        """Return the sizes of the actions that the target critics are given."""
        actions = []

        def values(params, view, action, own=None):
            actions.append(action)
            return value_of(params, view, action, own)

        networks = maddpg_networks(GO)._replace(critics=SimpleNamespace(values=values))
        critics = (jnp.float32(1.0),) * count
        target = ActorCritics(jnp.float32(0.0), critics)
        maddpg.critic_loss(networks, hyper, critics, None, target, batch, jax.random.key(0))
        assert not actions[0][2, :, 1].any()
        return np.unique(abs(np.asarray(actions[0])).round(6)).tolist()

    assert seen(1) == [0.0]
    assert seen(2)[-1] == 0.25


def test_the_gradient_of_maddpgs_policies_by_hand():
    # dQ_i/da_i = 1, so the gradient is -(1 - tanh²) of the mean over the live agents; the second
    # agent of the last step is dead. The outputs' squares add 2 w x o.
    batch = steps(jnp.full((3, 1, 2, 1), 0.25), alive_tm1=ALIVE.at[2, 1].set(False), alive_t=ALIVE)
    hyper = hyperparameters(maddpg.Args(regularise=0.01))
    loss = partial(maddpg.actor_loss, maddpg_networks(GO), hyper)
    gradient, metrics = jax.grad(loss, has_aux=True)(
        jnp.float32(0.3), (jnp.float32(1.0),) * 2, batch, jax.random.key(0)
    )
    x = np.array([1.0, 1, 2, 2, 3])
    slope = -x * (1 - np.tanh(0.3 * x) ** 2) + 2 * 0.01 * 0.3 * x**2
    assert gradient == pytest.approx(slope.mean(), rel=1e-5)
    q = x + 0.25 + np.tanh(0.3 * x)
    assert metrics["actor_loss"] == pytest.approx((0.01 * (0.3 * x) ** 2 - q).mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("delay", "actor", "target", "metric"),
    [(2, [0.0, 0.6], [(0.0, 0.0), (0.15, 0.3)], [0.0, 6.0]),
     (1, [0.25], [(0.0625, 0.125)], [3.0])],
)  # fmt: skip
def test_policies_and_targets_are_updated_after_some_updates_of_the_critics(
    delay, actor, target, metric
):
    """The critic learns the reward, 1, and the policy the critic's new value, by half steps."""
    batch = sequence([[[0, 0]]], reward=jnp.ones((1, 1, 2)))
    losses = (
        lambda critics, _params, _target, batch, _key: (
            0.5 * (critics[0] - batch.reward.mean()) ** 2, {}),
        lambda actor, critics, _batch, _key: (
            0.5 * (actor - critics[0]) ** 2, {"actor": jnp.float32(3.0)}),
    )  # fmt: skip
    optimiser = optax.sgd(0.5, momentum=0.9)
    learner = init_learner(ActorCritics(jnp.zeros(()), (jnp.zeros(()),)), optimiser)
    # With momentum the second step of the critic is half of ½ + 0.9.
    critic, norm, update = (
        [0.5, 1.2],
        [1.0, 0.5],
        jax.jit(partial(learn, *losses, optimiser, 0.25, delay)),
    )
    for number in range(delay):
        learner, metrics = update(learner, batch, jax.random.key(0), number + 1)
        params, (of_actor, (of_critic,)) = learner.params, learner.target
        expected = actor[number], critic[number], *target[number], metric[number], norm[number]
        found = params.actor, params.critics[0], of_actor, of_critic
        np.testing.assert_allclose(
            [*found, metrics["actor"], metrics["grad_norm"]], expected, rtol=1e-6
        )
        moved = jax.tree.leaves(learner.optimiser[1])[0]
        assert (moved != 0) == (actor[number] != 0)


# ---------------------------------------------------------------------------------- soft


def test_the_losses_of_soft_actor_critics_by_hand():
    # Policies are uniform over two actions. Q is c times the state, plus 1 for action 1; the
    # smaller target value has c = 1, so that a view is worth its number + 0.5 + 0.1 ln 2.
    def values(scales, view, others, own=None):
        actions = jnp.array([[0.0, 1.0], [0.0, 1.0]])
        return jnp.stack([scale * view.state[..., None] + actions for scale in scales])

    networks = soft_actor_critic.Networks(
        PICK,
        without_memory(lambda scale, carry, view: (scale * jnp.tile(view, 2), carry)),
        categorical,
        SimpleNamespace(values=values),
    )
    action = jnp.array([[[0, 1]], [[1, 1]], [[0, 0]]])
    batch = steps(action, alive_tm1=ALIVE.at[2, 1].set(False), alive_t=ALIVE.at[0, 1].set(False))
    hyper = hyperparameters(masac.Args(gamma=0.5, discrete_entropy=0.5, reward_scale=2.0))
    params = soft_actor_critic.Params(
        jnp.float32(0.0), (jnp.float32(1.0),), jnp.log(jnp.array([0.1, 0.2]))
    )
    target = soft_actor_critic.Target((jnp.float32(1.0), jnp.float32(2.0)))
    learn = jax.grad(soft_actor_critic.loss, has_aux=True)
    gradient, metrics = jax.jit(
        lambda params: learn(params, target, networks, hyper, batch, jax.random.key(0))
    )(params)
    h, g = 0.1 * np.log(2), 0.2 * np.log(2)
    # The second agent is dead after the first step, so that its entropy does not count there.
    # Rewards are doubled.
    targets = [2 + 0.5 * (2.5 + h), 4 + 0.5 * 2.5, 0.5 * (4.5 + h), 2 + 0.5 * (4.5 + g)]
    errors = np.array([1.0, 2.0, 3.0, 3.0, 3.0]) - np.array([*targets, 6 + 0.5 * (8.5 + h)])
    assert metrics["critic_loss"] == pytest.approx(0.5 * (errors**2).mean(), rel=1e-5)
    numbers = np.array([1.0, 1, 2, 2, 3])
    assert metrics["actor_loss"] == pytest.approx(
        -(numbers + 0.5).mean() - (3 * h + 2 * g) / 5, rel=1e-5
    )
    assert metrics["entropy"] == pytest.approx(np.log(2), rel=1e-5)
    # d/dc of ½ error² is error x state; α (H - aim) has itself as the gradient of log α.
    assert gradient.critics[0] == pytest.approx((errors * numbers).mean(), rel=1e-5)
    np.testing.assert_allclose(
        gradient.log_temperature, np.array([3 * h, 2 * g]) * 0.5 / 5, rtol=1e-5
    )


def test_entries_that_an_agent_lacks_are_not_valued():
    networks = maddpg_networks(GO)
    soft = soft_actor_critic.Networks(
        GO,
        without_memory(lambda scale, carry, view: (scale * jnp.tile(view, 2), carry)),
        agent_head(PolicyConfig("feedforward", "soft_gaussian")),
        networks.critics,
    )
    critics, key = (jnp.float32(1.0), jnp.float32(2.0)), jax.random.key(0)
    params = soft_actor_critic.Params(jnp.float32(0.1), critics, jnp.zeros(2))
    target = ActorCritics(jnp.float32(0.1), critics)
    of_maddpg = hyperparameters(maddpg.Args(reward_scale=1.0))

    def losses(held: float) -> list[jax.Array]:
        action = jnp.full((3, 1, 2, 1), 0.25).at[:, :, 1].set(held)
        batch = steps(action, alive_tm1=ALIVE, alive_t=ALIVE)
        legal = batch.view.legal_actions.at[:, :, 1].set(False)
        batch = batch._replace(view=batch.view._replace(legal_actions=legal))
        own = soft_actor_critic.Target(critics)
        hyper = hyperparameters(masac.Args(reward_scale=1.0))
        of_soft = soft_actor_critic.loss(params, own, soft, hyper, batch, key)
        of_critics = maddpg.critic_loss(networks, of_maddpg, critics, None, target, batch, key)
        of_actor = maddpg.actor_loss(networks, of_maddpg, jnp.float32(0.1), critics, batch, key)
        return [x for x, _ in (of_soft, of_critics, of_actor)]

    assert losses(0.0) == losses(100.0)


def test_the_entropy_aimed_at_depends_on_what_is_legal():
    legal = jnp.array([[True, True], [True, False]])
    hyper = hyperparameters(
        masac.Args(reward_scale=1.0, discrete_entropy=0.5, continuous_entropy=2.0)
    )
    discrete = soft_actor_critic.target_entropy(PICK, hyper, legal)
    np.testing.assert_allclose(discrete, [0.5 * np.log(2), 0.0], rtol=1e-6)
    np.testing.assert_allclose(soft_actor_critic.target_entropy(GO, hyper, legal), [-4.0, -2.0])


@pytest.mark.slow
def test_a_temperature_may_be_kept():
    args = masac.Args(
        env="probe/match",
        num_envs=2,
        num_steps=2,
        updates=2,
        batch_size=4,
        capacity=4,
        hidden=4,
        fix_temperature=True,
        temperature=0.3,
    )
    program, state, hyper = begun(masac, args)
    after, metrics = jax.jit(program.stages[0].update)(state, None, jax.random.key(1), hyper)
    np.testing.assert_allclose(after.params.log_temperature, np.log(0.3), rtol=1e-6)
    assert metrics["temperature"] == pytest.approx(0.3)
    assert differ(state.params.actor, after.params.actor)


def test_random_steps_are_of_no_policy():
    sizes = {"num_envs": 2, "num_steps": 1, "capacity": 4, "hidden": 2, "batch_size": 2}
    args = maddpg.Args(env="probe/match", random_steps=3, updates=1, **sizes)
    program, state, hyper = begun(maddpg, args)
    for number in range(3):
        state, _ = jax.jit(program.stages[0].update)(state, None, jax.random.key(number), hyper)
    ids = state.capture.buffer.experience.transition.policy_id
    assert ids[0, :3].flatten().tolist() == [-1, -1, 2]


# ---------------------------------------------------------------------------------- learning

SMALL = {
    "num_envs": 16, "num_steps": 4, "updates": 8, "batch_size": 64, "capacity": 64, "hidden": 32,
    "learning_rate": 3e-3, "total_steps": 12_000, "reward_scale": 1.0,
}  # fmt: skip
SOFT = SMALL | {"temperature": 0.02, "fix_temperature": True}
MATD3 = SMALL | {"twin": True, "share_parameters": True}
MADDPG = SMALL | {"random_steps": 1000}
RECURRENT = {"network": "recurrent", "length": 8, "batch_size": 256}
nightly = pytest.mark.nightly


def learned(recorder, settings, probe):
    env = Dial() if probe == "dial" else envs.make(f"probe/{probe}")
    args = recorder.Args(**({} if probe == "dial" else {"env": env.name}), **settings)
    env, program, state = train(recorder, args, env)
    return env, state, returns_of(env, program, state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recorder", "settings", "probe"),
    [
        (isac, SOFT, "observation"),
        pytest.param(maddpg, MATD3, "dial", marks=nightly),
        pytest.param(maddpg, MADDPG, "dial", marks=nightly),
        pytest.param(maddpg, MADDPG, "one-step", marks=nightly),
        pytest.param(maddpg, MADDPG, "observation", marks=nightly),
        pytest.param(maddpg, MADDPG, "match", marks=nightly),
        pytest.param(maddpg, MATD3, "two-step", marks=nightly),
        pytest.param(masac, SOFT, "dial", marks=nightly),
        pytest.param(masac, SOFT, "observation", marks=nightly),
        pytest.param(maddpg, MATD3 | RECURRENT, "memory", marks=nightly),
        pytest.param(masac, SOFT | RECURRENT, "memory", marks=nightly),
        pytest.param(masac, SOFT | {"share_parameters": False}, "match", marks=nightly),
        pytest.param(isac, SOFT, "dial", marks=nightly),
        pytest.param(isac, SOFT, "one-step", marks=nightly),
        pytest.param(isac, SOFT | {"share_parameters": False}, "two-step", marks=nightly),
    ],
)
def test_the_optimum_of_a_probe_is_found(recorder, settings, probe):
    env, _, (greedy, sampled) = learned(recorder, settings, probe)
    assert greedy > 0.95 * env.optimal_return
    assert sampled > 0.85 * env.optimal_return


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recorder", "settings"), [(maddpg, MADDPG), pytest.param(masac, SOFT, marks=nightly)]
)
def test_the_values_of_two_steps_are_the_analytic_ones(recorder, settings):
    env, state, (greedy, sampled) = learned(recorder, settings, "two-step")
    assert greedy == env.optimal_return
    assert sampled > 0.9
    start = jax.jit(env.reset)(jax.random.key(0))
    later = jax.jit(env.step)(jax.random.key(0), start[0], jnp.array([1, 1]))[1]
    views = jax.tree.map(lambda *x: jnp.stack(x), start[1].view, later.view)
    estimates = values(env, state, recorder, views, jnp.ones((2, 2), int))
    # γ at the start, where both choose the later reward, and 1 in the second step.
    np.testing.assert_allclose(estimates[0], 0.95, atol=0.06)
    np.testing.assert_allclose(estimates[1], 1.0, atol=0.06)
    now = values(env, state, recorder, views, jnp.zeros((2, 2), int))[0]
    # Half now, and nothing later; few of the newest steps are of this kind.
    np.testing.assert_allclose(now, 0.5, atol=0.2)


def values(env, state, recorder, views: View, action: jax.Array) -> np.ndarray:
    """Return the critics' values ``(views, N)`` of a joint action in each view."""
    count = 2 if recorder is masac else 1
    critics: Critics = make_critics(
        env.spec,
        outputs=2 if recorder is masac else 1,
        hidden=32,
        count=count,
        share_parameters=recorder is masac,
    )
    joint, params = as_vectors(env.spec, action), state.params.critics
    if recorder is maddpg:
        return np.asarray(critics.values(params, views, joint)[0, ..., 0])
    by_action = critics.values(params, views, joint, jnp.zeros_like(joint)).min(0)
    return np.asarray((by_action * joint).sum(-1))
