"""Actors that lag behind the learner, and options, against numbers computed by hand."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs
from offmarl.errors import OptionError
from offmarl.programs.learning.ppo import ActorCritic, RolloutWindows
from offmarl.types import View
from recorders import impala, opre

from .learning import Dial, Given, begun, learn

SMALL = {"num_envs": 16, "total_steps": 12_000, "learning_rate": 5e-3, "hidden": 32}
BOTH = pytest.mark.parametrize("recorder", [impala, opre], ids=["impala", "opre"])


def states_of(recorder, count, **options):
    """Return the states of a training before each of some updates, and the metrics of each."""
    args = recorder.Args(env="probe/two-step", num_envs=2, num_steps=4, hidden=4, **options)
    program, state, hyper = begun(recorder, args)
    update = jax.jit(program.stages[0].update)
    states, metrics = [state], []
    for number in range(count):
        state, row = update(state, None, jax.random.key(number), hyper)
        states.append(state)
        metrics.append(row)
    return program, states, metrics


# ---------------------------------------------------------------------------------- the lag


@BOTH
def test_the_policy_that_acts_is_as_many_updates_old_as_the_lag(recorder):
    program, states, metrics = states_of(recorder, 5, lag=2, learning_rate=0.1)
    policy = program.policy(False)
    for number, state in enumerate(states[1:]):
        steps = state.capture.buffer.experience.transition
        version = max(number - 2, 0)
        np.testing.assert_array_equal(steps.policy_id, version)
        log_prob = partial(policy.log_prob, states[version].params.actor, ())
        view = steps.view
        logs, _ = jax.vmap(jax.vmap(log_prob))(view.observation, view.legal_actions, steps.action)
        np.testing.assert_allclose(logs, steps.behaviour_log_prob, atol=1e-6)
    if recorder is impala:  # the first update has no lag, and its ratios are 1
        ratios = [float(row["ratio"]) for row in metrics]
        assert ratios[0] == pytest.approx(1) and max(ratios[1:]) < 0.999


def test_without_a_lag_or_a_correction_v_trace_is_a_plain_actor_critic():
    _, (*_, corrected), _ = states_of(impala, 3, lag=0)
    _, (*_, plain), _ = states_of(impala, 3, lag=0, correct=False)
    chex.assert_trees_all_close(corrected.params, plain.params, atol=1e-5)
    assert corrected.behind == ()


# ---------------------------------------------------------------------------------- options

# marl-jax mixes the logits of options: logits (4, 0) and (0, 0) at half each are then (2, 0), and
# the first action has the probability .881. Half of .982 and half of .5 are .741.


def outputs(options, actions):
    return jnp.concatenate([jnp.asarray(options), jnp.asarray(actions).ravel()])


@pytest.mark.parametrize(
    ("options", "wanted"), [([0.0, 0.0], 0.7410), ([99.0, 0.0], 0.9820), ([0.0, np.log(3)], 0.6205)]
)
def test_probabilities_of_options_are_mixed_and_not_their_logits(options, wanted):
    policy = opre.head(outputs(options, [[4.0, 0.0], [0.0, 0.0]]), jnp.ones(2, bool))
    np.testing.assert_allclose(jnp.exp(policy.log_prob(jnp.array(0))), wanted, atol=1e-4)


def test_illegal_actions_have_no_part_in_any_option():
    legal = jnp.array([True, True, False])
    policy = opre.head(outputs([0.0, 0.0], [[4.0, 0.0, 9.0], [0.0, 0.0, 50.0]]), legal)
    np.testing.assert_allclose(jax.nn.softmax(policy.logits), [0.7410, 0.2590, 0], atol=1e-4)
    np.testing.assert_allclose(policy.entropy(), 0.5720, atol=1e-4)


def test_hindsight_options_choose_the_policy_and_the_value_and_pull_those_that_act():
    # Agent 1 acts by even odds, and hindsight has 3:1 for the option (4, 0). Values are 8 and 4.
    actor = outputs([0.0, 0.0], [[4.0, 0.0], [0.0, 0.0]])[None, None, None]
    critic = jnp.array([[[[np.log(3.0), 0.0, 8.0, 4.0]]]])
    networks = opre.Options(Given(), opre.head, Given(), lambda view: view, (0,))
    params, carry = ActorCritic(actor, critic), ActorCritic((), ())
    view = View(jnp.zeros((1, 1, 1, 1)), None, jnp.ones((1, 1, 1, 2), bool), None)
    blank = [None] * 4
    steps = RolloutWindows(view, jnp.zeros((1, 1), bool), jnp.zeros((1, 1, 1), int), *blank)
    log_prob, _, penalty = networks.evaluate(params, carry, steps, steps.first)
    np.testing.assert_allclose(jnp.exp(log_prob), 0.8615, atol=1e-4)
    expected = 0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)
    np.testing.assert_allclose(penalty, expected, rtol=1e-5)
    value, _ = networks.value(params, carry, view, steps.first)
    np.testing.assert_allclose(value, 7.0, rtol=1e-6)


def test_options_are_of_discrete_actions():
    with pytest.raises(OptionError, match="continuous: record impala"):
        opre.make(Dial.spec, opre.Args(), Dial())


# ---------------------------------------------------------------------------------- learning


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recorder", "probe", "options"),
    [
        (impala, "two-step", {"lag": 8}),
        (impala, "memory", {"network": "recurrent", "lag": 2}),
        (opre, "match", {"lag": 2}),
        pytest.param(opre, "memory", {"network": "recurrent"}, marks=pytest.mark.nightly),
        pytest.param(impala, "match", {"share_parameters": False}, marks=pytest.mark.nightly),
        pytest.param(
            impala, "one-step", {"epochs": 2, "minibatches": 2}, marks=pytest.mark.nightly
        ),
    ],
)
def test_the_optimum_of_a_probe(recorder, probe, options):
    env = envs.make(f"probe/{probe}")
    greedy, sampled = learn(recorder, recorder.Args(env=env.spec.name, **SMALL, **options))
    assert greedy == env.optimal_return and sampled > 0.9
