"""OMIGA: an update by hand, of discrete and of continuous actions."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.distributions import categorical
from offmarl.networks import MixedParams
from offmarl.programs import Hyperparameters, registry
from offmarl.programs.learning import factored_actor_critic
from offmarl.types import Continuous
from tests.rollouts import SPEC, sequence

from .building import THREE_WAYS, blank, build, metrics_of, values_of, weights_of
from .test_updates import update

omiga = registry.load("baseline", "omiga")
CONTINUOUS = replace(SPEC, action=Continuous(3))


def prepared(spec: Any, q: list[float], q_target: list[float], outputs: list[float]) -> Any:
    """Return a program, and a state whose networks do not depend on their input."""
    program, hyper = build("omiga", spec, network="recurrent", gamma=0.5, value_temperature=2.0)
    state = blank(program, hyper)
    params, critic = state.params, state.params.critic
    online = MixedParams(values_of(critic.agent, q), weights_of(critic.mixer, [1.0, -2.0], 0.25))
    other = MixedParams(
        values_of(critic.agent, q_target), weights_of(critic.mixer, [1.0, 1.0], 0.5)
    )
    actor, value = values_of(params.actor, outputs), values_of(params.value, [1.5])
    target = omiga.Target(values_of(params.value, [1.0]), other)
    return program, hyper, state._replace(params=omiga.Params(actor, value, online), target=target)


def test_an_update_with_discrete_actions_by_hand() -> None:
    program, hyper, state = prepared(SPEC, [1.0, 2.0, 4.0], [1.0, 3.0, 2.0], [0.0] * 3)
    batch = sequence(
        [[[0, 2], [1, 1]], [[2, 2], [0, 0]], [[1, 0], [0, 0]]],
        legal_actions=jnp.ones((3, 3, 2, 3), bool).at[0, 0, 0, 2].set(False),
        alive=jnp.ones((3, 3, 2), bool).at[0, 2, 1].set(False).at[2, 0, 1].set(False),
        reward=jnp.array([[[0.0, 2.0], [0.0, 0.0]], [[4.0, 0.5]] * 2, [[50.0, 50.0]] * 2]),
        **THREE_WAYS,
    )
    metrics = metrics_of(program, state, batch, hyper)
    # First window: 1 + 2·4 + ¼ against 1 + ½ (1 + 1 + ½); 2 + 2·2 + ¼ against ½ (1 + ½), truncated,
    # with one agent left in its last view. Second: 4 + 2·4 + ¼ against 9/4, terminated. Third: 2 +
    # ¼ of the living agent, and what follows is not known.
    errors = [9.25 - 2.25, 6.25 - 0.75, 12.25 - 2.25]
    np.testing.assert_allclose(metrics["critic_loss"], np.square(errors).mean(), rtol=1e-6)
    q_tot = (9.25 + 6.25 + 12.25 + 2.25) / 4
    np.testing.assert_allclose(metrics["q_tot"], q_tot, rtol=1e-6)
    # z = (Q̄ - 1.5) / 2 of the seven living agents; V adds 1.5 / 2. The largest z is ¾.
    z = np.array([-0.25, 0.25, 0.75, 0.75, 0.25, 0.25, 0.75])
    value_loss = (np.exp(z - 0.75) + np.exp(-0.75) * 0.75).mean()
    np.testing.assert_allclose(metrics["value_loss"], value_loss, rtol=1e-6)
    log_probs = np.log([1 / 2, *[1 / 3] * 6])  # uniform over legal actions
    np.testing.assert_allclose(metrics["policy_loss"], -(np.exp(z) * log_probs).mean(), rtol=1e-6)


def test_an_update_with_continuous_actions_by_hand() -> None:
    # The actor's outputs are means and logarithms of standard deviations: 0 and log 2.
    program, hyper, state = prepared(CONTINUOUS, [3.0], [2.5], [0.0] * 3 + [np.log(2.0)] * 3)
    action = np.zeros((2, 2, 2, 3), np.float32)
    action[0, 0, 0] = [0.5, -0.5, 0.0]
    batch = sequence(
        action,
        legal_actions=jnp.ones((2, 3, 2, 3), bool).at[1, :, 1, 2].set(False),
        reward=jnp.ones((2, 2, 2)),
        terminated=jnp.zeros((2, 2, 2), bool).at[1, 1].set(True),
    )
    metrics = metrics_of(program, state, batch, hyper)
    # 3 + 2·3 + ¼ against 1 + ½ (1 + 1 + ½), three times, and against 1.
    errors = [9.25 - 2.25] * 3 + [9.25 - 1]
    np.testing.assert_allclose(metrics["critic_loss"], np.square(errors).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["value_loss"], 1 + np.exp(-0.5) * 0.75, rtol=1e-6)
    # The log-density of an entry: that of N(0, 2²) at artanh a = log(3) / 2 for a = ½, or at 0,
    # less log(1 - a²), here log ¾ or 0. The second agent of the last window has two entries.
    at_zero = -0.5 * np.log(2 * np.pi) - np.log(2.0)
    at_half = at_zero - 0.5 * (np.log(3) / 2 / 2) ** 2 - np.log(0.75)
    log_probs = [2 * at_half + at_zero, *[3 * at_zero] * 5, *[2 * at_zero] * 2]
    np.testing.assert_allclose(metrics["policy_loss"], -np.exp(0.5) * np.mean(log_probs), rtol=1e-5)


@pytest.mark.parametrize(("q", "z"), [(3.0, 0.5), (-3.0, -1.0), (1e6, 10.0), (-1e6, -10.0)])
def test_exponents_are_clipped(q: float, z: float) -> None:
    result = omiga.exponents(jnp.float32(0.5), jnp.float32(q), jnp.float32(1.0), 2.0)
    np.testing.assert_allclose(result, z)


@pytest.mark.parametrize("alpha", [0.5, 4.0])
def test_the_temperature_divides_what_is_weighed(
    alpha: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one step with w = ½ and ¼, Q = 3 and 0, and V = 1 and 2."""
    w, v = np.array([0.5, 0.25]), jnp.array([1.0, 2.0])
    weights = SimpleNamespace(w=jnp.array(w)[None, None])
    monkeypatch.setattr(omiga, "mixing_weights", lambda *_: weights)
    networks = SimpleNamespace(
        mixer=None,
        action_values=lambda *_: jnp.array([[[3.0, 0.0]]]),
        values=lambda v, _batch: jnp.stack([v, v])[None],
        policy=SimpleNamespace(apply=lambda *_, method: jnp.zeros((1, 1, 2, 3))),
        head=categorical,
    )
    hyper = SimpleNamespace(value_temperature=alpha)
    target = omiga.Target(None, MixedParams(None, None))

    @jax.jit
    def losses(v: Any) -> Any:
        params = omiga.Params(None, v, None)
        return omiga.local_losses(networks, params, target, sequence([[[0, 1]]]), hyper)

    found, slope = losses(v), jax.grad(lambda v: losses(v)["value_loss"])(v)
    z = w * (np.array([3.0, 0.0]) - v) / alpha
    scale = np.exp(-max(z.max(), -1.0))
    of_values = scale * (np.exp(z) + w * v / alpha).mean()
    np.testing.assert_allclose(found["value_loss"], of_values, rtol=1e-5)
    np.testing.assert_allclose(found["policy_loss"], np.exp(z).mean() * np.log(3), rtol=1e-5)
    # Of e^z + w V / α, with no gradient through the scale: least where e^z is 1 on average.
    np.testing.assert_allclose(slope, scale * w / alpha * (1 - np.exp(z)) / 2, rtol=1e-5)


def test_the_loss_is_the_sum_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comadice's mean weight, say, is only a metric."""
    local = {"value_loss": jnp.float32(10), "policy_loss": jnp.float32(100), "ratio": jnp.ones(())}
    of_critic = jnp.ones(()), {"q_tot": jnp.zeros(())}
    monkeypatch.setattr(factored_actor_critic, "critic_loss", lambda *_: of_critic)
    total, metrics = factored_actor_critic.total_loss(
        lambda *_: local,
        omiga.Networks.of(SPEC, omiga.Args(Path())),
        omiga.Params(None, None, None),
        omiga.Target(None, MixedParams(None, None)),
        sequence([[[0, 1]]]),
        jax.random.key(0),
        Hyperparameters(),
    )
    assert total == 111
    assert metrics == local | {"critic_loss": 1.0, "q_tot": 0.0}


@pytest.mark.slow
def test_parts_are_clipped_by_their_own_norms() -> None:
    program, hyper = build("omiga", max_grad_norm=1e-4, value_temperature=0.5)
    state = jax.jit(program.init)(jax.random.key(0), hyper)
    batch = sequence([[[0, 2]], [[2, 1]]], reward=jnp.array([[[1e4, 1e4]], [[-1e4, 1e4]]]))
    observation = jax.random.normal(jax.random.key(1), (2, 2, 2, 2))
    view = batch.view._replace(observation=observation, state=jnp.ones((2, 2, 2)))
    batch = batch._replace(view=view)
    after, _ = update(program, state, batch, hyper)
    # Adam's first moments are 0.1 of the clipped gradients: those of a huge critic loss do not
    # shrink those of the actor and the values.
    moments = [
        leaf for leaf in jax.tree.leaves(after.optimiser, is_leaf=is_params) if is_params(leaf)
    ]
    for part in moments[0]:
        norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(part)))
        np.testing.assert_allclose(norm, 0.1 * 1e-4, rtol=1e-3)


def is_params(node: Any) -> bool:
    return isinstance(node, omiga.Params)
