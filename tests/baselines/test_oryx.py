"""Oryx: updates by hand, what it learns from, and the coordination of agents that act in turn."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.errors import OptionError
from offmarl.programs import DatasetStatistics, hyperparameters, registry
from offmarl.programs.program import TD_ERRORS, structure
from offmarl.types import Continuous, Discrete, EnvSpec, Sequence

from .test_updates import sequence, update

SPEC = EnvSpec("", num_agents=2, observation_size=2, state_size=2, action=Discrete(3))
CONTINUOUS = replace(SPEC, action=Continuous(3))


def make(spec: EnvSpec, name: str = "oryx", **options: Any) -> tuple[Any, Any]:
    baseline = registry.load("baseline", name)
    sizes = {"hidden": 8, "heads": 2} if name == "oryx" else {"hidden": 8}
    args = baseline.Args(vault=Path(), updates=300, **sizes | options)
    program = baseline.make(spec, structure(args), DatasetStatistics(None))
    return program, hyperparameters(args)


def state_of(program: Any, hyper: Any) -> Any:
    """A state of zeros, without compiling `init`."""
    shapes = jax.eval_shape(program.init, jax.random.key(0), hyper)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def outputs_of(params: Any, policy: list[float], value: list[float]) -> Any:
    """A network with these outputs, whatever happens."""
    params = jax.tree.map(jnp.zeros_like, params)
    params["params"]["policy_output"]["Dense_1"]["bias"] = jnp.array(policy)
    params["params"]["value_output"]["Dense_1"]["bias"] = jnp.array(value)
    return params


def with_outputs(state: Any, online: list[float], target: list[float]) -> Any:
    size = state.params["params"]["policy_output"]["Dense_1"]["bias"].size
    return state._replace(
        params=outputs_of(state.params, [0.0] * size, online),
        target=outputs_of(state.target, [0.0] * size, target),
    )


BATCH: dict[str, Any] = {
    "reward": jnp.array([[[0.0, 2.0], [9.0, 9.0]], [[1.0, 1.0], [3.0, 3.0]], [[50.0, 50.0]] * 2]),
    "terminated": jnp.zeros((3, 2, 2), bool).at[1, 1].set(True),
    "truncated": jnp.zeros((3, 2, 2), bool).at[2, 0].set(True),
    "mask": jnp.array([[True, True], [True, True], [True, False]]),
    "first": jnp.zeros((3, 3), bool).at[2, 2].set(True),
}
"""Three windows: the first is cut off, the second terminates, the third is truncated after its
first step, and holds the view that its episode ended with."""


def test_an_update_by_hand() -> None:
    # At this temperature the better of two target values, 3 and 1, has three times the weight.
    program, hyper = make(
        SPEC, gamma=0.5, value_temperature=2 / np.log(3), policy_temperature=0.5, critic_weight=2.0
    )
    state = with_outputs(state_of(program, hyper), [1.0, 2.0, 4.0], [1.0, 3.0, 2.0])
    batch = sequence(
        [[[0, 2], [1, 1]], [[2, 2], [0, 0]], [[1, 1], [0, 0]]],
        legal_actions=jnp.ones((3, 3, 2, 3), bool).at[0, 0, 0, 2].set(False),
        **BATCH,
    )
    after, metrics = update(program, state, batch, hyper)
    # The target's values of the second step, 3 and 1, count 1½ and ½ times: 4½ and ½. The first
    # step of the first window: 1 and 4 against ½ 4½ and 2 + ½ 4½; of the second window: 4 against
    # 1 + ½ ½; then 1 against 3. What follows the first and the third window is not known.
    errors = np.array([[1 - 2.25, 4 - 4.25], [4 - 1.25] * 2, [1 - 3] * 2])
    np.testing.assert_allclose(metrics["critic_loss"], 0.5 * (errors**2).mean(), rtol=1e-5)
    largest = [[1.25, 0], [2.75, 2], [0, 0]]
    np.testing.assert_allclose(metrics[TD_ERRORS], largest, rtol=1e-5)
    np.testing.assert_allclose(metrics["q"], (1 + 4 + 2 + 2 + 4 + 4 + 1 + 1 + 2 + 2) / 10)
    # The policy is uniform over legal actions. Its first agent's advantages in the first step: 1 -
    # 3/2, 4 - 7/3 and 2 - 7/3. All other log-probabilities are -log 3, and weights have mean 1.
    weight = np.exp(np.array([-1 / 2, 5 / 3, -1 / 3]) / 0.5)
    weight *= 3 / weight.sum()
    first = weight @ np.log([2, 3, 3])
    np.testing.assert_allclose(metrics["policy_loss"], (first + 7 * np.log(3)) / 10, rtol=1e-5)
    # The target moves by τ = 0.005.
    moved = jax.tree.map(
        lambda old, new, target: jnp.abs(old + 0.005 * (new - old) - target).max(),
        *(state.target, after.params, after.target),
    )
    assert max(jax.tree.leaves(moved)) < 1e-6
    # A second update with another weight of the critic's loss has another gradient.
    norm = metrics["grad_norm"]
    half = make(SPEC, gamma=0.5, value_temperature=2 / np.log(3), policy_temperature=0.5)[0]
    assert update(half, state, batch, hyper)[1]["grad_norm"] < norm


def test_an_update_with_continuous_actions_by_hand() -> None:
    program, hyper = make(CONTINUOUS, gamma=0.5)
    state = with_outputs(state_of(program, hyper), [2.0], [4.0])
    action = np.zeros((3, 2, 2, 3), np.float32)
    action[1, 0] = [[0.5, -0.5, 0.0], [1.0, 0.0, 0.0]]
    batch = sequence(
        action,
        legal_actions=jnp.ones((3, 3, 2, 3), bool).at[0, :, 1, 2].set(False),
        **BATCH,
    )
    _, metrics = update(program, state, batch, hyper)
    # All values are equal, so all weights are 1: 2 against r + ½ 4, and against 3 at the end.
    errors = 2 - np.array([2, 4, 3, 3, 3, 3])
    np.testing.assert_allclose(metrics["critic_loss"], 0.5 * (errors**2).mean(), rtol=1e-6)
    # The clone is Gaussian, clipped at 1, with mean 0 and standard deviation log 2 + 0.01.
    std = np.log(2) + 0.01
    at_zero = -0.5 * np.log(2 * np.pi) - np.log(std)
    from_half, at_one = 2 * -0.5 * (0.5 / std) ** 2, float(jax.scipy.stats.norm.logcdf(-1 / std))
    total = (8 * 3 + 4) * at_zero + from_half + at_one - at_zero
    np.testing.assert_allclose(metrics["policy_loss"], -total / 10, rtol=1e-5)


@pytest.mark.parametrize(("reward", "follows"), [("team", 3.0), ("individual", 0.0)])
def test_a_shared_reward_continues_after_an_agents_death(reward: str, follows: float) -> None:
    spec = replace(SPEC, reward=reward)
    program, hyper = make(spec, gamma=0.5)
    state = with_outputs(state_of(program, hyper), [0.0, 0.0, 0.0], [1.0, 3.0, 2.0])
    died = jnp.zeros((1, 2, 2), bool).at[0, 0, 1].set(True)
    batch = sequence(
        [[[0, 2], [1, 0]]],
        alive=jnp.ones((1, 3, 2), bool).at[0, 1:, 1].set(False),
        terminated=died,
    )
    _, metrics = update(program, state, batch, hyper)
    # Of the second agent's next action nothing is used; the first one's value is 3.
    wanted = 0.5 * ((0.5 * 3) ** 2 + (0.5 * follows) ** 2) / 2
    np.testing.assert_allclose(metrics["critic_loss"], wanted, rtol=1e-6)


def random_state(program: Any, hyper: Any) -> Any:
    rng = np.random.default_rng(0)
    state = state_of(program, hyper)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.5, jnp.float32), state.params
    )
    return state._replace(params=params, target=params)


def random_batch(seed: int) -> Sequence:
    """Windows as in `BATCH`, with the noise of a seed in all that does not count."""
    fixed, noise = np.random.default_rng(0), np.random.default_rng(seed)
    steps = np.asarray(BATCH["mask"])
    views = np.array([[True, True, True], [True, True, False], [True, True, False]])
    views[2, 1] = False  # nothing follows from the view that an episode ended with

    def fill(where: np.ndarray, draw: str, *args: Any) -> jax.Array:
        one, other = (getattr(rng, draw)(*args) for rng in (fixed, noise))
        where = where.reshape(where.shape + (1,) * (one.ndim - where.ndim))
        return jnp.asarray(np.where(where, one, other))

    views[0, 2] = False
    batch = sequence(fill(steps, "integers", 0, 3, (3, 2, 2)), **BATCH)
    observation = fill(views, "normal", 0, 1, (3, 3, 2, 2)).astype(jnp.float32)
    reward = fill(steps, "normal", 0, 1, (3, 2, 2)).astype(jnp.float32)
    return batch._replace(view=batch.view._replace(observation=observation), reward=reward)


def test_nothing_is_learnt_from_padding() -> None:
    program, hyper = make(SPEC)
    state = random_state(program, hyper)
    step = jax.jit(program.stages[0].update)
    wanted = step(state, random_batch(0), jax.random.key(1), hyper)
    for seed in (1, 2):
        found = step(state, random_batch(seed), jax.random.key(1), hyper)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_the_order_of_the_agents_is_drawn_for_each_update() -> None:
    program, hyper = make(SPEC)
    state = random_state(program, hyper)
    step = jax.jit(program.stages[0].update)
    found = [step(state, random_batch(0), jax.random.key(seed), hyper)[1] for seed in range(8)]
    assert len({float(metrics["policy_loss"]) for metrics in found}) == 2


def test_the_critic_that_is_loaded_is_the_one_of_the_loss() -> None:
    program, hyper = make(SPEC)
    state, batch = random_state(program, hyper), random_batch(0)
    inputs = state.params, batch.view_tm1, batch.first[:, :-1], batch.action
    q = jax.jit(program.values.apply)(*inputs)
    losses = jax.jit(program.stages[0].update)
    orders = [losses(state, batch, jax.random.key(seed), hyper)[1]["q"] for seed in range(8)]
    of_steps = np.asarray(q)[np.asarray(batch.mask)].mean()
    assert min(abs(float(each) - of_steps) for each in orders) < 1e-5


def test_widths_must_be_multiples_of_heads() -> None:
    with pytest.raises(OptionError, match="--hidden 8 must be a multiple of --heads 3"):
        make(SPEC, heads=3)


# ---------------------------------------------------------------------------------- learning


def train(name: str, spec: EnvSpec, batch: Sequence, updates: int, **options: Any) -> Any:
    """Return a program and what it learns of one batch."""
    program, hyper = make(spec, name, **options)

    @jax.jit
    def run(key: Any) -> Any:
        def step(state: Any, key: Any) -> Any:
            return program.stages[0].update(state, batch, key, hyper)[0], None

        return jax.lax.scan(step, program.init(key, hyper), jax.random.split(key, updates))[0]

    return program, run(jax.random.key(0))


def joint_actions(program: Any, state: Any, spec: EnvSpec, greedy: bool = False) -> Any:
    """Return how often each joint action is played from the start, of 500."""
    policy, legal = program.policy(greedy), jnp.ones((2, 2), bool)
    act = partial(policy.act, program.policy_params(state), policy.initial_carry())
    draw = jax.jit(jax.vmap(lambda key: act(jnp.zeros((2, 2)), legal, key)[0]))
    return Counter(map(tuple, draw(jax.random.split(jax.random.key(1), 500)).tolist()))


def test_of_two_joint_modes_one_is_kept_where_independent_clones_mix_them() -> None:
    spec = EnvSpec("", 2, 2, 2, Discrete(2))
    modes = jnp.array([[[0, 1]], [[1, 0]]] * 4)
    over = jnp.ones(modes.shape, bool)
    batch = sequence(modes, legal_actions=jnp.ones((8, 2, 2, 2), bool), terminated=over)
    batch = batch._replace(reward=jnp.ones(modes.shape))
    program, state = train("oryx", spec, batch, 120, learning_rate=1e-2)
    played = joint_actions(program, state, spec)
    assert played[0, 1] + played[1, 0] > 490
    assert min(played[0, 1], played[1, 0]) > 150
    greedy = joint_actions(program, state, spec, greedy=True)
    assert set(greedy) in ({(0, 1)}, {(1, 0)})
    clone = joint_actions(*train("bc", spec, batch, 120, learning_rate=1e-2), spec)
    assert clone[0, 0] + clone[1, 1] > 150
