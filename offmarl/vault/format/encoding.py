"""Conversion between records of experience and the arrays on disk."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from offmarl.errors import ShapeError, VaultLayoutError
from offmarl.gate import is_float
from offmarl.types import (
    DTYPES,
    ArraySpec,
    Continuous,
    Discrete,
    EnvSpec,
    Transition,
    View,
    flatten_tree,
    flatten_view,
    unflatten_tree,
)
from offmarl.vault.format import layout
from offmarl.vault.format.layout import (
    DISK_NAMES,
    EXTRAS,
    OBSERVATIONS,
    POLICY_IDS,
    STATE,
    Leaf,
    NumpyArray,
    Schema,
    leaves,
)
from offmarl.vault.format.tables import Signals


def to_disk(transition: Transition) -> dict[str, NumpyArray]:
    """Return the arrays of a record by their names on disk, neither copied nor converted.

    `fit` also converts them to a vault's shapes.
    """
    fields = transition._asdict() | transition.view._asdict()
    trees = {name: fields[field] for field, name in DISK_NAMES.items()}
    arrays: dict[str, Any] = {}
    for name, tree in (trees | {EXTRAS: transition.extras or {}}).items():
        arrays |= flatten_tree(tree, name) if isinstance(tree, Mapping) else {name: tree}
    return {name: np.asarray(array) for name, array in arrays.items()}


def from_disk(arrays: Mapping[str, NumpyArray], spec: EnvSpec) -> Transition:
    """Build a record from arrays that were read; arrays that a vault lacks are filled in."""
    lead = next(iter(arrays.values())).shape[:2]
    target_leaves = leaves(spec)

    def fitted(name: str, missing: float = 0.0) -> NumpyArray:
        dtype, shape = target_leaves[name]
        if name not in arrays:
            return np.full((*lead, *shape), missing, dtype)
        array = arrays[name]
        if array.ndim == len(lead) and len(shape) == 1:  # one number for all agents
            array = np.broadcast_to(array[..., None], (*lead, *shape))
        return array.reshape(*lead, *shape).astype(dtype, copy=False)

    def tree(name: str, specs: Any) -> Any:
        paths = {path: f"{name}.{path}" if path else name for path in flatten_tree(specs)}
        return unflatten_tree({path: fitted(disk_name) for path, disk_name in paths.items()})

    def mask(name: str, missing: float = 0.0) -> NumpyArray:
        return fitted(name, missing) != 0

    observation = tree(OBSERVATIONS, spec.observation_spec)
    if any(name in arrays for name in flatten_tree(spec.state_spec, STATE)):
        state = tree(STATE, spec.state_spec)
    elif spec.state_size == 0:
        state = np.zeros((*lead, 0), np.float32)
    else:
        state = observation.reshape(*lead, -1)  # all observations, if they are vectors
    terminated, truncated = mask("terminals"), mask("truncations")
    return Transition(
        view=View(observation, state, mask("infos.legals", 1.0), mask("infos.alive", 1.0)),
        action=fitted("actions"),
        reward=fitted("rewards"),
        terminated=terminated,
        truncated=truncated,
        last=(terminated | truncated).all(-1),
        behaviour_log_prob=fitted("infos.behaviour_log_probs", np.nan),
        policy_id=fitted(POLICY_IDS, -1),
        extras=tree(EXTRAS, spec.extras) if spec.extras else None,
    )


def signals_of(arrays: Mapping[str, NumpyArray]) -> Signals:
    """Return the arrays that determine the episodes; missing ends are false, missing ids -1."""
    reward = arrays["rewards"]
    if reward.dtype.kind not in "biuf":  # bfloat16 and its like do not mix with others
        reward = reward.astype(np.float32)
    reward = reward.reshape(*reward.shape[:2], -1)
    ends = [arrays.get(name, np.zeros_like(reward)) for name in ("terminals", "truncations")]
    ends = [end.reshape(*reward.shape[:2], -1) for end in ends]  # perhaps one number for all agents
    terminated, truncated = (np.broadcast_to(end != 0, reward.shape) for end in ends)
    ids = np.asarray(arrays.get(POLICY_IDS, -1))
    ids = ids[..., None] if ids.ndim == 2 else ids  # one id for all agents, as in older vaults
    shape = np.broadcast_shapes(ids.shape, reward.shape)
    return Signals(reward, terminated, truncated, np.broadcast_to(ids, shape))


def spec_of(disk_leaves: Mapping[str, Leaf]) -> EnvSpec:
    """Infer the sizes of a foreign vault from the names, types and shapes of its arrays.

    The number of discrete actions is that of the legal-action mask; 0 without a mask, when it must
    be inferred from the data.
    """
    observation = {name: leaf for name, leaf in disk_leaves.items() if is_of(OBSERVATIONS, name)}
    required = (*(observation or [OBSERVATIONS]), "actions", "rewards")
    if lacking := [x for x in required if x not in disk_leaves or not disk_leaves[x].shape]:
        raise VaultLayoutError(
            f"no multi-agent data in OG-MARL's layout: the vault's arrays are "
            f"{', '.join(map(repr, disk_leaves)) or 'none'}, and {', '.join(lacking)} with an axis "
            "of agents must be among them. Its arrays can still be read one by one with read()."
        )
    num_agents = next(iter(observation.values())).shape[0]
    state = {name: leaf for name, leaf in disk_leaves.items() if is_of(STATE, name)}
    actions, legals = disk_leaves["actions"], disk_leaves.get("infos.legals")
    action: Discrete | Continuous = Discrete(legals.shape[-1] if legals and legals.shape else 0)
    if actions.dtype.kind not in "biu":
        action = Continuous(math.prod(actions.shape[1:]))
    try:
        spec = EnvSpec(
            name="",
            num_agents=num_agents,
            observation_size=0,
            state_size=0,
            action=action,
            reward="individual",
            state="native" if state else "concatenated",
            observation=_tree_of(observation, OBSERVATIONS, num_agents),
            global_state=_tree_of(state, STATE) if state else None,
            extras=_extras_of(disk_leaves),
        )
        layout.check_leaves(spec)
        _check_shapes(disk_leaves, leaves(spec))
    except ShapeError as error:
        raise VaultLayoutError(
            f"{error} The vault's arrays can still be read one by one with read()."
        ) from error
    if state or not spec.is_vector:
        return spec
    return dataclasses.replace(spec, state_size=num_agents * spec.observation_size)


def _check_shapes(disk_leaves: Mapping[str, Leaf], expected: Mapping[str, Leaf]) -> None:
    """Raise `ShapeError` if an array cannot be brought to the shape that it has in a vault."""
    for name, leaf in disk_leaves.items():
        shape = expected[name].shape if name in expected else leaf.shape
        is_of_all = not leaf.shape and len(shape) == 1
        if not is_of_all and math.prod(leaf.shape) != math.prod(shape):
            raise ShapeError(f"{name} has the shape {leaf.shape}, and not {shape}.")


def is_of(group: str, name: str) -> bool:
    """Whether an array is that of a group, such as the observations, or a leaf of its tree."""
    return name == group or name.startswith(f"{group}.")


def _tree_of(disk_leaves: Mapping[str, Leaf], group: str, num_agents: int | None = None) -> Any:
    """Return the specs of a group of another program's arrays, without the axis of agents."""
    specs: dict[str, ArraySpec] = {}
    for name, leaf in disk_leaves.items():
        shape = leaf.shape
        if num_agents is not None:
            if shape[0] != num_agents:
                raise ShapeError(f"{name} is of {shape[0]} agents, and others of {num_agents}.")
            shape = shape[1:]
        spec = ArraySpec(shape, leaf.dtype.name if leaf.dtype.name in DTYPES else "float32")
        if name == group and is_float(spec.numpy_dtype) and len(shape) < 2 + (num_agents is None):
            spec = ArraySpec((spec.size,), spec.dtype)  # a scalar, or a state of each agent
        specs[name.removeprefix(group).removeprefix(".")] = spec
    return unflatten_tree(specs)


def _extras_of(disk_leaves: Mapping[str, Leaf]) -> dict[str, ArraySpec]:
    """Return the specs of the extra leaves of another program's vault."""
    names = {name.removeprefix(f"{EXTRAS}."): name for name in disk_leaves if is_of(EXTRAS, name)}
    return {
        extra: ArraySpec(disk_leaves[name].shape, disk_leaves[name].dtype.name)
        for extra, name in names.items()
        if "." not in extra and extra != EXTRAS and disk_leaves[name].dtype.name in DTYPES
    }


def view_dtype(spec: EnvSpec) -> np.dtype[Any]:
    """Return the packed type of one stored final view: a field for each leaf."""
    leaves = spec.view_leaves
    return np.dtype([(name, leaf.numpy_dtype, leaf.shape) for name, leaf in leaves.items()])


def pack_view(view: View, spec: EnvSpec) -> NumpyArray:
    """Pack M views into records of `view_dtype`; `ShapeError` if they do not fit."""
    dtype = view_dtype(spec)
    packed = np.zeros(len(np.asarray(view.alive)), dtype)
    arrays = flatten_view(view)
    _check_names(arrays, dtype.names or (), "the final views")
    for name in dtype.names or ():
        source = np.asarray(arrays[name])
        _check(f"the final views' {name}", source, packed[name].shape, dtype[name].base)
        with np.errstate(over="ignore"):
            packed[name] = source
    return packed


def unpack_view(packed: NumpyArray) -> View:
    """Undo `pack_view`."""
    return unflatten_view({name: packed[name] for name in packed.dtype.names or ()})


def unflatten_view(leaves: Mapping[str, Any]) -> View:
    """Undo `flatten_view`."""
    return View(**unflatten_tree(leaves))


def fit(transition: Transition, schema: Schema, place: str) -> dict[str, NumpyArray]:
    """Return the arrays of a record by their names on disk, in the shapes of a vault.

    Arrays are not copied if possible. Wider numbers of the same kind, such as float64, are cast
    later, by `offmarl.vault.format.values`.
    """
    arrays = to_disk(transition)
    shape = arrays["rewards"].shape
    steps = shape[1] if len(shape) > 1 else 0
    if not steps:
        raise ShapeError(
            f"rewards: got shape {shape}{place}, and the vault takes (rows, T, N) with T > 0."
        )
    lead = (schema.rows, steps)
    if arrays[POLICY_IDS].shape == lead:  # one id for all agents
        ids = arrays[POLICY_IDS][..., None]
        arrays[POLICY_IDS] = np.broadcast_to(ids, (*lead, schema.spec.num_agents))
    if not schema.spec.state_size:
        arrays.pop(STATE, None)
    _check_names(arrays, schema.leaves, f"the steps{place}")
    for name, leaf in schema.leaves.items():
        _check(name, arrays[name], (*lead, *leaf.shape), leaf.dtype, place)
    return {name: arrays[name] for name in schema.leaves}


def _check_names(names: Collection[str], expected: Collection[str], who: str) -> None:
    """Raise `ShapeError` if leaves are missing or unknown; names are those of all leaves."""
    if missing := [name for name in expected if name not in names]:
        raise ShapeError(
            f"{who} lack {', '.join(missing)}: the vault's leaves are {', '.join(expected)}, and "
            "every step has all of them."
        )
    if unknown := [name for name in names if name not in expected]:
        raise ShapeError(
            f"{who} have {', '.join(unknown)}, and the vault's leaves are {', '.join(expected)}: "
            "name it in the EnvSpec that a vault is created with, or leave it out."
        )


def _check(
    label: str, array: NumpyArray, shape: tuple[int, ...], dtype: np.dtype[Any], place: str = ""
) -> None:
    if array.shape != shape or not can_cast(array.dtype, dtype):
        raise ShapeError(
            f"{label}: got {array.dtype} of shape {array.shape}{place}, and the vault takes "
            f"{dtype} of shape {shape}. Convert the array first, or create another vault."
        )


def can_cast(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether numbers may be cast: to a type of their kind, or of a kind that contains theirs."""
    return np.can_cast(source, target, "same_kind") or (is_float(source) and is_float(target))
