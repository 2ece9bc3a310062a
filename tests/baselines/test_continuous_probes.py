"""What MATD3+BC, MADDPG+CQL and OMAR learn of uniform play in the probes, against the exact values.

With continuous actions, an agent of a probe chooses the share (1 + a) / 2 of action 1.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from baselines import maddpg_cql, matd3_bc, omar
from offmarl import envs
from offmarl.types import Sequence, View

from .building import build, repeated
from .probes import uniform_play
from .test_offline import train

SMALL = {
    "hidden": 16,
    "critic_hidden": 32,
    "cql_samples": 3,
    "search_rounds": 2,
    "search_samples": 3,
    "learning_rate": 1e-2,
    "schedule": "linear",
    "tau": 0.05,
    "gamma": 0.9,
    "network": "feedforward",
}
nightly = pytest.mark.nightly


def probe(name: str) -> Any:
    return envs.make(f"probe/{name}", action="continuous")


class Fitted(NamedTuple):
    """The functions of a trained program."""

    act: Callable[[View], jax.Array]
    """Returns the greedy actions ``(B, T, N)`` in the views of episodes."""
    values: Callable[[Sequence, jax.Array], jax.Array]
    """Returns the values ``(B, T, N)`` of actions ``(B, T, N)`` in the views of episodes."""


def learn(module: Any, env: Any, batch: Sequence, updates: int, **options: Any) -> Fitted:
    """Train a program on the same batch again and again."""
    settings = {name: value for name, value in SMALL.items() if hasattr(module.Args, name)}
    program, hyper = build(module, env.spec, updates=updates, **settings | options)
    state = repeated(program, hyper, batch, updates)
    policy, params = program.policy(True), program.policy_params(state)

    def step(carry: Any, view: View) -> Any:
        key = jax.random.key(0)
        action, _, carry = policy.act(params, carry, view.observation, view.legal_actions, key)
        return carry, action[..., 0]

    def act(view: View) -> jax.Array:
        return jax.lax.scan(step, policy.initial_carry(), view)[1]

    def values(batch: Sequence, action: jax.Array) -> jax.Array:
        parameters = program.values.params(state)
        return program.values.apply(
            parameters, batch.view_tm1, batch.first[:, :-1], action[..., None]
        )

    return Fitted(jax.jit(jax.vmap(act)), jax.jit(values))


@pytest.mark.slow
def test_td3_bc_stops_half_way_between_the_data_and_the_best_action() -> None:
    # The mean value of an agent's action is ½ + a/4, and the squared distance to uniform data has
    # the slope 2 a. So 2 a = α/4 / (½ + a/4), which for α = 2.5 is solved by a = ½. If a gradient
    # flowed through the normaliser, the policy would stay at 0, the mean of the data.
    env = probe("one-step")
    batch = uniform_play(env)
    fitted = learn(matd3_bc, env, batch, 300, critic="observation")
    action = fitted.act(batch.view_tm1)
    assert action.mean() == pytest.approx(0.5, abs=0.1)
    np.testing.assert_allclose(action, 0.5, atol=0.2)
    for action in (-1.0, 0.5, 1.0):
        values = fitted.values(batch, jnp.full((128, 1, 2), action))
        np.testing.assert_allclose(values, 0.5 + action / 4, atol=0.1)


@nightly
def test_joint_values_of_two_steps_are_the_exact_ones() -> None:
    # At the start, the mean share s of action 1 earns ½ (1 - s) now and s later.
    env = probe("two-step")
    batch = uniform_play(env)
    fitted = learn(maddpg_cql, env, batch, 300, cql_weight=0.0)
    first = batch.action[:, 0, :, 0]
    share = (1 + first.mean(-1)) / 2
    values = fitted.values(batch, batch.action[..., 0])
    for time, expected in enumerate((0.5 * (1 - share) + 0.9 * share, share)):
        errors = abs(values[:, time] - expected[:, None])
        assert errors.mean() < 0.04 and errors.max() < 0.15
    assert fitted.act(batch.view_tm1)[:, 0].min() > 0.9


@nightly
def test_the_penalty_makes_values_flatter_by_what_theory_says() -> None:
    # Where Q is least, Q - r = α (1 - the mean share of an action in the log-sum-exp). Of K uniform
    # samples, that is 1 + (1 - 1/K) slope × a for small slopes, which thus fall from ¼ by a factor
    # of 1 + α (1 - 1/K). Much noise makes all samples uniform. No step is followed by another,
    # so there are two kinds of samples: K = 6.
    env = probe("one-step")
    batch = uniform_play(env)
    options = {"cql_weight": 1.0, "cql_samples": 3, "cql_noise": 100.0, "critic": "observation"}
    fitted = learn(omar, env, batch, 300, **options)
    low, high = (fitted.values(batch, jnp.full((128, 1, 2), x)).mean() for x in (-1.0, 1.0))
    assert (high - low) / 2 == pytest.approx(0.25 / (1 + 5 / 6), abs=0.02)
    assert (high + low) / 2 == pytest.approx(0.5, abs=0.03)
    assert fitted.act(batch.view_tm1).min() > 0.9


@nightly
@pytest.mark.parametrize("network", ["recurrent", "feedforward"])
@pytest.mark.parametrize("name", ["one-step", "two-step", "observation", "match", "memory"])
@pytest.mark.parametrize("program", ["matd3_bc", "maddpg_cql", "omar"])
def test_the_best_actions_are_found(
    program: str, name: str, network: str, random_data: Callable[[str], Path], tmp_path: Path
) -> None:
    if name == "memory" and network == "feedforward":
        pytest.skip("needs a memory")
    data = random_data(f"probe/{name}:action=continuous")
    options: dict[str, Any] = {"hidden": 32, "critic_hidden": 32, "length": 3, "network": network}
    # Uniform data say little about what is good, so imitation and penalty are small: the penalty
    # makes the values flat where the policy acts. OMAR, led by samples, is slower than a gradient.
    updates, weights = {
        "matd3_bc": (1000, {"alpha": 30.0}),
        "maddpg_cql": (1000, {"cql_weight": 0.1, "cql_samples": 4}),
        "omar": (2000, {"cql_weight": 0.01, "cql_samples": 4}),
    }[program]
    returns = train(
        program, data, tmp_path / "run", updates=updates, eval_every=updates, seeds=2,
        learning_rate=3e-3, tau=0.02, **options, **weights,
    )  # fmt: skip
    assert returns.mean(-1).min() > 0.95
