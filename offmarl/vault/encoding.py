"""Conversion between records of experience and the arrays on disk."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from offmarl.errors import ShapeError, VaultLayoutError
from offmarl.types import Continuous, Discrete, EnvSpec, Transition, View
from offmarl.vault.layout import POLICY_IDS, Leaf, NumpyArray, Schema, leaves
from offmarl.vault.tables import Signals


def to_disk(transition: Transition) -> dict[str, NumpyArray]:
    """Return the arrays of a record by their names on disk, neither copied nor converted.

    `fit` also converts them to a vault's shapes.
    """
    view = transition.view
    return {
        "observations": np.asarray(view.observation),
        "actions": np.asarray(transition.action),
        "rewards": np.asarray(transition.reward),
        "terminals": np.asarray(transition.terminated),
        "truncations": np.asarray(transition.truncated),
        "infos.state": np.asarray(view.state),
        "infos.legals": np.asarray(view.legal_actions),
        "infos.alive": np.asarray(view.alive),
        "infos.behaviour_log_probs": np.asarray(transition.behaviour_log_prob),
        POLICY_IDS: np.asarray(transition.policy_id),
    }


_ON_DISK = {
    "observation": "observations",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminals",
    "truncated": "truncations",
    "state": "infos.state",
    "legal_actions": "infos.legals",
    "alive": "infos.alive",
    "behaviour_log_prob": "infos.behaviour_log_probs",
    "extras": "extras",
}


def disk_name(field: str) -> str:
    """Return the name on disk of a field of transitions or views.

    A leaf of a tree has its path, as in "observation.image", which is ``observations.image``.
    """
    name, dot, path = field.partition(".")
    return f"{_ON_DISK[name]}{dot}{path}"


def from_disk(arrays: Mapping[str, NumpyArray], spec: EnvSpec) -> Transition:
    """Build a record from arrays that were read; arrays that a vault lacks are filled in.

    Parameters
    ----------
    arrays
        Disk name to ``(B, T, ...)``. Trailing axes may differ from those of offmarl's vaults, if a
        step has the same number of entries.
    spec
        The sizes of the record.
    """
    lead = arrays["observations"].shape[:2]
    wanted = leaves(spec)

    def field(name: str, missing: float = 0.0) -> NumpyArray:
        dtype, shape = wanted[name]
        if name not in arrays:
            return np.full((*lead, *shape), missing, dtype)
        array = arrays[name]
        if name == POLICY_IDS and array.ndim == len(lead):  # of all agents, as older vaults have it
            array = np.broadcast_to(array[..., None], (*lead, *shape))
        return array.reshape(*lead, *shape).astype(dtype, copy=False)

    def mask(name: str, missing: float = 0.0) -> NumpyArray:
        return field(name, missing) != 0

    observation = field("observations")
    state = field("infos.state") if "infos.state" in arrays else observation.reshape(*lead, -1)
    terminated, truncated = mask("terminals"), mask("truncations")
    return Transition(
        view=View(observation, state, mask("infos.legals", 1.0), mask("infos.alive", 1.0)),
        action=field("actions"),
        reward=field("rewards"),
        terminated=terminated,
        truncated=truncated,
        last=(terminated | truncated).all(-1),
        behaviour_log_prob=field("infos.behaviour_log_probs", np.nan),
        policy_id=field(POLICY_IDS, -1),
    )


def signals_of(arrays: Mapping[str, NumpyArray]) -> Signals:
    """Return the arrays that determine the episodes; missing ends and policies are unknown."""
    reward = arrays["rewards"]
    if reward.dtype.kind not in "biuf":  # bfloat16 and its like do not mix with others
        reward = reward.astype(np.float32)
    reward = reward.reshape(*reward.shape[:2], -1)
    ends = [arrays.get(name, np.zeros_like(reward)) for name in ("terminals", "truncations")]
    terminated, truncated = (end.reshape(reward.shape) != 0 for end in ends)
    ids = arrays.get(POLICY_IDS, np.full(reward.shape[:2], -1))
    return Signals(reward, terminated, truncated, first_agents(ids))


def first_agents(policy_ids: NumpyArray) -> NumpyArray:
    """Return the ``(*b, T)`` policy ids of the first agent, of ids ``(*b, T)`` or ``(*b, T, N)``.

    Tables with one policy id for each step use it for the whole team.
    """
    return policy_ids if policy_ids.ndim < 3 else policy_ids[..., 0]


def spec_of(found: Mapping[str, Leaf]) -> EnvSpec:
    """Infer the sizes of a foreign vault from the shapes of its arrays.

    The number of discrete actions is that of the legal-action mask; 0 without a mask, when it must
    be inferred from the data.

    Raises
    ------
    VaultLayoutError
        The arrays are not those of OG-MARL's layout.
    """
    needed = ("observations", "actions", "rewards")
    lacking = [name for name in needed if name not in found or not found[name].shape]
    if lacking:
        raise VaultLayoutError(
            f"no multi-agent data in OG-MARL's layout: the vault's arrays are "
            f"{', '.join(map(repr, found)) or 'none'}, and {', '.join(lacking)} with an axis of "
            "agents must be among them. Its arrays can still be read one by one with read()."
        )
    num_agents, *observation = found["observations"].shape
    observation_size = math.prod(observation)
    state = found.get("infos.state")
    return EnvSpec(
        name="",
        num_agents=num_agents,
        observation_size=observation_size,
        state_size=math.prod(state.shape) if state else num_agents * observation_size,
        action=_action_of(found),
        reward="individual",
        state="native" if state else "concatenated",
    )


def _action_of(found: Mapping[str, Leaf]) -> Discrete | Continuous:
    dtype, (_, *action) = found["actions"]
    if dtype.kind not in "biu":
        return Continuous(math.prod(action))
    legals = found.get("infos.legals")
    return Discrete(legals.shape[-1] if legals else 0)


def view_dtype(spec: EnvSpec) -> np.dtype[Any]:
    """Return the packed type of one stored final view."""
    agents = (spec.num_agents,)
    return np.dtype(
        [
            ("observation", "<f4", (*agents, spec.observation_size)),
            ("state", "<f4", (spec.state_size,)),
            ("legal_actions", "?", (*agents, spec.action_size)),
            ("alive", "?", agents),
        ]
    )


def pack_view(view: View, spec: EnvSpec) -> NumpyArray:
    """Pack M views into records of `view_dtype`; `ShapeError` if they do not fit."""
    dtype = view_dtype(spec)
    packed = np.zeros(len(np.asarray(view.alive)), dtype)
    for name in dtype.names or ():
        source = np.asarray(getattr(view, name))
        _check(f"the final views' {name}", source, packed[name].shape, dtype[name].base)
        with np.errstate(over="ignore"):
            packed[name] = source
    return packed


def unpack_view(packed: NumpyArray) -> View:
    """Undo `pack_view`."""
    return View(*(packed[name] for name in View._fields))


def fit(transition: Transition, schema: Schema) -> dict[str, NumpyArray]:
    """Return the arrays of a record by their names on disk, in the shapes of a vault.

    Arrays are not copied if possible. Wider numbers of the same kind, such as float64, are cast
    later, by `offmarl.vault.values`.

    Raises
    ------
    ShapeError
        The record is of other shapes or kinds than the vault.
    """
    arrays = to_disk(transition)
    shape = arrays["rewards"].shape
    steps = shape[1] if len(shape) > 1 else 0
    if not steps:
        raise ShapeError(
            f"rewards: got shape {shape}, and the vault takes (rows, T, N) with T > 0."
        )
    lead = (schema.rows, steps)
    arrays[POLICY_IDS] = _fit_policies(arrays[POLICY_IDS], lead, schema)
    for name, leaf in schema.leaves.items():
        _check(name, arrays[name], (*lead, *leaf.shape), leaf.dtype)
    return arrays


def _fit_policies(ids: NumpyArray, lead: tuple[int, int], schema: Schema) -> NumpyArray:
    """Add the axis of agents to policy ids, or remove it, as the vault has it."""
    if schema.agent_policies and ids.shape == lead:
        return np.broadcast_to(ids[..., None], (*lead, schema.spec.num_agents))
    if schema.agent_policies or ids.shape != (*lead, schema.spec.num_agents):
        return ids
    if (ids != ids[..., :1]).any():
        raise ShapeError(
            f"{POLICY_IDS}: agents have different policies, and this vault, which an older offmarl "
            "made, keeps one for all of them: record to another vault."
        )
    return ids[..., 0]


def _check(what: str, array: NumpyArray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ShapeError(
            f"{what}: got {array.dtype} of shape {array.shape}, and the vault takes {dtype} of "
            f"shape {shape}. Convert the array first, or create another vault."
        )
