"""Records of experience as the arrays on disk, and back."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from offmarl.errors import ShapeError, VaultFormatError
from offmarl.types import Continuous, Discrete, EnvSpec, Transition, View
from offmarl.vault.layout import Leaf, NumpyArray, Schema, leaves
from offmarl.vault.tables import Signals


def to_disk(transition: Transition) -> dict[str, NumpyArray]:
    """Name the arrays of a record as they are on disk; nothing is copied or converted."""
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
        "infos.policy_ids": np.asarray(transition.policy_id),
    }


def from_disk(arrays: Mapping[str, NumpyArray], spec: EnvSpec) -> Transition:
    """Make a record of what was read; what a foreign vault lacks is filled in.

    Parameters
    ----------
    arrays
        Disk name to ``(B, T, ...)``. Trailing axes may be split otherwise than ours are, as long as
        a step has as many entries.
    spec
        The sizes to bring them to.
    """
    lead = arrays["observations"].shape[:2]
    wanted = leaves(spec)

    def field(name: str, missing: float = 0.0) -> NumpyArray:
        dtype, shape = wanted[name]
        if name not in arrays:
            return np.full((*lead, *shape), missing, dtype)
        return arrays[name].reshape(*lead, *shape).astype(dtype, copy=False)

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
        policy_id=field("infos.policy_ids", -1),
    )


def signals_of(arrays: Mapping[str, NumpyArray]) -> Signals:
    """Return what episodes are told by; ends and policies that no array names are unknown."""
    reward = arrays["rewards"]
    reward = reward.reshape(*reward.shape[:2], -1)
    ends = [arrays.get(name, np.zeros_like(reward)) for name in ("terminals", "truncations")]
    terminated, truncated = (end.reshape(reward.shape) != 0 for end in ends)
    unknown = np.full(reward.shape[:2], -1)
    return Signals(reward, terminated, truncated, arrays.get("infos.policy_ids", unknown))


def spec_of(found: Mapping[str, Leaf]) -> EnvSpec:
    """Infer the sizes of a foreign vault from the shapes of its arrays.

    The number of discrete actions is that of the legal-action mask, or 0 where there is none and
    the data must tell.
    """
    needed = ("observations", "actions", "rewards")
    lacking = [name for name in needed if name not in found or not found[name].shape]
    if lacking:
        raise VaultFormatError(
            f"no multi-agent data: the vault's arrays are {', '.join(found) or 'none'}, and "
            f"{', '.join(lacking)} with an axis of agents must be among them. Its arrays can still "
            "be read one by one with read()."
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
    if dtype.kind == "f":
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
    """Pack M views into records of `view_dtype`; `ShapeError` where they do not fit."""
    dtype = view_dtype(spec)
    packed = np.zeros(len(np.asarray(view.alive)), dtype)
    for name in dtype.names or ():
        source = np.asarray(getattr(view, name))
        _check(f"the final views' {name}", source, packed[name].shape, dtype[name].base)
        packed[name] = source
    return packed


def unpack_view(packed: NumpyArray) -> View:
    """Undo `pack_view`."""
    return View(*(packed[name] for name in View._fields))


def check_transition(arrays: Mapping[str, NumpyArray], schema: Schema) -> int:
    """Return T, the steps in a record; `ShapeError` where it does not fit the vault."""
    shape = arrays["rewards"].shape
    steps = shape[1] if len(shape) > 1 else 0
    if not steps:
        raise ShapeError(
            f"rewards: got shape {shape}, and the vault takes (rows, T, N) with T > 0."
        )
    for name, leaf in leaves(schema.spec).items():
        _check(name, arrays[name], (schema.rows, steps, *leaf.shape), leaf.dtype)
    return steps


def _check(what: str, array: NumpyArray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if array.shape != shape or not np.can_cast(array.dtype, dtype, "safe"):
        raise ShapeError(
            f"{what}: got {array.dtype} of shape {array.shape}, and the vault takes {dtype} of "
            f"shape {shape}. Convert the array first, or create another vault."
        )
