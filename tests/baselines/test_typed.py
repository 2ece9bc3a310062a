"""Baselines on images and trees."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.programs import DatasetStatistics, hyperparameters, registry
from offmarl.programs.program import structure
from offmarl.testing import entries
from offmarl.types import ArraySpec, Discrete, EnvSpec, Sequence, map_tree

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
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def make(name: str, spec: EnvSpec, **options: Any) -> Any:
    baseline = registry.load("baseline", name)
    args = baseline.Args(vault=Path(), updates=10_000, **options)
    program = baseline.make(spec, structure(args), DatasetStatistics(None))
    return program, hyperparameters(args)


def sequence(spec: EnvSpec, action: Any, view: Any) -> Sequence:
    """Windows whose every slot is a step, ``(B, T)``."""
    lead = action.shape[:2]
    agents, no = (*lead, spec.num_agents), jnp.zeros((*lead, spec.num_agents), bool)
    yes = jnp.ones(lead, bool)
    legal, alive = jnp.ones_like(view.legal_actions), jnp.ones_like(view.alive)
    return Sequence(
        view=view._replace(legal_actions=legal, alive=alive),
        action=action,
        reward=jnp.ones(agents),
        terminated=no,
        truncated=no,
        behaviour_log_prob=jnp.zeros(agents),
        mask=yes,
        next_known=yes,
        first=jnp.zeros((lead[0], lead[1] + 1), bool),
    )


def views(spec: EnvSpec, *lead: int) -> Any:
    rng = np.random.default_rng(0)
    return map_tree(lambda leaf: jnp.asarray(entries(leaf, lead, rng)), spec.view_spec)


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
    program, hyper = make(name, spec, hidden=16)
    batch = sequence(spec, jnp.ones((2, 2, 2), jnp.int32), views(spec, 2, 3))

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
    program, hyper = make("bc", IMAGES, hidden=16, learning_rate=1e-2)
    row, column = np.random.default_rng(0).integers(3, size=(2, 64, 3, 2))
    image = np.zeros((64, 3, 2, 3, 3, 1), np.uint8)
    np.put_along_axis(image.reshape(64, 3, 2, 9), (3 * row + column)[..., None], 200, axis=-1)
    view = views(IMAGES, 64, 3)._replace(observation=jnp.asarray(image))
    batch = sequence(IMAGES, jnp.asarray(row[:, :2], jnp.int32), view)

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
