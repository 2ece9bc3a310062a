"""One update of each baseline: what it learns from, and what it must ignore."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from offmarl._compiling import QUICKLY
from offmarl.errors import OptionError
from offmarl.losses import sample_legal_actions
from offmarl.programs import TD_ERRORS, registry
from offmarl.programs.learning.offline_q_learning import next_values
from offmarl.types import Continuous, EnvSpec, Sequence
from tests.rollouts import SPEC, sequence

from .building import blank, build, metrics_of, values_of


def sum_of(params: Any) -> Any:
    """A mixer of width 1 that adds the agents' values; their sum must not be negative."""
    params = jax.tree.map(jnp.zeros_like, params)
    for layer in ("Dense_0", "Dense_3"):  # of the first and of the second weights
        params["params"][layer]["bias"] = jnp.ones_like(params["params"][layer]["bias"])
    return params


def with_sum(params: Any, values: list[float]) -> Any:
    """Return agents and a mixer by which Q_tot is the sum of these values, in every state."""
    return params._replace(agent=values_of(params.agent, values), mixer=sum_of(params.mixer))


def learner(program: Any, hyper: Any, of_values: Any) -> Any:
    """Return a state whose networks value the actions at 1, 2 and 4, and its targets 1, 3 and 2."""
    state = blank(program, hyper)
    params = of_values(state.params, [1.0, 2.0, 4.0])
    return state._replace(params=params, target=of_values(state.target, [1.0, 3.0, 2.0]))


def update(program: Any, state: Any, batch: Sequence, hyper: Any) -> tuple[Any, dict[str, float]]:
    """Return the state and the metrics after an update of the last stage."""
    return jax.jit(program.stages[-1].update)(state, batch, jax.random.key(1), hyper)


def head_gradient(program: Any, state: Any, batch: Sequence, hyper: Any) -> np.ndarray:
    """Return the gradient of the biases that are the agents' values; nothing else is compiled."""

    def found(state: Any, batch: Sequence, hyper: Any) -> Any:
        after, _ = program.stages[-1].update(state, batch, jax.random.key(1), hyper)
        moments = optax.tree_utils.tree_get(after.optimiser, "mu")
        return getattr(moments, "agent", moments)["params"]["head"]["bias"]

    # Adam's first moments are 0.1 of the first gradient.
    return 10 * np.asarray(jax.jit(found, compiler_options=QUICKLY)(state, batch, hyper))


def test_qmix_cql_by_hand() -> None:
    program, hyper = build("qmix_cql", gamma=0.5, cql_samples=3, mixer_embed=1, bootstrap="greedy")
    state = learner(program, hyper, with_sum)
    action = jnp.array([[[0, 2], [1, 1]], [[2, 2], [0, 0]], [[0, 0], [0, 0]]])
    # Only the data's actions are legal, anything in the last slot; agent 2 is dead there.
    legal = jnp.ones((3, 3, 2, 3), bool).at[:, :-1].set(jax.nn.one_hot(action, 3) > 0)
    batch = sequence(
        action,
        legal_actions=legal,
        alive=jnp.ones((3, 3, 2), bool).at[0, 2, 1].set(False),
        reward=jnp.array([[[0.0, 2.0], [0.0, 0.0]], [[4.0, 0.0]] * 2, [[100.0, 100.0]] * 2]),
        terminated=jnp.zeros((3, 2, 2), bool).at[1, 0].set(True),
        truncated=jnp.zeros((3, 2, 2), bool).at[0, 1].set(True).at[2, 0].set(True),
        mask=jnp.array([[True, True], [True, False], [True, False]]),
        next_known=jnp.array([[True, True], [True, True], [False, False]]),
    )
    metrics = metrics_of(program, state, batch, hyper)
    # First window: 5 against 1 + ½ (3 + 3), the values of the legal actions, not of the best ones;
    # 4 against 0 + ½ 2, truncated: of the last view, the target's value of the action that is best
    # by the other network, of the live agent only.
    # Second window: 8 against 2, terminated. What the third led to is not known.
    np.testing.assert_allclose(metrics["td_loss"], 0.5 * (1**2 + 3**2 + 6**2) / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["q_tot"], (5 + 4 + 8 + 2) / 4, rtol=1e-6)
    # No other joint action is legal, so all three drawn are the data's.
    np.testing.assert_allclose(metrics["cql_loss"], np.log(4), rtol=1e-6)


def test_maicq_by_hand() -> None:
    # Temperatures at which the better of two entries of the batch has three times the weight.
    program, hyper = build(
        "maicq",
        gamma=0.5,
        td_lambda=0.5,
        value_temperature=4 / np.log(3),
        policy_temperature=13 / 6 / np.log(3),
        mixer_embed=1,
    )
    state = blank(program, hyper)
    state = state._replace(
        actor=jax.tree.map(jnp.zeros_like, state.actor),
        critic=with_sum(state.critic, [1.0, 2.0, 4.0]),
        target=with_sum(state.target, [1.0, 3.0, 2.0]),
    )
    batch = sequence(
        [[[0, 2], [1, 1]], [[2, 2], [0, 0]]],
        legal_actions=jnp.ones((2, 3, 2, 3), bool).at[0, 0, 0, 2].set(False),
        reward=jnp.array([[[0.0, 2.0], [9.0, 9.0]], [[1.0, 1.0], [3.0, 3.0]]]),
        terminated=jnp.zeros((2, 2, 2), bool).at[1, 1].set(True),
        truncated=jnp.zeros((2, 2, 2), bool).at[0, 1].set(True),
    )
    metrics = metrics_of(program, state, batch, hyper)
    # The target's values of the second step's actions, 6 and 2, count 1½ and ½ times: 9 and 1.
    # 5 against 1 + ½ 9; 8 against 1 + ½ (½ 1 + ½ 3); 2 against 3. The action that would follow 4,
    # truncated, is not known.
    np.testing.assert_allclose(metrics["critic_loss"], (0.5**2 + 6**2 + 1) / 3, rtol=1e-5)
    np.testing.assert_allclose(metrics["q_tot"], (5 + 4 + 8 + 2) / 4, rtol=1e-6)
    # Agent 1's first advantages are 1 - 3/2, over its legal actions, and 4 - 7/3: weights ½, 1½.
    # Elsewhere all log-probabilities are -log 3, weights have mean 1, mixing coefficients are ½.
    first = 0.5 * np.log(2) + 1.5 * np.log(3)
    expected = 0.5 * (first + 6 * np.log(3)) / 8
    np.testing.assert_allclose(metrics["policy_loss"], expected, rtol=1e-5)


def test_a_dead_agent_has_no_part_in_the_policies_of_maicq() -> None:
    """Of one step; the dead agent has one legal action, whose log-probability is 0."""
    program, hyper = build("maicq", mixer_embed=1)
    state = blank(program, hyper)
    critic = state.critic._replace(mixer=sum_of(state.critic.mixer))
    batch = sequence(
        [[[0, 0]]],
        legal_actions=jnp.ones((1, 2, 2, 3), bool).at[0, 0, 1, 1:].set(False),
        alive=jnp.ones((1, 2, 2), bool).at[0, 0, 1].set(False),
    )
    metrics = metrics_of(program, state._replace(critic=critic), batch, hyper)
    np.testing.assert_allclose(metrics["policy_loss"], 0.5 * np.log(3), rtol=1e-6)


def test_bc_by_hand() -> None:
    program, hyper = build("bc")
    state = blank(program, hyper)
    state = state._replace(params=values_of(state.params, np.log([1.0, 2.0, 5.0]).tolist()))
    batch = sequence(
        [[[0, 2], [1, 1]], [[2, 0], [0, 0]]],
        legal_actions=jnp.ones((2, 3, 2, 3), bool).at[0, 1, 0, 2].set(False),
        alive=jnp.ones((2, 3, 2), bool).at[0, 1:, 1].set(False),
        mask=jnp.array([[True, True], [True, False]]),
    )
    metrics = metrics_of(program, state, batch, hyper)
    likelihoods = [1 / 8, 5 / 8, 2 / 3, 5 / 8, 1 / 8]
    np.testing.assert_allclose(metrics["policy_loss"], -np.log(likelihoods).mean(), rtol=1e-6)


@pytest.mark.parametrize(
    ("reward", "errors"),
    [
        # Window by window, step by step: 1 against 1 + ½ 3, the target's value of the best action
        # that is legal in the next step; 4 against 2 + ½ 2. What the second step led to is not
        # known. 4 against 5, terminated; agent 2 died before and terminates now, so that its value,
        # that of action 0, is learned too: 1 against 9. 4 against 6, as agent 1 dies and
        # terminates; 2 against 0 + ½ 3.
        ("individual", [1 - 2.5, 4 - 3, 4 - 5, 1 - 9, 4 - 6, 2 - 1.5]),
        # The third window goes on after agent 1 has died: 4 against 6 + ½ 1.
        ("team", [1 - 2.5, 4 - 3, 4 - 5, 1 - 9, 4 - 6.5, 2 - 1.5]),
    ],
)
def test_iql_cql_by_hand(reward: str, errors: list[float]) -> None:
    spec = replace(SPEC, reward=reward)
    program, hyper = build("iql_cql", spec, gamma=0.5, cql_weight=2.0, bootstrap="greedy")
    state = learner(program, hyper, values_of)
    alive = jnp.ones((3, 3, 2), bool).at[1, 0, 1].set(False).at[2, 1, 0].set(False)
    batch = sequence(
        [[[0, 2], [1, 1]], [[2, 0], [0, 0]], [[2, 1], [0, 0]]],
        legal_actions=jnp.ones((3, 3, 2, 3), bool)
        .at[0, 1, 0, 2]
        .set(False)
        .at[2, 1, 1, 2]
        .set(False),
        alive=alive,
        reward=jnp.array([[[1.0, 2.0], [0.0, 0.0]], [[5.0, 9.0], [7.0, 7.0]], [[6.0, 0.0]] * 2]),
        terminated=jnp.zeros((3, 2, 2), bool).at[1, 0].set(True).at[2, 0, 0].set(True),
        truncated=jnp.zeros((3, 2, 2), bool).at[0, 1].set(True).at[2, 0, 1].set(True),
        mask=jnp.array([[True, True], [True, False], [True, False]]),
        next_known=jnp.array([[True, False], [True, True], [True, True]]),
    )
    metrics = metrics_of(program, state, batch, hyper)
    np.testing.assert_allclose(metrics["td_loss"], 0.5 * np.square(errors).mean(), rtol=1e-6)
    largest = np.abs(errors).reshape(3, 2).max(1)
    np.testing.assert_allclose(metrics[TD_ERRORS], [[x, 0] for x in largest], rtol=1e-6)
    np.testing.assert_allclose(metrics["q"], (1 + 4 + 2 + 2 + 4 + 4 + 2) / 7, rtol=1e-6)
    of_all, of_legal = np.log(np.exp([1, 2, 4]).sum()), np.log(np.exp([1, 2]).sum())
    # Dead agents have no penalty.
    gaps = [of_all - 1, of_all - 4, of_legal - 2, of_all - 2, of_all - 4, of_all - 4, of_all - 2]
    np.testing.assert_allclose(metrics["cql_loss"], np.mean(gaps), rtol=1e-6)


def test_targets_take_the_next_action_of_the_data() -> None:
    """The first window has no end; the others hold one, a termination and a truncation."""
    batch = sequence(
        [[[0, 2], [1, 1], [2, 0]], [[2, 2], [0, 0], [1, 1]], [[2, 2], [0, 0], [1, 1]]],
        terminated=jnp.zeros((3, 3, 2), bool).at[1, 0].set(True),
        truncated=jnp.zeros((3, 3, 2), bool).at[2, 0].set(True),
        mask=jnp.array([[True, True, True], [True, False, True], [True, False, True]]),
    )
    args = registry.load("baseline", "iql_cql").Args(Path())
    values = jnp.broadcast_to(jnp.array([1.0, 3.0, 2.0]), (3, 3, 2, 3))
    v_t, known = next_values(args, batch, values, -values)
    np.testing.assert_array_equal(v_t[0, :2], [[3, 3], [2, 1]])
    mean = softmax([1.0, 3.0, 2.0]) @ [1, 3, 2]  # in the view that the truncated episode ended with
    np.testing.assert_allclose(v_t[2, 0], [mean, mean], rtol=1e-6)
    np.testing.assert_array_equal(known, [[True, True, False]] * 3)
    # An agent that is truncated alone has a last view, in which the data have an action of nobody.
    alone = batch._replace(truncated=batch.truncated.at[0, 0, 1].set(True))
    v_t, _ = next_values(args, alone, values, -values)
    np.testing.assert_allclose(v_t[0, 0], [3, mean], rtol=1e-6)
    with pytest.raises(OptionError, match="--length 2 or more"):
        registry.load("baseline", "iql_cql").Args(Path(), length=1)
    for name in ("maicq", "oryx"):  # runs of before can be loaded
        program = registry.load("baseline", name)
        with pytest.raises(OptionError, match="--length 2 or more"):
            program.main(program.Args(Path(), length=1))


def softmax(values: list[float]) -> np.ndarray:
    return np.exp(values) / np.exp(values).sum()


def test_the_gradient_of_iql_cql_has_the_weighted_penalty() -> None:
    options = {"cql_weight": 3.0, "max_grad_norm": None, "gamma": 0.5}
    program, hyper = build("iql_cql", bootstrap="greedy", **options)
    state = learner(program, hyper, values_of)
    batch = sequence(
        [[[0, 2]], [[2, 1]]],
        legal_actions=jnp.ones((2, 2, 2, 3), bool).at[1, 0, 1, 2].set(False),
        terminated=jnp.zeros((2, 1, 2), bool).at[1].set(True),
    )
    # 1 and 4 against ½ 2, of the action that is best by the other network; 4 and 2 against 0.
    of_error = [0 * np.eye(3)[0], 3 * np.eye(3)[2], 4 * np.eye(3)[2], 2 * np.eye(3)[1]]
    full, part = softmax([1, 2, 4]), np.append(softmax([1, 2]), 0.0)
    of_gap = [full - np.eye(3)[0], full - np.eye(3)[2], full - np.eye(3)[2], part - np.eye(3)[1]]
    expected = np.mean(of_error, 0) + 3 * np.mean(of_gap, 0)
    np.testing.assert_allclose(head_gradient(program, state, batch, hyper), expected, rtol=1e-5)


def test_the_gradient_of_qmix_cql_has_the_weighted_penalty() -> None:
    options = {"cql_weight": 3.0, "cql_samples": 2, "max_grad_norm": None, "gamma": 0.5}
    program, hyper = build("qmix_cql", mixer_embed=1, **options)
    state, value = blank(program, hyper), np.array([1.0, 2.0, 4.0])
    state = state._replace(params=with_sum(state.params, value.tolist()))
    batch = sequence([[[0, 2]]], terminated=jnp.ones((1, 1, 2), bool))
    gradient = head_gradient(program, state, batch, hyper)
    samples = sample_legal_actions(jax.random.key(1), batch.view_tm1.legal_actions, 2)[0, 0]
    of_data = np.eye(3)[0] + np.eye(3)[2]  # 1 + 4 against nothing
    joint = [np.eye(3)[samples[:, 0]].sum(0), np.eye(3)[samples[:, 1]].sum(0), of_data]
    gap = softmax([choice @ value for choice in joint]) @ joint - of_data
    assert np.abs(gap).max() > 0.01
    np.testing.assert_allclose(gradient, 5 * of_data + 3 * gap, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------- laws of all

PERIODIC = ("cfcql", "iql_cql", "maicq", "qmix_bcq", "qmix_cql")
GRADUAL = ("comadice", "mac_flow", "omiga", "oryx")
OF_CONTINUOUS = ("maddpg_cql", "matd3_bc", "omar")
SMALL: dict[str, dict[str, Any]] = {
    "mac_flow": {"critic_hidden": 4, "layers": 1, "flow_steps": 1},
    "oryx": {"heads": 2},
    "matd3_bc": {"delay": 1},
    "maddpg_cql": {"twin": False},
    "omar": {"twin": False, "search_rounds": 1},
    "comadice": {"mixer_hidden": 4},
    "omiga": {"mixer_hidden": 4},
}


def small(name: str, **options: Any) -> tuple[Any, Any, EnvSpec]:
    """Return a small program without a memory, with its hyperparameters and spec."""
    spec = replace(SPEC, action=Continuous(3)) if name in OF_CONTINUOUS else SPEC
    settings = {"network": "feedforward"} | SMALL.get(name, {}) | options
    return *build(name, spec, **settings), spec


@pytest.mark.parametrize("name", [*PERIODIC, *GRADUAL, *OF_CONTINUOUS])
def test_how_far_target_networks_move(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the way in each update, or all of it in each fourth update of the values.

    Those of matd3_bc move in each second update, as its policies do.
    """
    option: dict[str, Any] = {"target_every": 4} if name in PERIODIC else {"tau": 1 / 3}
    option |= {"delay": 2} if name == "matd3_bc" else {}
    program, hyper, spec = small(name, **option)
    # All that is learned goes from 0 to 1, so that no gradient is compiled.
    monkeypatch.setattr(
        optax, "apply_updates", lambda params, _: jax.tree.map(jnp.ones_like, params)
    )
    action = [[[0, 2]]] if spec is SPEC else np.zeros((1, 1, 2, 3), np.float32)
    batch, state = sequence(action), blank(program, hyper)

    @partial(jax.jit, compiler_options=QUICKLY)
    def target_after(updates: Any) -> Any:
        before = state._replace(updates=updates)
        after, _ = program.stages[-1].update(before, batch, jax.random.key(1), hyper)
        return after.target, after.updates

    first = name == "cfcql"  # one of the ten updates clones
    moved, waits = option.get("tau", 1), name in (*PERIODIC, "matd3_bc")
    for done, distance in ((2, 0 if waits else moved), (3, moved)):
        target, count = target_after(jnp.int32(done + first))
        assert count == done + first + 1
        for leaf in jax.tree.leaves(target):
            np.testing.assert_allclose(leaf, distance, rtol=1e-6)


@pytest.mark.parametrize("name", [*PERIODIC, *GRADUAL, *OF_CONTINUOUS])
def test_nothing_follows_a_termination_and_something_a_truncation(name: str) -> None:
    """The discount matters where the team's episode does not terminate, and only there.

    In the last window an agent is dead, whose values then are 0 or not used, and never infinite.
    """
    program, hyper, spec = small(name)
    rng, state = np.random.default_rng(0), blank(program, hyper)
    fields = {x: getattr(state, x) for x in ("params", "critic", "target") if hasattr(state, x)}
    noise = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), fields)
    action = rng.integers(0, 3, (4, 1, 2)) if spec is SPEC else rng.uniform(-1, 1, (4, 1, 2, 3))
    action = jnp.asarray(action, jnp.int32 if spec is SPEC else jnp.float32)
    batch = sequence(
        action,
        alive=jnp.ones((4, 2, 2), bool).at[3, :, 1].set(False),
        reward=jnp.full((4, 1, 2), 2.0),
        terminated=jnp.zeros((4, 1, 2), bool).at[0].set(True).at[2, 0, 1].set(True),
        truncated=jnp.zeros((4, 1, 2), bool).at[1].set(True),
    )
    obs = jnp.asarray(rng.normal(size=(4, 2, 2, 2)), jnp.float32)
    batch = batch._replace(view=batch.view._replace(observation=obs, state=obs[:, :, 0]))

    def errors(gamma: float) -> np.ndarray:
        result = metrics(jnp.float32(gamma))
        assert all(np.isfinite(value).all() for value in result.values())
        return np.asarray(result[TD_ERRORS])[:, 0]

    @partial(jax.jit, compiler_options=QUICKLY)
    def metrics(gamma: Any) -> Any:
        settings = jax.tree_util.tree_map_with_path(
            lambda path, value: gamma if path[0].name == "gamma" else value, hyper
        )
        _, result = program.stages[-1].update(
            state._replace(**noise), batch, jax.random.key(1), settings
        )
        return {name: value for name, value in result.items() if name != "grad_norm"}

    none, half, full = map(errors, (0.0, 0.5, 1.0))
    assert none[0] == half[0] == full[0] != 0
    if name in ("cfcql", "iql_cql", "maicq", "oryx", "qmix_cql"):
        # They need the data's next action, which no window has.
        assert not full[1:].any()
    else:
        assert (half[1:] != none[1:]).all() and (half[1:] != full[1:]).all()


def test_iql_cql_rewards_an_agent_that_is_dead_and_not_terminated() -> None:
    """The second agent dies in the first step; what its side earns in the second is its reward."""
    program, hyper = build("iql_cql", replace(SPEC, reward="individual"), gamma=0.5, cql_weight=0)
    state = learner(program, hyper, values_of)
    batch = sequence(
        [[[2, 2], [2, 1]]],
        alive=jnp.ones((1, 3, 2), bool).at[0, 1:, 1].set(False),
        reward=jnp.array([[[0.0, 0.0], [7.0, 7.0]]]),
        terminated=jnp.zeros((1, 2, 2), bool).at[0, 1].set(True),
    )
    metrics = metrics_of(program, state, batch, hyper)
    # The values of the dead are those of action 0: the target's 1, and 1 against 7.
    errors = [4 - 0.5 * 2, 4 - 0.5 * 1, 4 - 7, 1 - 7]
    np.testing.assert_allclose(metrics["td_loss"], 0.5 * np.square(errors).mean(), rtol=1e-6)


def test_qmix_bcq_by_hand() -> None:
    program, hyper = build("qmix_bcq", gamma=0.5, threshold=0.3, mixer_embed=1)
    state = blank(program, hyper)
    state = state._replace(
        params=with_sum(state.params, [1.0, 2.0, 4.0]),
        target=with_sum(state.target, [1.0, 3.0, 2.0]),
        # Ratios to the likeliest: 1, 0.5 and 0.2, so the best action by value is not allowed.
        behaviour=values_of(state.behaviour, np.log([1.0, 0.5, 0.2]).tolist()),
    )
    batch = sequence(
        [[[0, 2], [1, 1]], [[2, 2], [0, 0]]],
        legal_actions=jnp.ones((2, 3, 2, 3), bool).at[0, 1, 0, 0].set(False),
        reward=jnp.array([[[0.0, 2.0], [9.0, 9.0]], [[1.0, 1.0], [3.0, 3.0]]]),
        terminated=jnp.zeros((2, 2, 2), bool).at[1, 0].set(True),
        truncated=jnp.zeros((2, 2, 2), bool).at[0, 0].set(True),
        mask=jnp.array([[True, False], [True, False]]),
    )
    metrics = metrics_of(program, state, batch, hyper)
    # 5 against 1 + ½ (2 + 3), truncated: agent 1's first action is illegal in the next step, so its
    # third is allowed there (0.2 / 0.5 = 0.4) and best. 8 against 1, terminated.
    np.testing.assert_allclose(metrics["td_loss"], 0.5 * (1.5**2 + 7**2) / 2, rtol=1e-5)
    probs = np.array([1.0, 0.5, 0.2]) / 1.7
    expected = -np.log([probs[0], probs[2], probs[2], probs[2]]).mean()
    np.testing.assert_allclose(metrics["behaviour_loss"], expected, rtol=1e-5)


@pytest.mark.slow
def test_qmix_bcq_acts_by_allowed_actions_too() -> None:
    program, hyper = build("qmix_bcq", threshold=0.3)
    actor = program.policy_params(program.init(jax.random.key(0), hyper))
    actor = actor._replace(
        network=values_of(actor.network, [1.0, 2.0, 4.0]),
        behaviour=values_of(actor.behaviour, np.log([1.0, 0.5, 0.2]).tolist()),
    )
    policy = program.policy(True)
    act = jax.jit(
        lambda legal, actor: policy.act(
            actor, policy.initial_carry(), jnp.zeros((2, 2)), legal, jax.random.key(0)
        )
    )
    legal = jnp.ones((2, 3), bool).at[1, 0].set(False)
    action, _, _ = act(legal, actor)
    assert action.tolist() == [1, 2]
    action, _, _ = act(legal, actor._replace(threshold=jnp.float32(0)))
    assert action.tolist() == [2, 2]
    action, _, _ = act(legal, actor._replace(threshold=jnp.float32(1)))
    assert action.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["cfcql", "iql_cql", "maicq", "oryx", "qmix_cql"])
def test_a_reward_at_the_end_of_a_truncated_episode_is_learned(name: str) -> None:
    """The last view has no action in the data, and a value all the same; all values are 0 here."""
    options = {"oryx": {"heads": 2}, "cfcql": {"td_lambda": 0.0}}.get(name, {})
    program, hyper = build(name, **options)
    batch = sequence(
        np.zeros((2, 3, 2), int),
        reward=np.full((2, 3, 2), 7.0, np.float32),
        mask=jnp.ones((2, 3), bool).at[0, 1].set(False),
        truncated=jnp.zeros((2, 3, 2), bool).at[0, 0].set(True),
        first=jnp.zeros((2, 4), bool).at[0, 2].set(True),
    )
    errors = jnp.abs(metrics_of(program, blank(program, hyper), batch, hyper)[TD_ERRORS])
    # The last step of a window has its target in another window, which holds what follows it.
    np.testing.assert_allclose(errors, [[7, 0, 0], [7, 7, 0]], atol=1e-5)
