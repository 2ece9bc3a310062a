"""Episodes that share a window are learned from as if each had a window of its own."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.programs import TD_ERRORS
from offmarl.types import Continuous, Discrete, EnvSpec, Sequence, View

from .building import build

STEPS = 5


class Piece(NamedTuple):
    """Steps of an episode of four, and what follows the last of them."""

    episode: int
    start: int
    stop: int


class Case(NamedTuple):
    """How the episodes end, and whether only the data's actions are legal."""

    terminated: bool
    next_known: bool
    forced: bool


def record(episode: int, time: int, forced: bool) -> dict[str, np.ndarray]:
    """Return the slot of an episode at some time; its end is at time 4."""
    rng = np.random.default_rng(100 * episode + time)
    action = rng.integers(0, 3, 2)
    return {
        "observation": rng.normal(size=(2, 2)),
        "state": rng.normal(size=2),
        "alive": np.array([True, time < 2 or episode % 2 == 0]),
        "action": action,
        "legal_actions": (np.arange(3) == action[:, None]) | (time == 4) | (not forced),
        "reward": rng.normal(size=2),
    }


def noise(rng: np.random.Generator) -> dict[str, Any]:
    """Return a slot without a step, which no loss may depend on."""
    return {
        "observation": rng.normal(size=(2, 2)),
        "state": rng.normal(size=2),
        "alive": rng.random(2) < 0.5,
        "legal_actions": np.ones((2, 3), bool),
        "action": rng.integers(0, 3, 2),
        "reward": rng.normal(size=2),
        "terminated": rng.random(2) < 0.5,
        "truncated": rng.random(2) < 0.5,
        "mask": False,
        "next_known": rng.random() < 0.5,
        "first": rng.random() < 0.5,
    }


def window(pieces: list[Piece], case: Case, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Return the slots of a window, ``T+1`` of them."""
    slots = []
    for episode, start, stop in pieces:
        for time in range(start, stop + 1):
            last = time == 3
            slot = noise(rng) | record(episode, time, case.forced) | {"first": time == 0}
            if time < stop:
                slot |= {
                    "terminated": np.full(2, last and case.terminated),
                    "truncated": np.full(2, last and not case.terminated),
                    "mask": True,
                    "next_known": not last or case.terminated or case.next_known,
                }
            elif not case.next_known and stop == 4:
                slot |= noise(rng)
            slots.append(slot)
    return slots + [noise(rng) for _ in range(STEPS + 1 - len(slots))]


def batch_of(windows: list[list[Piece]], case: Case, seed: int) -> Sequence:
    rng = np.random.default_rng(seed)
    slots = [window(pieces, case, rng) for pieces in windows]
    fields = {
        name: jnp.asarray(np.array([[slot[name] for slot in row] for row in slots]))
        for name in slots[0][0]
    }
    fields = {n: x.astype(jnp.float32) if x.dtype == float else x for n, x in fields.items()}
    view = View(*(fields.pop(name) for name in View._fields))
    first = fields.pop("first")
    steps = {name: x[:, :STEPS] for name, x in fields.items()}
    unknown = jnp.full(steps["reward"].shape, jnp.nan)
    return Sequence(view=view, first=first, behaviour_log_prob=unknown, **steps)


APART = [[Piece(0, 1, 4)], [Piece(1, 0, 1)], [Piece(2, 2, 4)], [Piece(3, 0, 2)]]
PACKED = [[*APART[0], *APART[1]], [*APART[2], *APART[3]], [], []]
LAYOUTS = (APART, 1), (PACKED, 2)
"""Windows, and the seed of what is in their empty slots."""
# Weights that depend on what else is in the batch at the same time are switched off, and so are
# random actions that differ from place to place.
OPTIONS = {
    "alberdice": {"gradient_penalty": 0.0},
    "maicq": {"value_temperature": 1e9, "policy_temperature": 1e9},
    "omiga": {"network": "recurrent"},
    "matd3_bc": {"target_noise": 0.0, "delay": 1},
    "maddpg_cql": {"cql_weight": 0.0},
    "omar": {"cql_weight": 0.0, "search_weight": 0.0},
}
OF_CONTINUOUS = ("matd3_bc", "maddpg_cql", "omar")
DAILY = ("bc", "maicq", "matd3_bc")
OTHERS = (
    *("alberdice", "cfcql", "comadice", "iql_cql", "omiga", "qmix_bcq", "qmix_cql"),
    *("maddpg_cql", "omar"),
)
RANDOM = ("cql_loss", "found_better")  # metrics of the actions that are switched off


def first_moments(state: Any) -> dict[str, Any]:
    """Return Adam's means of the gradients of all parameters, by their place in a state."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    pairs = ((jax.tree_util.keystr(path), leaf) for path, leaf in leaves)
    return {name: leaf for name, leaf in pairs if ".mu" in name}


def with_continuous(batch: Sequence) -> Sequence:
    """Return a batch whose actions have one entry in [-1, 1]."""
    legal = jnp.ones_like(batch.view.legal_actions[..., :1])
    view = batch.view._replace(legal_actions=legal)
    return batch._replace(view=view, action=0.5 * (batch.action[..., None] - 1.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*DAILY, *(pytest.param(n, marks=pytest.mark.nightly) for n in OTHERS)]
)
def test_nothing_passes_from_one_episode_to_the_next(name: str) -> None:
    action = Continuous(1) if name in OF_CONTINUOUS else Discrete(3)
    program, hyper = build(name, EnvSpec("", 2, 2, 2, action), **OPTIONS.get(name, {}))
    key = jax.random.key(0)
    state, update = program.init(key, hyper), jax.jit(program.stages[-1].update)
    forced = name == "qmix_cql"  # or the other actions that it draws would differ
    for ends in ((True, False), (False, True), (False, False)):
        batches = [batch_of(windows, Case(*ends, forced), seed) for windows, seed in LAYOUTS]
        if name in OF_CONTINUOUS:
            batches = map(with_continuous, batches)
        (apart, apart_metrics), (packed, metrics) = (update(state, x, key, hyper) for x in batches)
        for metrics_of in (apart_metrics, metrics):  # one a step, in other places
            errors = metrics_of.pop(TD_ERRORS, np.zeros(0))
            metrics_of["sorted errors"] = np.sort(errors[errors != 0])
        for metric in apart_metrics.keys() - RANDOM:
            expected = apart_metrics[metric]
            np.testing.assert_allclose(metrics[metric], expected, rtol=1e-4, err_msg=metric)
        separate, together = first_moments(apart), first_moments(packed)
        chex.assert_trees_all_close(separate, together, atol=1e-6)
        assert any(jnp.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(separate))
