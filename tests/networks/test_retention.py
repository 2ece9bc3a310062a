"""Retention: its parallel and its recurrent form, and what a token can depend on."""

from functools import partial

import chex
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from offmarl.networks import retention as module
from offmarl.networks.retention import Retention, retain

T, N, H, D = 6, 3, 2, 4
LAYERS = {causal: Retention(H * D, H, causal, decay=0.9) for causal in (False, True)}
PARAMS = jax.jit(LAYERS[True].init)(
    jax.random.key(0),
    jnp.zeros((H, D, D)),
    jnp.zeros((1, N, H * D)),
    jnp.zeros((1, N, H * D)),
    jnp.zeros(1, bool),
)


@jax.jit
def in_parallel(causal, memory, query, token, first):
    """Both kinds of layers, of which ``causal`` chooses one."""
    results = [LAYERS[kind].apply(PARAMS, memory, query, token, first) for kind in (False, True)]
    return jax.tree.map(lambda a, b: jnp.where(causal, b, a), *results)


@jax.jit
def one_by_one(causal, memory, query, token, first):
    """The recurrent form: all agents of a step at once, or one after the other."""

    def step(memory, x):
        layer, is_first, *tokens = LAYERS[True], *x
        memory = jnp.where(is_first, 0.0, layer.apply(PARAMS, memory, method="decayed"))
        together = layer.apply(PARAMS, memory, *tokens, method="step")
        outputs = []
        for agent in range(N):
            slices = (x[agent : agent + 1] for x in tokens)
            output, memory = layer.apply(PARAMS, memory, *slices, method="step")
            outputs.append(output)
        return memory, jnp.where(causal, jnp.concatenate(outputs), together[0])

    memory, outputs = jax.lax.scan(step, memory, (first, query, token))
    return outputs, memory


@partial(jax.jit, static_argnames=("decay", "causal"))
def retain_all(memory, q, k, v, first, decay, causal):
    return retain(memory, q, k, v, first, module.decays(memory.shape[-3], decay), causal)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    first=arrays.arrays(bool, T),
    causal=st.booleans(),
)
@pytest.mark.slow
def test_the_parallel_form_equals_the_recurrent_one(seed, first, causal):
    """Also with several episodes in a window, and with memory from before it."""
    rng = np.random.default_rng(seed)
    memory = rng.normal(size=(H, D, D)).astype(np.float32)
    query, token = rng.normal(size=(2, T, N, H * D)).astype(np.float32)
    expected = one_by_one(causal, memory, query, token, first)
    result = in_parallel(causal, memory, query, token, first)
    chex.assert_trees_all_close(result, expected, atol=2e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("most", [N, 2 * N, 5 * N])
def test_chunks_change_nothing(causal, most, monkeypatch):
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.normal(size=(3, 2, T, N, H, D)), jnp.float32)
    memory = jnp.asarray(rng.normal(size=(2, H, D, D)), jnp.float32)
    first = jnp.array([[0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 1]], bool)
    expected = retain_all(memory, *inputs, first, decay=0.7, causal=causal)
    monkeypatch.setattr(module, "_CHUNK", most)
    retain_all.clear_cache()
    result = retain_all(memory, *inputs, first, decay=0.7, causal=causal)
    chex.assert_trees_all_close(result, expected, atol=1e-5)


def test_by_hand():
    # One head of width 1, κ = ½ (31 / 32); two agents, whose queries, keys and values are all 1.
    ones, first = jnp.ones((3, 2, 1, 1)), jnp.array([False, False, True])
    memory = jnp.full((1, 1, 1), 8.0)
    retain = partial(retain_all, memory, ones, ones, ones, first, decay=16 / 31)
    outputs, memory = retain(causal=False)
    np.testing.assert_allclose(outputs.squeeze(), [[6, 6], [5, 5], [2, 2]], rtol=1e-6)
    assert memory.item() == 2
    outputs, memory = retain(causal=True)
    np.testing.assert_allclose(outputs.squeeze(), [[5, 6], [4, 5], [1, 2]], rtol=1e-6)
    assert memory.item() == 2


def test_each_head_has_a_decay_of_its_own():
    np.testing.assert_allclose(module.decays(4, 1.0)[[0, 3]], [31 / 32, 511 / 512], rtol=1e-6)
    ratios = 1 - module.decays(4, 1.0)
    np.testing.assert_allclose(ratios[1:] / ratios[:-1], 16 ** (-1 / 3), rtol=1e-3)
    assert module.decays(3, 0.0).tolist() == [0, 0, 0]


def test_without_decay_nothing_is_remembered():
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.normal(size=(3, T, N, H, D)), jnp.float32)
    memory, first = jnp.ones((H, D, D)), jnp.zeros(T, bool)
    result, _ = retain_all(memory, *inputs, first, decay=0.0, causal=True)
    alone, _ = retain_all(memory, *inputs, ~first, decay=0.9, causal=True)
    np.testing.assert_allclose(result, alone, atol=1e-6)
