"""QMIX, VDN and IQL against numbers computed by hand."""

from dataclasses import replace
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from offmarl import envs
from offmarl.networks import MixedParams, MixedValues, MixerWeights, QParams
from offmarl.programs import TD_ERRORS, Hyperparameters, hyperparameters
from offmarl.programs.learning import q_learning
from offmarl.programs.learning.off_policy import fit_unit, no_rewards, running_sums
from offmarl.programs.learning.q_learning import AgentParams
from offmarl.programs.program import structure, unit_scale
from offmarl.teams import largest_return, teams_of
from offmarl.types import Discrete, EnvSpec, Sequence, Transition
from recorders import iql, maddpg, masac, qmix, vdn
from tests.programs.learning import OneStep, train
from tests.rollouts import SPEC, differ, sequence

# An agent values action a in the slot that shows the number n at n times entry a of its
# parameters. The mixer adds the agents' values and its parameter times the state.
NETWORKS = MixedValues(
    agent=SimpleNamespace(apply=lambda params, seen, first, method: seen * params),
    mixer=SimpleNamespace(
        apply=lambda scale, state: MixerWeights(
            jnp.ones((*state.shape[:-1], 2, 1)),
            jnp.zeros((*state.shape[:-1], 1)),
            jnp.ones((*state.shape[:-1], 1)),
            scale * state[..., 0],
        )
    ),
)
ONLINE = MixedParams(jnp.array([1.0, 2.0, 4.0]), jnp.array(1.0))
TARGET = MixedParams(jnp.array([3.0, 1.0, 2.0]), jnp.array(10.0))


def batch() -> Sequence:
    """Two windows of three steps: one is truncated in the second, the other ends in the first."""
    return sequence(
        [[[0, 1], [2, 2], [0, 0]], [[1, 1], [0, 0], [0, 0]]],
        EnvSpec("", 2, 1, 1, Discrete(3)),
        jnp.array([[1.0, 2.0, 3.0, 9.0], [1.0, 5.0, 5.0, 5.0]]),
        legal_actions=jnp.ones((2, 4, 2, 3), bool).at[0, 2, 0, 2].set(False),
        alive=jnp.ones((2, 4, 2), bool).at[0, 2, 1].set(False).at[1, 0, 1].set(False),
        reward=jnp.array([[[1.0, 1], [2, 4], [99, 99]], [[4, 0], [99, 99], [99, 99]]]),
        terminated=jnp.zeros((2, 3, 2), bool).at[0, 1, 1].set(True).at[1, 0].set(True),
        truncated=jnp.zeros((2, 3, 2), bool).at[0, 1, 0].set(True),
        mask=jnp.array([[True, True, False], [True, False, False]]),
    )


def learn(loss, networks, args, online, target):
    """Return the gradient of a loss on the batch, and its metrics."""
    hyper = hyperparameters(args)
    gradient = jax.grad(lambda p: loss(networks, p, target, hyper, batch()), has_aux=True)
    return jax.jit(gradient)(online)


def test_the_loss_of_qmix_at_a_truncation_and_at_a_termination():
    gradient, metrics = learn(qmix.loss, NETWORKS, qmix.Args(**SCALE), ONLINE, TARGET)
    # First window. Values 1 and 2, and 1 for the state: 4. The other network values the online
    # network's best actions of the next slot at 2·2 each, and the state at 20: 1 + ½ 28.
    # Then 8 + 8 + 2 = 18. The truncated step leads to slot 3, where agent 1 may not do its best
    # action, so 3·1, and agent 2 is dead: 3 + ½ (3 + 30).
    # Second window. Agent 2 is dead, so 2 + 1 = 3, and all that follows the step is its reward, 2.
    errors = np.array([4 - 15, 18 - 19.5, 3 - 2])
    np.testing.assert_allclose(metrics["td_loss"], 0.5 * (errors**2).sum() / 3)
    np.testing.assert_allclose(metrics["q_tot"], (4 + 18 + 3) / 3)
    # No gradient flows through the targets: Q_tot grows with the mixer's parameter by the state,
    # and with the agents' by their numbers.
    np.testing.assert_allclose(gradient.mixer, (errors * [1, 2, 1]).sum() / 3)
    by_action = np.array([[1, 1, 0], [0, 0, 4], [0, 1, 0]])
    np.testing.assert_allclose(gradient.agent, errors @ by_action / 3)


# Values of all agents and steps without the state: 1 and 2, then 8 and 8; and 2 of the only agent.
VALUES = np.array([1 + 2, 8 + 8, 2.0])


SCALE = {"gamma": 0.5, "reward_scale": 1.0}


def vdn_learn(**options):
    params = AgentParams(ONLINE.agent), AgentParams(TARGET.agent)
    return learn(vdn.loss, NETWORKS.agent, vdn.Args(**SCALE | options), *params)


@pytest.mark.parametrize(
    ("options", "targets"),
    [
        # Of each step its reward and half of the next value, 2·2 + 2·2 and 3·1 + 0; after the
        # termination there is none.
        ({}, [1 + 8 / 2, 3 + 3 / 2, 2]),
        # The second step's target follows the first; the truncation ends what is looked ahead.
        ({"td_lambda": 1.0}, [1 + 4.5 / 2, 4.5, 2]),
        ({"td_lambda": 0.25}, [1 + (0.75 * 8 + 0.25 * 4.5) / 2, 4.5, 2]),
        ({"reward_scale": 10.0}, [10 + 4, 30 + 1.5, 20]),
    ],
)
def test_the_loss_of_vdn_at_a_truncation_and_at_a_termination(options, targets):
    gradient, metrics = vdn_learn(**options)
    errors = VALUES - np.array(targets)
    np.testing.assert_allclose(metrics["td_loss"], 0.5 * (errors**2).sum() / 3)
    np.testing.assert_allclose(metrics["q_tot"], VALUES.mean(), rtol=1e-6)
    by_action = np.array([[1, 1, 0], [0, 0, 4], [0, 1, 0]])
    np.testing.assert_allclose(gradient.agent, errors @ by_action / 3, rtol=1e-6)


def iql_learn(shared_reward, steps=None):
    pair = AgentParams(ONLINE.agent), AgentParams(TARGET.agent)
    spec = replace(SPEC, reward="team" if shared_reward else "individual")

    def loss(network, params, target, hyper, windows):
        windows = windows if steps is None else steps
        return iql.loss(network, spec, params, target, hyper, windows)

    return learn(loss, NETWORKS.agent, iql.Args(**SCALE), *pair)


def check_iql(gradient, metrics, errors):
    """Compare a loss and its gradient with the errors of the six values that are learned."""
    np.testing.assert_allclose(metrics["td_loss"], 0.5 * (errors**2).sum() / 6)
    by_action = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 2], [0, 0, 2], [0, 1, 0], [0, 1, 0]])
    np.testing.assert_allclose(gradient.agent, errors @ by_action / 6, rtol=1e-6)


def test_the_loss_of_iql_at_a_truncation_and_at_a_termination():
    gradient, metrics = iql_learn(shared_reward=False)
    # Each agent has its own reward. In the truncated step the first agent's next value is 3·1; the
    # second agent terminates. In the second window only the first agent acts, and the end of the
    # episode is that of both.
    errors = np.array([1 - (1 + 4 / 2), 2 - (1 + 4 / 2), 8 - (2 + 3 / 2), 8 - 4, 2 - 4, 2 - 0])
    np.testing.assert_allclose(metrics["q"], (1 + 2 + 8 + 8 + 2 + 2) / 6, rtol=1e-6)
    check_iql(gradient, metrics, errors)
    # A window's error, by which it may be drawn, is the largest of its agents'.
    np.testing.assert_allclose(metrics["td_errors"][:, 0], [2, 2])


def test_iql_learns_what_a_team_earns_after_an_agent_s_death():
    gradient, metrics = iql_learn(shared_reward=True)
    # The second agent dies in the second step, where its next value is 3·2. In the second window
    # it is dead, and the episode ends for both.
    errors = np.array([1 - 3, 2 - 3, 8 - (2 + 3 / 2), 8 - (4 + 6 / 2), 2 - 4, 2 - 0])
    np.testing.assert_allclose(metrics["q"], (1 + 2 + 8 + 8 + 2 + 2) / 6, rtol=1e-6)
    check_iql(gradient, metrics, errors)


def test_iql_learns_the_values_of_the_dead_where_they_have_not_terminated():
    steps = batch()
    # The second agent is dead from the second slot on; the first window does not terminate.
    alive = steps.view.alive.at[0, 1:, 1].set(False)
    windows = steps._replace(
        view=steps.view._replace(alive=alive),
        terminated=steps.terminated.at[0, 1].set(False),
        truncated=steps.truncated.at[0, 1].set(True),
    )
    gradient, metrics = iql_learn(shared_reward=False, steps=windows)
    errors = np.array([1 - 3, 2 - (1 + 4 / 2), 8 - (2 + 3 / 2), 8 - (4 + 6 / 2), 2 - 4, 2 - 0])
    check_iql(gradient, metrics, errors)


@pytest.fixture(scope="module")
def rounds():
    """The states before and after each of four rounds of two updates, and their metrics.

    ε falls over three rounds, and every third update is copied to the target networks.
    """
    args = qmix.Args(
        num_envs=4,
        num_steps=2,
        length=2,
        batch_size=2,
        capacity=4,
        hidden=4,
        total_steps=4 * 2 * 6,
        exploration=0.5,
        epsilon=0.1,
        updates=2,
        target_every=3,
        max_grad_norm=1e-3,
        mixer_embed=2,
    )
    env, hyper = envs.make("probe/match"), hyperparameters(args)
    program = qmix.make(env.spec, structure(args), env)
    state = jax.jit(program.init)(jax.random.key(0), hyper)
    states, metrics = [state], []
    update = jax.jit(program.stages[0].update)
    for number in range(4):
        state, row = update(state, None, jax.random.key(number), hyper)
        states.append(state)
        metrics.append(row)
    return program, states, metrics


@pytest.mark.slow
def test_exploration_comes_down_linearly_and_stays(rounds):
    _, states, metrics = rounds
    np.testing.assert_allclose([m["epsilon"] for m in metrics], [1.0, 0.7, 0.4, 0.1], rtol=1e-6)
    logs = states[1].capture.buffer.experience.transition.behaviour_log_prob[:, :2]
    np.testing.assert_allclose(logs, np.log(0.5), rtol=1e-6)  # all of the first round is chance
    replay = states[-1].capture.buffer.experience.transition.policy_id
    assert {*replay.flatten().tolist()} == {-1, 3}  # the versions before did not act alone


def test_recorded_data_has_the_final_epsilon_and_the_newest_parameters(rounds):
    program, states, _ = rounds
    for state in (states[0], states[-1]):
        acting = program.policy_params(state)
        assert float(acting.epsilon) == pytest.approx(0.1)
        assert acting.network is state.params.agent


same = chex.assert_trees_all_equal


def test_the_target_networks_are_copies_of_every_third_update(rounds):
    _, states, _ = rounds
    same(states[0].target, states[0].params)
    same(states[1].target, states[0].params)  # after 2 updates
    assert differ(states[1].params, states[0].params)
    third = states[2].target  # after 4: of the third, neither the second nor the fourth
    assert differ(third, states[1].params)
    assert differ(third, states[2].params)
    same(states[3].target, states[3].params)  # after 6


def test_gradients_are_clipped(rounds):
    """Adam's mean of two gradients; Adam itself takes steps of any gradient alike."""
    _, states, _ = rounds
    mean = optax.tree_utils.tree_get(states[1].optimiser, "mu")
    assert 0 < float(optax.tree.norm(mean)) <= (0.1 + 0.9 * 0.1) * 1e-3 * 1.001


def test_the_step_size_falls_until_the_last_update_also_if_the_last_round_is_not_full():
    """Adam's step is the step size where the gradient is constant."""
    args = vdn.Args(
        **{"num_envs": 2, "num_steps": 4, "updates": 4, "batch_size": 2, "length": 2, "hidden": 4},
        **{"capacity": 4, "total_steps": 9, "schedule": "linear", "learning_rate": 0.01},
    )
    env, hyper = envs.make("probe/match"), hyperparameters(args)
    program = vdn.make(env.spec, structure(args), env)

    def loss(params, _target, _hyper, batch):
        total = sum(leaf.sum() for leaf in jax.tree.leaves(params))
        return total, {TD_ERRORS: jnp.zeros(batch.mask.shape)}

    @jax.jit
    def learned(key):
        state = program.init(key, hyper)
        state = state._replace(capture=state.capture._replace(buffer=filled(state.capture.buffer)))
        after, _ = q_learning._learn(args, loss, state, key, hyper)
        later = after._replace(iteration=after.iteration + 1)
        return [state, after, q_learning._learn(args, loss, later, key, hyper)[0]]

    states = learned(jax.random.key(0))
    falls = [-jax.tree.leaves(state.params)[0].ravel()[0] for state in states]
    # Two rounds of four updates: of the step size, 8, 7, 6 and 5 eighths, then 4, 3, 2 and 1.
    np.testing.assert_allclose(np.diff(falls), [0.01 * 26 / 8, 0.01 * 10 / 8], rtol=1e-3)


def filled(buffer):
    """Return a buffer that holds steps, all alike."""
    return buffer.replace(is_full=jnp.ones_like(buffer.is_full))


def played(rewards, last, number):
    """Return the rewards, ends and members of three steps in two environments."""
    fields = dict.fromkeys(Transition._fields)
    return Transition(**fields)._replace(
        reward=jnp.array(rewards)[..., None],
        last=jnp.array(last, bool),
        policy_id=jnp.array(number, jnp.int32)[..., None],
    )


def test_a_guide_acts_until_the_learner_returns_more():
    guide = q_learning.Guide((), jnp.zeros((2, 2)), jnp.array([[1.0], [0.0]]))
    assert not guide.is_worse
    # The learner ends an episode of 1 + 2, with a step before; the guide's goes on with 3 + 4 + 5.
    steps = played([[2.0, 3], [8, 4], [9, 5]], [[1, 0], [0, 0], [0, 0]], [[0, 1]] * 3)
    guide, steps = q_learning._judged(guide, steps, jnp.int32(-1), jnp.int32(7))
    np.testing.assert_allclose(guide.scores, [[3, 1], [0, 0]])
    np.testing.assert_allclose(guide.totals, [[17], [12]])
    np.testing.assert_array_equal(steps.policy_id, [[-1, 7]] * 3)  # the version is the guide
    ends = played([[0.0, 1], [1, 2], [0, 0]], [[0, 1], [1, 1], [0, 0]], [[0, 1], [0, 1], [1, 0]])
    guide, _ = q_learning._judged(guide, ends, jnp.int32(8), jnp.int32(8))
    np.testing.assert_allclose(guide.scores, [[3 * 0.98 + 18, 0.98 + 1], [13 + 2, 2]])
    assert not guide.is_worse  # 10.6 and 7.5 on average, of too few episodes
    guide = guide._replace(scores=15 * guide.scores)
    assert guide.is_worse
    after, steps = q_learning._judged(guide, ends, jnp.int32(9), jnp.int32(9))
    counts = after.scores[:, 1] - jnp.array([0.98, 1]) * guide.scores[:, 1]
    np.testing.assert_allclose(counts, [1, 2], rtol=1e-5)  # only the learner's fade
    np.testing.assert_array_equal(steps.policy_id, [[9, -1], [9, -1], [-1, 9]])


def test_rewards_of_an_episode_are_discounted_and_summed():
    opponents = replace(SPEC, teams=(0, 1))
    steps = played([[0.0], [0.0], [0.0]], [[0], [1], [0]], [[0]] * 3)
    steps = steps._replace(reward=jnp.array([[[1.0, -3.0]], [[1.0, 2.0]], [[9.0, 0.0]]]))
    start = SimpleNamespace(**no_rewards(opponents, 1))
    start._replace = SimpleNamespace
    for discount, sums in ((1.0, [[1, -3], [2, -1], [9, 0]]), (0.5, [[1, -3], [1.5, 0.5], [9, 0]])):
        totals, after_each = running_sums(start.totals, steps, discount)
        np.testing.assert_array_equal(after_each[:, 0], sums)
        np.testing.assert_array_equal(totals, [[9, 0]])
        hyper = Hyperparameters(reward_scale=jnp.zeros(()), gamma=jnp.float32(discount))
        after, fitted = fit_unit(opponents, start, steps, hyper)
        assert after.largest_return == 9 and fitted.reward_scale == unit_scale(jnp.float32(9))
        np.testing.assert_array_equal(after.totals, totals)
    given = Hyperparameters(reward_scale=jnp.float32(3), gamma=jnp.float32(1))
    assert fit_unit(opponents, start, steps, given)[1].reward_scale == 3


def test_the_largest_return_is_that_of_a_team():
    one, two = teams_of(SPEC), teams_of(replace(SPEC, teams=(0, 1)))
    shared, opposed = jnp.array([[1.0, 0.0], [-2.0, -3.0]]), jnp.array([[8.0, -8.0], [0.0, 1.0]])
    assert largest_return(shared, one) == 2.5 and largest_return(shared, two) == 3
    assert largest_return(opposed, one) == 4 and largest_return(opposed, two) == 8
    assert largest_return(opposed, one, 5.0) == 5
    assert unit_scale(jnp.float32(4.0)) == 5 and unit_scale(jnp.zeros(())) == 1


@pytest.mark.parametrize(
    "program",
    [vdn, *(pytest.param(program, marks=pytest.mark.slow) for program in (maddpg, masac))],
)
def test_rewards_times_eight_give_the_same_policy(program):
    args = program.Args(total_steps=32, num_envs=4, num_steps=2, batch_size=4, updates=2, hidden=4)

    def learned(factor):
        spec = EnvSpec("paid", 2, 1, 1, Discrete(2), time_limit=1)
        env = OneStep(spec, lambda action: factor * action.astype(jnp.float32))
        return train(program, args, env)[2].params

    two, sixteen, none = map(learned, (2.0, 16.0, 0.0))
    chex.assert_trees_all_equal(two, sixteen)
    with pytest.raises(AssertionError):  # rewards count
        chex.assert_trees_all_equal(two, none)


def test_the_better_of_guide_and_learner_is_the_policy():
    state = q_learning.QState(ONLINE, *[None] * 8)
    assert q_learning._best(state) is ONLINE.agent
    for learner, best in ((1.0, TARGET.agent), (3.0, ONLINE.agent)):
        scores = 30 * jnp.array([[learner, 1], [2.0, 1]])
        guide = q_learning.Guide(TARGET.agent, scores, jnp.zeros((1, 2)))
        chex.assert_trees_all_equal(q_learning._best(state._replace(guide=guide)), best)
        params = QParams(ONLINE.agent, jnp.ones(()))
        weights = q_learning._members(
            params, guide, Hyperparameters(epsilon=jnp.float32(0.05))
        ).weights
        np.testing.assert_array_equal(weights, [1, 0 if best is ONLINE.agent else 1])
