"""Oryx: updates by hand, what it learns from, and the coordination of agents that act in turn."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from baselines import oryx
from offmarl._compiling import QUICKLY
from offmarl.errors import OptionError
from offmarl.programs import TD_ERRORS
from offmarl.types import Continuous, EnvSpec, Sequence
from tests.rollouts import SPEC, sequence

from .building import blank, build, spread_like

SIZES = {"hidden": 8, "heads": 2}
CONTINUOUS = replace(SPEC, action=Continuous(3))


def outputs_of(params: Any, policy: list[float], value: list[float]) -> Any:
    """Return a network with these outputs for every input."""
    params = jax.tree.map(jnp.zeros_like, params)
    params["params"]["policy_output"]["Dense_1"]["bias"] = jnp.array(policy)
    params["params"]["value_output"]["Dense_1"]["bias"] = jnp.array(value)
    return params


def metrics_of(
    spec: EnvSpec, batch: Sequence, online: list[float], target: list[float], **options: Any
) -> dict[str, float]:
    """Return the metrics of networks with these values, and the total loss."""
    program, hyper = build(oryx, spec, **SIZES | options)
    params = blank(program, hyper).params
    policy = [0.0] * params["params"]["policy_output"]["Dense_1"]["bias"].size
    model = oryx.make_model(spec, oryx.Args(vault=Path(), **SIZES | options))
    networks = outputs_of(params, policy, online), outputs_of(params, policy, target)
    loss = jax.jit(partial(oryx.loss, model), compiler_options=QUICKLY)
    total, metrics = loss(*networks, batch, jax.random.key(1), hyper)
    return metrics | {"total": total}


BATCH: dict[str, Any] = {
    "reward": jnp.array([[[0.0, 2.0], [9.0, 9.0]], [[1.0, 1.0], [3.0, 3.0]], [[5.0, 5.0]] * 2]),
    "terminated": jnp.zeros((3, 2, 2), bool).at[1, 1].set(True),
    "truncated": jnp.zeros((3, 2, 2), bool).at[2, 0].set(True),
    "mask": jnp.array([[True, True], [True, True], [True, False]]),
    "first": jnp.zeros((3, 3), bool).at[2, 2].set(True),
}
"""Three windows: the first is cut off, the second terminates, the third is truncated after its
first step, and holds the view that its episode ended with."""


def test_an_update_by_hand() -> None:
    # At this temperature the better of two target values, 3 and 1, has three times the weight.
    options = {"value_temperature": 2 / np.log(3), "policy_temperature": 0.5, "critic_weight": 2.0}
    options["normalise_values"] = False
    batch = sequence(
        [[[0, 2], [1, 1]], [[2, 2], [0, 0]], [[1, 1], [0, 0]]],
        legal_actions=jnp.ones((3, 3, 2, 3), bool).at[0, 0, 0, 2].set(False),
        **BATCH,
    )
    values = [1.0, 2.0, 4.0], [1.0, 3.0, 2.0]
    metrics = metrics_of(SPEC, batch, *values, gamma=0.5, **options)
    # The target's values of the second step, 3 and 1, count 1½ and ½ times: 4½ and ½. The first
    # step of the first window: 1 and 4 against ½ 4½ and 2 + ½ 4½; of the second window: 4 against
    # 1 + ½ ½; then 1 against 3. The third window ends in a view without an action, where the mean
    # value of the target's policy is 2: 2 against 5 + ½ 2. What follows the first is not known.
    errors = np.array([[1 - 2.25, 4 - 4.25], [4 - 1.25] * 2, [1 - 3] * 2, [2 - 6] * 2])
    np.testing.assert_allclose(metrics["critic_loss"], 0.5 * (errors**2).mean(), rtol=1e-5)
    largest = [[1.25, 0], [2.75, 2], [4, 0]]
    np.testing.assert_allclose(metrics[TD_ERRORS], largest, rtol=1e-5)
    np.testing.assert_allclose(metrics["q"], (1 + 4 + 2 + 2 + 4 + 4 + 1 + 1 + 2 + 2) / 10)
    # The policy is uniform over legal actions. Its first agent's advantages in the first step: 1 -
    # 3/2, 4 - 7/3 and 2 - 7/3. All other log-probabilities are -log 3, and weights have mean 1.
    weight = np.exp(np.array([-1 / 2, 5 / 3, -1 / 3]) / 0.5)
    weight *= 3 / weight.sum()
    first = weight @ np.log([2, 3, 3])
    np.testing.assert_allclose(metrics["policy_loss"], (first + 7 * np.log(3)) / 10, rtol=1e-5)
    total = metrics["policy_loss"] + 2 * metrics["critic_loss"]
    np.testing.assert_allclose(metrics["total"], total, rtol=1e-6)


def test_an_update_with_continuous_actions_by_hand() -> None:
    action = np.zeros((3, 2, 2, 3), np.float32)
    action[1, 0] = [[0.5, -0.5, 0.0], [1.0, 0.0, 0.0]]
    batch = sequence(
        action,
        legal_actions=jnp.ones((3, 3, 2, 3), bool).at[0, :, 1, 2].set(False),
        **BATCH,
    )
    metrics = metrics_of(CONTINUOUS, batch, [2.0], [4.0], gamma=0.5)
    # All values are equal, so all weights are 1: 2 against r + ½ 4, and against 3 at the end.
    targets = np.array([2, 4, 3, 3, 3, 3, 7, 7])
    errors, scale = 2 - targets, targets.var() / 25
    np.testing.assert_allclose(metrics["critic_loss"], 0.5 * (errors**2).mean(), rtol=1e-6)
    # The clone is Gaussian, clipped at 1, with mean 0 and standard deviation log 2 + 0.01.
    std = np.log(2) + 0.01
    at_zero = -0.5 * np.log(2 * np.pi) - np.log(std)
    from_half, at_one = 2 * -0.5 * (0.5 / std) ** 2, float(jax.scipy.stats.norm.logcdf(-1 / std))
    total = (8 * 3 + 4) * at_zero + from_half + at_one - at_zero
    np.testing.assert_allclose(metrics["policy_loss"], -total / 10, rtol=1e-5)
    total = metrics["policy_loss"] + 0.5 * metrics["critic_loss"] / scale
    np.testing.assert_allclose(metrics["total"], total, rtol=1e-6)


@pytest.mark.parametrize(
    ("targets", "scale"),
    [
        ([0.0, 20.0, 5.0, 15.0], 62.5 / 25),
        ([0.0, 0.2, 0.05, 0.15], 62.5e-4 / 25),
        ([2.0, 2.0, 2.0, 2.0], 0.1 * 4 / 25),  # all alike: a tenth of their mean square
        ([200.0, 200.0, 200.0, 200.0], 1.0),  # but no more than the reference's variance
        ([0.0, 0.0, 0.0, 0.0], 1.0),
    ],
)
def test_the_scale_of_values(targets: list[float], scale: float) -> None:
    mask = jnp.array([[[True, True], [True, True], [False, False]]])
    values = jnp.array([*targets, 1e9, 1e9]).reshape(1, 3, 2)
    result = oryx.value_scale(values, mask)
    np.testing.assert_allclose(result, scale, rtol=1e-5)


@pytest.mark.parametrize(
    ("reward", "terminates", "follows"),
    [("team", True, 3.0), ("individual", True, 0.0), ("individual", False, 3.0)],
)
def test_a_dead_agent_expects_the_mean_of_the_living(
    monkeypatch: pytest.MonkeyPatch, reward: str, terminates: bool, follows: float
) -> None:
    """Of three agents, whose values are 2 and 4 in the second step; the third dies before it."""
    values = jnp.array([[[1.0, 1.0, 1.0], [2.0, 4.0, 9.0]]])
    monkeypatch.setattr(oryx, "decode", lambda *_: None)
    monkeypatch.setattr(oryx, "data_values", lambda *_: values)
    monkeypatch.setattr(oryx, "mean_values", lambda *_: values)
    spec = replace(SPEC, num_agents=3, reward=reward)
    model = SimpleNamespace(spec=spec, value_temperature=1.0)
    batch = sequence(
        jnp.zeros((1, 2, 3), int),
        spec,
        alive=jnp.ones((1, 3, 3), bool).at[0, 1:, 2].set(False),
        reward=jnp.ones((1, 2, 3)),
        terminated=jnp.zeros((1, 2, 3), bool).at[0, 0, 2].set(terminates),
    )
    hyper = SimpleNamespace(gamma=0.5)
    targets, known = oryx.critic_targets(model, None, batch, None, None, hyper)
    np.testing.assert_allclose(targets[0, 0], [1 + 1, 1 + 2, 1 + follows / 2])
    np.testing.assert_array_equal(known[0], [[True] * 3, [False] * 3])


def test_an_agent_with_a_reward_of_its_own_expects_its_own_value_after_a_lone_truncation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(oryx, "decode", lambda *_: None)
    monkeypatch.setattr(oryx, "data_values", lambda *_: jnp.array([[[1.0, 1.0], [2.0, 4.0]]]))
    monkeypatch.setattr(oryx, "mean_values", lambda *_: jnp.array([[[0.0, 0.0], [0.0, 6.0]]]))
    for reward, follows in (("individual", 6.0), ("team", 2.0)):
        model = SimpleNamespace(spec=replace(SPEC, reward=reward), value_temperature=1.0)
        batch = sequence(
            jnp.zeros((1, 2, 2), int),
            alive=jnp.ones((1, 3, 2), bool).at[0, 1:, 1].set(False),
            truncated=jnp.zeros((1, 2, 2), bool).at[0, 0, 1].set(True),
        )
        hyper = SimpleNamespace(gamma=0.5)
        targets, _ = oryx.critic_targets(model, None, batch, None, None, hyper)
        np.testing.assert_allclose(targets[0, 0], [2 / 2, follows / 2])


class Learner:
    """A program whose update is compiled once, for windows like those of `random_batch`."""

    def __init__(self) -> None:
        self.program, self.hyper = build(oryx, updates=300, learning_rate=1e-2, **SIZES)
        self.update = jax.jit(self.program.stages[0].update)
        zeros = blank(self.program, self.hyper)
        params = spread_like(zeros.params, 0.3)
        self.state = zeros._replace(params=params, target=params)

    def learn(self, batch: Sequence, seed: int = 0, state: Any = None) -> Any:
        """Return the state after an update, and its metrics."""
        state = self.state if state is None else state
        return self.update(state, batch, jax.random.key(seed), self.hyper)


@pytest.fixture(scope="module")
def learner() -> Learner:
    return Learner()


def random_batch() -> Sequence:
    """Return windows as in `BATCH`, with random observations, actions and rewards."""
    rng = np.random.default_rng(0)
    fields = {name: jnp.concatenate([field, field[:1]]) for name, field in BATCH.items()}
    reward, observation = (
        jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((4, 2, 2), (4, 3, 2, 2))
    )
    action = jnp.asarray(rng.integers(0, 3, (4, 2, 2)), jnp.int32)
    return sequence(action, observation=observation, **fields | {"reward": reward})


@pytest.mark.slow
def test_the_order_of_the_agents_is_drawn_for_each_update(learner: Learner) -> None:
    losses = {float(learner.learn(random_batch(), seed)[1]["policy_loss"]) for seed in range(8)}
    assert len(losses) == 2


@pytest.mark.slow
def test_the_critic_that_is_loaded_is_that_of_the_loss(learner: Learner) -> None:
    batch = random_batch()
    inputs = learner.state.params, batch.view_tm1, batch.first[:, :-1], batch.action
    q = np.asarray(jax.jit(learner.program.values.apply)(*inputs))[np.asarray(batch.mask)].mean()
    values = [float(learner.learn(batch, seed)[1]["q"]) for seed in range(8)]
    assert min(abs(value - q) for value in values) < 1e-5  # in the natural order of the agents


def test_widths_must_be_multiples_of_heads() -> None:
    with pytest.raises(OptionError, match="--hidden 8 must be a multiple of --heads 3"):
        build(oryx, hidden=8, heads=3)


@pytest.mark.slow
def test_of_two_joint_modes_one_is_kept(learner: Learner) -> None:
    """Independent clones of these data play equal actions half of the time."""
    modes = jnp.array([[0, 1], [1, 0]])[jnp.array([[0, 0], [0, 1], [1, 0], [1, 1]])]
    over = jnp.ones(modes.shape, bool)
    batch = sequence(modes, terminated=over, reward=jnp.ones(modes.shape))
    state = learner.state
    for seed in range(250):
        state, metrics = learner.learn(batch._replace(first=jnp.ones((4, 3), bool)), seed, state)
    assert metrics["policy_loss"] < 0.4  # log 2 for the first agent, nothing for the second
    sampled, greedy = (joint_actions(learner.program, state, greedy) for greedy in (False, True))
    assert sampled[0, 1] + sampled[1, 0] > 490
    assert min(sampled[0, 1], sampled[1, 0]) > 150
    assert set(greedy) in ({(0, 1)}, {(1, 0)})


def joint_actions(program: Any, state: Any, greedy: bool) -> Any:
    """Return how often each joint action is played from the start, of 500."""
    policy, legal = program.policy(greedy), jnp.ones((2, 3), bool)
    act = partial(policy.act, program.policy_params(state), policy.initial_carry())
    draw = jax.jit(jax.vmap(lambda key: act(jnp.zeros((2, 2)), legal, key)[0]))
    return Counter(map(tuple, draw(jax.random.split(jax.random.key(1), 500)).tolist()))
