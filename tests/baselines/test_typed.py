"""Baselines on images and trees."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl._compiling import QUICKLY
from offmarl.types import ArraySpec, Discrete, EnvSpec
from tests.rollouts import random_view, sequence

from .building import build

IMAGES = EnvSpec("images", 2, 0, 0, Discrete(3), observation=ArraySpec((3, 3, 1), "uint8"))
TREES = EnvSpec(
    "trees",
    2,
    0,
    0,
    Discrete(3),
    observation={"camera": ArraySpec((3, 3, 1), "uint8"), "speed": ArraySpec((2,))},
    global_state={"map": ArraySpec((3, 3), "bool"), "wind": ArraySpec((2,), "bfloat16")},
)


DAILY = {("bc", "trees"), ("qmix_cql", "images")}
CASES = [
    pytest.param(
        name,
        spec,
        marks=[] if (name, spec.name) in DAILY else pytest.mark.nightly,
        id=f"{name}-{spec.name}",
    )
    for name in (
        "alberdice",
        "bc",
        "cfcql",
        "comadice",
        "iql_cql",
        "mac_flow",
        "maicq",
        "omiga",
        "oryx",
        "qmix_bcq",
        "qmix_cql",
    )
    for spec in (IMAGES, TREES)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "spec"), CASES)
def test_every_leaf_is_learnt_from(name: str, spec: EnvSpec) -> None:
    program, hyper = build(name, spec, updates=10_000, hidden=16)
    action, reward = jnp.ones((2, 2, 2), jnp.int32), jnp.ones((2, 2, 2))
    batch = sequence(action, view=random_view(spec, 2, 3), reward=reward)

    def learn(key: Any, hyper: Any) -> Any:
        state = after = program.init(key, hyper)
        for stage in program.stages:
            after, metrics = stage.update(after, batch, key, hyper)
        return state, after, metrics

    learn = jax.jit(learn, compiler_options=QUICKLY)
    state, after, metrics = learn(jax.random.key(0), hyper)
    assert all(np.isfinite(value).all() for value in metrics.values())
    encoders = [
        (before, leaf)
        for (path, before), leaf in zip(
            jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(after), strict=True
        )
        if "'encoder'" in jax.tree_util.keystr(path)
        and "kernel" in jax.tree_util.keystr(path)
        and ".target" not in jax.tree_util.keystr(path)
        and "optimiser" not in jax.tree_util.keystr(path)
    ]
    assert len(encoders) >= 3
    assert all(np.any(np.asarray(before) != np.asarray(leaf)) for before, leaf in encoders)


@pytest.mark.slow
def test_a_clone_of_images_sees_where_the_pixel_is() -> None:
    # Each agent's action is the row of its own bright pixel.
    program, hyper = build("bc", IMAGES, updates=10_000, hidden=16, learning_rate=1e-2)
    row, column = np.random.default_rng(0).integers(3, size=(2, 64, 3, 2))
    image = np.zeros((64, 3, 2, 3, 3, 1), np.uint8)
    np.put_along_axis(image.reshape(64, 3, 2, 9), (3 * row + column)[..., None], 200, axis=-1)
    view = random_view(IMAGES, 64, 3)._replace(observation=jnp.asarray(image))
    batch = sequence(jnp.asarray(row[:, :2], jnp.int32), view=view)

    @jax.jit
    def learn(key: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            return program.stages[0].update(state, batch, key, hyper)

        return jax.lax.scan(step, program.init(key, hyper), length=60)

    state, metrics = learn(jax.random.key(0))
    policy = program.policy(True)
    act = jax.jit(jax.vmap(policy.act, in_axes=(None, None, 0, 0, None)))
    carry, legal = policy.initial_carry(), jnp.ones((64, 2, 3), bool)
    action, _, _ = act(state.params, carry, view.observation[:, 0], legal, jax.random.key(0))
    assert metrics["policy_loss"][0] > 1.0
    assert (np.asarray(action) == row[:, 0]).mean() > 0.95
