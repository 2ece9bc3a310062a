"""Networks for many agents: the split first layer, agent ids, and pooled critics and mixers."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.errors import OptionError
from offmarl.networks import (
    FeedForward,
    InputLayer,
    Inputs,
    MixerWeights,
    PolicyConfig,
    Recurrent,
    blank_view,
    critic_encoder,
    init_mixer,
    init_policy,
    make_mixer,
    mixing_weights,
)
from offmarl.networks.encoders import AttentionPool
from offmarl.networks.linear import id_features
from offmarl.types import Discrete, EnvSpec
from tests.plain import Args
from tests.rollouts import dense, numbers, random_params, random_view

SPEC = EnvSpec("some", num_agents=3, observation_size=7, state_size=5, action=Discrete(4))
MANY = replace(SPEC, name="many", num_agents=11, state_size=23)


def shapes(params: Any) -> Any:
    return jax.tree.map(jnp.shape, params)


# ------------------------------------------------------------------------------- the first layer


@pytest.mark.parametrize("agent_id", ["onehot", "sinusoidal", "none"])
@pytest.mark.parametrize("with_shared", [False, True])
def test_the_input_layer_is_a_dense_layer_on_the_concatenation(
    agent_id: Any, with_shared: bool
) -> None:
    obs, shared = numbers(2, 6, 3, 7), numbers(2, 6, 5, seed=1)
    ids = jnp.broadcast_to(id_features(agent_id, 3), (2, 6, 3, id_features(agent_id, 3).shape[-1]))
    everyone = jnp.repeat(shared[..., None, :], 3, axis=-2)
    stacked = np.concatenate([everyone, obs, ids] if with_shared else [obs, ids], -1)
    kernel, bias = numbers(stacked.shape[-1], 4, seed=2), numbers(4, seed=3)
    params = {"params": {"kernel": kernel, "bias": bias}}
    layer, inputs = InputLayer(4, agent_id), Inputs(shared, obs) if with_shared else obs
    chex.assert_trees_all_equal_shapes(
        jax.eval_shape(layer.init, jax.random.key(0), inputs), params
    )
    np.testing.assert_allclose(
        jax.jit(layer.apply)(params, inputs),
        stacked @ np.asarray(kernel) + bias,
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("torso", [FeedForward, Recurrent])
def test_the_state_is_not_copied_to_every_agent(torso: Any) -> None:
    spec = replace(SPEC, num_agents=500, state_size=400)
    critic, view = torso(1, 8, "none", encoder=critic_encoder(spec, 8)), blank_view(spec)
    carry = critic.initial_carry(500)
    params = jax.eval_shape(critic.init, jax.random.key(0), carry, view)
    text = str(jax.make_jaxpr(critic.apply)(params, carry, view))
    assert "500,400" not in text
    assert "500,8" in text


# ------------------------------------------------------------------------------- ids


def test_sinusoidal_ids_distinguish_agents_and_have_one_size() -> None:
    for agents in (1, 2, 3, 100, 1000):
        ids = id_features("sinusoidal", agents)
        assert ids.shape == (agents, 16)
        assert len(np.unique(ids.round(3), axis=0)) == agents
    np.testing.assert_allclose(
        id_features("sinusoidal", 10), id_features("sinusoidal", 100)[::10], atol=1e-4
    )


def test_unknown_ids_are_refused_with_the_choices() -> None:
    with pytest.raises(
        OptionError, match="agent_id must be one of onehot, sinusoidal, none, not T"
    ):
        Args(Path(), agent_id=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("agent_id", "same"), [("onehot", False), ("sinusoidal", True), ("none", True)]
)
@pytest.mark.parametrize("kind", ["feedforward", "recurrent"])
def test_policies_have_one_size_unless_their_ids_are_onehot(
    kind: Any, agent_id: Any, same: bool
) -> None:
    config = PolicyConfig(kind, hidden=4, agent_id=agent_id)
    few, many = (
        jax.eval_shape(partial(init_policy, config, spec), jax.random.key(0))
        for spec in (SPEC, MANY)
    )
    assert (shapes(few) == shapes(many)) is same


# ------------------------------------------------------------------------------- pooling


@pytest.mark.parametrize("heads", [1, 2])
def test_attention_weighs_values_by_the_softmax_of_queries_and_keys(heads: int) -> None:
    """Without the dead; at first all queries are zero, so that values are plain means."""
    pool, x, alive = AttentionPool(4, heads=heads), numbers(5, 3), np.arange(5) != 1
    params = jax.jit(pool.init)(jax.random.key(0), x, alive)["params"]
    assert not params["Dense_1"]["kernel"].any()
    params["Dense_1"]["kernel"] = numbers(4, heads, seed=5)
    params["Dense_2"]["bias"] = numbers(4, seed=6)
    x, params = np.asarray(x), jax.tree.map(np.asarray, params)
    hidden = np.maximum(dense(params, "Dense_0", x), 0)
    logits = dense(params, "Dense_1", hidden)
    weights = np.exp(logits) * alive[:, None]
    weights /= weights.sum(0)
    parts = np.split(dense(params, "Dense_2", hidden), heads, axis=-1)
    means = [weights[:, head] @ parts[head] for head in range(heads)]
    apply = jax.jit(pool.apply)
    result = apply({"params": params}, x, alive)
    assert np.isfinite(apply({"params": params}, x, alive & False)).all()
    np.testing.assert_allclose(result, np.maximum(np.concatenate(means), 0), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_pooled_critics_have_one_size_and_values_follow_the_agents() -> None:
    critic = FeedForward(1, 8, "none", encoder=critic_encoder(SPEC, 8, "pooled"))
    view, many = random_view(SPEC, 2), random_view(MANY, 2)
    params = jax.jit(critic.init)(jax.random.key(0), (), view)
    assert shapes(params) == shapes(jax.eval_shape(critic.init, jax.random.key(0), (), many))
    value = jax.jit(lambda view: critic.apply(params, (), view)[0][..., 0])
    order = np.random.default_rng(0).permutation(11)
    permuted = many._replace(observation=many.observation[:, order])
    np.testing.assert_allclose(value(permuted), value(many)[:, order], atol=1e-5)
    changed = many._replace(observation=many.observation.at[:, 3].add(1.0))
    assert not np.isclose(value(changed)[:, 0], value(many)[:, 0], atol=1e-6).any()
    assert value(view).shape == (2, 3)


def test_pooled_mixers_have_one_size_and_mix_by_hand() -> None:
    """Weights of an agent are those of its own observation, and a mean: of any number of agents."""
    mixer = make_mixer(SPEC, 4, 8, "pooled")
    params = random_params(partial(init_mixer, mixer, SPEC))
    other = jax.eval_shape(
        partial(init_mixer, make_mixer(MANY, 4, 8, "pooled"), MANY), jax.random.key(0)
    )
    assert shapes(params) == shapes(other)
    view = random_view(SPEC, 2)
    view = view._replace(alive=view.alive.at[0, 1].set(False))
    weights = jax.jit(partial(mixing_weights, mixer))(params, view)
    params = params["params"]
    pool = {"params": params["PooledEncoder_0"]["AttentionPool_0"]}
    pooled = jax.jit(AttentionPool(8).apply)(pool, view.observation, view.alive)

    inputs = np.concatenate([jnp.repeat(pooled[:, None], 3, 1), view.observation], -1)
    apply = partial(dense, params)
    rows = apply("row", np.maximum(apply("row_hidden", inputs), 0))
    expected = MixerWeights(
        w1=abs(rows) / 3,
        b1=apply("b1", pooled),
        w2=abs(apply("Dense_0", np.maximum(apply("Dense_1", pooled), 0))),
        b2=apply("Dense_2", np.maximum(apply("Dense_3", pooled), 0))[:, 0],
    )
    chex.assert_trees_all_close(weights, expected, rtol=1e-3, atol=1e-3)
