"""Episodes that share a window are learned from as if each had a window of its own.

Nothing is learned from padding, from the dead, and from entries of actions that an agent lacks.
"""

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
    deaths: bool
    """Whether the second agent of odd episodes dies in the first step."""


def record(
    episode: int, time: int, case: Case, meaningless: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Return the slot of an episode at some time; its end is at time 4."""
    rng = np.random.default_rng(100 * episode + time)
    alive = np.array([True, time < 1 or episode % 2 == 0 or not case.deaths])
    action = np.where(alive, rng.integers(0, 3, 2), meaningless["action"])
    return {
        "observation": np.where(
            alive[:, None], rng.normal(size=(2, 2)), meaningless["observation"]
        ),
        "state": rng.normal(size=2),
        "alive": alive,
        "action": action,
        "legal_actions": (np.arange(3) == action[:, None]) | (time == 4) | (not case.forced),
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
            last, slot = time == 3, noise(rng)
            slot |= record(episode, time, case, slot) | {"first": time == 0}
            if time < stop:
                dies = np.array([False, episode % 2 == 1 and case.deaths])
                slot |= {
                    "terminated": np.full(2, last and case.terminated) | dies,
                    "truncated": np.full(2, last and not case.terminated) & ~dies,
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
# Weights that depend on what else is in the batch at the same time are switched off, and so are
# random actions that differ from place to place. Windows at the same places need neither.
OFF: dict[str, dict[str, Any]] = {
    "alberdice": {"gradient_penalty": 0.0},
    "maicq": {"value_temperature": 1e9, "policy_temperature": 1e9},
    "omiga": {"network": "recurrent"},
    "matd3_bc": {"target_noise": 0.0, "delay": 1, "critic": "joint"},
    "maddpg_cql": {"cql_weight": 0.0},
    "omar": {"cql_weight": 0.0, "search_weight": 0.0},
}
SMALL: dict[str, dict[str, Any]] = {
    "mac_flow": {"critic_hidden": 4, "layers": 2, "flow_steps": 2},
    "oryx": {"heads": 2},
}
D, C = "discrete", "continuous"
MIXED = ("cfcql", "comadice", "maicq", "omiga", "qmix_bcq", "qmix_cql")
CONTINUOUS = ("maddpg_cql", "matd3_bc", "omar")
CASES = [
    *((name, D, True) for name in ("alberdice", "bc", "iql_cql", *MIXED)),
    *((name, C, True) for name in CONTINUOUS),
    *((name, D, False) for name in ("alberdice", "maicq", "qmix_cql", *SMALL)),
    *((name, C, False) for name in (*CONTINUOUS, "omiga", *SMALL)),
]
DAILY = {("bc", True), ("matd3_bc", True), ("maicq", False), ("omar", False), ("qmix_cql", False)}
DAILY |= {("mac_flow", C), ("oryx", C)}
RANDOM = ("cql_loss", "found_better")  # metrics of the actions that are switched off


def first_moments(state: Any) -> dict[str, Any]:
    """Return Adam's means of the gradients of all parameters, by their place in a state."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    pairs = ((jax.tree_util.keystr(path), leaf) for path, leaf in leaves)
    return {name: leaf for name, leaf in pairs if ".mu" in name}


def with_continuous(batch: Sequence, seed: int) -> Sequence:
    """Return a batch whose actions have two entries in [-1, 1]; the second agent lacks one."""
    legal = jnp.broadcast_to(jnp.array([[True, True], [True, False]]), (*batch.view.alive.shape, 2))
    noise = jax.random.uniform(jax.random.key(seed), (*batch.action.shape, 2), minval=-1)
    action = jnp.where(legal[:, :-1], 0.5 * (batch.action[..., None] - 1.0), noise)
    return batch._replace(view=batch.view._replace(legal_actions=legal), action=action)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "packs"),
    [pytest.param(*x, marks=[] if DAILY & {x[::2], x[:2]} else pytest.mark.nightly) for x in CASES],
)
def test_nothing_passes_between_episodes_nor_from_slots_without_a_step(
    name: str, kind: str, packs: bool
) -> None:
    action, sizes = (Continuous(2), (2, 1)) if kind == C else (Discrete(3), None)
    # With a reward of the team, iql_cql also learns the values of dead agents.
    spec = EnvSpec("", 2, 2, 2, action, reward="individual", action_sizes=sizes)
    program, hyper = build(name, spec, **(OFF if packs else SMALL).get(name, {}))
    key = jax.random.key(0)
    state, update = program.init(key, hyper), jax.jit(program.stages[-1].update)
    forced = packs and name == "qmix_cql"  # or the other actions that it draws would differ
    layouts = [APART, PACKED if packs else APART]
    for ends in ((True, False), (False, True), (False, False)):
        case = Case(*ends, forced, deaths=name != "oryx")  # whose agents also see the dead
        batches = [batch_of(x, case, seed) for seed, x in enumerate(layouts)]
        if kind == C:
            batches = [with_continuous(x, seed) for seed, x in enumerate(batches)]
        (apart, apart_metrics), (packed, metrics) = (update(state, x, key, hyper) for x in batches)
        for metrics_of in (apart_metrics, metrics):  # one a step, in other places
            errors = metrics_of.pop(TD_ERRORS, np.zeros(0))
            metrics_of["sorted errors"] = np.sort(errors[errors != 0])
        for metric in apart_metrics.keys() - (RANDOM if packs else ()):
            expected = apart_metrics[metric]
            assert np.isfinite(expected).all(), metric
            np.testing.assert_allclose(metrics[metric], expected, rtol=1e-4, err_msg=metric)
        separate, together = first_moments(apart), first_moments(packed)
        chex.assert_trees_all_close(separate, together, atol=1e-6)
        assert any(jnp.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(separate))
