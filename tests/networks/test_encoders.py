"""Encoders of images and trees, and the networks that use them."""

from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.networks import (
    Encoder,
    FeedForward,
    PolicyConfig,
    agent_network,
    init_mixer,
    init_policy,
    make_mixer,
    mix,
    mixing_weights,
    observation_encoder,
    state_encoder,
    view_encoder,
)
from offmarl.networks.encoders import _with_channels, as_input, by_convolution, by_patches
from offmarl.types import ArraySpec, Discrete, EnvSpec, map_tree
from tests.rollouts import random_view

VECTORS = EnvSpec("vectors", num_agents=3, observation_size=7, state_size=5, action=Discrete(4))
GRID = replace(VECTORS, name="grid", observation=ArraySpec((3, 2, 4), "uint8"), state_size=0)
TREE = replace(
    VECTORS,
    name="tree",
    observation={
        "camera": {"left": ArraySpec((3, 3, 1), "uint8")},
        "speed": ArraySpec((2,)),
        "radio": ArraySpec((4,), agents=(0, 2)),
    },
    global_state=ArraySpec((2, 2, 3), "bool"),
)
SPECS = [GRID, TREE]


def quick(function: Any, **options: Any) -> Any:
    """Jit a function that runs once."""
    return jax.jit(function, **options, compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.slow
def test_vectors_need_no_encoder_and_keep_their_parameters() -> None:
    assert observation_encoder(VECTORS) is None
    assert state_encoder(VECTORS) is None
    config = PolicyConfig("feedforward")
    assert agent_network(config, VECTORS).encoder is None
    names = init_policy(config, VECTORS, jax.random.key(0))["params"].keys()
    assert names == {"Dense_0", "Dense_1", "Dense_2"}
    view = random_view(VECTORS, 2)
    plain, critic = FeedForward(1, 4), FeedForward(1, 4, encoder=view_encoder(VECTORS))
    everyone = jnp.repeat(view.state[:, None], 3, axis=1)
    inputs = jnp.concatenate([everyone, view.observation], axis=-1)
    params = quick(plain.init)(jax.random.key(1), (), inputs)
    same = quick(critic.init)(jax.random.key(1), (), view)
    chex.assert_trees_all_equal(params, same)
    np.testing.assert_allclose(
        critic.apply(params, (), view)[0], plain.apply(params, (), inputs)[0], atol=1e-5
    )


def test_a_second_policy_of_the_same_kind_compiles_nothing(monkeypatch: Any) -> None:
    monkeypatch.setattr(Encoder, "__call__", chex.assert_max_traces(Encoder.__call__, n=1))
    first, second = (
        init_policy(PolicyConfig("feedforward", hidden=5), replace(GRID), jax.random.key(seed))
        for seed in (0, 1)
    )
    kernels = (params["params"]["encoder"]["conv_0"]["kernel"] for params in (first, second))
    assert not np.array_equal(*kernels)


@pytest.mark.parametrize(
    ("spec", "values", "expected"),
    [
        (ArraySpec((2,)), [-300.0, 0.5], [-300.0, 0.5]),
        (ArraySpec((2,), "float16"), [-300.0, 0.5], [-300.0, 0.5]),
        (ArraySpec((2,), "bool"), [True, False], [1, 0]),
        (ArraySpec((3,), "uint8"), [0, 1, 255], np.log([1, 2, 256])),
        (ArraySpec((2,), "int32"), [-9, 9], np.log(10) * np.array([-1, 1])),
        (ArraySpec((1, 2, 1), "uint8"), [[[0], [255]]], np.log([[[1], [256]]])),
        (ArraySpec((32, 32, 3), "uint8"), np.full((32, 32, 3), 51), np.full((32, 32, 3), 0.2)),
    ],
)
def test_numbers_are_scaled_by_their_type(spec: ArraySpec, values: Any, expected: Any) -> None:
    result = as_input(jnp.asarray(np.array(values, spec.numpy_dtype)), spec)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dtype", "kernels", "features"),
    [
        ((5, 4, 26), "uint8", [(3, 3, 26, 32), (2, 2, 32, 32)], 3 * 2 * 32),
        ((6, 6), "int8", [(3, 3, 1, 32), (2, 2, 32, 32)], 3 * 3 * 32),
        ((2, 5, 4, 3), "uint8", [(3, 3, 6, 32), (2, 2, 32, 32)], 3 * 2 * 32),
        (
            (84, 84, 3),
            "uint8",
            [(8, 8, 3, 32), (4, 4, 32, 64), (3, 3, 64, 64)],
            11 * 11 * 64,
        ),
    ],
)
def test_images_are_convolved_by_their_size(
    shape: tuple[int, ...], dtype: str, kernels: list[Any], features: int
) -> None:
    spec = ArraySpec(shape, dtype)
    encoder = Encoder((("", spec),), hidden=7)
    image = jax.ShapeDtypeStruct((2, 3, *shape), dtype)
    encoded, params = jax.eval_shape(encoder.init_with_output, jax.random.key(0), image)
    assert encoded.shape == (2, 3, 7)
    params = params["params"]
    assert [params[f"conv_{i}"]["kernel"].shape for i in range(len(params) - 1)] == kernels
    assert params["dense"]["kernel"].shape == (features, 7)


@pytest.mark.parametrize(("size", "stride"), [(3, 1), (2, 2), (8, 4), (4, 2)])
def test_patches_are_multiplied_as_xla_convolves(size: int, stride: int) -> None:
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.normal(size=(2, 3, 9, 11, 2)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(size, size, 2, 5)), jnp.float32)
    expected = by_convolution(images, kernel, stride)
    assert expected.shape == (2, 3, -(-9 // stride), -(-11 // stride), 5)
    result = quick(by_patches, static_argnums=2)(images, kernel, stride)
    np.testing.assert_allclose(result, expected, atol=1e-4)
    if stride == 1:  # each value is a sum over the pixels around it
        around = np.asarray(images)[0, 0, 3:6, 4:7]
        total = np.einsum("ijc,ijcf->f", around, np.asarray(kernel))
        np.testing.assert_allclose(result[0, 0, 4, 5], total, atol=1e-4)


def test_frames_become_channels_of_the_same_pixels() -> None:
    frames = jnp.arange(5 * 2 * 4 * 3 * 2.0).reshape(5, 2, 4, 3, 2)
    channels = _with_channels(frames, ArraySpec((2, 4, 3, 2), "uint8"))
    np.testing.assert_array_equal(channels, np.concatenate([frames[:, 0], frames[:, 1]], -1))


@pytest.mark.slow
def test_each_leaf_has_its_own_encoding_in_the_order_of_names() -> None:
    encoder = Encoder(tuple(TREE.observation_leaves.items()), 4, agents=3)
    observation = random_view(TREE, 2).observation
    params = quick(encoder.init)(jax.random.key(0), observation)
    encode = quick(encoder.apply)
    encoded = encode(params, observation)
    assert encoded.shape == (2, 3, 12)
    for part, path in enumerate(["camera.left", "radio", "speed"]):
        name = path.partition(".")[0]
        blank = observation | {name: map_tree(jnp.zeros_like, observation[name])}
        same = np.isclose(encode(params, blank), encoded).reshape(2, 3, 3, 4).all((0, 1, 3))
        assert same.tolist() == [index != part for index in range(3)], path
    assert not encoded[:, 1, 4:8].any()  # agent 1 has no radio
    assert encoded[:, [0, 2], 4:8].any()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.slow
def test_mixers_see_any_state_or_all_observations(spec: EnvSpec) -> None:
    mixer, view = make_mixer(spec, embed=4, hidden=8), random_view(spec, 6)
    params = jax.jit(partial(init_mixer, mixer, spec))(jax.random.key(1))
    weights = quick(partial(mixing_weights, mixer))(params, view)
    assert weights.w1.shape == (6, 3, 4)
    assert np.ptp(np.asarray(weights.b2)) > 0  # it depends on the state
    slope = quick(jax.vmap(jax.grad(lambda q, w: mix(w, q))))(jnp.ones((6, 3)), weights)
    assert (slope >= 0).all() and (slope > 0).any()


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_critics_see_the_state_and_the_own_observation(spec: EnvSpec) -> None:
    encoder, view = view_encoder(spec, 4), random_view(spec, 2)
    params = quick(encoder.init)(jax.random.key(0), view)
    encoded = quick(encoder.apply)(params, view)
    by_agent = quick(encoder.observation.apply)(
        {"params": params["params"]["observation"]}, view.observation
    )
    if spec is GRID:
        state = by_agent.reshape(2, -1)
    else:
        state = quick(encoder.state.apply)({"params": params["params"]["state"]}, view.state)
    np.testing.assert_allclose(encoded.shared, state, rtol=1e-5)
    np.testing.assert_allclose(encoded.own, by_agent, rtol=1e-5)
