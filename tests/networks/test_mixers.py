"""Mixers: joint values of one action replaced, and weighted sums."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np

from offmarl.networks import (
    MixerWeights,
    init_mixer,
    make_linear_mixer,
    mix,
    mix_counterfactuals,
    mix_each,
    mix_linearly,
    mixing_weights,
)
from offmarl.networks.mixers import LinearWeights
from offmarl.types import Discrete, EnvSpec
from tests.rollouts import dense, random_params, view_of


def draw(*shape: int) -> jax.Array:
    rng = np.random.default_rng(sum(shape))
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def some_weights() -> MixerWeights:
    return MixerWeights(jnp.abs(draw(4, 3, 5)), draw(4, 5), jnp.abs(draw(4, 5)), draw(4))


def test_several_joint_actions_are_mixed_as_each_of_them() -> None:
    weights, q = some_weights(), draw(4, 3, 7)
    result = jax.jit(mix_each)(weights, q)
    expected = jnp.stack([mix(weights, q[..., k]) for k in range(7)], -1)
    np.testing.assert_allclose(result, expected, atol=1e-5)
    slopes, expected = (
        jax.jit(jax.grad(lambda w, q, each=each: (each(w, q) ** 2).sum(), (0, 1)))(weights, q)
        for each in (mix_each, jax.vmap(mix, in_axes=(None, -1), out_axes=-1))
    )
    chex.assert_trees_all_close(slopes, expected, rtol=1e-4, atol=1e-4)


def test_counterfactual_values_are_those_of_the_joint_actions() -> None:
    weights = some_weights()
    base, q = draw(4, 3), draw(4, 3, 6)
    result = jax.jit(mix_counterfactuals)(weights, base, q)
    for agent in range(3):
        for action in range(6):
            joint = base.at[:, agent].set(q[:, agent, action])
            np.testing.assert_allclose(result[:, agent, action], mix(weights, joint), atol=1e-5)


def test_a_weighted_sum_by_hand() -> None:
    weights = LinearWeights(jnp.array([[1.0, 2.0], [0.5, 0.0]]), jnp.array([0.25, -1.0]))
    values = jnp.array([[1.0, 4.0], [2.0, 100.0]])
    np.testing.assert_allclose(mix_linearly(weights, values), [9.25, 0.0])


def test_linear_weights_are_absolute_values() -> None:
    spec = EnvSpec("", num_agents=3, observation_size=2, state_size=4, action=Discrete(2))
    mixer = make_linear_mixer(spec, hidden=8)
    params = random_params(partial(init_mixer, mixer, spec))
    state = draw(50, 4)
    view = view_of(spec, jnp.zeros(50), state=state)
    weights = jax.jit(lambda params, view: mixing_weights(mixer, params, view))(params, view)
    params = params["params"]
    x = np.maximum(dense(params, "hidden_layer", state), 0)
    assert (dense(params, "weights", x) < 0).any()
    np.testing.assert_allclose(weights.w, abs(dense(params, "weights", x)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(weights.b, dense(params, "constant", x)[:, 0], rtol=1e-4, atol=1e-5)
