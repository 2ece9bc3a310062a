"""Arrays in memory, such as those of another program: written to a vault by `from_arrays`."""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, get_args

import numpy as np

from offmarl.errors import InvalidValueError, OptionError, ShapeError
from offmarl.gate import is_float, is_number, to_unit_range
from offmarl.terminal import Progress, quiet
from offmarl.types import (
    DTYPES,
    ArraySpec,
    Continuous,
    Discrete,
    EnvSpec,
    flatten_tree,
    map_tree,
    spec_tree,
    unflatten_tree,
)
from offmarl.vault.convert import common
from offmarl.vault.convert.admission import ImportedRow, Treatment, to_steps
from offmarl.vault.convert.containers import StrPath
from offmarl.vault.dataset import Dataset, open_vault
from offmarl.vault.format.encoding import is_of
from offmarl.vault.format.layout import EXTRAS, OBSERVATIONS, POLICY_IDS, STATE, Codec, NumpyArray

_NARROWER = {"float64": "float32", "int64": "int32", "uint32": "int32", "uint64": "int32"}
"""Types that vaults do not have, and the types that are stored instead."""

_OF_ALL = ("rewards", "terminals", "truncations", POLICY_IDS)
"""Arrays that may have one entry for all agents."""
_OF_AGENTS = (*_OF_ALL, "actions", "infos.legals", "infos.alive", "infos.behaviour_log_probs")


def from_arrays(
    path: StrPath,
    *,
    observations: Any,
    actions: Any,
    rewards: Any,
    terminals: Any = None,
    truncations: Any = None,
    next_observations: Any = None,
    states: Any = None,
    next_states: Any = None,
    legal_actions: Any = None,
    next_legal_actions: Any = None,
    alive: Any = None,
    log_probs: Any = None,
    policy_ids: Any = None,
    extras: Mapping[str, Any] | None = None,
    num_agents: int | None = None,
    num_actions: int | None = None,
    action_bounds: tuple[Any, Any] | None = None,
    env_spec: EnvSpec | None = None,
    provenance: Mapping[str, Any] | None = None,
    codec: Codec = "raw",
    on_invalid: Treatment = "cut",
    progress: Progress = quiet,
) -> Dataset:
    """Make a vault from arrays ``(T, ...)`` that hold episodes end to end.

    Observations, actions, rewards and one of ``terminals`` and ``truncations`` are enough. Arrays
    of a single agent have no axis of agents: rewards ``(T,)`` mean one agent, unless
    ``num_agents`` is given. Arrays of several agents have it after T. All arrays may be
    memory-mapped; they are read a block at a time.

    Parameters
    ----------
    path
        The vault to write, of one row; see `offmarl.vault.create`.
    observations
        An array ``(T, N, ...)``, or a (nested) dict of such arrays. Types are kept, but float64
        becomes float32, and int64 becomes int32.
    actions
        Whole numbers ``(T, N)``, or floats ``(T, N, A)`` in [-1, 1]. The number -1 of an agent that
        is not alive is stored as 0. Floats that are all whole numbers are discrete actions if
        ``num_actions`` or ``legal_actions`` is given, continuous if ``action_bounds`` is, and
        otherwise refused, as one-hot vectors are.
    rewards
        ``(T, N)``; or ``(T,)``, the same for all agents.
    terminals, truncations
        Flags ``(T, N)`` or ``(T,)`` of steps that terminated, and of steps that a time limit or the
        like truncated; none by default. An episode ends where every agent has one of them. An
        episode that is open at the end of the data is cut off there.
    next_observations
        The observations after each step, as ``observations``. Only those at the ends of episodes
        are stored, as final observations. Without them, a truncated step has no target for values.
        Where they differ from those of the next step, although no flag is set, the episode is cut
        off.
    states, next_states
        The global state ``(T, ...)`` of each step, an array or a dict, and that after it. By
        default the state is all observations if these are float32 vectors, or there is none.
    legal_actions, next_legal_actions
        Masks ``(T, N, A)`` of the actions that may be used; by default all.
    alive
        Mask ``(T, N)`` of the agents that still act; by default all.
    log_probs
        Log-probability ``(T, N)`` of each action; unknown by default. That of continuous actions is
        the log-density of ``actions`` as they are given, in the unit of ``action_bounds``.
    policy_ids
        The number ``(T, N)`` or ``(T,)`` of the policy that acted; unknown by default.
    extras
        Further arrays ``(T, ...)`` of each step, by name; see `offmarl.EnvSpec.extras`.
    num_agents
        N. Only needed if no array but observations and actions has the axis of agents, or if those
        of a single agent have a second axis of the same size.
    num_actions
        Number of discrete actions; by default that of ``legal_actions``, or one more than the
        highest action.
    action_bounds
        The lowest and the highest continuous action, numbers or vectors ``(A,)``, from which
        actions are scaled to [-1, 1]. The provenance keeps them.
    env_spec
        The environment; its sizes and leaves must be those of the arrays. By default the
        environment is unknown.
    provenance
        Where the data comes from; a JSON object.
    codec
        As for `offmarl.vault.create`.
    on_invalid
        The treatment of observations, states and rewards that are NaN or infinite: "cut" ends the
        episode before the step, leaves out the rest of it, and counts both; "raise" refuses the
        data; "keep" stores them, and batches leave them out.
    progress
        Shows the progress.

    Raises
    ------
    OptionError
        Neither ``terminals`` nor ``truncations`` was given, or arrays that only make sense
        together.
    ShapeError
        An array has another length or axis of agents than the others; the message names it.
    InvalidValueError
        A value is invalid, as in `offmarl.vault.Writer.append`; the message names its leaf and
        step.
    VaultExistsError
        Something exists at the path.
    """
    arrays = _given(
        {
            OBSERVATIONS: observations,
            "actions": actions,
            "rewards": rewards,
            "terminals": terminals,
            "truncations": truncations,
            STATE: states,
            "infos.legals": legal_actions,
            "infos.alive": alive,
            "infos.behaviour_log_probs": log_probs,
            POLICY_IDS: policy_ids,
            EXTRAS: dict(extras) if extras else None,
        }
    )
    after = _given(
        {OBSERVATIONS: next_observations, STATE: next_states, "infos.legals": next_legal_actions}
    )
    columns = _Columns(arrays, after, _agents_of(arrays, num_agents), action_bounds)
    columns.check()
    if not isinstance(provenance, Mapping | None):
        raise OptionError(f"provenance is a JSON object: give a mapping, not {provenance!r:.80}.")
    if on_invalid not in get_args(Treatment) or (action_bounds and num_actions):
        raise OptionError(
            f"on_invalid is one of {', '.join(get_args(Treatment))}, and action_bounds are for "
            "continuous actions, num_actions for discrete ones."
        )
    spec = common.check_spec(columns.spec(num_actions), env_spec)
    bounds = None if action_bounds is None else [np.ravel(x).tolist() for x in action_bounds]
    facts = {"source": {"format": "arrays"}, **({"action_bounds": bounds} if bounds else {})}
    blocks = common.blocks(columns.steps, columns.step_bytes)
    records = (columns.read(start, stop, spec) for start, stop in blocks)
    dataset = common.Imported(spec, {}, records, len(blocks))
    facts |= provenance or {}
    common.write_vault(path, dataset, facts, codec, on_invalid, progress)
    return open_vault(path)


def _given(trees: Mapping[str, Any]) -> dict[str, NumpyArray]:
    """Return arrays by their names on disk; `ShapeError` if one is no array of numbers."""
    leaves: dict[str, Any] = {}
    for name, tree in trees.items():
        if tree is not None:
            _check_names(name, tree)
            leaves |= flatten_tree(tree, name)
    for name, leaf in leaves.items():
        if isinstance(leaf, np.ma.MaskedArray):
            raise InvalidValueError(
                f"{name} is a masked array, and vaults keep no mask: replace the masked values "
                "with .filled(value)."
            )
    arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    for name, array in arrays.items():
        if not array.ndim or not is_number(array.dtype):
            raise ShapeError(
                f"{name} is {array.dtype} of shape {array.shape}: give an array of numbers whose "
                "first axis is that of time."
            )
    return arrays


def _check_names(name: str, tree: Any) -> None:
    try:
        spec_tree(map_tree(lambda _: ArraySpec(()), tree))
    except ShapeError as error:
        raise ShapeError(f"{name}: {error}") from error


class _Agents(NamedTuple):
    """The axis of agents."""

    number: int
    """N"""
    is_there: bool
    """Whether observations and actions have it."""


def _agents_of(arrays: Mapping[str, NumpyArray], num_agents: int | None) -> _Agents:
    """Return the number of agents; if it is not given, it follows from the other arrays.

    Raises `ShapeError` if it follows from none of them.
    """
    counts = [
        arrays[name].shape[1]
        for name in _OF_AGENTS
        if name in arrays and name != "actions"
        if arrays[name].ndim > (2 if name == "infos.legals" else 1)
    ]
    steps = [x for name, x in arrays.items() if name == "actions" or is_of(OBSERVATIONS, name)]
    second = {array.shape[1:2] for array in steps}
    if num_agents is not None:
        return _Agents(num_agents, num_agents != 1 or bool(counts) or second == {(1,)})
    if counts:
        return _Agents(counts[0], is_there=True)
    same = all(array.ndim == 2 for array in steps) and second == {(1,)}  # whatever the axis means
    if len(second) == 1 and second != {()} and not same:
        raise ShapeError(
            f"observations and actions have a second axis of {steps[0].shape[1]}, and no other "
            "array says whether it is that of agents: give num_agents."
        )
    return _Agents(1, is_there=False)


class _Columns(NamedTuple):
    """Arrays by their names on disk."""

    arrays: dict[str, NumpyArray]
    after: dict[str, NumpyArray]
    """The views after each step."""
    agents: _Agents
    action_bounds: tuple[Any, Any] | None = None

    @property
    def steps(self) -> int:
        """T."""
        return len(self.arrays["rewards"])

    @property
    def step_bytes(self) -> int:
        """Bytes of one step of all arrays."""
        arrays = (*self.arrays.values(), *self.after.values())
        return sum(array.nbytes for array in arrays) // self.steps

    def check(self) -> None:
        """Raise if the arrays do not fit one another."""
        self._check_options()
        after = {f"next {name}": array for name, array in self.after.items()}
        for name, array in (self.arrays | after).items():
            if len(array) != self.steps or not self.steps:
                raise ShapeError(
                    f"{name} has {len(array)} steps, and rewards has {self.steps}: the arrays "
                    "need one entry for each of the same steps, and at least one."
                )
            axes = array.shape[1:2]
            group = name.removeprefix("next ").partition(".")[0]
            of_agents = name in _OF_AGENTS or group == OBSERVATIONS
            shared = name in _OF_ALL and array.ndim == 1
            if of_agents and self.agents.is_there and not shared and axes != (self.agents.number,):
                raise ShapeError(
                    f"{name} has shape {array.shape}, and the number of agents is "
                    f"{self.agents.number}: the second axis must be theirs. If there is one agent, "
                    "leave that axis out of all arrays; otherwise give num_agents."
                )
        for name, array in after.items():
            before = self.arrays[name.removeprefix("next ")]
            if array.shape != before.shape:
                raise ShapeError(
                    f"{name} has shape {array.shape}, and before the step {before.shape}."
                )

    def _check_options(self) -> None:
        if self.action_bounds is not None:
            size, fits = self.arrays["actions"].shape[-1], False
            with suppress(TypeError, ValueError):  # they are not two, or no numbers
                low, high = (np.asarray(x, float) for x in self.action_bounds)
                fits = {low.shape, high.shape} <= {(), (1,), (size,)}
                fits = fits and bool((np.isfinite(high - low) & (low < high)).all())
            if not fits:
                raise OptionError(
                    f"action_bounds are {self.action_bounds!r:.100}: give two, the lowest and the "
                    f"highest action, each one finite number or {size}, as actions have entries."
                )
        if not {"terminals", "truncations"} & self.arrays.keys():
            raise OptionError(
                "give `terminals` or `truncations`, or both: without them it is unknown where "
                "episodes end."
            )
        if not self.after:
            return
        arguments = {OBSERVATIONS: "observations", STATE: "states", "infos.legals": "legal_actions"}
        for group, argument in arguments.items():
            before = {name for name in self.arrays if is_of(group, name)}
            if before != {name for name in self.after if is_of(group, name)}:
                raise OptionError(
                    f"`next_{argument}` must have the leaves of `{argument}`, since a final view "
                    "has all that a view has: give both or neither, or leave all `next_...` out."
                )

    def spec(self, num_actions: int | None) -> EnvSpec:
        """Describe the arrays."""
        state = self._tree(STATE)
        spec = EnvSpec(
            name="",
            num_agents=self.agents.number,
            observation_size=0,
            state_size=0,
            action=self._action(num_actions),
            reward="team" if self.arrays["rewards"].ndim == 1 else "individual",
            state="concatenated" if state is None else "native",
            observation=self._tree(OBSERVATIONS, with_agents=True),
            global_state=state,
            extras=self._tree(EXTRAS) or {},
        )
        if state is None and spec.is_vector:
            return dataclasses.replace(spec, state_size=spec.num_agents * spec.observation_size)
        return spec

    def _tree(self, group: str, *, with_agents: bool = False) -> Any:
        """Return the specs of a group of arrays; None if none was given."""
        specs: dict[str, ArraySpec] = {}
        for name, array in self.arrays.items():
            if is_of(group, name):
                shape = array.shape[2 if with_agents and self.agents.is_there else 1 :]
                specs[name.removeprefix(group).removeprefix(".")] = _leaf(name, array, shape)
        if with_agents and specs.keys() == {""} and is_float(specs[""].numpy_dtype):
            shape = specs[""].shape or (1,)  # a number counts as a vector of one entry
            specs = {"": dataclasses.replace(specs[""], shape=shape)}
        return unflatten_tree(specs) if specs else None

    def _action(self, num_actions: int | None) -> Discrete | Continuous:
        actions, legal = self.arrays["actions"], self.arrays.get("infos.legals")
        axes = actions.shape[2 if self.agents.is_there else 1 :]
        count = legal.shape[-1] if num_actions is None and legal is not None else num_actions
        bounded = self.action_bounds is not None
        if len(axes) < 2 and (bounded or (is_float(actions.dtype) and count is None)):
            # One-hot vectors are numbers of actions, too; the first steps show them.
            one = np.arange(*axes or (1,)) == actions.shape[-1] - 1
            numbers = axes in ((), (1,)) or (np.sort(actions[:1000]) == one).all()
            if not bounded and numbers and (actions == np.trunc(actions)).all():
                raise InvalidValueError(
                    f"actions are {actions.dtype}, and all are whole numbers: if they are numbers "
                    "of discrete actions, give num_actions; if one-hot, their .argmax(-1); if "
                    "they are continuous, give action_bounds."
                )
            return Continuous(axes[0] if axes else 1)
        if axes not in ((), (1,)):
            raise ShapeError(
                f"actions have shape {actions.shape}: whole numbers have one entry for each agent, "
                "and continuous actions are vectors."
            )
        return Discrete(int(actions.max()) + 1 if count is None else count)

    def read(self, start: int, stop: int, spec: EnvSpec) -> ImportedRow:
        """Read an interval of steps as a record of one row."""
        steps = to_steps(self._block(self.arrays, slice(start, stop), spec), spec, start)
        if not self.after:
            return ImportedRow(steps)
        arrays = {**self.after, "rewards": self.arrays["rewards"]}
        next_steps = to_steps(self._block(arrays, slice(start, stop), spec), spec, start)
        return ImportedRow(steps, after=next_steps.view._replace(alive=steps.view.alive))

    def _block(
        self, arrays: Mapping[str, NumpyArray], steps: slice, spec: EnvSpec
    ) -> dict[str, NumpyArray]:
        """Read steps of some arrays as ``(1, T, ...)``, with the axis of agents."""
        block = {}
        for name, array in arrays.items():
            values = np.asarray(array[steps])
            if name in _OF_ALL and values.ndim == 1:
                values = np.broadcast_to(values[:, None], (len(values), self.agents.number))
            block[name] = values[None]
        if "actions" in block and self.action_bounds is not None:
            low, high = map(np.asarray, self.action_bounds)
            block["actions"] = to_unit_range(block["actions"], low, high)
            if (name := "infos.behaviour_log_probs") in block:
                half = np.broadcast_to((high - low) / 2, block["actions"].shape[2:])
                block[name] = block[name] + np.log(np.where(half > 0, half, 1)).sum(-1)
        if {"actions", "infos.alive"} <= block.keys() and isinstance(spec.action, Discrete):
            actions = block["actions"]
            dead = block["infos.alive"].reshape(actions.shape) == 0
            block["actions"] = np.where((actions == -1) & dead, 0, actions)
        return block


def _leaf(name: str, array: NumpyArray, shape: tuple[int, ...]) -> ArraySpec:
    dtype = _NARROWER.get(array.dtype.name, array.dtype.name)
    if dtype not in DTYPES:
        raise ShapeError(f"{name} is {array.dtype}: vaults keep {', '.join(DTYPES)}.")
    return ArraySpec(shape, dtype)
